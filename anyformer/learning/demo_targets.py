"""Two targets of one class, trained from scratch in about a minute: what ``anyformer demo`` starts from.

    class      2 heads, 2 layers, d = 28, D = 32, pre-norm (RMS) residual attention, no MLP, learned positions
    "dyck"     are the brackets balanced?                 "one-hop"   what followed this letter last time?

Each is trained in a process of its own on one thread, so the result is the same however many cores there are.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from anyformer.errors import AnyformerError, require_choice
from anyformer.learning.training import TrainingConfig, train
from anyformer.targets.transformer import Transformer, TransformerConfig
from anyformer.tasks import Dyck, KHop, Task

Report = Callable[[str, int, int, float, float, float], None]

DEMO_CLASS = TransformerConfig(
    vocab=23,
    heads=2,
    layers=2,
    head_dim=28,
    features=32,
    residual=True,
    norm="rms",
    norm_position="pre",
    causal=True,
    positions="learned",
    max_length=100,
)

DEMO_TRAINING: dict[str, TrainingConfig] = {
    "dyck": TrainingConfig(steps=1500, learning_rate=5e-3, seed=1, evaluate_every=50, evaluation_size=1024, stop_at=1.0),
    "one-hop": TrainingConfig(steps=1000, learning_rate=5e-3, seed=1, evaluate_every=50, evaluation_size=1024, stop_at=0.9995),
}
"""Fixed steps, ended early by ``stop_at``. What is worth nothing: the rule "equal counts" scores 93.1 % on Dyck, one-hop by position alone
27.7 % (``anyformer tasks``)."""


def demo_tasks() -> dict[str, Task]:
    """The task of each target, by name; both use the vocabulary of :data:`DEMO_CLASS`."""
    return {"dyck": Dyck(vocab=DEMO_CLASS.vocab), "one-hop": KHop(vocab=DEMO_CLASS.vocab, hops=1)}


def train_demo_targets(
    report: Report | None = None, training: Mapping[str, TrainingConfig] = DEMO_TRAINING
) -> dict[str, Transformer]:
    """Train the targets that ``training`` names, side by side, and return them by name.

    ``report(task, step, steps, loss, accuracy, seconds_left)`` is called in this process at each evaluation.
    Whatever ends this function, Ctrl-C included, ends the workers too. They are spawned: a script that calls
    it needs the usual ``if __name__ == "__main__":``. Raises AnyformerError where a worker fails.
    """
    for name in training:
        require_choice("train_demo_targets", "a name in training", name, tuple(demo_tasks()))
    context = get_context("spawn")
    workers: list[BaseProcess] = []
    pipes: dict[str, Connection] = {}
    targets: dict[str, Transformer] = {}
    try:
        with _interrupts_ignored():  # the workers inherit it: Ctrl-C is for this process to handle
            for name, config in training.items():
                ours, theirs = context.Pipe(duplex=False)
                worker = context.Process(target=_work, args=(name, config, theirs), daemon=True)
                worker.start()
                workers.append(worker)
                pipes[name] = ours
                theirs.close()  # so that the pipe ends where its worker ends
        while pipes:
            ready = wait(pipes.values())
            for name, pipe in [(name, pipe) for name, pipe in pipes.items() if pipe in ready]:
                try:
                    kind, content = pipe.recv()
                except EOFError:
                    raise AnyformerError(f"training {name}: its process ended without a result") from None
                if kind == "failure":
                    raise AnyformerError(f"training {name}: {content}")
                if kind == "weights":
                    targets[name] = _target(name, training[name].seed)
                    targets[name].load_state_dict({k: torch.tensor(v) for k, v in content.items()})
                    del pipes[name]
                elif report is not None:
                    step, loss, accuracy, seconds_left = content
                    report(name, step, training[name].steps, loss, accuracy, seconds_left)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    return {name: targets[name] for name in training}


def _work(name: str, config: TrainingConfig, pipe: Connection) -> None:
    """The worker: progress, then weights (as arrays) or the failure, go through the pipe."""
    torch.set_num_threads(1)
    try:
        target = _target(name, config.seed)
        train(target, demo_tasks()[name], config, lambda *figures: pipe.send(("progress", figures)))
        pipe.send(("weights", {k: v.numpy() for k, v in target.state_dict().items()}))
    except BrokenPipeError:
        pass  # nobody is waiting any more
    except Exception as error:
        pipe.send(("failure", str(error) or repr(error)))


def _target(name: str, seed: int) -> Transformer:
    """A fresh target of the demo's class; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(DEMO_CLASS, token_names=demo_tasks()[name].token_names)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it gets Ctrl-C
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
