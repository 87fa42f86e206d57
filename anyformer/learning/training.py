"""Training an ordinary module on a task.

    minimise   mean over scored positions of  -log softmax(logits)[label]       AdamW, gradient norm clipped
    cosine     rate(s) = peak min(1, (s + 1) / warm_up) (1 + cos(pi f)) / 2,  f: share done since the warm-up
    one-cycle  rate(s) goes from peak / 25 to peak over the warm-up, then to peak / 10,000, along half cosines

Fresh batches for ever; accuracy is taken on a held-out set that is the same for every run. With one torch
thread, the same module and the same configuration give the same bits.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from anyformer.errors import AnyformerError, require_choice, require_size
from anyformer.spec import Spec
from anyformer.tasks import HELD_OUT as HELD_OUT
from anyformer.tasks import IGNORED, Task


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Spec):
    """How to train. ``clip`` is the largest gradient norm (None: no clipping); the held-out set has
    ``evaluation_size`` sequences and is scored every ``evaluate_every`` steps and after the last one. With
    ``stop_at``, training ends once the accuracy is at least that at two evaluations in a row."""

    steps: int
    batch_size: int = 64
    learning_rate: float = 1e-3
    warm_up: int = 100
    weight_decay: float = 0.01
    clip: float | None = 1.0
    schedule: str = "cosine"
    seed: int = 0
    evaluate_every: int = 100
    evaluation_size: int = 512
    stop_at: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "evaluate_every", "evaluation_size"):
            require_size("TrainingConfig", name, getattr(self, name))
        for name in ("warm_up", "seed"):
            require_size("TrainingConfig", name, getattr(self, name), minimum=0)
        require_choice("TrainingConfig", "schedule", self.schedule, ("cosine", "one-cycle"))
        for name in ("learning_rate", "weight_decay", "clip", "stop_at"):
            value, smallest = getattr(self, name), 0.0 if name == "weight_decay" else 1e-12
            optional = name in ("clip", "stop_at")
            if not (optional if value is None else smallest <= value < math.inf):
                rule = f"a number >= {smallest:g}{' or None' * optional}"
                raise AnyformerError(f"TrainingConfig: {name} must be {rule}, got {value!r}")
        if self.warm_up >= self.steps:
            got = f"{self.warm_up} of {self.steps}"
            raise AnyformerError(f"TrainingConfig: warm_up must be below steps, got {got}")
        if self.seed == HELD_OUT:
            raise AnyformerError(f"TrainingConfig: seed {HELD_OUT} is the held-out set's, choose another")

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ..., steps - 1."""
        up = (step + 1) / self.warm_up if step < self.warm_up else 1.0
        down = max(0, step - self.warm_up) / (self.steps - self.warm_up)
        fall = (1 + math.cos(math.pi * down)) / 2
        if self.schedule == "cosine":
            return self.learning_rate * up * fall
        low, high = (1 / 25, (1 - math.cos(math.pi * up)) / 2) if up < 1 else (1e-4, fall)
        return self.learning_rate * (low + (1 - low) * high)


@dataclass(frozen=True)
class History:
    """What happened: at evaluation i, after ``steps[i]`` steps, the mean training loss since the one before
    and the accuracy. ``stopped_early``: ``stop_at`` was reached. ``seconds``: wall time (not compared)."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    stopped_early: bool
    seconds: float = field(compare=False)


def train(
    module: nn.Module,
    task: Task,
    config: TrainingConfig,
    report: Callable[[int, float, float, float], None] | None = None,
) -> History:
    """Train in place every parameter of ``module`` that requires a gradient; ``module(inputs)`` gives logits.

    ``report(step, loss, accuracy, seconds_left)`` is called at each evaluation. Raises AnyformerError where
    nothing is trainable and where the loss is not finite (the module then has the weights before that step).
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise AnyformerError("train: no parameter of the module requires a gradient")
    device, start, was_training = parameters[0].device, time.perf_counter(), module.training
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    steps, losses, accuracies, running, stop = [], [], [], [], False
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)  # what dropout draws from
        try:
            for step in range(config.steps):
                module.train()
                batch = task.batch(config.seed, step, config.batch_size)
                logits, labels = module(batch.inputs.to(device)), batch.labels.to(device)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
                running.append(loss.item())
                if not math.isfinite(running[-1]):
                    got = f"the loss is {running[-1]} at step {step}"
                    raise AnyformerError(f"train: {got}; try a smaller learning_rate or clip")
                optimizer.zero_grad()
                loss.backward()
                if config.clip is not None:
                    nn.utils.clip_grad_norm_(parameters, config.clip)
                for group in optimizer.param_groups:
                    group["lr"] = config.rate(step)
                optimizer.step()
                if (step + 1) % config.evaluate_every and step + 1 < config.steps:
                    continue
                steps.append(step + 1)
                losses.append(sum(running) / len(running))
                accuracies.append(evaluate(module, task, config.evaluation_size))
                running.clear()
                stop = len(steps) > 1 and min(accuracies[-2:]) >= (config.stop_at or math.inf)
                if report is not None:
                    left = (time.perf_counter() - start) / (step + 1) * (config.steps - step - 1)
                    report(step + 1, losses[-1], accuracies[-1], 0.0 if stop else left)
                if stop:
                    break
        finally:
            module.train(was_training)
    return History(tuple(steps), tuple(losses), tuple(accuracies), stop, time.perf_counter() - start)


@torch.no_grad()
def evaluate(module: nn.Module, task: Task, size: int, seed: int = HELD_OUT, rows: int = 256) -> float:
    """The accuracy of ``module``, in evaluation mode, on the held-out set, or on batch 0 of another ``seed``; ``size`` rows."""
    require_size("evaluate", "size", size)
    batch = task.held_out(size) if seed == HELD_OUT else task.batch(seed, 0, size)
    was_training = module.training
    module.eval()
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    logits = torch.cat([module(part.to(device)).cpu() for part in batch.inputs.split(rows)])
    module.train(was_training)
    return task.accuracy(logits, batch)
