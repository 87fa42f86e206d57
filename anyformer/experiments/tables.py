"""``anyformer reproduce table1 | table2``: train every cell, score it on the machine itself, beside the paper and trivial baselines.

    results/<table>.json      a list of rows, one a cell (per cent)
    results/<table>.md        the same as a table of Markdown, with how it was made
    results/<table>-<profile>.png     held-out accuracy against steps

A cell's runs lie in their run folders; what is finished there is read, not trained again, and a row that nobody ran keeps what the file had.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyformer.backbones import Machine, PathTree, StoredProgram
from anyformer.backbones.frozen import FrozenMasked
from anyformer.charts import draw_curves
from anyformer.compiling import compile
from anyformer.errors import AnyformerError
from anyformer.experiments.learned import (
    KINDS,
    PAPER,
    PROFILES,
    VARIANTS,
    Cell,
    floors,
    model_of,
    run_config,
    sizes_of,
)
from anyformer.experiments.report import read_written, require_curves, require_seeds, require_writable, spelled, write
from anyformer.learning.models import FullyTrained
from anyformer.learning.run_folder import checksum_of_files
from anyformer.learning.runs import RunConfig, RunResult
from anyformer.learning.sweeps import SweepReport, sweep
from anyformer.learning.training import History
from anyformer.program import Program, load
from anyformer.storage import write_text
from anyformer.targets.transformer import Transformer, TransformerConfig
from anyformer.tasks import Batch, Task

TABLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "table1": (("dyck", "1-hop", "2-hop", "3-hop", "4-hop"), ("none", "residual+norm")),
    "table2": (("dyck", "2-hop"), tuple(VARIANTS)),
}
"""Tasks and variants of each table."""
MODELS = (*KINDS, "compiled")
SCORED_LABELS, SCORED_ROWS = 4096, 512
"""A finished model is scored on at least so many labels and so many sequences of the held-out set."""
LEGEND = (
    "`none` is attention alone; `sparse` the 0/1 machine, `random` the one of random maps, `full` a transformer trained whole",
    "(its `m` is D = H d; how wide the paper's are is not said), `compiled` that transformer on its 0/1 machine. `ours` are all",
    "scored places, `letters` those of k-hop whose answer is a letter; `steps` is where each seed stopped. Best trivial: the best",
    "predictor without understanding. **Attention alone, `random`: E is trained by its reads, which takes the steps of the 0/1",
    "machine (docs/learning.md); the curve is the same one, no second confirmation.**",
)
SCORES = "scores.json"
Scored = tuple[History, dict[str, Any]]
"""How a run went, and what its result is worth."""


@dataclass(frozen=True)
class Row:
    """One line of a table, in per cent; one number a seed. ``accuracy`` looks at every scored position (all 99 outputs of k-hop)."""

    task: str
    norm: str
    model: str
    H: int
    L: int
    d: int
    m: int
    seeds: list[int]
    accuracy: list[float]
    accuracy_letters: list[float]
    paper: float | None
    profile: str
    command: str
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    baselines: dict[str, float] = field(default_factory=dict)
    curves: list[list[list[int | float]]] = field(default_factory=list)
    """For each seed, [step, held-out accuracy] at every evaluation."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What names the line."""
        return self.task, self.norm, self.model, self.profile


def cells(table: str, profile: str, only: Sequence[str] = ()) -> list[Cell]:
    """The cells of a table that training fills; ``only`` keeps those that match one of task:variant:model, * for any."""
    tasks, variants = TABLES[table]
    all_cells = [Cell(task, variant, kind, profile) for task in tasks for variant in variants for kind in KINDS]
    if not only:
        return all_cells
    patterns = [_pattern(text, tasks, variants) for text in only]
    return [c for c in all_cells if any(all(p in ("*", v) for p, v in zip(pattern, c.name, strict=True)) for pattern in patterns)]


def _pattern(text: str, tasks: Sequence[str], variants: Sequence[str]) -> tuple[str, ...]:
    parts, allowed = tuple(text.split(":")), (tasks, variants, MODELS)
    if len(parts) != 3:
        raise AnyformerError(f"reproduce: --only takes task:variant:model, * for any; got {text!r}")
    for part, names in zip(parts, allowed, strict=True):
        if part != "*" and part not in names:
            raise AnyformerError(f"reproduce: {part!r} in {text!r} is none of {', '.join(names)} (or *)")
    return (*parts[:2], "full") if parts[2] == "compiled" else parts  # which is what full learned


def run(
    folder: Path,
    table: str,
    profile: str,
    seeds: Sequence[int],
    runs: Path,
    executor: Executor | None = None,
    only: Sequence[str] = (),
    command: str = "",
    report: SweepReport | None = None,
) -> dict[str, Any]:
    """Train, score and write; returns the rows, the failures and the files. Raises AnyformerError for unknown names."""
    if table not in TABLES or profile not in PROFILES:
        raise AnyformerError(
            f"reproduce: {', '.join(TABLES)} and profiles {', '.join(PROFILES)} exist, got {table!r}, {profile!r}"
        )
    require_seeds(seeds)
    require_writable(folder)
    require_writable(runs)
    before = read_written(folder, table, partial(_rows, table)) or []
    wanted = cells(table, profile, only)
    configs = {(cell, seed): run_config(cell, seed) for cell in wanted for seed in seeds}
    done = sweep(configs.values(), executor, runs, report)
    finished, failures = {result.folder.name: result for result in done.runs}, dict(done.failures)
    rows = {row.key: row for row in before}
    for cell in cells(table, profile):
        of_cell = {s: c for (w, s), c in configs.items() if w == cell}
        for model in (cell.kind, "compiled") if cell.kind == "full" else (cell.kind,):
            scored: dict[int, Scored] = {}
            for seed, config in of_cell.items():
                if config.name in finished:
                    try:
                        scored[seed] = finished[config.name].history, scores(config, finished[config.name], model == "compiled")
                    except AnyformerError as error:  # a result that is gone or damaged
                        failures[config.name] = str(error)
            row = _row(cell, model, scored, command)
            there = row.key in rows and rows[row.key].accuracy
            if not there or (of_cell and len(scored) == len(of_cell)):  # where a run failed, figures that the file had stay
                rows[row.key] = row
    order = {row: i for i, row in enumerate(_order(table))}
    listed = sorted(rows.values(), key=lambda row: order[row.key])
    write(folder, table, [asdict(row) for row in listed], markdown(table, listed))
    _draw(table, profile, listed, folder / f"{table}-{profile}.png")
    return {"rows": listed, "failures": failures, "skipped": list(done.skipped)}


def _rows(table: str, data: Any) -> list[Row]:
    """The lines that a file holds; raises where it is not one that this version writes."""
    if not isinstance(data, list):
        raise TypeError("a list was expected")
    rows, known = [Row(**row) for row in data], set(_order(table))
    for row in rows:
        if row.key not in known:
            raise ValueError(f"{row.key} is no line of {table}")
        require_curves(row.curves)
    markdown(table, rows)  # what cannot be told is not ours
    return rows


def _draw(table: str, profile: str, rows: Sequence[Row], path: Path) -> None:
    """The curves of one profile."""
    curves: dict[str, dict[str, list[list[list[int | float]]]]] = {}
    lowest: dict[str, float] = {}
    for row in rows:
        if row.profile == profile and row.curves and row.model != "compiled":
            panel = f"{row.task}, {row.norm.replace('none', 'attention only')}"
            curves.setdefault(panel, {})[row.model] = row.curves
            lowest[panel] = max(row.baselines.values())
    if curves:
        draw_curves(path, curves, KINDS, lowest, f"{table}, profile {profile}: dashed, the best predictor without understanding")


def _order(table: str) -> Iterator[tuple[str, str, str, str]]:
    tasks, variants = TABLES[table]
    for profile in reversed(PROFILES):
        for variant in variants:
            for task in tasks:
                yield from ((task, variant, model, profile) for model in MODELS)


def _row(cell: Cell, model: str, held: dict[int, Scored], command: str) -> Row:
    sizes = sizes_of(cell.task, cell.profile)
    scored = [score for _, score in held.values()]
    width = scored[0]["width"] if scored else unscored_width(cell, model)
    histories = [history for history, _ in held.values()]
    return Row(
        *cell.name[:2],
        model,
        sizes.heads,
        sizes.layers,
        sizes.head_dim,
        width,
        list(held),
        [100 * s["accuracy"] for s in scored],
        [100 * s["letters"] for s in scored if "letters" in s],
        PAPER.get(cell.name) if model != "compiled" else None,
        cell.profile,
        f"{command} --only {':'.join(cell.name)}" if held else "",
        [h.steps[-1] for h in histories],
        [round(h.seconds, 1) for h in histories],
        floors(cell.task),
        [[[s, round(a, 5)] for s, a in zip(h.steps, h.accuracies, strict=True)] for h in histories],
    )


def unscored_width(cell: Cell, model: str) -> int:
    """The width of a line that nobody ran."""
    made, sizes = model_of(cell, 0), sizes_of(cell.task, cell.profile)
    if isinstance(made, FullyTrained):
        return made.config.features if model == "full" else compiled_on(made.config).width
    return sizes.width


# --- scores of a finished run -----------------------------------------------------------------------------------------------------


def scores(config: RunConfig, result: RunResult, compiled: bool = False) -> dict[str, Any]:
    """Accuracies of what a run left behind, on the held-out set, and the width that it runs at; kept in its folder. ``compiled``: of a fully
    trained target, compiled for the 0/1 machine of its class and run there."""
    kept = result.folder / ("compiled-" * compiled + SCORES)
    about = {"sample": [SCORED_LABELS, SCORED_ROWS], "result": checksum_of_files(result.result)}
    with contextlib.suppress(OSError, ValueError):  # missing, damaged or of another result: scored again
        earlier = json.loads(kept.read_text(encoding="utf-8"))
        if isinstance(earlier, dict) and about.items() <= earlier.items():
            return earlier
    if compiled:
        target = Transformer.load(result.result)
        program: Program | Transformer = compile(target, compiled_on(target.config))
    else:
        program = Transformer.load(result.result) if isinstance(config.model, FullyTrained) else load(result.result)
    if isinstance(program, Program):
        machine, width = program.machine(), program.width
        found = evaluated(lambda tokens: machine(tokens, program), config.task)
    else:
        width = program.config.features
        found = evaluated(program, config.task)
    out = found | {"width": width} | about
    write_text(kept, json.dumps(out) + "\n")
    return out


def compiled_on(config: TransformerConfig) -> Machine:
    """The 0/1 machine that runs a compiled target: the tree, or, as hidden units are branches of it and its width takes their count to the
    power of the layers, the stored program where there is an MLP."""
    if config.mlp:
        return StoredProgram.for_class(config)
    return (PathTree if config.residual or config.norm else FrozenMasked).for_class(config)


@torch.no_grad()
def evaluated(run: Callable[[Tensor], Tensor], task: Task, rows: int = 16) -> dict[str, float]:
    """Every accuracy of the task on its held-out set."""
    a_row = int(task.held_out(1).scored.sum())
    batch: Batch = task.held_out(max(SCORED_ROWS, SCORED_LABELS // a_row))
    return task.accuracies(torch.cat([run(part) for part in batch.inputs.split(rows)]), batch)


# --- the table for people -----------------------------------------------------------------------------------------------------------


def markdown(table: str, rows: Iterable[Row]) -> str:
    """The table: ours (mean and, over seeds, the standard deviation), the paper's, the best trivial baseline."""
    lines = [f"# {table}: held-out accuracy in per cent", ""]
    rows = list(rows)
    for profile in reversed(PROFILES):
        mine = [row for row in rows if row.profile == profile]
        if not any(row.accuracy for row in mine):
            continue
        said = (
            "the paper's H, L, d and m" if profile == "paper" else "smaller models, few steps: no claim about the paper's figures"
        )
        head = ["task", "variant", "model", "m", "seeds", "ours", "letters", "paper", "best trivial", "steps"]
        lines += [f"## Profile `{profile}` ({said})", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for row in mine:
            best = max(row.baselines.items(), key=lambda item: item[1])
            cells = [
                row.task,
                row.norm,
                row.model,
                str(row.m),
                str(len(row.seeds)),
                spelled(row.accuracy),
                spelled(row.accuracy_letters) if row.accuracy_letters or not row.accuracy else "",
            ]
            cells += [
                "" if row.paper is None else f"{row.paper:.1f}",
                f"{best[1]:.1f} ({best[0]})",
                " ".join(map(str, row.steps)),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", *LEGEND]
        made = sorted({row.command.split(" --only ")[0] for row in mine if row.command})
        lines += ["", f"Made by {', '.join(f'`{command}`' for command in made)}; one row: `--only task:variant:model`.", ""]
    return "\n".join(lines)
