"""Charts of computed numbers: the cost of universality, and the figures of the experiments.

Log scales; lines differ by style and marker, so that a grey print reads as well; labels stand at the lines. matplotlib is the extra
``viz``, imported when a chart is drawn.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyformer.errors import AnyformerError
from anyformer.figures import pyplot
from anyformer.scaling import Panel

COLOURS = ("#000000", "#c1440e", "#1f5fa8", "#6b8e23", "#7b3294", "#8c6d31", "#3a9d9d", "#555555")
STYLES = ("-", "--", "-.", (0, (1, 1.2)), (0, (5, 1, 1, 1, 1, 1)), (0, (7, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
BOUND = dict(color="#777777", linestyle=(0, (2, 2)), linewidth=1.0)
AXES = {"layers": "layers L", "heads": "heads H", "head_dim": "head width d"}
QUANTITIES = {"state": "state = width x length", "nonzero_weights": "non-zero weights"}
FORMATS = (".png", ".pdf", ".svg")
TINY = 1e-17
"""What an error of exactly 0 is drawn as."""


@dataclass(frozen=True)
class Line:
    """A line to be labelled at its end (x, y), in data: text and colour."""

    x: float
    y: float
    text: str
    colour: str


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure and close it. Raises :class:`AnyformerError` where the file cannot be written."""
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise AnyformerError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        pyplot().close(figure)


def draw_curves(
    path: Path,
    curves: dict[str, dict[str, list[list[list[int | float]]]]],
    models: Sequence[str],
    floors: dict[str, float],
    title: str,
) -> None:
    """Held-out accuracy against steps: a panel a task and variant, a line a model (thin: its seeds), dashed the best trivial baseline.

    ``curves[panel][model]`` holds [step, accuracy] of every evaluation, a list a seed; each of ``models`` has its colour in all panels.
    """
    plt = pyplot()
    columns = min(5, len(curves))
    rows = -(-len(curves) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.1 * columns, 2.5 * rows), squeeze=False, sharey=True)
    colours = dict(zip(models, COLOURS[1:], strict=False))
    for axis in axes.flat[len(curves) :]:
        axis.set_axis_off()
    for axis, (panel, shown) in zip(axes.flat, curves.items(), strict=False):
        axis.axhline(floors[panel], **BOUND)
        for i, (model, seeds) in enumerate(shown.items()):
            for number, seed in enumerate(seeds):
                steps, accuracies = zip(*seed, strict=True)
                label = model if number == 0 else None
                axis.plot(
                    steps, [100 * a for a in accuracies], color=colours[model], linestyle=STYLES[i], linewidth=1.1, label=label
                )
        axis.set_title(panel, fontsize=9)
        axis.set_ylim(0, 102)
        axis.legend(fontsize=7, frameon=False, loc="lower right")
    for axis in axes[-1]:
        axis.set_xlabel("steps", fontsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("held-out accuracy (%)", fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    save_figure(figure, path)


def spread(wanted: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Centres of intervals of the given sizes, in the order of ``wanted`` (ascending), that do not overlap and stay close to it."""
    groups: list[tuple[float, float, int]] = []  # offset of the first start, total size, members
    starts: list[float] = []
    for centre, size in zip(wanted, sizes, strict=True):
        groups.append((centre - size / 2, size, 1))
        while len(groups) > 1 and groups[-2][0] + groups[-2][1] > groups[-1][0]:
            (a, size_a, n_a), (b, size_b, n_b) = groups[-2:]
            groups[-2:] = [((n_a * a + n_b * (b - size_a)) / (n_a + n_b), size_a + size_b, n_a + n_b)]
    member = iter(sizes)
    for start, _, count in groups:
        for _ in range(count):
            size = next(member)
            starts.append(start + size / 2)
            start += size
    return starts


def label_ends(axis: Any, lines: list[Line], height: float, size: float = 7.5) -> None:
    """Write each line's text right of the axis, ``height`` points tall, level with its end, pushed apart where texts would overlap."""
    low, high = axis.get_ylim()
    logarithmic = axis.get_yscale() == "log"

    def level(y: float) -> float:
        return (math.log10(y / low) / math.log10(high / low)) if logarithmic else (y - low) / (high - low)

    ordered = sorted(lines, key=lambda line: line.y)
    places = spread([level(line.y) for line in ordered], [1.4 * size / height * (1 + line.text.count("\n")) for line in ordered])
    for line, place in zip(ordered, places, strict=True):
        axis.annotate(
            line.text, (line.x, line.y), (1.04, place), xycoords="data", textcoords="axes fraction", va="center", ha="left",
            fontsize=size, color=line.colour, annotation_clip=False,
            arrowprops=dict(arrowstyle="-", color=line.colour, linewidth=0.6, shrinkA=0, shrinkB=3, relpos=(0, 0.5)),
        )  # fmt: skip


def require_drawable(path: Path) -> None:
    """Raise now, rather than after the work, where no chart can be drawn into ``path``."""
    pyplot()
    if path.suffix not in FORMATS:
        raise AnyformerError(f"{path} cannot be drawn: expected a file name that ends in {', '.join(FORMATS)}")
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"{path.parent} is not a folder"
        raise AnyformerError(f"{path} cannot be written: {why}")


# --- the cost of universality ---------------------------------------------------------------------------------------------------


def cost_figure(panels: list[Panel], length: int, title: str = "") -> Any:
    """A row of panels (against L, H, d) for each class and quantity; sizes are drawn by their logarithm, of any magnitude."""
    plt = pyplot()
    kinds = list(dict.fromkeys((p.kind, p.quantity) for p in panels))
    figure, axes = plt.subplots(len(kinds), len(AXES), figsize=(11.5, 3.0 * len(kinds)), squeeze=False)
    top = 1 - 0.6 / (3.0 * len(kinds))
    figure.subplots_adjust(left=0.08, right=0.89, top=top, bottom=0.6 / (3.0 * len(kinds)), wspace=0.65, hspace=0.28)
    names = list(dict.fromkeys(name for p in panels for name in (*p.series, *p.left_out)))
    for panel in panels:
        row, column = kinds.index((panel.kind, panel.quantity)), list(AXES).index(panel.against)
        axis = axes[row][column]
        _draw_cost(axis, panel, names)
        if column == 0:
            axis.set_ylabel(f"{panel.kind}\n{QUANTITIES[panel.quantity]}", fontsize=9)
        axis.set_xlabel(AXES[panel.against], fontsize=9)
    figure.text(
        0.5,
        1 - 0.04 / (3.0 * len(kinds)),
        f"{title}{'; ' if title else ''}sequence length {length}",
        ha="center",
        va="top",
        fontsize=10,
    )
    return figure


def draw_cost(path: Path, panels: list[Panel], length: int, title: str = "") -> None:
    """Draw :func:`cost_figure` into a file."""
    save_figure(cost_figure(panels, length, title), path)


def _draw_cost(axis: Any, panel: Panel, names: list[str]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    together: dict[tuple[int | None, ...], list[str]] = {}
    for name, values in panel.series.items():
        together.setdefault(tuple(values), []).append(name)
    labels, partial = [], []
    for values, group in together.items():
        i = names.index(group[0])
        points = [(float(x), math.log10(v)) for x, v in zip(panel.x, values, strict=True) if v is not None]
        colour = COLOURS[i % len(COLOURS)]
        axis.plot(
            *zip(*points, strict=True), color=colour, linestyle=STYLES[i % len(STYLES)], marker=MARKERS[i % len(MARKERS)],
            markersize=4, markerfacecolor="white", linewidth=1.3,
        )  # fmt: skip
        text = " =\n".join(group)
        if values[-1] is None:
            partial.append((points[-1], text, colour))
        else:
            labels.append(Line(*points[-1], text, colour))
    bound = [math.log10(v) for v in panel.lower_bound]
    axis.plot(panel.x, bound, **BOUND)
    labels.append(
        Line(
            float(panel.x[-1]),
            bound[-1],
            f"{'n ' if panel.quantity == 'state' else ''}$H^{{L/2}}$: bound\n(attention only)",
            "#555555",
        )
    )
    if panel.against != "layers" or panel.x[-1] > 16:
        axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=2))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"$10^{{{y:g}}}$" if y >= 0 else ""))
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25, linewidth=0.5)
    low, high = axis.get_ylim()
    if partial:
        axis.set_ylim(low := low - 0.2 * (high - low), high)
    for i, (point, text, colour) in enumerate(partial):
        axis.annotate(
            text, point, (0.02 + 0.2 * i, 0.03), textcoords="axes fraction", fontsize=7.5, color=colour,
            arrowprops=dict(arrowstyle="-", color=colour, linewidth=0.6, shrinkA=0, shrinkB=2),
        )  # fmt: skip
    label_ends(axis, labels, height=165.0)


# --- the limits -----------------------------------------------------------------------------------------------------------------


def _threshold(axis: Any, x: int, text: str) -> None:
    axis.axvline(x, **BOUND)
    axis.annotate(
        text, (x, 1.0), (0, 3), xycoords=("data", "axes fraction"), textcoords="offset points", rotation=38, fontsize=7.5
    )


def draw_below_width(path: Path, result: dict[str, Any]) -> None:
    """The largest attention error against the width m: by the optimiser, and by the two linear systems."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8.2, 5.0), layout="constrained")
    widths = [row["width"] for row in result["curve"]]
    texts = {
        "optimised": "E optimised for attention\n(median and range over seeds)",
        "attention_only": "least squares,\nattention's reads alone",
        "compiled": "the program: least squares,\nall N reads",
    }
    labels = []
    for i, (name, text) in enumerate(texts.items()):
        rows = [{k: max(v, TINY) for k, v in row[name].items()} for row in result["curve"]]
        median, colour = [r["median"] for r in rows], COLOURS[i]
        if name == "optimised":
            axis.fill_between(widths, [r["min"] for r in rows], [r["max"] for r in rows], color=colour, alpha=0.13, linewidth=0)
            axis.plot(widths, [r["min"] for r in rows], color=colour, linewidth=0.7)
        axis.plot(widths, median, color=colour, linestyle=STYLES[i], marker=MARKERS[i], markersize=5, markerfacecolor="white")
        labels.append((median, text, colour))
    axis.set_yscale("log")
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks := [2, 4, 8, 16, 32], [str(t) for t in ticks])
    axis.set_ylim(1e-16, 4.0)
    for x, text in (
        (result["lower_bound"], f"$H^{{L/2}}$ = {result['lower_bound']} (theorem)"),
        (result["our_bound"], f"our bound: {result['our_bound']}"),
        (result["counted_width"], f"count of unknowns: {result['counted_width']}"),
        (result["attention_reads"], f"attention's reads: {result['attention_reads']}"),
        (result["required_reads"], f"N = {result['required_reads']}"),
    ):
        _threshold(axis, x, text)
    label_ends(axis, [Line(float(widths[-1]), median[-1], text, colour) for median, text, colour in labels], height=260.0)
    axis.set_xlabel("width m of a random backbone")
    axis.set_ylabel("largest error of any attention pattern, new inputs")
    axis.grid(alpha=0.25, linewidth=0.5)
    save_figure(figure, path)


def draw_conditioning(path: Path, condition: dict[str, Any]) -> None:
    """Histograms of log10 cond(R_all) over seeds, at m = N and at m = 1.25 N."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7.0, 3.6), layout="constrained")
    least, recommended = condition["least"], condition["recommended"]
    everything = least["log10_condition"] + recommended["log10_condition"]
    edges = [i / 8 for i in range(int(8 * min(everything)) - 1, int(8 * max(everything)) + 3)]
    styles = (
        (least, dict(color="#bbbbbb", edgecolor="black"), f"m = N = {least['width']}"),
        (recommended, dict(facecolor="white", edgecolor=COLOURS[1], hatch="////"), f"m = 1.25 N = {recommended['width']}"),
    )
    for part, style, text in styles:
        counts, _, _ = axis.hist(part["log10_condition"], bins=edges, linewidth=0.8, **style)
        place = max(range(len(counts)), key=lambda i: counts[i])
        axis.annotate(
            f"{text}\nmedian $10^{{{part['median']:.2f}}}$", (edges[place] + 1 / 16, counts[place]), (0, 4),
            textcoords="offset points", ha="center", fontsize=8.5,
        )  # fmt: skip
    axis.margins(x=0.1, y=0.22)
    axis.set_xlabel("log10 of the condition number of R_all")
    axis.set_ylabel(f"backbones, of {condition['seeds']}")
    save_figure(figure, path)


def draw_layer_norm(path: Path, result: dict[str, Any]) -> None:
    """The largest error of the best fits of a stage with LayerNorm against the width, and of the norm operator."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7.6, 4.0), layout="constrained")
    widths = sorted({row["width"] for row in result["fits"]})
    texts = {
        "error": "standard LayerNorm over m,\nbest embedding found",
        "error_with_constant": "the same with\na constant feature",
        "floor": "floor max |b - beta U|",
    }
    labels = []
    for i, (name, text) in enumerate(texts.items()):
        means = [_mean([row[name] for row in result["fits"] if row["width"] == w]) for w in widths]
        axis.plot(widths, means, color=COLOURS[i], linestyle=STYLES[i], marker=MARKERS[i], markersize=5, markerfacecolor="white")
        labels.append(Line(float(widths[-1]), means[-1], text, COLOURS[i]))
    exact = max(result["norm_operator_error"], TINY)
    axis.plot(widths, [exact] * len(widths), color=COLOURS[4], linestyle=STYLES[3], marker=MARKERS[3], markersize=5)
    labels.append(Line(float(widths[-1]), exact, "norm over D reads\n(path tree)", COLOURS[4]))
    axis.set_yscale("log")
    axis.set_xscale("log", base=2)
    axis.set_ylim(1e-17, 1e2)
    axis.set_xticks(widths, [str(w) for w in widths])
    label_ends(axis, labels, height=230.0)
    axis.set_xlabel("width m of the backbone")
    axis.set_ylabel("largest error (mean over seeds)")
    axis.grid(alpha=0.25, linewidth=0.5)
    save_figure(figure, path)


def draw_simulator(path: Path, points: Sequence[Any]) -> None:
    """Error against size, a line a program; solid float64, dashed float32."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2))
    programs = list(dict.fromkeys(p.program for p in points))
    for i, program in enumerate(programs):
        for dtype, style in (("float64", "-"), ("float32", "--")):
            mine = sorted(
                {(p.size, max(p.error, 1e-17)) for p in points if (p.program, p.dtype, p.heads_simulated) == (program, dtype, 1)}
            )
            label = program if dtype == "float64" else None
            left.plot(
                *zip(*mine, strict=True), linestyle=style, marker="osv^DPX"[i % 7], markersize=3.5, color=f"C{i}", label=label
            )
        sizes = sorted(
            {(p.size, p.width * p.tokens) for p in points if (p.program, p.dtype, p.heads_simulated) == (program, "float64", 1)}
        )
        right.plot(*zip(*sizes, strict=True), marker="osv^DPX"[i % 7], markersize=3.5, color=f"C{i}", label=program)
    left.set_yscale("log")
    left.set_xlabel("n (matrices n x n; layers with n tokens, d = d_v = n)")
    left.set_ylabel("largest error (solid float64, dashed float32)")
    right.set_yscale("log")
    right.set_xlabel("n")
    right.set_ylabel("state = width x tokens")
    left.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    save_figure(figure, path)


def draw_universality(
    path: Path, graphs: dict[str, list[dict[str, Any]]], supports: dict[str, Any], times: Sequence[dict[str, Any]]
) -> None:
    """Masks with their groups above; layers against n, and seconds of proofs against n, below. ``supports``: the mask of each graph."""
    plt = pyplot()
    figure, axes = plt.subplot_mosaic(
        [list(graphs), ["layers"] * 3 + ["time"] * 2], figsize=(13, 6.5), height_ratios=(1, 1.6), layout="constrained"
    )
    for name, lines in graphs.items():
        n = len(supports[name])
        axes[name].imshow(supports[name], cmap="Greys", vmin=0, vmax=1.4)
        said = next(line for line in lines if line["n"] == n)
        axes[name].set_title(f"{name}, n = {n}\n{said['group'][:34]}", fontsize=9)
        axes[name].set_xticks([])
        axes[name].set_yticks([])
    for (name, lines), marker in zip(graphs.items(), MARKERS, strict=False):
        good = [line for line in lines if line["upper"] is not None]
        axes["layers"].plot([g["n"] for g in good], [g["upper"] for g in good], marker=marker, label=name)
    axes["layers"].set(xlabel="tokens n", ylabel="attention layers needed (exact)", title="least m for the mask's own group")
    axes["layers"].legend()
    sizes, seconds = [t["n"] for t in times], [t["seconds"] for t in times]
    slope = statistics.linear_regression([math.log(n) for n in sizes], [math.log(s) for s in seconds]).slope
    axes["time"].loglog(sizes, seconds, marker="o")
    axes["time"].set(xlabel="tokens n", ylabel="seconds", title=f"proof in balls, D_n, m = 2, pair marks (slope {slope:.2f})")
    save_figure(figure, path)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
