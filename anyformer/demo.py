"""The main job on real work: two trained targets become two programs of one fixed machine."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.backbones import PathTree
from anyformer.compiling import compile
from anyformer.figures import draw_overview, head_patterns
from anyformer.learning.demo_targets import DEMO_CLASS, Report, demo_tasks, train_demo_targets
from anyformer.program import Program
from anyformer.storage import checksum
from anyformer.targets.transformer import Transformer
from anyformer.tasks import Task
from anyformer.verifying import Verdict, verify

EVALUATION_SEED, EVALUATION_SIZE, BATCH = 2, 2048, 64
LITERAL_SEQUENCES = 8


@dataclass(frozen=True)
class DemoResult:
    """One program's figures; accuracies in per cent, errors absolute."""

    task: str
    target_accuracy: float
    program_accuracy: float
    max_abs_error: float
    max_pattern_error: float
    literal_error: float
    passed: bool
    dtype: str
    parameters: int


def tensors_sha256(*modules: nn.Module) -> str:
    """sha256 of every parameter and buffer of the modules: names, dtypes, shapes and bytes."""
    return checksum({f"{i}.{name}": tensor for i, module in enumerate(modules) for name, tensor in module.state_dict().items()})


def run_demo(folder: Path, report: Report | None = None) -> dict[str, Any]:
    """Train, compile, verify, hash the machine before and after, draw; returns what ``--json`` prints."""
    targets = train_demo_targets(report)
    machine = PathTree.for_class(DEMO_CLASS)
    literal = machine.literal()
    before = tensors_sha256(machine, literal)
    tasks, results, rows, drawn = demo_tasks(), [], [], []
    for name, target in targets.items():
        program = compile(target, machine)
        verdict = verify(program, target)
        program = replace(program, report=verdict.to_json()).detach()
        results.append(_measure(name, tasks[name], target, program, machine, literal, verdict))
        target.save(folder / "targets" / name)
        program.save(folder / "programs" / name)
        rows.append(_patterns(name, tasks[name], target, program, machine))
        drawn.append((name, program, machine.tree))
    after = tensors_sha256(machine, literal)
    draw_overview(folder / "overview.png", rows, drawn)
    cost = machine.cost(DEMO_CLASS.max_length or 1)
    return {
        "programs": [vars(r) for r in results],
        "accuracy_unit": "percent",
        "backbone_unchanged": before == after,
        "backbone": machine.name,
        "width": machine.width,
        "nonzero_weights": cost.nonzero_weights,
        "sha256": before,
        "fingerprint": machine.fingerprint,
        "passed": before == after and all(r.passed for r in results),
        "folder": str(folder),
    }


def _measure(
    name: str, task: Task, target: Transformer, program: Program, machine: PathTree, literal: nn.Module, verdict: Verdict
) -> DemoResult:
    mine, theirs, error = 0.0, 0.0, verdict.max_abs_error
    literal_error = magnitude = 0.0
    batches = EVALUATION_SIZE // BATCH
    with torch.no_grad():
        for index in range(batches):
            batch = task.batch(EVALUATION_SEED, index, BATCH)
            expected, got = target(batch.inputs), machine(batch.inputs, program)
            magnitude = max(magnitude, float(expected.abs().max()))
            error = max(error, float((expected - got).abs().max()))
            theirs += task.accuracy(expected, batch) / batches
            mine += task.accuracy(got, batch) / batches
            if index == 0:
                dense = literal(batch.inputs[:LITERAL_SEQUENCES], program)
                literal_error = float((dense - got[:LITERAL_SEQUENCES]).abs().max())
    judged = verdict.atol + verdict.rtol * magnitude + verdict.allowance
    passed = verdict.passed and literal_error <= judged
    return DemoResult(
        name, 100 * theirs, 100 * mine, error, verdict.max_pattern_error, literal_error, passed, verdict.dtype, program.parameters
    )


def _patterns(
    name: str, task: Task, target: Transformer, program: Program, machine: PathTree
) -> tuple[str, list[str], list, list]:
    """Patterns on the first held-out sequence, cut to its first 24 tokens."""
    tokens: Tensor = task.batch(EVALUATION_SEED, 0, 1).inputs[:, :24]
    with torch.no_grad():
        _, theirs = target.with_patterns(tokens)
        mine = machine.trace(tokens, program).patterns
    labels = [task.token_names[i] for i in tokens[0].tolist()]
    return name, labels, head_patterns(theirs, 0), head_patterns(mine, 0)
