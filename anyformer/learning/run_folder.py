"""The folder of a run, held by one process at a time.

    config.json        the whole configuration          environment.json   where it ran, one entry a change
    metrics.jsonl      one line an evaluation           checkpoints/       the last two
    result/            what was trained                 finished.json      the history; it makes the run a finished one

Every file but ``metrics.jsonl`` is replaced as a whole, and the lines of that one are in the checkpoints as well: from
there it is written anew when a run goes on, cut back to the step of the checkpoint.
"""

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError

import anyformer
from anyformer.errors import AnyformerError
from anyformer.learning.checkpoints import checkpoints, read_checkpoint, write_checkpoint
from anyformer.learning.sinks import LOG
from anyformer.learning.training import History, Record, TrainingState
from anyformer.spec import Spec, UnknownSpecification, differences
from anyformer.storage import fcntl, write_text

CONFIG, ENVIRONMENT, METRICS, CHECKPOINTS, RESULT, FINISHED, LOCK = (
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "checkpoints",
    "result",
    "finished.json",
    ".lock",
)


class RunFolder:
    """``path``, the folder of the run called ``path.name``, whose configuration is ``config``."""

    def __init__(self, path: Path, config: Spec):
        self.path, self.config = path, config
        self.lines_missing = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder; raises AnyformerError where another process does. A killed process holds nothing."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise AnyformerError(f"{self.path} cannot be used as the folder of a run: {error.strerror}") from None
        try:
            self._lock(handle)
            yield
        finally:
            os.close(handle)

    def _lock(self, handle: int) -> None:
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 20).decode(errors="replace").strip() or "unknown"
            raise AnyformerError(f"{self.path}: another process (id {holder}) is training here; wait for it or end it") from None
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())

    def finished(self) -> History | None:
        """The history of a finished run, or None. Raises AnyformerError where the folder is not of this configuration."""
        if not (self.path / FINISHED).exists():
            return None
        remedy = f"remove {self.path / FINISHED} and resume the run"
        if not self._check_config():
            raise AnyformerError(f"{self.path / CONFIG} is missing; move the folder away")
        try:
            data = json.loads((self.path / FINISHED).read_text(encoding="utf-8"))
            steps, losses, accuracies = (tuple(data[name]) for name in ("steps", "losses", "accuracies"))
            history, expected = History(steps, losses, accuracies, data["stopped_early"], data["seconds"]), data["result"]
            if data["sha256"] != checksum_of(history):
                raise ValueError("its sha256 is another")
            if not (steps and len(steps) == len(losses) == len(accuracies)):
                raise ValueError("it has no evaluation")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error!s:.80}"
            raise AnyformerError(f"{self.path / FINISHED} is damaged ({what}); {remedy}") from None
        if not (self.path / RESULT).exists():
            raise AnyformerError(f"{self.path / RESULT} is missing; {remedy}: it is written from the last checkpoint")
        if checksum_of_files(self.path / RESULT) != expected:
            raise AnyformerError(
                f"{self.path / RESULT} is damaged or was changed; {remedy}: it is written from the last checkpoint"
            )
        return history

    def open(self, resume: bool) -> TrainingState | None:
        """Make the folder this run's, or check that it is; the state to go on from, None: from the start.

        A damaged checkpoint is reported and the one before it is taken. Without ``resume`` an unfinished run is an error.
        """
        if not self._check_config():
            self._write(CONFIG, self.config.to_json())
        found = checkpoints(self.path / CHECKPOINTS)
        if found and not resume:
            held = f"{self.path} holds an unfinished run ({found[0].stem})"
            raise AnyformerError(f"{held}; continue it with --resume (resume=True) or move the folder away")
        state = self.newest()
        if found and state is None:
            LOG.warning("%s has no whole checkpoint; starting anew", self.path)
        self._note_environment(0 if state is None else state.step)
        try:
            self.write_metrics(() if state is None else state.records)
        except OSError as error:
            raise AnyformerError(f"{self.path / METRICS} could not be written: {error.strerror}") from None
        return state

    def newest(self) -> TrainingState | None:
        """The newest whole checkpoint; each damaged one that is newer is named in a warning."""
        for path in checkpoints(self.path / CHECKPOINTS):
            try:
                return read_checkpoint(path, self.path.name)
            except AnyformerError as error:
                LOG.warning("%s; going back to the one before", error)
        return None

    def keep(self, state: TrainingState) -> bool:
        """Write a checkpoint, unless a number in it is not finite. A disk that is full is a warning, not an end."""
        if not finite(state):
            return False
        try:
            write_checkpoint(self.path / CHECKPOINTS, state, self.path.name)
        except OSError as error:
            older = checkpoints(self.path / CHECKPOINTS)
            stands = f"{older[0].stem} stands" if older else "there is none before it"
            LOG.warning("checkpoint of step %d not written (%s); %s, training goes on", state.step, error, stands)
            return False
        return True

    def log(self, records: list[Record]) -> None:
        """Add the line of the newest record."""
        try:
            if self.lines_missing:
                self.write_metrics(tuple(records))
            else:
                with open(self.path / METRICS, "a", encoding="utf-8") as handle:
                    handle.write(_line(records[-1]))
            self.lines_missing = False
        except OSError as error:
            if not self.lines_missing:
                LOG.warning("%s not written (%s); its lines follow when the disk takes them", self.path / METRICS, error)
            self.lines_missing = True

    def write_metrics(self, records: tuple[Record, ...]) -> None:
        """Write ``metrics.jsonl`` anew."""
        write_text(self.path / METRICS, "".join(map(_line, records)))

    def finish(self, save: Callable[[Path], object], history: History) -> None:
        """Save the result (``save(folder)``), then say that the run is finished."""
        result = self.path / RESULT
        try:
            if result.is_dir():  # of a run that was killed here, or damaged: it is made anew
                shutil.rmtree(result)
            result.unlink(missing_ok=True)
            save(result)
            sums = {"sha256": checksum_of(history), "result": checksum_of_files(result)}
            self._write(FINISHED, dataclasses.asdict(history) | sums)
        except (OSError, SafetensorError) as error:
            raise AnyformerError(
                f"{self.path}: the result could not be written ({error}); make room and resume the run"
            ) from None

    def _write(self, name: str, data: Any) -> None:
        try:
            write_text(self.path / name, json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False))
        except OSError as error:
            raise AnyformerError(f"{self.path / name} could not be written: {error.strerror}") from None

    def _check_config(self) -> bool:
        """Whether there is a configuration; raises AnyformerError where it is not this run's."""
        stored = read_config(self.path)
        if stored is None:
            return False
        if stored != self.config:
            parts = differences(stored.to_json(), self.config.to_json())
            said = "; ".join(f"{where} is {there!r} there, {here!r} here" for where, there, here in parts)
            path = self.path / CONFIG
            raise AnyformerError(f"{path} is not the configuration of this run: {said}; it was changed, move the folder away")
        return True

    def _note_environment(self, step: int) -> None:
        """Add an entry where the environment is not that of the last one."""
        path = self.path / ENVIRONMENT
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
            entries = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        except (OSError, ValueError):
            entries = []
        now = environment()
        if not entries or {k: v for k, v in entries[-1].items() if k != "from_step"} != now:
            self._write(ENVIRONMENT, [*entries, {"from_step": step} | now])


def read_config(folder: Path) -> Spec | None:
    """The configuration in a run's folder, None: there is none. Raises AnyformerError where it is damaged."""
    path = folder / CONFIG
    try:
        return Spec.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnknownSpecification as error:
        raise AnyformerError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:  # AnyformerError is a ValueError
        raise AnyformerError(f"{path} is damaged ({error!s:.100}); move the folder away and start anew") from None


def checksum_of(history: History) -> str:
    """A sha256 of everything in it."""
    return hashlib.sha256(json.dumps(dataclasses.asdict(history), sort_keys=True).encode()).hexdigest()


def checksum_of_files(folder: Path) -> str:
    """A sha256 of the names and contents of all files below a folder; of nothing where it is none."""
    sums = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        sums.update(f"{path.relative_to(folder).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return sums.hexdigest()


def finite(state: TrainingState) -> bool:
    """Whether every number of a state is finite."""
    tensors = (*state.parameters.values(), *state.memory.values())
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def environment() -> dict[str, Any]:
    """Versions and machine, without any name or path of its user."""
    return {
        "anyformer": anyformer.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def _cpu() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as table:
            return next((line.split(":", 1)[1].strip() for line in table if line.startswith("model name")), None)
    except OSError:
        return platform.processor() or None


def _commit() -> str | None:
    """The git commit that this package is a checkout of (``-dirty``: with changes), or None."""
    root = Path(anyformer.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _line(record: Record) -> str:
    return json.dumps(dataclasses.asdict(record)) + "\n"
