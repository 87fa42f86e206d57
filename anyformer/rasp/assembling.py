"""A plan becomes a :class:`~anyformer.network.Network`.

Coordinates get places in the stream; a place whose number is read no more is erased by one unit and used again. Layer l is an attention
stage (residual + heads, banks by mask and kernel) and a feed-forward stage (residual + banks of units by function).
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from anyformer.maps import ConstantMap, IdentityMap, LowRankMap
from anyformer.network import Branch, Network, Stage
from anyformer.operators import Attention, AverageHard, Bidirectional, Causal, Gate, Identity, Mask, Offsets, Softmax
from anyformer.rasp.plan import Form, Head, Intervals, Plan, Unit, number

BANK = 8
"""The largest number of heads whose (n, n) patterns are held at once."""


@dataclass(frozen=True)
class Stream:
    """Where coordinates live: ``place[c]``, the ``width`` (with the constant feature, the last), and what is erased when: {time: places}."""

    place: dict[int, int]
    width: int
    erased: dict[int, list[int]]
    names: tuple[tuple[str, ...], ...]
    """Of every place, the names of what lives there, one after the other."""
    written: dict[str, tuple[int, int]]
    """Where a coordinate is found by its name: its place, and the number of stages after which it is there."""

    def column(self, form: Form, dtype: torch.dtype) -> Tensor:
        """A form as a probe column (width,)."""
        out = torch.zeros(self.width, dtype=torch.float64)
        for coordinate, coefficient in form.terms:
            out[self.place[coordinate]] += coefficient
        out[-1] = form.constant
        return out.to(dtype)

    def columns(self, forms: Iterable[Form], dtype: torch.dtype) -> Tensor:
        """Forms as probe columns (width, number of forms)."""
        return torch.stack([self.column(form, dtype) for form in forms], 1)


def last_reads(plan: Plan, outputs: Iterable[Form]) -> dict[int, int | float]:
    """When each coordinate is read last; infinity for those of the output, and its own time for one that nobody reads."""
    last: dict[int, int | float] = {c: coordinate.time for c, coordinate in enumerate(plan.coordinates)}

    def read(form: Form | None, time: int | float) -> None:
        for c, _ in () if form is None else form.terms:
            last[c] = max(last[c], time)

    for head in plan.heads:
        for form in (*head.score.forms(), *head.writes.values()):
            read(form, head.time)
    for unit in plan.units:
        read(unit.gate, unit.time)
        read(unit.value, unit.time)
    for form in outputs:
        read(form, float("inf"))
    return last


def prune(plan: Plan, outputs: list[Form]) -> None:
    """Drop heads and units that write nothing that is read."""
    before = -1
    while before != (before := sum(len(worker.writes) for worker in (*plan.heads, *plan.units))):
        last = last_reads(plan, outputs)
        for worker in (*plan.heads, *plan.units):
            for c in [c for c, weight in worker.writes.items() if last[c] <= worker.time or weight == 0]:
                del worker.writes[c]
        plan.heads = [h for h in plan.heads if h.writes]
        plan.units = [u for u in plan.units if u.writes]


def allocate(plan: Plan, outputs: Iterable[Form]) -> Stream:
    """Places for all coordinates, first come first served; a free one is erased at the feed-forward time that follows its last read."""
    last = last_reads(plan, outputs)
    place: dict[int, int] = {}
    living: list[tuple[int | float, int]] = []  # of each place: last read, and when it was written
    erased: dict[int, list[int]] = defaultdict(list)
    names: list[list[str]] = []
    needed = [c for c, coordinate in enumerate(plan.coordinates) if last[c] > coordinate.time]
    for c in sorted(needed, key=lambda c: plan.coordinates[c].time):
        time = plan.coordinates[c].time
        for p, (read, written) in enumerate(living):
            if read == float("inf"):
                continue
            free = max(int(read) + int(read) % 2, 2)
            free += 2 if free == written else 0
            if free < time:  # not together: old + new - old would round the new number
                erased[free].append(p)
                break
        else:
            p = len(living)
            living.append((0.0, 0))
            names.append([])
        place[c], living[p] = p, (last[c], time)
        names[p].append(plan.coordinates[c].name)
    written = {plan.coordinates[c].name: (p, _stages_until(plan, erased, plan.coordinates[c].time)) for c, p in place.items()}
    return Stream(place, len(living) + 1, dict(erased), (*tuple(tuple(n) for n in names), ("constant",)), written)


def _stages_until(plan: Plan, erased: Iterable[int], time: int) -> int:
    """How many stages there are up to a time: times at which nothing happens have none."""
    return len({w.time for w in (*plan.heads, *plan.units) if w.time <= time} | {t for t in erased if t <= time})


def assemble(
    plan: Plan, outputs: list[Form], *, vocab: int, max_length: int, dtype: torch.dtype, causal: bool, softmax: float | None
) -> tuple[Network, Stream]:
    """The network, whose outputs are these forms. ``softmax``: hard heads become softmax heads with their scores times this number."""
    stream = allocate(plan, outputs)
    embedding = torch.zeros(vocab, stream.width, dtype=torch.float64)
    positions = torch.zeros(max_length, stream.width, dtype=torch.float64)
    embedding[:, -1] = 1.0
    for table, columns in ((embedding, plan.token_columns), (positions, plan.index_columns)):
        for c, values in ((c, v) for c, v in columns.items() if c in stream.place):
            table[:, stream.place[c]] = torch.from_numpy(values.astype(float))
    stages = []
    last = max((w.time for w in (*plan.heads, *plan.units)), default=0)
    for time in range(1, last + 1):
        heads = [h for h in plan.heads if h.time == time]
        units = [u for u in plan.units if u.time == time]
        erased = stream.erased.get(time, [])
        if heads:
            stages.append(_attention(heads, stream, dtype, causal, softmax))
        elif units or erased:
            stages.append(_feed_forward(units, erased, stream, dtype))
    readout = stream.columns(outputs, dtype)
    return Network(embedding.to(dtype), tuple(stages), readout, positions.to(dtype), constant=True), stream


def _residual(width: int) -> Branch:
    return Branch(Identity(), None, IdentityMap(width))


def mask_of(offsets: Intervals | None, causal: bool) -> Mask:
    """The mask rule of a score."""
    if causal:
        kept = tuple(
            (low, 0 if high is None else min(high, 0))
            for low, high in (((None, None),) if offsets is None else offsets)  # (): no distance at all
            if low is None or low <= 0
        )
        return Causal() if kept == ((None, 0),) else Offsets(kept)
    if offsets is None:
        return Bidirectional()
    return Causal() if offsets == ((None, 0),) else Offsets(offsets)


def _attention(heads: list[Head], stream: Stream, dtype: torch.dtype, causal: bool, softmax: float | None) -> Stage:
    """Banks of heads with one mask and kernel; shorter scores and fewer values are padded with zeros."""
    alike: dict[tuple[Mask, str], list[Head]] = defaultdict(list)
    for head in heads:
        alike[mask_of(head.score.offsets, causal), head.kernel].append(head)
    banks = [(*kind, found[i : i + BANK]) for kind, found in alike.items() for i in range(0, len(found), BANK)]
    branches = [_residual(stream.width)]
    for mask, kernel, bank in banks:
        dim = max(1, *(len(h.score.pairs) for h in bank)) if bank else 1
        rank = max(len(h.writes) for h in bank)
        probes = torch.zeros(stream.width, len(bank), 2 * dim, dtype=dtype)
        left = torch.zeros(len(bank), stream.width, rank, dtype=dtype)
        right = torch.zeros(len(bank), rank, stream.width, dtype=dtype)
        for g, head in enumerate(bank):
            for i, (query, key) in enumerate(head.score.pairs):
                probes[:, g, i], probes[:, g, dim + i] = stream.column(query, dtype), stream.column(key, dtype)
            for i, (coordinate, value) in enumerate(head.writes.items()):
                left[g, :, i] = stream.column(value, dtype)
                right[g, i, stream.place[coordinate]] = 1.0
        soft = kernel == "soft" or softmax is not None
        scale = softmax if softmax is not None and kernel == "hard" else 1.0
        attention = Attention(len(bank), dim, mask, Softmax() if soft else AverageHard(), scale=scale, sink=True)
        branches.append(Branch(attention, probes.flatten(1), LowRankMap(left, right)))
    return Stage(tuple(branches))


def _feed_forward(units: list[Unit], erased: list[int], stream: Stream, dtype: torch.dtype) -> Stage:
    """Banks of plain units (value 1) and of multiplying ones, by function; an erasing unit writes minus what it reads."""
    plain: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    gated: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
    for unit in units:
        row = torch.zeros(stream.width, dtype=dtype)
        for coordinate, coefficient in unit.writes.items():
            row[stream.place[coordinate]] += coefficient
        gate = stream.column(unit.gate, dtype)
        if unit.value is None:
            plain[unit.function].append((gate, row))
        else:
            gated[unit.function].append((gate, stream.column(unit.value, dtype), row))
    for p in erased:
        unit = torch.zeros(stream.width, dtype=dtype)
        unit[p] = 1.0
        gated["identity"].append((stream.column(number(1.0), dtype), unit, -unit))
    branches = [_residual(stream.width)]
    for function, bank in plain.items():
        gates, rows = (torch.stack(parts) for parts in zip(*bank, strict=True))
        branches.append(Branch(Gate(len(bank), function), gates.T.contiguous(), ConstantMap(stream.width, rows)))
    for function, bank in gated.items():
        gates, values, rows = (torch.stack(parts) for parts in zip(*bank, strict=True))
        branches.append(Branch(Gate(len(bank), function), gates.T.contiguous(), LowRankMap(values[:, :, None], rows[:, None])))
    return Stage(tuple(branches))
