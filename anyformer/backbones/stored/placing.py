"""Where a smaller network stands inside a larger stored-program machine, and why what is left over changes nothing.

A branch adds ``Op(X P) X M``. With ``P = 0`` and ``M = 0`` it adds ``Op(0) X 0``, which is 0 wherever ``Op(0)`` is finite; so a
stage with a residual whose other branches are all 0 is the identity, missing heads and units add 0, and outputs that are not
asked for are left out. An identity map is no constant and cannot be 0: a stage that has one beside its residual cannot be left
out. Nothing else is neutral: a norm divides by the number of features, a score by the square root of head_dim, and eps,
frequencies and mask rules stand in the operators themselves. Keys and values of a group may be stored several times, never
merged.
"""

from dataclasses import replace
from functools import lru_cache

import torch

from anyformer.backbones.machine import misfits
from anyformer.classes import BranchClass, NetworkClass, StageClass, inner_operator
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.operators import ALiBi, Attention, Context, FixedMatrix, Gate, Normed, Operator, RelativeBias, TableBias
from anyformer.program import Placement

Branches = tuple[tuple[int, ...] | int, ...]


def place(machine: NetworkClass, target: NetworkClass) -> Placement:
    """Where ``target`` stands in a machine of class ``machine``. Raises :class:`OutsideClass` with every value that differs."""
    reasons = []
    if machine.features != target.features:
        reasons.append(
            f"{target.features} features, the machine has {machine.features}: padding them would change what a norm divides by"
        )
    if machine.constant != target.constant:
        have = ["no feature that is always 1, which biases read", "one"]
        reasons.append(f"the target has {have[target.constant]}, the machine has {have[machine.constant]}")
    if target.outputs > machine.outputs:
        reasons.append(f"{target.outputs} outputs, the machine has {machine.outputs}")
    if len(target.stages) > len(machine.stages):
        reasons.append(f"{len(target.stages)} stages, the machine has {len(machine.stages)}")
    found = None if reasons else _align(machine.stages, target.stages)
    if found is None:
        misfits = _misfits(machine.stages, target.stages) if machine.features == target.features else []
        reasons += misfits or ([] if reasons else ["its stages do not follow each other as the machine's do"])
        raise OutsideClass("the target does not fit into this stored-program machine", reasons)
    branches = tuple(_fit(machine.stages[s], stage)[0] for s, stage in zip(found, target.stages, strict=True))
    return Placement(found, branches, target.outputs)


def is_whole(placement: Placement, machine: NetworkClass, target: NetworkClass) -> bool:
    """Whether the target fills the machine."""
    same = len(placement.stages) == len(machine.stages) and placement.outputs == machine.outputs
    return same and all(
        a.operator.count == b.operator.count
        for s, t in zip(machine.stages, target.stages, strict=True)
        for a, b in zip(s.branches, t.branches, strict=True)
    )


def _align(machine: tuple[StageClass, ...], target: tuple[StageClass, ...]) -> tuple[int, ...] | None:
    """The earliest machine stage for each target stage, in order, such that those left out are neutral; None where there is no way."""
    spare = len(machine) - len(target)
    # good[i][k]: target stages from i on fit into machine stages from i + k on
    good = [[False] * (spare + 1) for _ in range(len(target) + 1)]
    for i in range(len(target), -1, -1):
        for k in range(spare, -1, -1):
            s = i + k
            skip = k < spare and good[i][k + 1] and not _skip_problems(machine[s])
            fits = good[i + 1][k] and not _fit(machine[s], target[i])[1] if i < len(target) else k == spare
            good[i][k] = skip or fits
    if not good[0][0]:
        return None
    at, k = [], 0
    for i, stage in enumerate(target):
        while not (good[i + 1][k] and not _fit(machine[i + k], stage)[1]):
            k += 1
        at.append(i + k)
    return tuple(at)


def _misfits(machine: tuple[StageClass, ...], target: tuple[StageClass, ...]) -> list[str]:
    """For every target stage that no machine stage can hold: what differs from the most similar one; else which cannot be left out."""
    found: dict[str, list[int]] = {}
    for i, stage in enumerate(target):
        candidates = machine[i : i + 1] if len(machine) == len(target) else machine
        problems = {s: _fit(s, stage)[1] for s in candidates}
        if problems and all(problems.values()):
            closest = min(problems, key=lambda s: (_kinds(s) != _kinds(stage), len(problems[s])))
            for problem in problems[closest]:
                found.setdefault(problem, []).append(i + 1)
    reasons = [f"stage {', '.join(map(str, at))}: {problem}" for problem, at in found.items()]
    if not reasons and len(machine) > len(target):
        for s, stage in enumerate(machine):
            reasons += [f"the machine's stage {s + 1} cannot be left out: {p}" for p in _skip_problems(stage)]
    return reasons


def _kinds(stage: StageClass) -> list[tuple[str, str]]:
    """What sorts of branches a stage has."""
    return [(type(inner_operator(b.operator)).__name__, b.map) for b in stage.branches]


@lru_cache(maxsize=4096)
def _fit(machine: StageClass, target: StageClass) -> tuple[Branches, tuple[str, ...]]:
    """The machine branches that the banks of a target stage take, and what is in the way."""
    if len(machine.branches) != len(target.branches):
        return (), (f"{len(target.branches)} banks of branches, the machine has {len(machine.branches)}",)
    problems: list[str] = []
    for name in ("width", "shared_reads"):
        if getattr(machine, name) != getattr(target, name):
            problems.append(f"{name} is {getattr(target, name)!r}, the machine has {getattr(machine, name)!r}")
    branches = []
    for mine, theirs in zip(machine.branches, target.branches, strict=True):
        places, reasons = _fit_bank(mine, theirs)
        branches.append(places)
        problems += reasons
    return tuple(branches), tuple(problems)


def _fit_bank(machine: BranchClass, target: BranchClass) -> tuple[tuple[int, ...] | int, list[str]]:
    count, noun = target.operator.count, target.operator.noun
    if count > machine.operator.count:
        return 0, [f"{count} {noun}s, the machine has {machine.operator.count}"]
    try:
        smaller = replace(machine, operator=resized(machine.operator, count), kv_heads=target.kv_heads)
    except AnyformerError as error:
        return 0, [str(error)]
    if smaller != target:
        return 0, misfits(smaller.to_json(), target.to_json())
    if count < machine.operator.count and (problem := _zero_problem(machine.operator)):
        return 0, [f"{count} of {machine.operator.count} {noun}s: {problem}"]
    groups, size = (
        machine.kv_heads or machine.operator.count,
        machine.operator.count // (machine.kv_heads or machine.operator.count),
    )
    theirs = count // (target.kv_heads or count)
    if size == theirs or size == 1:
        return count, []
    needed = -(-theirs // size)  # machine groups that one group of the target takes
    if (count // theirs) * needed > groups:
        return 0, [f"{count // theirs} key/value heads for {count} heads do not fit into {groups} for {machine.operator.count}"]
    places = tuple(size * needed * (h // theirs) + h % theirs for h in range(count))
    if places == tuple(range(count)):
        return count, []
    if _has_own_biases(machine.operator):
        return 0, ["heads with position biases of their own cannot change places"]
    return places, []


def resized(operator: Operator, count: int) -> Operator:
    """The operator with another number of heads or units; position biases of the first heads."""
    if operator.count == count:
        return operator
    if isinstance(operator, Normed):
        return replace(operator, inner=resized(operator.inner, count))
    if isinstance(operator, Gate):
        return replace(operator, units=count)
    if isinstance(operator, Attention):
        bias = operator.bias
        if isinstance(bias, ALiBi) and bias.heads > 1:
            bias = ALiBi(bias.slopes[:count])
        elif isinstance(bias, RelativeBias) and bias.heads > 1:
            bias = RelativeBias(bias.table[:count])
        elif isinstance(bias, TableBias) and bias.heads > 1:
            bias = TableBias(bias.rows[:count])
        return replace(operator, heads=count, bias=bias)
    raise AnyformerError(f"{count} {operator.noun}s of {type(operator).__name__}, the machine has {operator.count}")


def _has_own_biases(operator: Operator) -> bool:
    inner = inner_operator(operator)
    return isinstance(inner, Attention) and inner.bias is not None and inner.bias.heads > 1


def is_neutral(stage: StageClass) -> bool:
    """Whether a stage with zeros in all its constants is the identity."""
    return not _skip_problems(stage)


@lru_cache(maxsize=256)
def _skip_problems(stage: StageClass) -> tuple[str, ...]:
    """Why a stage with zeros in all its constants is not the identity."""
    if stage.residual is None:
        return ("it has no residual branch",)
    others = [b for i, b in enumerate(stage.branches) if i != stage.residual]
    fixed = tuple(f"its {type(b.operator).__name__} adds the stream itself" for b in others if b.map == "identity")
    return fixed + tuple(p for b in others if (p := _zero_problem(b.operator, shared_too=True)))


@lru_cache(maxsize=256)
def _zero_problem(operator: Operator, shared_too: bool = False) -> str | None:
    """Why an operator that reads zeros does not give a finite map, at any length; ``shared_too``: its norm may read zeros as well."""
    if isinstance(operator, FixedMatrix):
        return f"FixedMatrix holds no more than {len(operator.rows)} tokens"
    ctx = Context(torch.arange(3)[None])
    shared = torch.linspace(-1.0, 1.0, 3 * operator.shared, dtype=torch.float64).reshape(1, 3, -1) if operator.shared else None
    if shared is not None and shared_too:
        shared = torch.zeros_like(shared)
    own = torch.zeros(1, 3, operator.count, operator.reads, dtype=torch.float64)
    out = operator(shared, own, ctx).apply(torch.ones(1, 3, operator.count, 1, dtype=torch.float64))
    if bool(torch.isfinite(out).all()):
        return None
    return f"{type(operator).__name__} is not finite where it reads zeros, so a left-over {operator.noun} is not neutral"
