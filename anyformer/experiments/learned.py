"""The paper's learned models: sizes, published figures, and the configuration that trains each of them here.

    five tasks x {attention only, + residual & LayerNorm} x {sparse, random, fully trained}       (Table 1)
    two tasks x five variants of the machine x {sparse, random, fully trained}                     (Table 2, the ablation)

The paper gives H, L, d and m; every other choice is ours and is written in a configuration. (Fixed Universal Transformers, arXiv 2605.31423.)
"""

from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from anyformer.backbones.frozen import FrozenMasked, FrozenRandom, attention_class
from anyformer.errors import require_choice
from anyformer.experiments.report import require_writable
from anyformer.learning.models import FullyTrained, Model
from anyformer.learning.recommended import recommended_model
from anyformer.learning.runs import RunConfig
from anyformer.learning.sweeps import SweepReport, SweepResult, sweep
from anyformer.learning.training import History, TrainingConfig
from anyformer.targets.transformer import TransformerConfig
from anyformer.tasks import Dyck, KHop, Task, baselines

KINDS = ("sparse", "random", "full")
PROFILES = ("quick", "paper")
FLOOR_ROWS = 20_000
"""Rows on which the predictors without understanding are fitted, and as many to score them."""


@dataclass(frozen=True)
class Sizes:
    """H, L, d of the paper, and its m; d_in is the vocabulary."""

    heads: int
    layers: int
    head_dim: int
    width: int


@dataclass(frozen=True)
class Variant:
    """A row of the ablation: what a layer has beside attention."""

    residual: bool = False
    norm: bool = False
    mlp: bool = False


SIZES = {
    "dyck": Sizes(4, 2, 24, 1024),
    "1-hop": Sizes(2, 2, 28, 456),
    "2-hop": Sizes(2, 3, 28, 1024),
    "3-hop": Sizes(2, 4, 30, 2280),
    "4-hop": Sizes(2, 4, 30, 2280),
}
VARIANTS = {
    "none": Variant(),
    "residual": Variant(residual=True),
    "residual+norm": Variant(residual=True, norm=True),
    "residual+mlp": Variant(residual=True, mlp=True),
    "residual+mlp+norm": Variant(residual=True, norm=True, mlp=True),
}
PAPER: dict[tuple[str, str, str], float] = {
    (task, norm, kind): figure
    for task, figures in {
        "dyck": ((100.0, 94.4, 100.0), (100.0, 100.0, 93.0)),
        "1-hop": ((30.2, 29.4, 8.4), (100.0, 96.1, 100.0)),
        "2-hop": ((33.2, 30.5, 51.8), (100.0, 85.7, 100.0)),
        "3-hop": ((39.2, 32.6, 99.5), (100.0, 92.6, 100.0)),
        "4-hop": ((39.4, 35.2, 95.6), (100.0, 89.2, 100.0)),
    }.items()
    for norm, row in zip(("none", "residual+norm"), figures, strict=True)
    for kind, figure in zip(KINDS, row, strict=True)
} | {
    ("dyck", "residual", "sparse"): 100.0,
    ("dyck", "residual", "random"): 95.4,
    ("dyck", "residual+mlp", "sparse"): 100.0,
    ("dyck", "residual+mlp", "random"): 100.0,
    ("dyck", "residual+mlp+norm", "sparse"): 100.0,
    ("dyck", "residual+mlp+norm", "random"): 100.0,
    ("2-hop", "residual", "sparse"): 53.8,
    ("2-hop", "residual", "random"): 54.3,
    ("2-hop", "residual", "full"): 58.4,
    ("2-hop", "residual+mlp", "sparse"): 54.6,
    ("2-hop", "residual+mlp", "random"): 54.1,
    ("2-hop", "residual+mlp", "full"): 100.0,
    ("2-hop", "residual+mlp+norm", "sparse"): 100.0,
    ("2-hop", "residual+mlp+norm", "random"): 66.2,
    ("2-hop", "residual+mlp+norm", "full"): 100.0,
}
"""Published accuracy in per cent, by task, variant and model."""


@dataclass(frozen=True)
class Cell:
    """One model of a table."""

    task: str
    variant: str
    kind: str
    profile: str

    def __post_init__(self) -> None:
        for name, known in (("task", SIZES), ("variant", VARIANTS), ("kind", KINDS), ("profile", PROFILES)):
            require_choice("a table", name, getattr(self, name), tuple(known))

    @property
    def name(self) -> tuple[str, str, str]:
        """Task, variant and model."""
        return self.task, self.variant, self.kind


def task_called(name: str) -> Task:
    """The task of a row."""
    require_choice("a table", "task", name, tuple(SIZES))
    return Dyck() if name == "dyck" else KHop(hops=int(name[0]))


def sizes_of(task: str, profile: str) -> Sizes:
    """The paper's sizes; of the quick profile, d = 8 and the width that follows."""
    sizes = SIZES[task]
    if profile == "paper":
        return sizes
    heads, layers, d = sizes.heads, sizes.layers, 8
    return Sizes(heads, layers, d, FrozenMasked.recipe_for(attention_class(heads, layers, d, task_called(task).vocab)).m)


def run_config(cell: Cell, seed: int) -> RunConfig:
    """What trains one cell of a table."""
    return RunConfig(task=task_called(cell.task), model=model_of(cell, seed), training=training_of(cell, seed))


def model_of(cell: Cell, seed: int) -> Model:
    """A frozen machine of the paper's size, or for "full" an ordinary transformer of H heads of width d, D = H d features."""
    sizes, what, task = sizes_of(cell.task, cell.profile), VARIANTS[cell.variant], task_called(cell.task)
    if cell.kind == "full":
        features = sizes.heads * sizes.head_dim
        return FullyTrained(
            config=TransformerConfig(
                vocab=task.vocab,
                heads=sizes.heads,
                layers=sizes.layers,
                head_dim=sizes.head_dim,
                features=features,
                residual=what.residual,
                norm="layer" if what.norm else None,
                mlp=4 * features if what.mlp else 0,
                positions="learned",
                max_length=task.length,
            )
        )
    options = {
        "residual": what.residual,
        "norm": "pre" if what.norm else None,
        "mlp": sizes.width if what.mlp else 0,
        "seed": seed,
    }
    machine = FrozenMasked if cell.kind == "sparse" else FrozenRandom
    attention = attention_class(sizes.heads, sizes.layers, sizes.head_dim, task.vocab)
    return recommended_model(machine.recipe_for(attention, **options))


def training_of(cell: Cell, seed: int) -> TrainingConfig:
    """AdamW, one cycle; those of attention alone are measured by ``anyformer reproduce learnability``, the others were found by hand."""
    quick, normed, dyck = cell.profile == "quick", VARIANTS[cell.variant].norm, cell.task == "dyck"
    steps = 4000  # stop_at ends most runs long before
    if normed:
        steps = {"dyck": 2500, "1-hop": 2000}.get(cell.task, steps)
    rate = 3e-3 if normed or cell.kind == "full" else 2e-2
    if normed and cell.kind != "full" and cell.task in ("2-hop", "3-hop", "4-hop") and not quick:
        rate, steps = 1e-2, 5000 if cell.task == "4-hop" else steps
        if cell.kind == "random" and cell.task == "2-hop":
            steps = 2000  # of 1.5 s each and more: dense maps of m = 1024
    if quick:
        steps = 200
    return TrainingConfig(
        steps=steps,
        batch_size=16 if quick else 128 if dyck else 64,  # Dyck scores one place a row, k-hop 99
        learning_rate=rate,
        schedule="one-cycle",
        warm_up=20 if quick else 200,
        seed=seed,
        evaluate_every=100,
        evaluation_size=64 if quick else 1024 if dyck else 256,
        stop_at=0.9995 if dyck else 0.999,
    )


def trained(
    configs: dict[tuple[str, int], RunConfig], folder: Path, runs: Path, executor: Executor | None, report: SweepReport | None
) -> tuple[dict[tuple[str, int], History], SweepResult]:
    """Train runs that are named by a choice and a seed, once it is sure that ``folder`` and ``runs`` can be written: the history of each
    that finished, and how the sweep went."""
    require_writable(folder)
    require_writable(runs)
    done = sweep(configs.values(), executor, runs, report)
    histories = {result.folder.name: result.history for result in done.runs}
    return {key: histories[c.name] for key, c in configs.items() if c.name in histories}, done


@lru_cache
def floors(task: str) -> dict[str, float]:
    """What predictors reach that understand nothing, in per cent."""
    found = baselines(task_called(task), size=FLOOR_ROWS).by_name()
    return {name: round(100 * score["accuracy"], 1) for name, score in found.items()}
