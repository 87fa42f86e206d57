"""Sweeps: many runs, over any ``concurrent.futures.Executor``.

    sweep([config, ...])                          a process a core of this machine
    sweep([config, ...], RayExecutor())           a Ray cluster

Runs are named by their configuration: equal ones are trained once, finished ones are only read, and one whose worker was
killed goes on from its checkpoint. Each worker trains with one thread, so a run in a sweep has the bits of a run alone.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from anyformer.errors import AnyformerError
from anyformer.learning.run_folder import RunFolder
from anyformer.learning.runs import RunConfig, RunResult, run_training
from anyformer.learning.sinks import LOG
from anyformer.memory import keep_freed_memory

LAST_WORDS = 30
"""Seconds that a worker has for its checkpoint when nobody waits for it any more."""
FRUITLESS = 3
"""After so many pools that broke before any run was finished, each run gets a pool of its own."""
_ORPHANED = threading.Event()
_ONE_AT_A_TIME = threading.Lock()  # torch's random state belongs to the process


@dataclass(frozen=True)
class SweepResult:
    """``runs``: every finished run, in the order of the configurations; ``failures``: name and reason of every other
    one; ``skipped``: the names of those that were finished before."""

    runs: tuple[RunResult, ...]
    failures: tuple[tuple[str, str], ...]
    skipped: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every run is finished."""
        return not self.failures


SweepReport = Callable[[str, RunResult | str], None]


def sweep(
    configs: Iterable[RunConfig],
    executor: Executor | None = None,
    folder: str | Path = "runs",
    report: SweepReport | None = None,
    device: str = "cpu",
) -> SweepResult:
    """Train every configuration in its run folder below ``folder``; a run that fails does not disturb the others.

    ``executor`` must reach workers that see ``folder``; it is left open. None: a pool of processes, one a core, that is made anew
    when a worker was killed. ``report(name, result)`` is called as runs end, with the reason as text where one failed.
    """
    wanted = {config.name: config for config in configs}
    where, outcomes = Path(folder), dict[str, RunResult | str]()
    skipped: list[str] = []

    def note(name: str, outcome: RunResult | str) -> None:
        outcomes[name] = outcome
        if report is not None:
            report(name, outcome)

    for name, config in wanted.items():
        try:
            history = RunFolder(where / name, config).finished()
        except AnyformerError as error:
            note(name, str(error))
            continue
        if history is not None:
            skipped.append(name)
            note(name, RunResult(where / name, history, True))
    pending = {name: config for name, config in wanted.items() if name not in outcomes}
    if executor is None:
        _in_pools(pending, where, device, note)
    else:
        for name in _in_one(executor, pending, where, device, note):
            note(name, "its executor broke before the run was finished; call sweep again with a new one")
    ends = [(name, outcomes[name]) for name in wanted]
    runs = tuple(end for _, end in ends if isinstance(end, RunResult))
    return SweepResult(runs, tuple((name, end) for name, end in ends if isinstance(end, str)), tuple(skipped))


def _in_pools(pending: dict[str, RunConfig], folder: Path, device: str, note: SweepReport) -> None:
    """Pools of processes until nothing is pending. Where pools keep breaking, runs are tried alone: who breaks it then, fails."""
    left, fruitless = dict(pending), 0
    while left and fruitless < FRUITLESS:
        with _pool(min(len(left), _cores())) as pool:
            broken = _in_one(pool, left, folder, device, note)
        if broken:
            LOG.warning("a worker of the sweep was killed; %d runs go on from their checkpoints", len(broken))
        fruitless = 0 if len(broken) < len(left) else fruitless + 1
        left = {name: left[name] for name in broken}
    for name, config in left.items():
        with _pool(1) as pool:
            for _ in _in_one(pool, {name: config}, folder, device, note):
                note(name, "its worker was killed again and again (out of memory?)")


def _in_one(executor: Executor, pending: dict[str, RunConfig], folder: Path, device: str, note: SweepReport) -> list[str]:
    """Run all on one executor; returns the names of those that it broke under."""
    futures: dict[Future[Any], str] = {}
    broken = []
    try:
        for name, config in pending.items():
            futures[executor.submit(work, config, str(folder.absolute()), device)] = name
    except BrokenExecutor:
        broken = [name for name in pending if name not in futures.values()]
    try:
        for future in as_completed(futures):
            name = futures[future]
            try:
                outcome = future.result()
                note(name, outcome if isinstance(outcome, str) else replace(outcome, folder=folder / name))
            except BrokenExecutor:
                broken.append(name)
            except Exception as error:
                note(name, f"{type(error).__name__}: {error}")
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    return broken


def work(config: RunConfig, folder: str, device: str = "cpu") -> RunResult | str:
    """What a worker does: train with one thread; a failure comes back as text."""
    if _ORPHANED.is_set():  # what is still queued is for nobody
        os._exit(1)
    with _ONE_AT_A_TIME:
        threads = torch.get_num_threads()
        keep_freed_memory()
        torch.set_num_threads(1)
        try:
            return run_training(config, folder, device=device)
        except AnyformerError as error:
            return str(error)
        except Exception as error:  # of a task or model of one's own
            return f"{type(error).__name__}: {error}"
        finally:
            torch.set_num_threads(threads)


@contextmanager
def _pool(workers: int) -> Iterator[Executor]:
    """loky's pool: it notices killed workers, and it carries classes that were defined in a script or a notebook."""
    from joblib.externals.loky import ProcessPoolExecutor

    pool = ProcessPoolExecutor(max_workers=workers, env={"OMP_NUM_THREADS": "1"}, initializer=_end_with, initargs=(os.getpid(),))
    finished = False
    try:
        yield pool
        finished = True
    finally:
        pool.shutdown(wait=True, kill_workers=not finished)


def _end_with(parent: int) -> None:
    """Of a worker: when the process that sweeps is gone, killed perhaps, stop as at Ctrl-C: with a checkpoint, and the folder is free again."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        _ORPHANED.set()
        for how, patience in ((signal.SIGTERM, LAST_WORDS), (signal.SIGKILL, 0)):
            os.kill(os.getpid(), how)
            time.sleep(patience)

    threading.Thread(target=watch, daemon=True).start()


def _cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


class RayExecutor(Executor):
    """Calls as tasks of a Ray cluster (extra ``ray``): ``address`` as for ``ray.init``, None starts one on this machine.

    A call takes ``cpus`` and ``gpus`` of the cluster; one whose worker dies is made again on another, up to ``retries`` times.
    Every node must see the folder of the runs. ``options`` go to ``ray.init``.
    """

    def __init__(self, address: str | None = None, *, cpus: float = 1, gpus: float = 0, retries: int = 5, **options: Any):
        try:
            import ray  # type: ignore[import-not-found]
        except ImportError:
            raise AnyformerError("RayExecutor needs the package ray; install it with pip install 'anyformer[ray]'") from None
        self.ray, self.ours = ray, not ray.is_initialized()
        if self.ours:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
            ray.init(address, **options)
        self.call = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=retries)(_call)
        self.references: list[Any] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """A future of ``fn(*args, **kwargs)``."""
        reference = self.call.remote(fn, args, kwargs)
        self.references.append(reference)
        return reference.future()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for (or cancel) what was submitted; leave the cluster where this executor joined it."""
        if cancel_futures:
            for reference in self.references:
                self.ray.cancel(reference)
        elif wait and self.references:
            self.ray.wait(self.references, num_returns=len(self.references))
        if self.ours:
            self.ray.shutdown()


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)
