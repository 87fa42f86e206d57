"""Checkpoints: the state of a training as one safetensors file, written so that a killed write loses nothing.

    checkpoints/step-000000400.safetensors     metadata: step, evaluations, a sha256 of the tensors; a sha256 of that text
    parameters/<name>, memory/<name>/<kind>, running                                         the tensors

A file is written beside its name, flushed and then renamed, so under its name it is whole or absent; the last two are
kept. Reading checks every byte that counts: the text against its sha256, the tensors against theirs.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from anyformer.errors import AnyformerError
from anyformer.learning.training import Record, TrainingState
from anyformer.storage import apart, checksum, flush_folder

KIND, VERSION, KEPT = "anyformer-checkpoint", 1, 2


def write_checkpoint(folder: Path, state: TrainingState, run: str) -> Path:
    """Write ``state`` of the run called ``run`` and remove all but the newest two checkpoints.

    Raises OSError where the file system refuses (a full disk), with the older checkpoints as they were.
    """
    tensors = {f"parameters/{name}": tensor for name, tensor in state.parameters.items()}
    tensors |= {f"memory/{name}": tensor for name, tensor in state.memory.items()}
    tensors["running"] = torch.tensor(state.running, dtype=torch.float64)
    tensors = apart(tensors)
    about = {
        "format": KIND,
        "format_version": VERSION,
        "run": run,
        "step": state.step,
        "stopped_early": state.stopped_early,
        "seconds": state.seconds,
        "frozen": state.frozen,
        "records": [dataclasses.astuple(record) for record in state.records],
        "tensors_sha256": checksum(tensors),
    }
    text = json.dumps(about, sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    path, following = folder / f"step-{state.step:09d}.safetensors", folder / ".next"
    try:
        save_file(tensors, following, metadata={"anyformer": text, "sha256": _sha256(text)})
        with open(following, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(following, path)
    except SafetensorError as error:  # what safetensors makes of a write that failed
        following.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written: {error}") from None
    except BaseException:
        following.unlink(missing_ok=True)
        raise
    flush_folder(folder)
    for old in checkpoints(folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, newest first."""
    return sorted(folder.glob("step-*.safetensors"), reverse=True)


def read_checkpoint(path: Path, run: str) -> TrainingState:
    """Read a checkpoint of the run called ``run``; raises AnyformerError where it is damaged or not one."""
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (a handle is no dict)
        text = metadata["anyformer"]
        if _sha256(text) != metadata["sha256"]:
            raise AnyformerError(f"{path}: the text does not match its checksum; the file is damaged")
        about: dict[str, Any] = json.loads(text)
        if (about["format"], about["format_version"], about["run"]) != (KIND, VERSION, run):
            raise AnyformerError(f"{path} is not a checkpoint of the run {run}")
        if checksum(tensors) != about["tensors_sha256"]:
            raise AnyformerError(f"{path}: the numbers do not match their checksum; the file is damaged")
        parts: dict[str, dict[str, torch.Tensor]] = {"parameters": {}, "memory": {}}
        running = tensors.pop("running")
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = tensor
        records = tuple(Record(*record) for record in about["records"])
        numbers = (tuple(running.tolist()), records, about["stopped_early"], about["seconds"], about["frozen"])
        return TrainingState(about["step"], parts["parameters"], parts["memory"], *numbers)
    except AnyformerError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise AnyformerError(f"{path} is damaged or no checkpoint ({type(error).__name__}: {error!s:.80})") from None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
