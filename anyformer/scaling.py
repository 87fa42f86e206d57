"""How the cost of universality grows: ``state = width * length`` and non-zero weights of every registered machine against L, H and d.

One number of the class runs, the others stay; all sizes come from :func:`anyformer.cost`. The bound ``H^(L/2)`` (times the length for the
state) holds for attention-only machines of the target's depth that match attention (arXiv 2605.31423, Theorem 4.1). It bounds
their non-zero weights as well: a coordinate whose row is 0 in every matrix can be left out, so each that counts carries a weight.
"""

from dataclasses import dataclass, replace
from typing import Any

from anyformer.costs import cost
from anyformer.errors import AnyformerError
from anyformer.targets.transformer import TransformerConfig

RANGES = {"layers": (1, 2, 3, 4, 5, 6, 7, 8), "heads": (1, 2, 4, 8, 16), "head_dim": (1, 2, 4, 8, 16, 32, 64, 128)}
QUANTITIES = ("state", "nonzero_weights")


@dataclass(frozen=True)
class Panel:
    """One panel of the chart: ``series`` are a quantity's values by machine, None where a machine cannot hold the class at that point
    or the size is too large to print; ``left_out`` are the machines without any value, with the reason."""

    kind: str
    quantity: str
    against: str
    x: list[int]
    series: dict[str, list[int | None]]
    lower_bound: list[int]
    left_out: dict[str, str]


def classes(config: TransformerConfig) -> dict[str, TransformerConfig]:
    """The two classes that are drawn: attention only, and with residual and MLP (4 D units where the configuration has none)."""
    plain = replace(config, residual=False, norm=None, mlp=0, gated=False, bias=False)
    full = replace(config, residual=True, mlp=config.mlp or 4 * config.features)
    return {"attention only": plain, f"residual and MLP ({full.mlp} units)": full}


def scaling(config: TransformerConfig, length: int = 1) -> list[Panel]:
    """All panels: for each class, quantity, and number that runs (L, H, d; the configuration's own value is among the points)."""
    panels = []
    for kind, base in classes(config).items():
        for against, usual in RANGES.items():
            x, sizes = [], []
            for value in sorted({*usual, getattr(base, against)}):
                try:
                    sizes.append(cost(replace(base, **{against: value}), length))
                    x.append(value)
                except AnyformerError:  # sizes of thousands of digits
                    if value == getattr(base, against):
                        raise
            own = x.index(getattr(base, against))
            panels += [_panel(kind, quantity, against, x, sizes, own, length) for quantity in QUANTITIES]
    return panels


def _panel(kind: str, quantity: str, against: str, x: list[int], sizes: list[dict[str, Any]], own: int, length: int) -> Panel:
    """One panel from the sizes at every x; ``own`` is where the configuration itself stands, whose reasons are given."""
    names = list(sizes[own]["backbones"])
    values = {name: [s["backbones"][name].get(quantity) for s in sizes] for name in names}
    drawn = {name: v for name, v in values.items() if any(x is not None for x in v)}
    left_out = {n: sizes[own]["backbones"][n].get("reason", f"has no {quantity}") for n in names if n not in drawn}
    bound = [s["lower_bound"] * (length if quantity == "state" else 1) for s in sizes]
    return Panel(kind, quantity, against, x, drawn, bound, left_out)


def reasons(panels: list[Panel]) -> list[str]:
    """Who is missing from which panels, one line each."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for panel in panels:
        for name, reason in panel.left_out.items():
            where = found.setdefault((name, panel.kind, reason), [])
            if panel.against not in where:
                where.append(panel.against.replace("_", " "))
        for name, values in panel.series.items():
            if None in values:
                held = [str(v) for v, value in zip(panel.x, values, strict=True) if value is not None]
                key = (name, panel.kind, f"drawn only at {panel.against.replace('_', ' ')} = {', '.join(held)}")
                found.setdefault(key, [])
    return [
        f"{name}, {kind}: " + (f"not drawn against {', '.join(dict.fromkeys(where))}; {reason}" if where else reason)
        for (name, kind, reason), where in found.items()
    ]
