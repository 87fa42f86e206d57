"""``anyformer reproduce``: one function a table."""

import contextlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from anyformer.errors import AnyformerError
from anyformer.options import Reproduce


def reproduce(options: Reproduce) -> tuple[dict[str, Any], int]:
    """Run the command."""
    run, uses = EXPERIMENTS[options.table]
    for name in ("profile", "seeds", "only", "engine", "runs"):
        if name not in uses and getattr(options, name) != Reproduce.__dataclass_fields__[name].default:
            raise AnyformerError(f"reproduce: {options.table} has no --{name}; it takes {_listed(uses)}")
    if options.table == "rasp" and len(options.seeds) != 1:
        raise AnyformerError(f"reproduce: rasp takes one seed, got {list(options.seeds)}")
    return run(options)


def _listed(uses: tuple[str, ...]) -> str:
    return ", ".join(f"--{name}" for name in (*uses, "output", "json"))


def _simulator(options: Reproduce) -> tuple[dict[str, Any], int]:
    from anyformer.experiments import simulator

    said = f"anyformer reproduce simulator --profile {options.profile}"
    return _counted(options, "simulator", lambda report: simulator.run(options.output, options.profile == "paper", said, report))


def _random_programs(options: Reproduce) -> tuple[dict[str, Any], int]:
    from anyformer.experiments import random_programs

    count, seed = 10_000 if options.profile == "paper" else 500, options.seeds[0]
    said = f"anyformer reproduce rasp --profile {options.profile} --seeds {seed}"
    return _counted(options, "rasp-programs", lambda report: random_programs.run(options.output, count, seed, said, report))


def _universality(options: Reproduce) -> tuple[dict[str, Any], int]:
    from anyformer.experiments import universality

    return _counted(
        options, "universality", lambda report: universality.run(options.output, "anyformer reproduce universality", report)
    )


def _universality_training(options: Reproduce) -> tuple[dict[str, Any], int]:
    from anyformer.experiments import universality_training

    said = " ".join(["anyformer reproduce universality-training --seeds", *map(str, options.seeds)])
    return _counted(
        options,
        "universality-training",
        lambda report: universality_training.run(options.output, options.seeds, said, report),
    )


def _counted(options: Reproduce, name: str, run: Callable[[Any], dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """An experiment with a bar over its parts and laws of its own: its table is printed, and a law that fails is exit code 1."""
    from anyformer.console import counted_progress, show

    with counted_progress(name, quiet=options.as_json) as report:
        result = run(report)
    if not options.as_json:
        show((options.output / f"{name}.md").read_text(encoding="utf-8"))
        show(f"wrote {options.output / name}.md; laws hold: {'yes' if result['passed'] else 'NO'}")
    return result, 0 if result["passed"] else 1


def _table(options: Reproduce) -> tuple[dict[str, Any], int]:
    from anyformer.console import reproduce_progress, show_table
    from anyformer.experiments import tables

    if options.only == ():
        raise AnyformerError("reproduce: --only takes one or more of task:variant:model, got none; leave it out for all cells")
    only = options.only or ()
    count = len(tables.cells(options.table, options.profile, only)) * len(options.seeds)
    said = " ".join(["anyformer reproduce", options.table, "--profile", options.profile, "--seeds", *map(str, options.seeds)])
    with contextlib.ExitStack() as stack:
        executor = stack.enter_context(_engine(options))
        report = stack.enter_context(reproduce_progress(quiet=options.as_json, runs=count))
        what, how = (options.table, options.profile, options.seeds), (options.runs, executor, only)
        result = tables.run(options.output, *what, *how, command=said, report=report)
    if not options.as_json:
        show_table(options.table, result, options.output)
    return result | {"rows": [asdict(row) for row in result["rows"]]}, 1 if result["failures"] else 0


def _learnability(options: Reproduce) -> tuple[dict[str, Any], int]:
    from anyformer.experiments import learnability

    said = " ".join(["anyformer reproduce learnability --seeds", *map(str, options.seeds)])
    count, where = len(learnability.CHOICES) + len(learnability.RANDOM), (options.output, options.seeds, options.runs)
    return _trained(options, "learnability", "lines", count, lambda *sweep: learnability.run(*where, *sweep, command=said))


def _rounded_products(options: Reproduce) -> tuple[dict[str, Any], int]:
    from anyformer.experiments import rounded_products

    said = " ".join(["anyformer reproduce bfloat16 --profile", options.profile, "--seeds", *map(str, options.seeds)])
    count, where = len(rounded_products.PRODUCTS), (options.output, options.profile, options.seeds, options.runs)
    return _trained(
        options, f"bfloat16-{options.profile}", "pairs", count, lambda *sweep: rounded_products.run(*where, *sweep, command=said)
    )


def _trained(
    options: Reproduce, name: str, rows: str, count: int, run: Callable[..., dict[str, Any]]
) -> tuple[dict[str, Any], int]:
    """An experiment of ``count`` runs a seed, ``run(executor, report)``: its table is printed, then the runs that failed."""
    from anyformer.console import reproduce_progress, show, show_failures

    with contextlib.ExitStack() as stack:
        executor = stack.enter_context(_engine(options))
        report = stack.enter_context(reproduce_progress(quiet=options.as_json, runs=count * len(options.seeds)))
        result = run(executor, report)
    if not options.as_json:
        show((options.output / f"{name}.md").read_text(encoding="utf-8"))
        show_failures(result["failures"])
        show(f"wrote {options.output / name}.json and .md")
    return result | {rows: [asdict(row) for row in result[rows]]}, 1 if result["failures"] else 0


def _engine(options: Reproduce) -> Any:
    from anyformer.learning.sweeps import RayExecutor

    return RayExecutor() if options.engine == "ray" else contextlib.nullcontext()


Experiment = tuple[Callable[[Reproduce], tuple[dict[str, Any], int]], tuple[str, ...]]
TRAINED = ("seeds", "engine", "runs")
EXPERIMENTS: dict[str, Experiment] = {
    "table1": (_table, ("profile", "only", *TRAINED)),
    "table2": (_table, ("profile", "only", *TRAINED)),
    "learnability": (_learnability, TRAINED),
    "bfloat16": (_rounded_products, ("profile", *TRAINED)),
    "rasp": (_random_programs, ("profile", "seeds")),
    "simulator": (_simulator, ("profile",)),
    "universality": (_universality, ()),
    "universality-training": (_universality_training, ("seeds",)),
}
"""What runs each, and the options that it uses; any other that is given is refused."""
