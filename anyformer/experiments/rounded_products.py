"""``anyformer reproduce bfloat16``: does rounding the products with frozen dense maps change how a program is learned?

1-hop on random maps with residual connections and LayerNorm, the cell of table 1, trained twice a seed: the same draws and the same batches,
products in float32 and in bfloat16 (float32 sums of rounded numbers; E, positions, U and AdamW stay in float32). Written are both curves,
the step at which each first reaches 90 %, and how far apart they are at most in their second halves. There is no bar: two curves of
training differ where each turns upwards, and a reader sees whether they are one curve.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from anyformer.charts import draw_curves
from anyformer.experiments.learned import Cell, floors, run_config, trained
from anyformer.experiments.report import read_written, require_curves, require_seeds, write
from anyformer.learning.frozen_machine import FrozenMachine
from anyformer.learning.runs import RunConfig
from anyformer.learning.sweeps import SweepReport

TASK = "1-hop"
PRODUCTS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Pair:
    """Two runs of a seed. ``accuracy`` in per cent at the end, ``steps_to_90`` (None: never) and ``curves`` ([step, accuracy] of every
    evaluation) by dtype; ``apart``: the largest difference in per cent after half of the steps that both made."""

    seed: int
    accuracy: dict[str, float]
    steps_to_90: dict[str, int | None]
    curves: dict[str, list[list[int | float]]]
    apart: float

    @staticmethod
    def of(seed: int, curves: dict[str, list[list[int | float]]]) -> "Pair":
        """What two curves say."""
        exact, rounded = (dict((int(step), accuracy) for step, accuracy in curves[name]) for name in PRODUCTS)
        both = sorted(exact.keys() & rounded.keys())
        late = [step for step in both if 2 * step >= both[-1]]
        return Pair(
            seed,
            {name: round(100 * curve[-1][1], 2) for name, curve in curves.items()},
            {name: next((int(step) for step, accuracy in curve if accuracy >= 0.9), None) for name, curve in curves.items()},
            curves,
            round(100 * max(abs(exact[step] - rounded[step]) for step in late), 2),
        )


def config_of(products: str, profile: str, seed: int) -> RunConfig:
    """The cell of table 1, its products in one dtype."""
    config = run_config(Cell(TASK, "residual+norm", "random", profile), seed)
    assert isinstance(config.model, FrozenMachine)
    return replace(config, model=replace(config.model, products=products))


def run(
    folder: Path,
    profile: str,
    seeds: Sequence[int],
    runs: Path,
    executor: Executor | None = None,
    report: SweepReport | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Train every pair, write ``bfloat16-PROFILE.json``, ``.md`` and ``.png``, in which other seeds keep their pairs; returns the pairs
    and the failures."""
    require_seeds(seeds)
    configs = {(products, seed): config_of(products, profile, seed) for seed in seeds for products in PRODUCTS}
    name = f"bfloat16-{profile}"
    known: dict[int, Pair] = {pair.seed: pair for pair in read_written(folder, name, _pairs) or ()}
    histories, done = trained(configs, folder, runs, executor, report)
    for seed in seeds:
        held = {name: histories.get((name, seed)) for name in PRODUCTS}
        found = {name: [[s, round(a, 5)] for s, a in zip(h.steps, h.accuracies, strict=True)] for name, h in held.items() if h}
        if len(found) == len(PRODUCTS):
            known[seed] = Pair.of(seed, found)
    pairs = [known[seed] for seed in sorted(known)]
    about = {"command": command, "profile": profile, "pairs": [asdict(pair) for pair in pairs]}
    write(folder, name, about, markdown(pairs, profile, command))
    if pairs:
        curves = {name: [pair.curves[name] for pair in pairs] for name in PRODUCTS}
        panel, lowest = f"{TASK}, random maps, residual & norm", max(floors(TASK).values())
        draw_curves(folder / f"{name}.png", {panel: curves}, PRODUCTS, {panel: lowest}, f"profile {profile}")
    return {"pairs": pairs, "failures": dict(done.failures), "skipped": list(done.skipped)}


def _pairs(data: Any) -> list[Pair]:
    """The pairs that a file holds; raises where it is not one that this version writes: a pair is what its curves say."""
    pairs = [Pair(**pair) for pair in data["pairs"]]
    for pair in pairs:
        require_curves(pair.curves.values())
        if type(pair.seed) is not int or pair != Pair.of(pair.seed, pair.curves):
            raise ValueError(f"the pair of seed {pair.seed!r} is not what its curves say")
    return pairs


def markdown(pairs: Sequence[Pair], profile: str, command: str) -> str:
    """The pairs as a table."""
    size = "the paper's H, L, d and m" if profile == "paper" else "a smaller model, few steps"
    out = [
        f"# Products with frozen dense maps in bfloat16: {TASK}, random maps, residual & norm",
        "",
        f"`{command}` ({size}). The last column: how far the two curves of held-out accuracy are apart at most after half of the steps.",
        "",
        "| seed | float32 (%) | bfloat16 (%) | steps to 90 %: float32 | bfloat16 | apart at most (%) |",
        "|---|---|---|---|---|---|",
    ]
    for pair in pairs:
        exact, rounded = (pair.accuracy[name] for name in PRODUCTS)
        reached = " | ".join("never" if pair.steps_to_90[name] is None else str(pair.steps_to_90[name]) for name in PRODUCTS)
        out.append(f"| {pair.seed} | {exact:.1f} | {rounded:.1f} | {reached} | {pair.apart:.1f} |")
    return "\n".join(out) + "\n"
