"""Pictures of compiled programs: what each head and unit reads and writes, and the attention of every head on an input.

The flow is drawn like a score. A line is a place of the stream, alive from where it is written to where it is read last; time goes from left
to right. A column is a head (above it, what it selects on the example: queries down, keys across) or the hidden units that write the same
places. matplotlib is the extra ``viz``, imported when something is drawn.
"""

import re
import textwrap
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyformer.charts import require_drawable, save_figure
from anyformer.errors import AnyformerError
from anyformer.figures import pyplot
from anyformer.network import Network
from anyformer.rasp.compiled import CompiledProgram, edge_inputs
from anyformer.rasp.flow import Flow, Worker
from anyformer.rasp.layers import head_patterns

COLUMN, ROW, LEFT, RIGHT = 1.9, 0.62, 2.1, 1.25
"""Inches: the width of a column, the height of a line, the margins."""

MATRIX, TOP = 1.02, 2.05
"""Inches: the side of a selector's matrix, and what is above the lines."""

ROLES = {"query": "#1f5fa8", "key": "#c1440e", "value": "#3f7d20", "gate": "#7b3294", "out": "#000000"}
LARGEST = (100, 80)
"""The most columns and lines of one drawing."""

LONGEST = 40
"""The most tokens of one drawing."""


def draw(compiled: CompiledProgram, path: str | Path, tokens: List[Any] | None = None) -> None:
    """The computation flow of a program on an example input (default: a random one of at most 6 tokens), as PNG, PDF or SVG by the suffix."""
    path = Path(path)
    require_drawable(path)
    tokens = _example(compiled) if tokens is None else list(tokens)
    _require_short(tokens)
    flow = Flow.of(compiled, tokens)
    size = len(flow.workers), len(flow.lines)
    if any(have > most for have, most in zip(size, LARGEST, strict=True)):
        raise AnyformerError(
            f"this program has {size[0]} heads and groups of units and {size[1]} places, too many for a picture (at most "
            f"{LARGEST[0]} and {LARGEST[1]}); draw_attention shows its heads"
        )
    save_figure(_Score(compiled, tokens, flow).figure, path)


def draw_attention(network: CompiledProgram | Network, tokens: List[Any], path: str | Path) -> None:
    """The attention patterns of all heads on one input: a row a layer, queries down, keys across, the sink's share in the last column.

    ``tokens``: of the program's vocabulary; for a :class:`Network`, token ids.
    """
    path = Path(path)
    require_drawable(path)
    tokens = list(tokens)
    _require_short(tokens)
    layers = _patterns(network, tokens)
    if not layers:
        raise AnyformerError("this network has no attention, so there is nothing to draw")
    plt, labels = pyplot(), [_label(t) for t in tokens]
    rows = [(layer, part, heads[part : part + 8]) for layer, heads in enumerate(layers) for part in range(0, len(heads), 8)]
    columns = max(len(heads) for _, _, heads in rows)
    side = max(1.5, 0.22 * (len(tokens) + 1))
    size = (0.5 + (side + 0.45) * columns, 0.4 + (side + 0.65) * len(rows))
    figure, axes = plt.subplots(len(rows), columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.set_axis_off()
    for row, (layer, first, heads) in zip(axes, rows, strict=True):
        for h, (axis, pattern) in enumerate(zip(row, heads, strict=False)):
            axis.set_axis_on()
            axis.set_title(f"layer {layer + 1}, head {first + h + 1}", fontsize=8)
            _matrix(axis, pattern, labels, size=6.5 if len(tokens) <= 16 else 5.0)
    save_figure(figure, path)


def _patterns(network: CompiledProgram | Network, tokens: List[Any]) -> list[list[Tensor]]:
    """Of every layer with attention, each head's (n, n + 1): the last column is the sink's share (nothing is kept where there is none)."""
    patterns: list[Tensor] = []
    if isinstance(network, CompiledProgram):
        network.run([tokens], patterns=patterns)
        network = network.network
    elif isinstance(network, Network):
        if not tokens or not all(isinstance(t, int) for t in tokens):
            raise AnyformerError(f"a Network's tokens are ids, at least one; got {tokens!r:.60}")
        with torch.no_grad():
            network.run(torch.tensor([tokens]), patterns=patterns)
    else:
        raise AnyformerError(f"draw_attention needs a compiled program or a Network, got {type(network).__name__}")
    left = iter(patterns)
    return [heads for stage in network.stages if (heads := head_patterns(stage, left))]


def _example(compiled: CompiledProgram) -> list[Any]:
    return edge_inputs(compiled, 1, longest=6)[-1]


def _require_short(tokens: List[Any]) -> None:
    if len(tokens) > LONGEST:
        raise AnyformerError(f"{len(tokens)} tokens are too many for a picture; give at most {LONGEST}")


def _label(token: Any) -> str:
    text = f"{token:.3g}" if isinstance(token, float) else str(token)
    return text if len(text) <= 6 else text[:5] + "…"


def _matrix(axis: Any, pattern: Tensor, labels: list[str], size: float = 6.0) -> None:
    """One pattern; the sink's column, where there is one, stands apart in grey."""
    n, shades = pattern.shape[0], pattern.numpy()
    axis.imshow(shades[:, :n], cmap="Blues", vmin=0, vmax=1.25, interpolation="nearest", extent=(-0.5, n - 0.5, n - 0.5, -0.5))
    ticks = labels
    if pattern.shape[1] > n:
        axis.imshow(
            shades[:, n:], cmap="Greys", vmin=0, vmax=1.6, interpolation="nearest", extent=(n - 0.2, n + 0.8, n - 0.5, -0.5)
        )
        ticks = [*labels, "sink"]
    places = [*range(n), n + 0.3][: len(ticks)]
    axis.set_xlim(-0.5, places[-1] + 0.5)
    axis.set_ylim(n - 0.5, -0.5)
    small = size if n <= 8 else 0.75 * size
    axis.set_xticks(places, ticks, fontsize=small, rotation=90 if max(map(len, labels)) > 2 or n > 8 else 0)
    if len(ticks) > n:
        axis.get_xticklabels()[-1].set(rotation=90, color="#777777")
    axis.set_yticks(range(n), labels, fontsize=small)
    axis.tick_params(length=0, pad=1.5)
    for cut in range(1, n) if n <= 24 else ():
        axis.plot((cut - 0.5, cut - 0.5), (-0.5, n - 0.5), color="white", linewidth=0.6)
        axis.plot((-0.5, places[-1] + 0.5), (cut - 0.5, cut - 0.5), color="white", linewidth=0.6)
    for spine in axis.spines.values():
        spine.set(linewidth=0.4, color="#999999")


def _wrapped(name: str, width: int, lines: int = 2) -> list[str]:
    """A name in lines of at most ``width`` letters, broken after brackets, commas and spaces."""
    out = [""]
    for piece in re.split(r"(?<=[(,)\s])", name):
        if len(out[-1] + piece.rstrip()) > width and out[-1]:
            out.append("")
        out[-1] += piece
    if len(out) > lines:
        out = [*out[: lines - 1], "".join(out[lines - 1 :])]
    return [line.rstrip() if len(line.rstrip()) <= width else line[: width - 1] + "…" for line in out]


class _Score:
    """The drawing of a flow; coordinates are inches from the lower left corner."""

    def __init__(self, compiled: CompiledProgram, tokens: list[Any], flow: Flow):
        plt = pyplot()
        self.flow, self.tokens = flow, tokens
        self.right = LEFT + COLUMN * len(flow.workers)
        self.width, self.height = self.right + RIGHT, TOP + ROW * len(flow.lines) + 0.55
        self.figure = plt.figure(figsize=(self.width, self.height))
        self.axis = self.figure.add_axes((0, 0, 1, 1))
        self.axis.set(xlim=(0, self.width), ylim=(0, self.height))
        self.axis.set_axis_off()
        self.row = {line: i for i, line in enumerate(flow.lines)}
        title = _wrapped(compiled.text, int(10.5 * self.width), lines=1)[0]
        self.axis.text(0.12, self.height - 0.1, title, fontsize=10, va="top", weight="bold")
        shown = " ".join(_label(t) for t in tokens)
        self.axis.text(0.12, self.height - 0.36, f"on the input {shown}", fontsize=8.5, va="top")
        self._legend()
        self._bands()
        self._lines()
        for i, worker in enumerate(flow.workers):
            self._worker(LEFT + COLUMN * (i + 0.5) - 0.35, worker)
        self._output(compiled)

    def y(self, line: int) -> float:
        """The height of a place's line."""
        return self.height - TOP - ROW * (self.row[line] + 0.5)

    def _legend(self) -> None:
        x = 0.12
        used = [role for role in ROLES if any(worker.reads.get(role) for worker in self.flow.workers)]
        for role in used:
            self._mark(x + 0.07, 0.2, role)
            self.axis.text(x + 0.19, 0.2, f"read as {role}", fontsize=7, va="center")
            x += 1.05
        self.axis.plot(x + 0.07, 0.2, marker="s", color="black", markersize=6)
        self.axis.text(x + 0.19, 0.2, "written", fontsize=7, va="center")
        if any(worker.erases for worker in self.flow.workers):
            self.axis.plot(x + 0.85, 0.2, marker="x", color="black", markersize=6)
            self.axis.text(x + 0.97, 0.2, "erased", fontsize=7, va="center")

    def _mark(self, x: float, y: float, role: str, letter: bool = True) -> None:
        self.axis.plot(x, y, marker="o", markersize=9, color="white", markeredgecolor=ROLES[role], markeredgewidth=1.2, zorder=4)
        if letter:
            self.axis.text(x, y - 0.005, role[0], fontsize=6.5, ha="center", va="center", color=ROLES[role], zorder=5)

    def _bands(self) -> None:
        """A title over the columns of each half layer, on grounds of two greys."""
        start, column = 0, 0
        for number, (title, count) in enumerate(self.flow.parts):
            column = start + count
            x = LEFT + COLUMN * start
            shade = "#f3f3f3" if number % 2 == 0 else "#fbfbfb"
            size = (COLUMN * count, self.height - 1.0)
            self.axis.add_patch(pyplot().Rectangle((x, 0.4), *size, color=shade, linewidth=0, zorder=0))
            self.axis.text(x + 0.07, self.height - 0.62, title, fontsize=7.5, va="top", color="#444444")
            start = column

    def _lines(self) -> None:
        for line in self.flow.lines:
            y = self.y(line)
            for life in self.flow.lives[line]:
                end = self.right + 0.12 if life.last is None else self._at(life.last)
                begin = LEFT - 0.25 if life.first is None else self._at(life.first)
                self.axis.plot((begin, end), (y, y), color="#444444", linewidth=0.9, zorder=1, solid_capstyle="butt")
                values = " ".join(_label(v) for v in life.values)
                self._name(0.12 if life.first is None else begin + 0.1, y, life.name, values, 27 if life.first is None else 25)

    def _at(self, column: int) -> float:
        return LEFT + COLUMN * (column + 0.5) - 0.35

    def _name(self, x: float, y: float, name: str, values: str, width: int) -> None:
        wrapped = _wrapped(name, width)
        ground = dict(facecolor="white", alpha=0.8, linewidth=0, pad=0.4)
        self.axis.text(x, y + 0.045, "\n".join(wrapped), fontsize=6.4, va="bottom", linespacing=1.05, zorder=3, bbox=ground)
        shown = textwrap.shorten(values, 29, placeholder=" …")
        self.axis.text(x, y - 0.05, shown, fontsize=6.4, va="top", color="#1f5fa8", zorder=3, bbox=ground)

    def _worker(self, x: float, worker: Worker) -> None:
        touched = [line for places in (*worker.reads.values(), worker.writes, worker.erases) for line in places]
        levels = [self.y(line) for line in touched]
        top = self.height - TOP + 0.12
        self.axis.plot((x, x), (min(levels, default=top), top), color="#888888", linewidth=0.8, zorder=2)
        if worker.pattern is not None:
            inset = self.axis.inset_axes((x - 0.22, top + 0.02, MATRIX * 1.1, MATRIX), transform=self.axis.transData)
            _matrix(inset, worker.pattern, [_label(t) for t in self.tokens], size=5.0)
            inset.set_title(worker.title, fontsize=6.2, pad=2.5)
        else:
            box = dict(boxstyle="round,pad=0.35", facecolor="#f2e9f7", edgecolor=ROLES["gate"], linewidth=0.8)
            self.axis.text(x - 0.2, top + 0.22, worker.title, fontsize=6.5, ha="left", va="bottom", bbox=box, zorder=4)
        for line in dict.fromkeys(touched):
            roles = [role for role, places in worker.reads.items() if line in places]
            shift = 0.15 * (len(roles) + (line in worker.writes) - 1) / 2
            for i, role in enumerate(roles):
                self._mark(x - shift + 0.15 * i, self.y(line), role)
            if line in worker.writes:
                self.axis.plot(x - shift + 0.15 * len(roles), self.y(line), marker="s", color="black", markersize=6, zorder=4)
            elif line in worker.erases:
                self.axis.plot(x, self.y(line), marker="x", color="black", markersize=6, markeredgewidth=1.5, zorder=4)

    def _output(self, compiled: CompiledProgram) -> None:
        values = " ".join(_label(v) for v in self.flow.output)
        x = self.right + 0.25
        levels = [self.y(line) for line in self.flow.read_out]
        for level in levels:
            self._mark(self.right + 0.12, level, "out", letter=False)
        middle = sum(levels) / len(levels) if levels else self.height - TOP - 0.3
        text = "\n".join(textwrap.wrap(values, 12)) or "nothing"
        self.axis.text(x, middle, f"output\n{text}", fontsize=8, va="center", weight="bold", linespacing=1.3)
