"""Runs: a configuration is a value, its hash names a folder, and the folder holds all that came of it.

    runs/<first 16 digits of the sha256 of the fields that are not defaults>/

A run that ends at any moment (killed, interrupted, out of disk) goes on from its last checkpoint; with one torch thread it ends
with the same bits as one that was never stopped. See :mod:`anyformer.learning.run_folder` for the files.
"""

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anyformer.errors import AnyformerError
from anyformer.learning.checkpoints import checkpoints
from anyformer.learning.models import Model
from anyformer.learning.ranks import Ranks, joined
from anyformer.learning.run_folder import CHECKPOINTS, CONFIG, RESULT, RunFolder, finite, read_config
from anyformer.learning.sinks import LOG, Sink, Sinks
from anyformer.learning.training import Diverged, History, Training, TrainingConfig
from anyformer.spec import Spec, digest
from anyformer.tasks import Task

REPORT_EVERY = 0.2
"""Seconds between two reports, at least (an evaluation is always reported)."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Spec):
    """What is trained on what, and how."""

    task: Task
    model: Model
    training: TrainingConfig

    def __post_init__(self) -> None:
        for name, kind in (("task", Task), ("model", Model), ("training", TrainingConfig)):
            if not isinstance(getattr(self, name), kind):
                raise AnyformerError(f"RunConfig: {name} must be a {kind.__name__}, got {type(getattr(self, name)).__name__}")

    @property
    def name(self) -> str:
        """16 hexadecimal digits. Fields that equal their default do not count, here and in every specification inside: a new
        option with a default leaves the names of old runs as they are."""
        return digest(_chosen(self))[:16]


def _chosen(value: Any) -> Any:
    """A specification as JSON data, without the fields that equal their default or that are not compared (where something lies)."""
    if isinstance(value, tuple):
        return [_chosen(item) for item in value]
    if not isinstance(value, Spec):
        return value
    out: dict[str, Any] = {"type": type(value).__name__}
    for f in dataclasses.fields(value):  # type: ignore[arg-type]
        own = getattr(value, f.name)
        default = (
            f.default_factory() if callable(f.default_factory) else f.default
        )  # MISSING of a class sent to a worker is a copy
        if f.compare and own != default:
            out[f.name] = _chosen(own)
    return out


@dataclass(frozen=True)
class Progress:
    """How far a run is: ``loss`` is the mean since the last evaluation, ``accuracy`` that of the last one (None: none yet)."""

    step: int
    steps: int
    loss: float | None
    accuracy: float | None
    steps_per_second: float
    seconds_left: float


@dataclass(frozen=True)
class RunResult:
    """A run on disk. ``finished`` is False where its training has still steps to go."""

    folder: Path
    history: History
    finished: bool

    @property
    def result(self) -> Path:
        """The folder of what was trained."""
        return self.folder / RESULT


Report = Callable[[Progress], None]


def run_training(
    config: RunConfig,
    folder: str | Path = "runs",
    *,
    resume: bool = True,
    report: Report | None = None,
    started: Callable[[nn.Module], None] | None = None,
    sinks: Sequence[Sink] = (),
    checkpoint_every: float = 60.0,
    device: str = "cpu",
) -> RunResult:
    """Train ``config`` in ``folder / config.name`` and return the finished run; one that is finished already is only read.

    A checkpoint is written at every evaluation, after ``checkpoint_every`` seconds without one, and on SIGINT (Ctrl-C) or SIGTERM,
    which then raise KeyboardInterrupt. With ``resume`` an unfinished run goes on from its last whole checkpoint; without it, it is
    an error. ``started`` gets the learner before its first step, ``report`` is called at every evaluation and
    a few times a second. Under ``torchrun`` the processes share every batch.
    Raises AnyformerError for a folder that is not this run's or is in use, and where the loss is not finite any more.
    """
    where, home = _device(device), RunFolder(Path(folder) / config.name, config)
    with joined(where) as ranks, ExitStack() as stack:
        history = ranks.from_first(home.finished)
        if history is not None:
            return RunResult(home.path, history, True)
        learner = config.model.build(config.task, config.training.seed).to(where)
        training = Training(learner, config.task, config.training, ranks)
        ranks.from_first(lambda: stack.enter_context(home.held()))
        state = ranks.from_first(lambda: home.open(resume))
        if state is not None:
            try:
                training.restore(state)
            except AnyformerError as error:
                raise AnyformerError(f"{home.path}: {error}; it was made by another version, move the folder away") from None
        if started is not None and ranks.first:
            started(learner)
        heard = Sinks(sinks if ranks.first else ())
        heard.begin(config.name, config.to_json())
        stack.callback(heard.end)
        try:
            _train(training, home, ranks, report if ranks.first else None, heard, checkpoint_every)
        except Diverged as error:
            kept = checkpoints(home.path / CHECKPOINTS)
            good = f"the last good checkpoint, {kept[0].stem}, is kept in" if kept else "no checkpoint yet in"
            raise Diverged(f"{error}; {good} {home.path}") from None
        history = training.history
        ranks.from_first(lambda: home.finish(lambda path: config.model.save(learner, path), history))
        return RunResult(home.path, history, True)


def _train(
    training: Training, home: RunFolder, ranks: Ranks, report: Report | None, sinks: Sinks, checkpoint_every: float
) -> None:
    """Advance to the end, keeping and telling what happens on the way."""
    kept = told = time.monotonic()
    with _signals_noted() as noted:
        while not training.finished:
            record = training.advance()
            stop, now = ranks.any(bool(noted), training.device), time.monotonic()
            if ranks.first and record is not None:
                home.log(training.records)
                sinks.log(record.step, {"loss": record.loss, "accuracy": record.accuracy, "rate": record.rate})
            if ranks.first and (record is not None or stop or now - kept >= checkpoint_every):
                home.keep(training.state())
                kept = now
            if report is not None and (record is not None or stop or now - told >= REPORT_EVERY):
                report(_progress(training))
                told = now
            if stop and not training.finished:
                if ranks.first:
                    LOG.warning(
                        "stopped after step %d of %d; resume continues %s", training.step, training.config.steps, home.path
                    )
                raise KeyboardInterrupt
    if not finite(training.state()):
        raise Diverged(f"train: the weights are not finite after the last step, {training.step}; try a smaller learning_rate")


def _progress(training: Training) -> Progress:
    last = training.records[-1] if training.records else None
    loss = sum(training.running) / len(training.running) if training.running else None if last is None else last.loss
    accuracy = None if last is None else last.accuracy
    pace = (training.steps_per_second, training.seconds_left)
    return Progress(training.step, training.config.steps, loss, accuracy, *pace)


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are put on the list instead of ending the process; a second one raises KeyboardInterrupt at once."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted  # only the main thread may set handlers, and only it gets signals
        return

    def note(number: int, _frame: Any) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]  # ignored ones stay so
    before = {number: signal.signal(number, note) for number in heard}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _device(name: str) -> torch.device:
    if name == "cuda":  # under torchrun each process of a machine has a GPU of its own
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # there, and it holds numbers ("meta" does not)
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise AnyformerError(f"device {name!r} cannot be used: {str(error).splitlines()[0]:.100}") from None


def read_run(folder: str | Path) -> RunResult:
    """Look at a run's folder, finished or not; nothing is trained and nothing written."""
    path = Path(folder)
    home = RunFolder(path, stored_config(path))
    history = home.finished()
    if history is not None:
        return RunResult(path, history, True)
    state = home.newest()
    told = History.of((), False, 0.0) if state is None else History.of(state.records, state.stopped_early, state.seconds)
    return RunResult(path, told, False)


def stored_config(folder: str | Path) -> RunConfig:
    """The configuration of a run's folder; raises AnyformerError where there is none or the folder is called otherwise."""
    path = Path(folder)
    config = read_config(path)
    if not isinstance(config, RunConfig):
        raise AnyformerError(f"{path} is not the folder of a run; expected one with {CONFIG}, as run_training makes it")
    if config.name != path.resolve().name:
        raise AnyformerError(
            f"{path}: the configuration inside is that of the run {config.name}; rename the folder so, or move it away"
        )
    return config
