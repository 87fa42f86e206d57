r"""Language modelling on a file of yours, byte by byte.

    inputs    T o \x20 b e
    labels    o \x20 b e ,        a window of "To be, or not"; every position is scored

The label at position i is the byte at i + 1. Training rows are windows at uniform places of the first part of the file; held-out
rows are the windows of its last part that do not overlap, in a fixed random order. The task's value holds the file's sha256: a
file that has changed since is refused.
"""

import hashlib
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int64, UInt8

from anyformer.errors import AnyformerError, require_number, require_size
from anyformer.tasks.finite import permutation
from anyformer.tasks.task import Batch, Ids, Task, Words, below

Bytes = UInt8[np.ndarray, "_"]


@dataclass(frozen=True, kw_only=True)
class Text(Task):
    """``Text(file="shakespeare.txt", length=64)``. The last ``held_out_share`` of the file is held out.

    ``sha256`` is filled in from the file. Where it is given (a task read back from JSON), the file is read and compared when rows
    are first asked for, once in a process. Ids are bytes; printable ASCII is named by its character, all else ``\\x0a``.
    """

    file: str
    length: int = 64
    held_out_share: float = 0.1
    sha256: str | None = None

    names: ClassVar[tuple[str, ...]] = tuple(chr(i) if 32 < i < 127 else f"\\x{i:02x}" for i in range(256))
    words: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "file", os.fspath(self.file))
        super().__post_init__()
        require_size("Text", "length", self.length)
        require_number("Text", "held_out_share", self.held_out_share)
        if not 0 < self.held_out_share < 1:
            raise AnyformerError(f"Text: held_out_share must be between 0 and 1, got {self.held_out_share!r}")
        if self.sha256 is None:
            object.__setattr__(self, "sha256", hashlib.sha256(_read(self.file)).hexdigest())
            self._parts()

    def _draw(self, words: Words) -> tuple[Ids, Ids]:
        part, _ = self._parts()
        return self._windows(part, below(words[:, 0], len(part) - self.length))

    def held_out(self, size: int) -> Batch:
        """The first ``size`` windows of the file's last part, or all of them."""
        require_size("Text", "size", size)
        _, part = self._parts()
        starts = self.length * permutation((len(part) - 1) // self.length)[:size]
        inputs, labels = self._windows(part, starts)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels))

    def _windows(self, part: Bytes, starts: Int64[np.ndarray, " batch"]) -> tuple[Ids, Ids]:
        rows = part[starts[:, None] + np.arange(self.length + 1)].astype(np.int64)
        return rows[:, :-1].copy(), rows[:, 1:].copy()

    def _parts(self) -> tuple[Bytes, Bytes]:
        """The bytes to train on, and those held out; each holds a window at least."""
        data = _checked(self.file, self.sha256 or "")
        held_out = int(self.held_out_share * len(data))
        if min(held_out, len(data) - held_out) <= self.length:
            parts = f"{len(data) - held_out} to train on and {held_out} held out"
            raise AnyformerError(f"Text: {self.file} is too short: both parts need more than {self.length} bytes, got {parts}")
        return data[: len(data) - held_out], data[len(data) - held_out :]


@lru_cache(maxsize=4)
def _checked(file: str, sha256: str) -> Bytes:
    """The file's bytes, whose sha256 is this one."""
    data = _read(file)
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise AnyformerError(f"Text: {file} has changed: sha256 {sha256} expected, got {found}; make a new task for the new file")
    return np.frombuffer(data, dtype=np.uint8)


def _read(file: str) -> bytes:
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise AnyformerError(f"Text: {file} cannot be read ({error.strerror}); name a text file") from None
    if not 0 < len(data) < 2**31:
        raise AnyformerError(f"Text: {file} must hold 1 to {2**31 - 1} bytes, got {len(data)}")
    return data
