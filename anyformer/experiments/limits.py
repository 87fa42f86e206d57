"""What a fixed machine cannot do, and what it needs: the lower bound, widths below N, the LayerNorm obstruction, random weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyformer.charts import draw_below_width, draw_conditioning, draw_layer_norm
from anyformer.experiments import below_width, layer_norm, lower_bound, random_weights
from anyformer.experiments.report import Report, counted, require_writable, write
from anyformer.figures import pyplot

INDEPENDENCE = ((2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (3, 2))
"""(heads, layers that paths pass through) at which the lemma of the lower bound is put in numbers; longer paths are past float64."""


@dataclass(frozen=True)
class Effort:
    """How much of everything: seeds, starts of each optimisation, steps of each start, and the widths tried."""

    seeds: int
    starts: int
    steps: int
    widths: tuple[int, ...]
    count_seeds: int
    count_starts: int
    other_classes: tuple[tuple[int, int, int, int], ...]
    norm_seeds: int
    norm_widths: tuple[int, ...]
    backbones: int
    independence: tuple[tuple[int, int], ...]

    @property
    def ticks(self) -> int:
        """Units of work, for a progress bar: widths below N, counts, LayerNorms, random backbones."""
        widths = self.seeds * len(self.widths) + 3 * len(self.other_classes)
        return widths + self.norm_seeds * len(self.norm_widths) + 2 * self.backbones


FULL = Effort(
    seeds=5,
    starts=4,
    steps=250,
    widths=below_width.WIDTHS,
    count_seeds=2,
    count_starts=4,
    other_classes=below_width.OTHER_CLASSES,
    norm_seeds=3,
    norm_widths=layer_norm.WIDTHS,
    backbones=200,
    independence=INDEPENDENCE,
)
QUICK = Effort(
    seeds=1,
    starts=1,
    steps=15,
    widths=(4, 19, 24, 40),
    count_seeds=1,
    count_starts=1,
    other_classes=(),
    norm_seeds=1,
    norm_widths=(8,),
    backbones=20,
    independence=INDEPENDENCE[:2],
)


def run(folder: Path, quick: bool = False, report: Report | None = None) -> dict[str, Any]:
    """Compute, draw, and write ``limits.json``, ``below_width.png``, ``conditioning.png`` and ``layer_norm.png`` into ``folder``; returns
    what ``--json`` prints. ``quick``: few seeds, few widths, a small class for the condition numbers."""
    pyplot()
    require_writable(folder)
    effort = QUICK if quick else FULL
    tick = counted(effort.ticks, report)

    def ticking(part: str) -> Callable[[], None]:
        return lambda: tick(part)

    result: dict[str, Any] = {
        "quick": quick,
        "lower_bound": {
            "independence": [lower_bound.independence(*sizes) for sizes in effort.independence],
            "standing": lower_bound.standing(),
        },
        "below_width": below_width.below_width(effort.seeds, effort.starts, effort.steps, effort.widths, ticking("below N"))
        | {
            "counts": below_width.counts(
                effort.count_seeds, effort.count_starts, effort.steps, effort.other_classes, ticking("the count")
            )
        },
        "layer_norm": layer_norm.layer_norm(
            effort.norm_seeds, 2, min(60, effort.steps), effort.norm_widths, ticking("LayerNorm")
        ),
        "random_weights": random_weights.random_weights(effort.backbones, quick, ticking("random")),
    }
    result["passed"] = all(laws(result).values())
    write(folder, "limits", result)
    draw_below_width(folder / "below_width.png", result["below_width"])
    draw_conditioning(folder / "conditioning.png", result["random_weights"]["condition"])
    draw_layer_norm(folder / "layer_norm.png", result["layer_norm"])
    return result | {"folder": str(folder)}


def laws(result: dict[str, Any]) -> dict[str, bool]:
    """What theory says of the figures, each true or false; what an optimiser found is not among them."""
    below, norm, weights = result["below_width"], result["layer_norm"], result["random_weights"]
    return {
        "the lemma's vectors are independent": all(i["rank"] == i["vectors"] for i in result["lower_bound"]["independence"]),
        "no attention-only machine is below a bound": all(
            (sizes["width"] or row["our_bound"]) >= row["our_bound"] >= row["bound"]
            for row in result["lower_bound"]["standing"]
            for name, sizes in row["machines"].items()
            if name in lower_bound.BOUNDED
        ),
        "nothing is exact below the lower bound": all(
            row["optimised"]["min"] > below_width.SOLVED for row in below["curve"] if row["width"] < below["our_bound"]
        ),
        "attention is exact from its reads on": all(
            row["attention_only"]["max"] < below_width.SOLVED
            for row in below["curve"]
            if row["width"] >= below["attention_reads"]
        ),
        "programs are exact from N on": all(
            row["compiled"]["max"] < below_width.SOLVED for row in below["curve"] if row["width"] >= below["required_reads"]
        ),
        "a standard LayerNorm stays above its floor": all(
            row["error"] >= row["floor"] * (1 - 1e-9) and abs(row["error_at_zero"] - row["floor"]) < 1e-9 for row in norm["fits"]
        ),
        "a norm over D reads is exact": norm["norm_operator_error"] < 1e-10
        and all(v["passed"] for v in norm["verified"].values()),
        "the 0/1 machine is a witness": all(abs(w["determinant"]) == 1 for w in weights["witness"].values()),
        "r ordinary units are too few, r * width are enough": weights["random_mlp"]["ordinary"]["rank"]
        < weights["random_mlp"]["ordinary"]["reads"]
        and weights["random_mlp"]["enough"]["rank"] == weights["random_mlp"]["enough"]["reads"],
    }
