"""Who reads whom in a compiled program: heads and groups of units, the places of the stream that they read and write, and what lives there.

It is read from the network's own probes and maps, not from the plan that it was made of.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyformer.network import Stage
from anyformer.operators import Attention, Causal, Gate, Identity, Offsets, Softmax
from anyformer.rasp.compiled import CompiledProgram
from anyformer.rasp.layers import head_patterns, layers, unit_columns


@dataclass(frozen=True)
class Worker:
    """One head, or the units of one feed-forward part that write the same places. ``reads`` by role: query, key, value or gate;
    ``erases``: places that are made 0. ``pattern`` (n, n + 1) is a head's attention on the example, the sink's share last."""

    title: str
    reads: dict[str, tuple[int, ...]]
    writes: tuple[int, ...]
    erases: tuple[int, ...] = ()
    pattern: Tensor | None = None


@dataclass(frozen=True)
class Life:
    """What lives in a place between two columns: ``first`` writes it (None: the embedding), ``last`` reads or erases it last (None: the
    output). ``values``: what it holds on the example."""

    name: str
    first: int | None
    last: int | None
    values: tuple[float, ...]


@dataclass(frozen=True)
class Flow:
    """The flow of a program on an example. ``parts``: (title, number of workers) of each half layer; ``lives`` of each place of the stream
    that is used, the constant apart; ``read_out``: the places that the output reads."""

    workers: tuple[Worker, ...]
    parts: tuple[tuple[str, int], ...]
    lives: dict[int, list[Life]]
    read_out: tuple[int, ...]
    output: tuple[Any, ...]

    @property
    def lines(self) -> list[int]:
        """The places that something lives in."""
        return [place for place, lives in self.lives.items() if lives]

    @classmethod
    def of(cls, compiled: CompiledProgram, tokens: list[Any]) -> "Flow":
        """The flow on these tokens. Raises where they are no input of the program, or it has no value there."""
        patterns: list[Tensor] = []
        streams = [compiled.first_stream([tokens])[1][0]]
        later: list[Tensor] = []
        out = compiled.run([tokens], patterns=patterns, streams=later)
        streams += [x[0] for x in later]
        workers: list[Worker] = []
        parts: list[tuple[str, int]] = []
        after: list[int] = []  # of each worker, the stage whose stream holds what it wrote
        left = iter(patterns)
        for number, layer in enumerate(layers(compiled.network), 1):
            for stage in layer.stages:
                found = _heads(stage, left) if stage is layer.attention else _units(stage)
                workers += found
                after += [len(parts) + 1] * len(found)
                parts.append((f"layer {number}: {'attention' if stage is layer.attention else 'feed-forward'}", len(found)))
        read_out = _places(compiled.network.final_readout())
        lives = _lives(compiled.names, workers, after, streams, read_out)
        return cls(tuple(workers), tuple(parts), lives, read_out, tuple(compiled.decode(out[0])))


def _places(columns: Tensor) -> tuple[int, ...]:
    """The places of the stream (the constant, the last, apart) that columns (width, ..) read."""
    return tuple(columns.reshape(len(columns), -1)[:-1].ne(0).any(1).nonzero()[:, 0].tolist())


def _heads(stage: Stage, patterns: Iterator[Tensor]) -> list[Worker]:
    out: list[Worker] = []
    shown = head_patterns(stage, patterns)
    for branch in stage.branches:
        op = branch.operator
        if isinstance(op, Attention):
            assert branch.probes is not None
            probes = branch.probes.unflatten(1, (op.heads, 2, op.head_dim))
            entering, leaving = branch.map.left, branch.map.right  # type: ignore[attr-defined]
            for h in range(op.heads):
                reads = {"query": _places(probes[:, h, 0]), "key": _places(probes[:, h, 1]), "value": _places(entering[h])}
                out.append(Worker(_kind(op, len(out) + 1), reads, _places(leaving[h].T), (), shown[len(out)]))
    return out


def _kind(op: Attention, number: int) -> str:
    mask = ", keys before" if op.mask == Causal() else ", by distance" if isinstance(op.mask, Offsets) else ""
    soft = ", softmax" if isinstance(op.kernel, Softmax) else ""
    return f"head {number}{soft}{mask}"


def _units(stage: Stage) -> list[Worker]:
    """Units by what they write; those that erase come last, in one group (all of them read the stream before the stage)."""
    groups: dict[tuple[int, ...], dict[str, Any]] = {}
    erased: list[int] = []
    for branch in stage.branches:
        if isinstance(branch.operator, Identity):
            continue
        assert isinstance(branch.operator, Gate)
        for gate, value, row in zip(*unit_columns(branch), strict=True):
            writes = _places(row[:, None])
            if branch.operator.function == "identity" and not _places(gate[:, None]) and torch.equal(value, -row):
                erased += writes
                continue
            group = groups.setdefault(writes, {"functions": {}, "gate": set(), "value": set()})
            name = branch.operator.function + (" (product)" if _places(value[:, None]) else "")
            group["functions"][name] = group["functions"].get(name, 0) + 1
            group["gate"].update(_places(gate[:, None]))
            group["value"].update(_places(value[:, None]))
    out: list[Worker] = []
    for writes, group in groups.items():
        title = "\n".join(f"{count} {'unit' if count == 1 else 'units'}: {name}" for name, count in group["functions"].items())
        reads = {role: tuple(sorted(group[role])) for role in ("gate", "value") if group[role]}
        out.append(Worker(title, reads, writes))
    return [*out, Worker("erase", {}, (), tuple(sorted(erased)))] if erased else out


def _lives(
    names: tuple[tuple[str, ...], ...], workers: list[Worker], after: list[int], streams: list[Tensor], read_out: tuple[int, ...]
) -> dict[int, list[Life]]:
    """What lives where: a place's next name begins with the first write after it was erased."""
    lives: dict[int, list[Life]] = {}
    for place, called in enumerate(names[:-1]):
        lives[place] = []
        erased = [c for c, worker in enumerate(workers) if place in worker.erases]
        bounds = [-1, *erased, len(workers)]
        for name, start, end in zip(called, bounds, bounds[1:], strict=False):
            written = [c for c in range(start + 1, end) if place in workers[c].writes]
            first = written[0] if written else None
            reads = [c for c in range(len(workers)) if start < c < end and any(place in r for r in workers[c].reads.values())]
            last = end if end < len(workers) else None
            if last is None and place not in read_out:
                last = max([*reads, first or 0])
            values = streams[0 if first is None else after[written[-1]]][:, place]
            lives[place].append(Life(name, first, last, tuple(values.tolist())))
    return lives
