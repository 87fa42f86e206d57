"""Pictures: attention of target and machine side by side, and the program as a labelled heat map over the path tree.

matplotlib is the extra ``viz``; it is imported when a figure is drawn.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyformer.backbones.tree import Tree
from anyformer.errors import AnyformerError
from anyformer.program import Program


def pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise AnyformerError("drawing needs matplotlib; install the extra: pip install 'anyformer[viz]'") from None
    return plt


def draw_overview(
    path: str | Path, rows: list[tuple[str, list[str], list[Tensor], list[Tensor]]], programs: list[tuple[str, Program, Tree]]
) -> None:
    """One picture. ``rows``: (title, token labels, target patterns, machine patterns), patterns of each layer (heads, n, n);
    ``programs``: (title, program, tree)."""
    plt = pyplot()
    heads = sum(p.shape[0] for p in rows[0][2])
    heights = [1.0 + 1.9 * len(rows)] + [3.9] * len(programs)
    figure = plt.figure(figsize=(3.1 * heads, sum(heights)), layout="constrained")
    parts = figure.subfigures(1 + len(programs), 1, height_ratios=heights)
    _draw_attention(parts[0], rows)
    for part, (title, program, tree) in zip(parts[1:], programs, strict=True):
        _draw_program(part, title, program, tree)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_attention(part: Any, rows: list[tuple[str, list[str], list[Tensor], list[Tensor]]]) -> None:
    columns = 2 * sum(p.shape[0] for p in rows[0][2])
    axes = part.subplots(len(rows), columns, squeeze=False)
    part.suptitle(
        "attention: the target, and the same head on the fixed machine (query down, key across; shade: square root)", fontsize=11
    )
    for row, (title, labels, target, machine) in zip(axes, rows, strict=True):
        pairs = [(layer, h) for layer in range(len(target)) for h in range(target[layer].shape[0])]
        for i, (layer, h) in enumerate(pairs):
            for j, (who, patterns) in enumerate((("target", target), ("machine", machine))):
                axis = row[2 * i + j]
                axis.imshow(patterns[layer][h].sqrt(), cmap="magma_r", vmin=0, vmax=1, interpolation="nearest")
                off = float((target[layer][h] - machine[layer][h]).abs().max())
                note = "" if j == 0 else f" (off by {off:.0e})"
                axis.set_title(f"{who}{note}\nlayer {layer + 1} head {h + 1}", fontsize=8)
                axis.set_xticks(range(len(labels)), labels, fontsize=4)
                axis.set_yticks(range(len(labels)), labels if i + j == 0 else [""] * len(labels), fontsize=5)
                axis.tick_params(length=0, pad=1)
        row[0].set_ylabel(title, fontsize=11)


def _draw_program(part: Any, title: str, program: Program, tree: Tree) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.colors import SymLogNorm

    top, heat = part.subplots(2, 1, sharex=True, height_ratios=[1, 2.6])
    part.suptitle(f"the program {title}: embedding E over the path tree ({program.width} coordinates)", fontsize=11)
    colours = plt.get_cmap("Pastel1")
    names: list[str] = []
    for block in tree.blocks():
        name, path, start, count = block.what, block.path, block.start, block.count
        if name not in names:
            names.append(name)
        level = len(path)
        top.barh(level, count, left=start, height=0.9, color=colours(names.index(name) % 9), edgecolor="white", linewidth=0.4)
        wide, short = count > 0.035 * program.width, [p.replace("residual", "res").replace("head ", "h") for p in path]
        if wide or (count > 0.012 * program.width and level < len(tree.stages)):
            label = " > ".join(short) if wide else short[-1]
            top.text(start + count / 2, level, label or "root", ha="center", va="center", fontsize=7 if wide else 5)
    top.set_yticks(range(len(names)), names, fontsize=8)
    top.invert_yaxis()
    top.set_title("what each block holds (row) and its path (label; res: residual, h1: head 1)", fontsize=8, loc="left")
    top.spines[:].set_visible(False)
    E = program.detach().embedding.float()
    used = [i for i in range(program.vocab) if program.token_names is None or not program.token_names[i].startswith("_")]
    E = E[used] if used else E
    size = float(E.abs().max()) or 1.0
    image = heat.imshow(
        E, aspect="auto", cmap="RdBu_r", norm=SymLogNorm(size * 1e-3, vmin=-size, vmax=size), interpolation="nearest"
    )
    labels = [program.token_names[i] for i in used] if program.token_names and used else [str(i) for i in range(len(E))]
    heat.set_yticks(range(len(labels)), labels, fontsize=6)
    heat.set_xlabel("coordinate of the backbone's stream", fontsize=8)
    heat.set_ylabel(f"token ({len(labels)} of {program.vocab} in use)", fontsize=8)
    part.colorbar(image, ax=heat, fraction=0.02, pad=0.01, ticks=[-1, -0.01, 0, 0.01, 1])


def head_patterns(patterns: list[Tensor], row: int) -> list[Tensor]:
    """Patterns (heads, n, n) of every layer for one sequence of a batch."""
    return [p[row].detach().to(torch.float32) for p in patterns]
