"""``anyformer reproduce``: one function a table."""

import contextlib
from dataclasses import asdict
from typing import Any

from anyformer.errors import AnyformerError
from anyformer.options import Reproduce


def reproduce(options: Reproduce) -> tuple[dict[str, Any], int]:
    """Run the command."""
    if options.only and options.table not in ("table1", "table2"):
        raise AnyformerError(f"reproduce: --only chooses cells of table1 and table2; {options.table} is run whole")
    return TABLES.get(options.table, _table)(options)


def _simulator(options: Reproduce) -> tuple[dict[str, Any], int]:
    from anyformer.console import counted_progress, show
    from anyformer.experiments.simulator import Point, markdown, run_simulator

    said = f"anyformer reproduce simulator --profile {options.profile}"
    with counted_progress("simulator", quiet=options.as_json) as report:
        result = run_simulator(options.output, full=options.profile == "paper", command=said, report=report)
    if not options.as_json:
        show(markdown([Point(**p) for p in result["points"]], said))
    return result, 0 if result["passed"] else 1


def _random_programs(options: Reproduce) -> tuple[dict[str, Any], int]:
    from anyformer.console import counted_progress, show
    from anyformer.experiments.random_programs import run_random_programs

    count = 10_000 if options.profile == "paper" else 500
    seed = options.seeds[0]
    said = f"anyformer reproduce rasp --profile {options.profile} --seeds {seed}"
    with counted_progress("random programs", quiet=options.as_json) as report:
        result = run_random_programs(options.output, count, seed, said, report)
    if not options.as_json:
        show((options.output / "rasp-programs.md").read_text(encoding="utf-8"))
    return result, 0 if result["passed"] else 1


def _table(options: Reproduce) -> tuple[dict[str, Any], int]:
    from anyformer.console import reproduce_progress, show_table
    from anyformer.experiments.tables import cells
    from anyformer.experiments.tables import reproduce as reproduce_table

    count = len(cells(options.table, options.profile, options.only)) * len(options.seeds)
    said = " ".join(["anyformer reproduce", options.table, "--profile", options.profile, "--seeds", *map(str, options.seeds)])
    with contextlib.ExitStack() as stack:
        executor = stack.enter_context(_engine(options))
        report = stack.enter_context(reproduce_progress(quiet=options.as_json, runs=count))
        where = (options.output, options.runs, executor, options.only)
        result = reproduce_table(options.table, options.profile, options.seeds, *where, command=said, report=report)
    if not options.as_json:
        show_table(options.table, result, options.output)
    return result | {"rows": [asdict(row) for row in result["rows"]]}, 1 if result["failures"] else 0


def _learnability(options: Reproduce) -> tuple[dict[str, Any], int]:
    from anyformer.console import reproduce_progress, show
    from anyformer.experiments.learnability import CHOICES, RANDOM, learnability, markdown

    said = " ".join(["anyformer reproduce learnability --seeds", *map(str, options.seeds)])
    with contextlib.ExitStack() as stack:
        executor = stack.enter_context(_engine(options))
        count = (len(CHOICES) + len(RANDOM)) * len(options.seeds)
        report = stack.enter_context(reproduce_progress(quiet=options.as_json, runs=count))
        result = learnability(options.seeds, options.output, options.runs, executor, command=said, report=report)
    if not options.as_json:
        show(markdown(result["lines"], said))
    return result | {"lines": [asdict(line) for line in result["lines"]]}, 1 if result["failures"] else 0


def _engine(options: Reproduce) -> Any:
    from anyformer.learning.sweeps import RayExecutor

    return RayExecutor() if options.engine == "ray" else contextlib.nullcontext()


def _universality(options: Reproduce) -> tuple[dict[str, Any], int]:
    from anyformer.console import show

    report = None if options.as_json else show
    if options.table == "universality":
        from anyformer.experiments.universality import reproduce_universality

        result = reproduce_universality(options.output, "anyformer reproduce universality", report)
    else:
        from anyformer.experiments.universality_training import reproduce_training

        said = " ".join(["anyformer reproduce universality-training --seeds", *map(str, options.seeds)])
        result = reproduce_training(options.output, options.seeds, said, report)
    if not options.as_json:
        show(f"wrote {options.output}")
    return result, 0


TABLES = {
    "learnability": _learnability,
    "rasp": _random_programs,
    "simulator": _simulator,
    "universality": _universality,
    "universality-training": _universality,
}
"""Tables that are not trained cell by cell."""
