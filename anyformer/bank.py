"""Many programs, one backbone, one batch: each row names its program.

Nothing but the embedding distinguishes two programs of one machine, so rows that run different programs share the pass: the first state is
gathered row by row, the rest is the machine's.
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.backbones.machine import Machine, Prepared
from anyformer.errors import AnyformerError, require_size
from anyformer.network import check_positions, check_tokens
from anyformer.operators import Context
from anyformer.program import Program, load

INT64 = 2**63 - 1
REMEMBERED = 1024
"""Of how many programs that had to go a bank remembers the names, to say so."""


class ProgramBank:
    """Programs of one machine by name; ``bank(tokens, programs=["a", "b"])`` runs row i with the program named there.

    A program is a :class:`Program` or the folder of one, which is read when it is first used. At most ``resident`` programs are held:
    the least recently used goes first. One that was given as a folder is read again when it is needed; one that was given itself is
    then gone, and naming it is an error. Programs may be added, replaced and dropped while other threads run the bank: a run uses
    those that it found when it began. Nothing here is differentiable.
    """

    def __init__(self, machine: Machine, programs: Mapping[str, Program | str | Path] | None = None, *, resident: int = 64):
        if not isinstance(machine, Machine):
            raise AnyformerError(
                f"a bank needs a machine, got {type(machine).__name__}; make one with PathTree.for_class(target)"
            )
        require_size("ProgramBank", "resident", resident)
        self.machine, self.resident = machine, resident
        self._lock = threading.RLock()
        self._held: dict[str, tuple[Program, Prepared]] = {}  # the least recently used first
        self._folders: dict[str, Path] = {}
        self._dropped: dict[str, None] = {}
        if not isinstance(programs, Mapping | None):
            raise AnyformerError(f"programs must be a mapping of names to programs, got {type(programs).__name__}")
        for name, program in (programs or {}).items():
            self[name] = program

    def __setitem__(self, name: str, program: Program | str | Path) -> None:
        if not isinstance(name, str) or not name:
            raise AnyformerError(f"a program's name must be a non-empty text, got {name!r}")
        if isinstance(program, (str, Path)):
            if not Path(program).is_dir():
                raise AnyformerError(f"{program} is not a folder; a bank takes programs or folders of them")
            with self._lock:
                self._forget(name)
                self._folders[name] = Path(program)
            return
        entry = self._prepare(program)
        with self._lock:
            self._forget(name)
            self._hold(name, entry)

    def __delitem__(self, name: str) -> None:
        with self._lock:
            if name not in self:
                raise self._unknown(name)
            self._forget(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._held or name in self._folders)

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter([*self._folders, *(name for name in self._held if name not in self._folders)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"ProgramBank({len(self)} programs, {len(self._held)} of at most {self.resident} resident; {self.machine!r})"

    @property
    def held(self) -> tuple[str, ...]:
        """Names of the resident programs, the least recently used first."""
        with self._lock:
            return tuple(self._held)

    def __getitem__(self, name: str) -> Program:
        return self._entries([name])[0][0]

    def __call__(
        self,
        tokens: Int[Tensor, "batch n"],
        programs: Sequence[str],
        *,
        mask: Bool[Tensor, "batch n"] | None = None,
        positions: Int[Tensor, "batch n"] | None = None,
    ) -> Float[Tensor, "batch n out"]:
        """Logits; row i is what the machine gives for the program ``programs[i]`` alone, bit for bit on one thread. Where programs have
        different numbers of outputs, those that a row does not have are -inf. Raises :class:`AnyformerError` for a name that is not
        there, before anything runs."""
        check_tokens(tokens, INT64)
        names = isinstance(programs, Sequence) and not isinstance(programs, str) and all(isinstance(p, str) for p in programs)
        if not names or len(programs) != len(tokens):
            shape = tuple(tokens.shape)
            got = f"{len(programs)} names" if names else f"{programs!r:.60}"
            raise AnyformerError(f"one program name for each row of tokens {shape} expected, got {got}")
        entries = self._entries(programs)
        ctx = Context.of(tokens, mask, positions)
        for i, (program, _) in enumerate(entries):
            check_tokens(tokens[i : i + 1], program.vocab)
            if program.positions is not None:
                check_positions(ctx.positions[i], program.positions.shape[0])
        if len({program.dtype for program, _ in entries}) > 1:
            raise AnyformerError("programs of one batch must have one dtype; convert them with program.to(dtype)")
        rows = self.machine.run_rows(tokens.long(), [prepared for _, prepared in entries], ctx)
        widest = max(row.shape[-1] for row in rows)
        return torch.cat([F.pad(row, (0, widest - row.shape[-1]), value=-math.inf) for row in rows])

    # --- who stays ----------------------------------------------------------------------------------------------------------------

    def _prepare(self, program: Program) -> tuple[Program, Prepared]:
        self.machine.check(program)
        return program, self.machine.prepare(program)

    def _entries(self, names: Sequence[str]) -> list[tuple[Program, Prepared]]:
        """The programs of a batch; those that are not resident are read. Held together until the run ends, however many they are."""
        wanted = dict.fromkeys(names)
        with self._lock:
            for name in wanted:
                if name not in self:
                    raise self._unknown(name)
            found = {name: self._held[name] for name in wanted if name in self._held}
            folders = {name: self._folders[name] for name in wanted if name not in found}
        for name, folder in folders.items():  # other threads go on meanwhile
            found[name] = self._prepare(load(folder))
        with self._lock:
            for name in wanted:
                now = self._held.get(name)
                if now is found[name] or (now is None and name in folders and self._folders.get(name) == folders[name]):
                    self._held.pop(name, None)  # not dropped or replaced meanwhile: the most recently used
                    self._hold(name, found[name])
        return [found[name] for name in names]

    def _hold(self, name: str, entry: tuple[Program, Prepared]) -> None:
        self._held[name] = entry
        while len(self._held) > self.resident:
            oldest = next(iter(self._held))
            del self._held[oldest]
            if oldest not in self._folders:
                self._dropped[oldest] = None
                while len(self._dropped) > REMEMBERED:
                    del self._dropped[next(iter(self._dropped))]

    def _forget(self, name: str) -> None:
        self._held.pop(name, None)
        self._folders.pop(name, None)
        self._dropped.pop(name, None)

    def _unknown(self, name: object) -> AnyformerError:
        if name in self._dropped:
            return AnyformerError(
                f"program {name!r} was the least recently used and had to go: this bank keeps {self.resident}; add it again, or give its folder"
            )
        known = ", ".join(map(repr, sorted(self))) or "none"
        return AnyformerError(f"there is no program {name!r} in this bank; it has {known}")
