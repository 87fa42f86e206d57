"""What every command of ``anyformer`` does: from its options to a result that JSON can hold, and an exit code."""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from anyformer.errors import AnyformerError
from anyformer.options import (
    Certify,
    Compile,
    CostCommand,
    Demo,
    Generate,
    Inspect,
    Limits,
    Rasp,
    Reproduce,
    Run,
    Simulate,
    Specialize,
    Tasks,
    Verify,
)
from anyformer.train_options import AnyTask, Train


@dataclass(frozen=True)
class Command:
    """One row of the table of commands."""

    options: type
    action: Callable[[Any], tuple[dict[str, Any], int]]
    line: str
    narrow: Callable[[list[str]], tuple[Any, list[str]]] | None = None
    """Where the first words decide which options there are: the type of the options, and the words that follow."""


def _demo(options: Demo) -> tuple[dict[str, Any], int]:
    from anyformer.console import demo_progress, show_demo
    from anyformer.demo import run_demo

    with demo_progress(quiet=options.as_json) as report:
        result = run_demo(options.output, report)
    if not options.as_json:
        show_demo(result)
    return result, 0 if result["passed"] else 1


def _compile(options: Compile) -> tuple[dict[str, Any], int]:
    import torch

    from anyformer.backbones import MACHINES, Composed, Composition, PathTree
    from anyformer.compiling import compile
    from anyformer.targets.loading import load_target
    from anyformer.verifying import verify

    if options.backbone not in MACHINES:
        raise AnyformerError(f"--backbone must be one of {', '.join(MACHINES)}, got {options.backbone!r}")
    target = load_target(options.target)
    given: dict[str, Any] = {k: v for k in ("seed", "width", "oversample", "law") if (v := getattr(options, k)) is not None}
    if options.backbone == Composed.name or options.composition_tolerance is not None:
        given["composition"] = Composition.of(target, options.composition_tolerance or 0.0)
    machine = MACHINES[options.backbone].for_class(target, **given)
    program = compile(target, machine, dtype=options.dtype and getattr(torch, options.dtype))
    verdict = verify(program, target)
    program = replace(program, report=verdict.to_json())
    program.save(options.output)
    result = {
        "program": str(options.output),
        "backbone": machine.name,
        "width": machine.width,
        "parameters": program.parameters,
        "fingerprint": machine.fingerprint,
        "report": program.report,
        "provenance": program.provenance,
    }
    if isinstance(machine, Composed):
        result["path_tree_width"] = PathTree.width_of(PathTree.recipe_for(machine.network_class))
    if not options.as_json:
        from anyformer.console import show

        show(f"compiled {options.target} for {machine!r}\n{verdict}\nwrote {options.output} ({program.parameters:,} numbers)")
        for key in ("condition", "oversampling", "forecast_relative_error", "neglected_products", "largest_neglected_product"):
            if key in program.provenance:
                show(f"  {key.replace('_', ' ')}: {program.provenance[key]:.3g}")
    return result, 0 if verdict.passed else 1


def _run(options: Run) -> tuple[dict[str, Any], int]:
    import torch

    from anyformer.program import load
    from anyformer.running import run

    program = load(options.program)
    ids = program.token_ids(options.tokens)
    with torch.no_grad():
        logits = run(program, torch.tensor([ids]))[0]
    names = program.token_names or tuple(str(i) for i in range(program.vocab))
    best = logits.argmax(-1).tolist()
    predicted = [names[i] if i < len(names) else str(i) for i in best]
    result = {"tokens": [names[i] for i in ids], "predictions": predicted, "logits": logits.tolist()}
    if not options.as_json:
        from anyformer.console import show_run

        show_run(result, logits.softmax(-1).amax(-1).tolist())
    return result, 0


def _generate(options: Generate) -> tuple[dict[str, Any], int]:
    import torch

    from anyformer.generating import generate
    from anyformer.program import load

    program = load(options.program)
    ids = program.token_ids(options.tokens)
    ends = [] if options.end is None else program.token_ids(options.end)
    if len(ends) > 1:
        raise AnyformerError(f"--end takes one token, got {len(ends)}")
    end = ends[0] if ends else None
    out = generate(program, torch.tensor([ids]), options.new_tokens, end=end)[0, len(ids) :].tolist()
    names = program.token_names or tuple(str(i) for i in range(program.vocab))
    result = {"tokens": [names[i] for i in ids], "generated": [names[i] for i in out], "ids": out}
    if not options.as_json:
        from anyformer.console import show

        show(" ".join(result["generated"]))
    return result, 0


def _verify(options: Verify) -> tuple[dict[str, Any], int]:
    import torch

    from anyformer.program import load
    from anyformer.targets.loading import load_target
    from anyformer.verifying import verify

    program, target = load(options.program), load_target(options.target)
    dtype = options.dtype and getattr(torch, options.dtype)
    verdict = verify(program, target, sequences=options.sequences, length=options.length, dtype=dtype)
    if not options.as_json:
        from anyformer.console import show

        show(str(verdict))
    return verdict.to_json(), 0 if verdict.passed else 1


def _specialize(options: Specialize) -> tuple[dict[str, Any], int]:
    from anyformer.exporting import write_huggingface
    from anyformer.program import load
    from anyformer.specialising import specialize
    from anyformer.targets.transformer import Transformer

    program = load(options.program)
    module = specialize(program)
    if options.to == "huggingface":
        written = write_huggingface(module, options.output)
    elif isinstance(module, Transformer):
        module.save(options.output, program.token_names)
        written = module
    else:
        raise AnyformerError(
            "no anyformer.Transformer has the class of this program; try --to huggingface, or specialize in Python, whose module runs"
        )
    report = module.report
    result = {
        "folder": str(options.output),
        "model": type(written).__name__,
        "parameters": sum(p.numel() for p in written.parameters()),
        "features": list(report.features),  # type: ignore[union-attr]
        "error": report.error,  # type: ignore[union-attr]
    }
    if not options.as_json:
        from anyformer.console import show

        show(
            f"wrote {options.output}: {result['model']}, {result['parameters']:,} numbers; relative error against the program "
            f"{result['error']:.1e}"
        )
    return result, 0


def _inspect(options: Inspect) -> tuple[dict[str, Any], int]:
    from anyformer.console import describe, show_description
    from anyformer.program import load

    result = describe(load(options.program))
    if not options.as_json:
        show_description(result)
    return result, 0


def _cost(options: CostCommand) -> tuple[dict[str, Any], int]:
    from anyformer.costs import cost
    from anyformer.targets.transformer import TransformerConfig

    config = TransformerConfig(
        vocab=options.features if options.vocab is None else options.vocab,
        heads=options.heads,
        layers=options.layers,
        head_dim=options.head_dim,
        features=options.features,
        residual=options.residual,
        norm=None if options.norm == "none" else options.norm,
        norm_position=options.norm_position,
        mlp=options.mlp,
        gated=options.gated,
        bias=options.bias,
    )
    result = cost(config, options.length)
    panels = _draw_chart(options.chart, config, options.length) if options.chart is not None else []
    if panels:
        result |= {"chart": {"file": str(options.chart), "length": options.length, "panels": [asdict(p) for p in panels]}}
    if not options.as_json:
        from anyformer.console import show, show_cost
        from anyformer.scaling import reasons

        show_cost(result)
        if panels:
            show("\n".join([f"wrote {options.chart}", *reasons(panels)]))
    return result, 0


def _draw_chart(path: Path, config: Any, length: int) -> list[Any]:
    from anyformer.charts import draw_cost, require_drawable
    from anyformer.scaling import scaling

    require_drawable(path)
    panels = scaling(config, length)
    given = f"H = {config.heads}, L = {config.layers}, d = {config.head_dim}, d_in = {config.features} where they do not run"
    draw_cost(path, panels, length, given)
    return panels


def _tasks(options: Tasks) -> tuple[dict[str, Any], int]:
    from anyformer.tasks.listing import listing

    result = {"rows": options.rows, "tasks": listing(options.rows, None if options.file is None else str(options.file))}
    if not options.as_json:
        from anyformer.console import show_tasks

        show_tasks(result)
    return result, 0


def _limits(options: Limits) -> tuple[dict[str, Any], int]:
    from anyformer.console import counted_progress, show, show_limits
    from anyformer.experiments import limits

    if not options.as_json:
        show("measuring limits, " + ("a few seconds ..." if options.quick else "several minutes ..."))
    with counted_progress("limits", quiet=options.as_json) as report:
        result = limits.run(options.output, options.quick, report)
    if not options.as_json:
        show_limits(result)
    return result, 0 if result["passed"] else 1


def _reproduce(options: Reproduce) -> tuple[dict[str, Any], int]:
    from anyformer.reproduce_command import reproduce

    return reproduce(options)


def _simulate(options: Simulate) -> tuple[dict[str, Any], int]:
    from anyformer.simulate_command import simulate

    return simulate(options)


def _certify(options: Certify) -> tuple[dict[str, Any], int]:
    from anyformer.certify_command import certify

    return certify(options)


def _train(options: Train[Any, Any]) -> tuple[dict[str, Any], int]:
    from anyformer.learning.ranks import by_torchrun
    from anyformer.train_command import train

    if by_torchrun()[0] > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for good: the first process speaks for all)
    return train(options), 0


def _rasp(options: Rasp) -> tuple[dict[str, Any], int]:
    from anyformer.rasp_command import rasp

    return rasp(options)


def _options_of_task(words: list[str]) -> tuple[Any, list[str]]:
    from anyformer.tasks import TASKS
    from anyformer.train_command import options_of

    if words and words[0] in TASKS:
        return options_of(TASKS[words[0]], words[1:]), words[1:]
    if words and words[0] in ("-h", "--help"):
        return options_of(AnyTask, words), words
    got = repr(words[0]) if words else "nothing"
    raise AnyformerError(f"train: a task must come first, one of {', '.join(TASKS)}; got {got}")


COMMANDS: dict[str, Command] = {
    "demo": Command(Demo, _demo, "train two targets, run both on one fixed machine (2 minutes)"),
    "train": Command(Train, _train, "train on a task, in a run folder that resumes", _options_of_task),
    "run": Command(Run, _run, "run a program on some tokens"),
    "generate": Command(Generate, _generate, "continue some tokens greedily"),
    "inspect": Command(Inspect, _inspect, "what a program is, coordinate by coordinate"),
    "compile": Command(Compile, _compile, "a target of yours becomes a program"),
    "verify": Command(Verify, _verify, "a program against its target, outputs and attention"),
    "specialize": Command(Specialize, _specialize, "a program becomes an ordinary transformer again"),
    "cost": Command(CostCommand, _cost, "width of every machine for a class"),
    "rasp": Command(Rasp, _rasp, "a program in the .rasp language on an input, or a prompt"),
    "simulate": Command(Simulate, _simulate, "a random attention layer on the universal simulator of attention"),
    "certify": Command(Certify, _certify, "which attention is a universal approximator, with which symmetry, in how many layers"),
    "tasks": Command(Tasks, _tasks, "what there is to learn, and what it is worth without understanding"),
    "reproduce": Command(Reproduce, _reproduce, "the papers' tables and figures, with our numbers"),
    "limits": Command(Limits, _limits, "what no fixed machine can do, measured (minutes; --quick: seconds)"),
}
"""In the order in which a newcomer needs them."""
