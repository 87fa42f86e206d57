"""``anyformer reproduce universality-training``: what is proved impossible stays above a floor, what is certified goes below it.

Three pairs; in each both stacks are trained on one target that only the second can express. Tokens are uniform on [-1, 1]^d, the error is
the mean squared error over the variance of the target. The floors are exact: the part of the target that the first stack cannot see,
whatever its parameters.

    hops     f_s = mean of all tokens                          path, n = 5: m = 3 misses one token of five at two of five slots: 2/5 * 1/5 = 0.08
    mirror   f_s = x_{s+1} x_{s+2} + x_{s-1} x_{s-2}           D_5 bias: m = 1 cannot tell s + k from s - k, each k by itself: 1/2
    shift    f_s = x_{s+1}                                     full softmax sees a set: the mean of the others is best, 3/4; the C_5 design
    is certified
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.approximation import certify, cyclic, dihedral, equivariant_attention, family
from anyformer.experiments.report import Report, counted, require_seeds, require_writable, write
from anyformer.operators import Attention, Context, Operator

TOKENS, DIM, HIDDEN = 5, 1, 32
STEPS, BATCH = 600, 128


class OperatorAttention(nn.Module):
    """One bank of an operator with trained probes and map: ``sum_h Op_h(X P) X M_h``."""

    def __init__(self, op: Operator, dim: int):
        super().__init__()
        self.op = op
        self.probes = nn.Linear(dim, op.count * op.reads)
        self.map = nn.Parameter(torch.randn(op.count, dim, dim) / dim**0.5)

    def forward(self, x: Tensor) -> Tensor:
        own = self.probes(x).reshape(*x.shape[:2], self.op.count, self.op.reads)
        places = torch.arange(x.shape[1])[None].expand(x.shape[:2])
        return self.op(None, own, Context(places)).apply(torch.einsum("bnd,hde->bnhe", x, self.map)).sum(2)


class Stacked(nn.Module):
    """m layers ``X + g(X)`` on ``wide`` features, two feed-forward layers after each and two before the first."""

    def __init__(self, layers: list[nn.Module], wide: int):
        super().__init__()
        depth = len(layers)
        self.layers = nn.ModuleList(layers)
        self.enter, self.leave = nn.Linear(DIM, wide), nn.Linear(wide, DIM)
        self.between = nn.ModuleList(
            nn.Sequential(nn.Linear(wide, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, wide)) for _ in range(2 * depth + 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for k in range(len(self.layers) + 1):
            if k:
                x = x + self.layers[k - 1](x)
            for unit in self.between[2 * k : 2 * k + 2]:
                x = x + unit(x)
        return self.leave(x)


WIDE = 12


def path(m: int) -> list[nn.Module]:
    """Windows of radius 1."""
    op = family("longformer", TOKENS, WIDE, 1).layers[0].operators[0]
    return [OperatorAttention(op, WIDE) for _ in range(m)]


def hops(x: Tensor) -> Tensor:
    """The mean of all tokens, at every slot."""
    return x.mean(1, keepdim=True).expand_as(x)


def mirror(x: Tensor) -> Tensor:
    """x_{s+1} x_{s+2} + x_{s-1} x_{s-2}."""
    return x.roll(-1, 1) * x.roll(-2, 1) + x.roll(1, 1) * x.roll(2, 1)


def shift(x: Tensor) -> Tensor:
    """x_{s+1}."""
    return x.roll(-1, 1)


@dataclass(frozen=True)
class Pair:
    """A target, its floor for the stack that cannot express it, and both stacks with what is certified of each."""

    name: str
    target: Callable[[Tensor], Tensor]
    floor: float
    stacks: tuple[Callable[[], list[nn.Module]], Callable[[], list[nn.Module]]]
    questions: tuple[dict[str, Any], dict[str, Any]]


def _design(group: Any, m: int) -> Callable[[], list[nn.Module]]:
    return lambda: [equivariant_attention(group, TOKENS, WIDE, 2) for _ in range(m)]


PAIRS = (
    Pair(
        "hops",
        hops,
        0.08,
        (lambda: path(3), lambda: path(4)),
        (
            {"subject": "longformer", "layers": 3, "group": "symmetric"},
            {"subject": "longformer", "layers": 4, "group": "symmetric"},
        ),
    ),
    Pair(
        "mirror",
        mirror,
        0.5,
        (_design(dihedral(TOKENS), 1), _design(dihedral(TOKENS), 2)),
        ({"subject": "dihedral", "layers": 1, "group": "dihedral"}, {"subject": "dihedral", "layers": 2, "group": "dihedral"}),
    ),
    Pair(
        "shift",
        shift,
        0.75,
        (lambda: [OperatorAttention(Attention(1, WIDE), WIDE)], _design(cyclic(TOKENS), 1)),
        ({"subject": "softmax", "layers": 1, "group": "cyclic"}, {"subject": "cyclic", "layers": 1, "group": "cyclic"}),
    ),
)


@dataclass(frozen=True)
class Line:
    """What one stack reached: relative errors on fresh tokens, one a seed."""

    pair: str
    verdict: str
    floor: float
    errors: list[float]


def train(target: Callable[[Tensor], Tensor], layers: list[nn.Module], seed: int, steps: int = STEPS) -> float:
    """Train one stack; the error on 4096 fresh sequences over the target's variance."""
    generator = torch.Generator().manual_seed(seed)
    model = Stacked(layers, WIDE)
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)

    def draw(rows: int) -> Tensor:
        return 2 * torch.rand(rows, TOKENS, DIM, generator=generator) - 1

    for _ in range(steps):
        x = draw(BATCH)
        loss = (model(x) - target(x)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        x = draw(4096)
        return float((model(x) - target(x)).square().mean() / target(x).var())


def run(folder: Path, seeds: Sequence[int], command: str, report: Report | None = None, steps: int = STEPS) -> dict[str, Any]:
    """Train all pairs, write ``universality-training.json`` and ``.md``."""
    require_seeds(seeds)
    require_writable(folder)
    tick = counted(sum(len(pair.stacks) for pair in PAIRS), report)
    lines = []
    for pair in PAIRS:
        for stack, question in zip(pair.stacks, pair.questions, strict=True):
            verdict = certify(question["subject"], tokens=TOKENS, dim=DIM, layers=question["layers"], group=question["group"])
            said = f"{question['subject']}, m = {question['layers']}: {verdict.strength}"
            errors = []
            for seed in seeds:
                torch.manual_seed(seed)
                errors.append(round(train(pair.target, stack(), seed, steps), 5))
            lines.append(Line(pair.name, said, 0.0 if verdict.holds else pair.floor, errors))
            tick(f"{pair.name}: {said}: {errors}")
    result = {
        "command": command,
        "steps": steps,
        "batch_size": BATCH,
        "seeds": list(seeds),
        "lines": [asdict(line) for line in lines],
    }
    write(folder, "universality-training", result, markdown(lines, command, steps))
    return result | {"passed": all(laws(result).values())}


def laws(result: dict[str, Any]) -> dict[str, bool]:
    """What is proved of the pairs, each true or false. Errors are of 4096 fresh sequences: a tenth is allowed for their noise."""
    lines = result["lines"]
    return {
        "an impossible stack stays above its floor": all(min(line["errors"]) > 0.9 * line["floor"] for line in lines),
        "a certified stack goes below the floor of its pair": all(
            max(certified["errors"]) < impossible["floor"] for impossible, certified in zip(lines[::2], lines[1::2], strict=True)
        ),
    }


def markdown(lines: list[Line], command: str, steps: int) -> str:
    """The lines as a table."""
    out = [
        "# Certified and impossible, trained on one target",
        "",
        f"`{command}`; {steps} steps of {BATCH} sequences, n = {TOKENS}, d = {DIM}; mean squared error over the target's variance,",
        "one number a seed.",
        "",
        "| target | stack and verdict | floor | errors |",
        "|---|---|---|---|",
    ]
    out += [f"| {line.pair} | {line.verdict} | {line.floor:g} | {', '.join(f'{e:.4f}' for e in line.errors)} |" for line in lines]
    return "\n".join(out) + "\n"
