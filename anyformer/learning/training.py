"""Training an ordinary module on a task.

    minimise   mean over scored positions of  -log softmax(logits)[label]       gradient norm clipped
    cosine     rate(s) = peak min(1, (s + 1) / warm_up) (1 + cos(pi f)) / 2,  f: share done since the warm-up
    one-cycle  rate(s) goes from peak / 25 to peak over the warm-up, then to peak / 10,000, along half cosines

Fresh batches for ever; accuracy is taken on a held-out set that is the same for every run. With one torch
thread, the same module and the same configuration give the same bits. Step s draws its batch and its dropout from
(seed, s) alone, so a :class:`Training` that is restored from the state of any step goes on with the same bits.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Int64, Shaped
from torch import Tensor, nn

from anyformer.errors import AnyformerError, is_number, require_choice, require_size
from anyformer.learning.optimisation import OPTIMIZERS, Optimizer
from anyformer.learning.ranks import ALONE, Ranks
from anyformer.philox import raw
from anyformer.spec import Spec
from anyformer.storage import apart, checksum
from anyformer.tasks import HELD_OUT as HELD_OUT
from anyformer.tasks import IGNORED, Batch, Task


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Spec):
    """How to train."""

    steps: int
    """How many batches."""
    batch_size: int = 64
    """Rows of a batch."""
    learning_rate: float = 1e-3
    """The peak of the schedule."""
    warm_up: int = 100
    """Steps on the way to the peak; below ``steps``."""
    weight_decay: float = 0.01
    """Decoupled, of trained parameters only."""
    clip: float | None = 1.0
    """Largest gradient norm (None: no clipping)."""
    schedule: str = "cosine"
    """cosine or one-cycle."""
    seed: int = 0
    """Of the batches, of dropout, and of the first weights in a run."""
    evaluate_every: int = 100
    """Steps between evaluations; there is one after the last step too."""
    evaluation_size: int = 512
    """Sequences of the held-out set."""
    stop_at: float | None = None
    """End early, once the accuracy is at least this at two evaluations in a row."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's memories (torch's defaults; 0.95 or 0.98 as the second forgets a bad start sooner)."""
    optimizer: str = "adamw"
    """adamw, or muon: Muon for trained parameters with two dimensions (embedding tables too), AdamW for the others."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "evaluate_every", "evaluation_size"):
            require_size("TrainingConfig", name, getattr(self, name))
        for name in ("batch_size", "evaluation_size"):
            if getattr(self, name) >= 2**32:
                raise AnyformerError(f"TrainingConfig: {name} must be below 2^32, got {getattr(self, name)}")
        for name in ("warm_up", "seed"):
            require_size("TrainingConfig", name, getattr(self, name), minimum=0)
        if self.seed >= 2**64:
            raise AnyformerError(f"TrainingConfig: seed must be below 2**64, got {self.seed}")
        require_choice("TrainingConfig", "schedule", self.schedule, ("cosine", "one-cycle"))
        require_choice("TrainingConfig", "optimizer", self.optimizer, OPTIMIZERS)
        for name in ("learning_rate", "weight_decay", "clip", "stop_at"):
            value, smallest = getattr(self, name), 0.0 if name == "weight_decay" else 1e-12
            optional = name in ("clip", "stop_at")
            if not (optional if value is None else is_number(value) and value >= smallest):
                rule = f"a number >= {smallest:g}{' or None' * optional}"
                raise AnyformerError(f"TrainingConfig: {name} must be {rule}, got {value!r}")
        if self.stop_at is not None and self.stop_at > 1:
            raise AnyformerError(f"TrainingConfig: stop_at is an accuracy, at most 1, got {self.stop_at!r}")
        if self.learning_rate > 1e30:  # torch's optimizers overflow
            raise AnyformerError(f"TrainingConfig: learning_rate must be at most 1e30, got {self.learning_rate!r}")
        pair = isinstance(self.betas, tuple) and len(self.betas) == 2 and all(map(is_number, self.betas))
        if not (pair and all(0 <= beta < 1 for beta in self.betas)):
            raise AnyformerError(f"TrainingConfig: betas must be a tuple of two numbers in [0, 1), got {self.betas!r}")
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

    @classmethod
    def of(cls, records: "Sequence[Record]", stopped_early: bool, seconds: float) -> "History":
        """The history that the records of evaluations tell."""
        steps, losses, accuracies = (tuple(getattr(r, name) for r in records) for name in ("step", "loss", "accuracy"))
        return cls(steps, losses, accuracies, stopped_early, seconds)


class Diverged(AnyformerError):
    """The loss or the gradient is no finite number any more."""


@runtime_checkable
class OwnGradients(Protocol):
    """A learner that computes its loss and its gradients itself."""

    def gradients(self, inputs: Int64[Tensor, "batch n"], labels: Int64[Tensor, "batch n"], total: int | None = None) -> float:
        """The cross-entropies of all scored positions, summed, / ``total`` (None: their number); its gradients are
        added to the ``grad`` of the trained parameters."""
        ...


@dataclass(frozen=True)
class Record:
    """One evaluation: after ``step`` steps, the mean loss since the one before, the accuracy, the rate of the last
    step, and the wall time so far (not compared)."""

    step: int
    loss: float
    accuracy: float
    rate: float
    seconds: float = field(compare=False)


@dataclass(frozen=True, eq=False)
class TrainingState:
    """Everything that a training needs to go on: the trained parameters (``w``), the optimizer's memory
    (``w/exp_avg`` and the like), the losses since the last evaluation, and the evaluations. ``frozen`` is the sha256
    of all that is not trained, which is not kept: it is built again."""

    step: int
    parameters: dict[str, Shaped[Tensor, "..."]]
    memory: dict[str, Shaped[Tensor, "..."]]
    running: tuple[float, ...]
    records: tuple[Record, ...]
    stopped_early: bool
    seconds: float
    frozen: str


class Training:
    """A training under way: :meth:`advance` until ``finished``; :meth:`state` and :meth:`restore` between two steps.

    It moves the parameters of ``module`` that require a gradient, in place, and nothing else; the caller's random
    state is left alone. Raises AnyformerError where nothing is trainable.
    """

    def __init__(self, module: nn.Module, task: Task, config: TrainingConfig, ranks: Ranks = ALONE):
        self.module, self.task, self.config, self.ranks = module, task, config, ranks
        self.named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.named:
            raise AnyformerError("train: no parameter of the module requires a gradient")
        if config.batch_size < ranks.size:
            raise AnyformerError(f"train: {ranks.size} processes need at least as many rows a batch, got {config.batch_size}")
        self.parameters = list(self.named.values())
        self.device = self.parameters[0].device
        self.optimizer = Optimizer(self.named, config.optimizer, config.betas, config.weight_decay)
        self.own_gradients = module.gradients if isinstance(module, OwnGradients) else None
        self.step, self.stopped_early = 0, False
        self.running: list[float] = []
        self.records: list[Record] = []
        task.held_out(
            config.evaluation_size
        )  # drawn anew at evaluations; where it is too large, that is said before the first step
        self._begin(0.0)

    def _begin(self, seconds: float) -> None:
        """Start the clock of this session; ``seconds`` have passed in earlier ones."""
        self._start, self._first_step, self._earlier = time.perf_counter(), self.step, seconds

    @cached_property
    def frozen(self) -> str:
        """sha256 of every parameter and buffer that is not trained."""
        everything = self.module.state_dict(keep_vars=True)
        return checksum(apart({name: tensor for name, tensor in everything.items() if not tensor.requires_grad}))

    @property
    def finished(self) -> bool:
        """Whether the last step is done or ``stop_at`` was reached."""
        return self.stopped_early or self.step >= self.config.steps

    @property
    def seconds(self) -> float:
        """Wall time of all sessions."""
        return self._earlier + time.perf_counter() - self._start

    @property
    def steps_per_second(self) -> float:
        """In this session."""
        return (self.step - self._first_step) / max(time.perf_counter() - self._start, 1e-9)

    @property
    def seconds_left(self) -> float:
        """At the pace of this session."""
        return 0.0 if self.finished else (self.config.steps - self.step) / max(self.steps_per_second, 1e-9)

    @property
    def history(self) -> History:
        """The evaluations so far."""
        return History.of(self.records, self.stopped_early, self.seconds)

    def state(self) -> TrainingState:
        """What :meth:`restore` needs; its tensors are this training's own, so use it before the next step."""
        parameters = {name: p.detach() for name, p in self.named.items()}
        about = (tuple(self.running), tuple(self.records), self.stopped_early, self.seconds, self.frozen)
        return TrainingState(self.step, parameters, self.optimizer.state(), *about)

    def restore(self, state: TrainingState) -> None:
        """Go on from ``state``; raises AnyformerError where it is not of this module."""
        shapes = {name: tuple(p.shape) for name, p in self.named.items()}
        if {name: tuple(t.shape) for name, t in state.parameters.items()} != shapes:
            raise AnyformerError("the state of this training is of other parameters: names or shapes differ")
        if state.frozen != self.frozen:
            raise AnyformerError("what is not trained has other numbers than when the state was made")
        self.optimizer.restore(state.memory)
        with torch.no_grad():
            for name, p in self.named.items():
                p.copy_(state.parameters[name])
        self.step, self.stopped_early = state.step, state.stopped_early
        self.running, self.records = list(state.running), list(state.records)
        self._begin(state.seconds)

    def advance(self) -> Record | None:
        """One step, and the evaluation where one is due. Raises Diverged where the loss or the gradient is not
        finite: everything then is as it was before that step."""
        config, step = self.config, self.step
        batch = self.task.batch(config.seed, step, config.batch_size)
        self.module.train()
        for p in self.parameters:
            p.grad = None
        with _drawing(self.device, int(raw(config.seed, step, 1 + self.ranks.rank)[-1])):
            loss = self.ranks.add(self.parameters, self._gradients(batch))
        if not math.isfinite(loss):
            raise Diverged(f"train: the loss is {loss} at step {step}; try a smaller learning_rate, clip or weight_decay")
        if config.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.parameters, config.clip).item()
            if not math.isfinite(norm):
                raise Diverged(
                    f"train: the gradient's norm is {norm} at step {step}; try a smaller learning_rate or weight_decay"
                )
        self.optimizer.step(config.rate(step))
        self.running.append(loss)
        self.step += 1
        if self.step % config.evaluate_every and self.step < config.steps:
            return None
        with _drawing(self.device, config.seed):
            accuracy = self.ranks.from_first(lambda: evaluate(self.module, self.task, config.evaluation_size))
        mean = sum(self.running) / len(self.running)
        self.records.append(Record(self.step, mean, accuracy, config.rate(step), self.seconds))
        self.running.clear()
        last = [record.accuracy for record in self.records[-2:]]
        self.stopped_early = len(last) > 1 and min(last) >= (config.stop_at or math.inf)
        return self.records[-1]

    def _gradients(self, batch: Batch) -> float:
        """The gradients of this rank's share of the batch's mean loss; returns that share."""
        inputs, labels = (self.ranks.rows(whole).to(self.device) for whole in (batch.inputs, batch.labels))
        total = int(batch.scored.sum())
        if total == 0:
            raise AnyformerError(
                f"train: no position of the batch of step {self.step} is scored; a larger batch_size, or another task"
            )
        if self.own_gradients is not None:
            return self.own_gradients(inputs, labels, total)
        logits = self.module(inputs).flatten(0, 1)
        if self.ranks.size == 1:
            loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
        else:
            loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum") / total
        loss.backward()
        return loss.item()


@contextmanager
def _drawing(device: torch.device, seed: int) -> Iterator[None]:
    """Random draws inside (dropout) come from ``seed``; the states outside are as they were."""
    cuda = device.type == "cuda"
    before, before_cuda = torch.get_rng_state(), torch.cuda.get_rng_state(device) if cuda else None
    try:
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(before)
        if before_cuda is not None:
            torch.cuda.set_rng_state(before_cuda, device)


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
    was_training, training = module.training, Training(module, task, config)
    try:
        while not training.finished:
            record = training.advance()
            if record is not None and report is not None:
                report(record.step, record.loss, record.accuracy, training.seconds_left)
    finally:
        module.train(was_training)
    return training.history


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
