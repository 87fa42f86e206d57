"""``anyformer reproduce learnability``: which choice lets gradient descent find attention-only programs? One is changed at a time.

The paper's attention-only k-hop programs stay near the best predictor by position (1-hop: 30.2 % and 27.7 %), although a program that is exact
exists. The base case here (rate up to 2e-2, rows of standard deviation 0.5, one head of a layer that starts at its own position, a
shared read-out, one cycle) learns 1-hop at the paper's size, m = 456; every other line differs from it in one choice. Equal budgets:
the same number of steps and rows for all.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from anyformer.experiments.learned import PAPER, Cell, floors, run_config, trained
from anyformer.experiments.report import read_written, require_seeds, spelled, write
from anyformer.learning.frozen_machine import FrozenMachine
from anyformer.learning.runs import RunConfig
from anyformer.learning.sweeps import SweepReport

STEPS, BATCH = 500, 32
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base": ({}, {}),
    "rate up to 3e-3": ({}, {"learning_rate": 3e-3}),
    "rate up to 6e-2": ({}, {"learning_rate": 6e-2}),
    "rows of 0.1": ({"embedding_std": 0.1}, {}),
    "rows of 1.0": ({"embedding_std": 1.0}, {}),
    "no head at its own position": ({"self_heads": 0.0}, {}),
    "no position rows": ({"self_heads": 0.0, "positions": False}, {}),
    "free read-out": ({"readout": "free"}, {}),
    "cosine schedule": ({}, {"schedule": "cosine"}),
    "Muon": ({}, {"optimizer": "muon"}),
    "rate 3e-3, rows of 0.02, no head at its own position": ({"embedding_std": 0.02, "self_heads": 0.0}, {"learning_rate": 3e-3}),
}
"""Changes of the model and of the training."""
RANDOM = {
    "random machine, by its reads": {},
    "random machine, E itself": {"coordinates": "embedding", "readout": "free", "self_heads": 0.0},
    "random machine, E itself, rows of 0.1": {
        "coordinates": "embedding", "readout": "free", "self_heads": 0.0, "embedding_std": 0.1,
    },
}  # fmt: skip
"""The same on a random machine of the same size."""


@dataclass(frozen=True)
class Line:
    """One choice: held-out accuracy in per cent at the end, and the first step at which it was 90 or more (None: never), a number a seed."""

    choice: str
    seeds: list[int]
    accuracy: list[float]
    steps_to_90: list[int | None]


def config_of(choice: str, seed: int) -> RunConfig:
    """The run of one line."""
    random = choice in RANDOM
    base = run_config(Cell("1-hop", "none", "random" if random else "sparse", "paper"), seed)
    assert isinstance(base.model, FrozenMachine)
    model, training = (RANDOM[choice], {}) if random else CHOICES[choice]
    about = {"steps": STEPS, "batch_size": BATCH, "warm_up": STEPS // 10, "stop_at": None, "evaluate_every": 50} | training
    return RunConfig(task=base.task, model=replace(base.model, **model), training=replace(base.training, **about))


def run(
    folder: Path,
    seeds: Sequence[int],
    runs: Path,
    executor: Executor | None = None,
    report: SweepReport | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Train every line, write ``learnability.json`` and ``.md``; returns the lines and the failures."""
    require_seeds(seeds)
    configs = {(choice, seed): config_of(choice, seed) for choice in (*CHOICES, *RANDOM) for seed in seeds}
    before = read_written(folder, "learnability", _lines) or {}
    histories, done = trained(configs, folder, runs, executor, report)
    lines = []
    for choice in (*CHOICES, *RANDOM):
        found = {seed: history for (name, seed), history in histories.items() if name == choice}
        reached = [next((step for step, a in zip(h.steps, h.accuracies, strict=True) if a >= 0.9), None) for h in found.values()]
        line = Line(choice, list(found), [round(100 * h.accuracies[-1], 2) for h in found.values()], reached)
        lines.append(before.get(choice, line) if len(found) < len(seeds) else line)  # where a run failed, what the file had stays
    about = {"command": command, "steps": STEPS, "batch_size": BATCH, "lines": [asdict(line) for line in lines]}
    write(folder, "learnability", about, markdown(lines, command))
    return {"lines": lines, "failures": dict(done.failures), "skipped": list(done.skipped)}


def _lines(data: Any) -> dict[str, Line]:
    """The lines that a file holds; raises where it is not one that this version writes."""
    lines = [Line(**line) for line in data["lines"]]
    markdown(lines, "")  # what cannot be told is not ours
    return {line.choice: line for line in lines}


def markdown(lines: Sequence[Line], command: str) -> str:
    """The lines as a table."""
    sparse, random = (PAPER["1-hop", "none", kind] for kind in ("sparse", "random"))
    best = max(floors("1-hop").values())
    out = [
        f"# Attention-only 1-hop, m = 456: one choice changed at a time ({STEPS} steps of {BATCH} rows)",
        "",
        f"`{command}`; the paper: {sparse} % (sparse) and {random} % (random); the best predictor without understanding: {best} %.",
        "",
        "| choice | seeds | held-out accuracy (%) | steps to 90 % |",
        "|---|---|---|---|",
    ]
    for line in lines:
        reached = ", ".join("never" if step is None else str(step) for step in line.steps_to_90)
        out.append(f"| {line.choice} | {len(line.seeds)} | {spelled(line.accuracy)} | {reached} |")
    return "\n".join(out) + "\n"
