"""Verify a program against its target: the target's *own* forward, outputs and every attention pattern.

The Network that was read from the target is never used here: a wrong reader would agree with itself. The ladder of
exactness (float64: 1e-10; float32: torch's defaults) is applied to the largest error against the largest magnitude:

    max |program - target|  <=  atol + rtol * max |target| + allowance

The allowance is 0 in float64 on a path tree. In shorter floats it is four times the target's own rounding (its distance from itself in
float64): no program can be closer to a target than the target is to what it means. A random backbone's reads are off by the condition
number of R_all times the dtype's epsilon: that share of the magnitude, and as many times the target's rounding, are added. The verdict
states the sum.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from anyformer import philox
from anyformer.backbones import Random
from anyformer.errors import AnyformerError, require_size
from anyformer.network import Network
from anyformer.operators.kernels import TIE
from anyformer.program import Program
from anyformer.targets.reading import network_class, registered
from anyformer.targets.transformer import Transformer

OwnForward = Callable[[Any, Tensor, Tensor | None, Tensor | None], tuple[Tensor, list[Tensor]]]
"""(module, tokens, mask, positions) -> logits and the patterns of every attention layer, by the module's own code."""


def _own_huggingface(model: Any, tokens: Tensor, mask: Tensor | None, positions: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    from anyformer.targets.huggingface import own_forward

    return own_forward(model, tokens, mask, positions)


OWN_FORWARD: dict[type | str, OwnForward] = {
    Transformer: lambda module, tokens, mask, positions: module.with_patterns(tokens, mask=mask, positions=positions),
    "transformers.modeling_utils.PreTrainedModel": _own_huggingface,
}
"""Module type (or its full name) -> its own forward with patterns. A target of your own is one entry."""

COVERED_ROWS = 4096

LADDER = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-5, 1.3e-6)}
"""dtype -> (atol, rtol)."""


class VerificationFailed(AnyformerError):
    """Raised by :meth:`Verdict.raise_if_not`; carries the verdict."""

    def __init__(self, verdict: "Verdict"):
        self.verdict = verdict
        super().__init__(str(verdict))


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a verification found. A failed one that nobody looks at warns when it is dropped.

    ``max_abs_error``, ``max_rel_error`` (against the largest magnitude) and ``where`` are of the outputs, ``max_pattern_error`` and
    ``pattern_where`` of all layers and heads. ``tie_gap`` is the smallest relative score gap of average-hard attention (None: there is
    none), ``tie_gap_sufficient`` whether it exceeds ten tie widths, the condition under which exactness is claimed.
    """

    outcome: bool
    max_abs_error: float
    max_rel_error: float
    where: str
    max_pattern_error: float
    pattern_where: str
    dtype: str
    atol: float
    rtol: float
    allowance: float
    sequences: int
    patterns: int
    tokens_covered: int
    positions_covered: int
    tie_gap: float | None = None
    tie_gap_sufficient: bool | None = None
    _seen: list[bool] = field(default_factory=list, repr=False)

    @property
    def passed(self) -> bool:
        """Whether every output and every pattern is within tolerance."""
        self._seen.append(True)
        return self.outcome

    def __bool__(self) -> bool:
        return self.passed

    def raise_if_not(self) -> "Verdict":
        """Raise :class:`VerificationFailed` unless passed; returns the verdict."""
        if not self.passed:
            raise VerificationFailed(self)
        return self

    def to_json(self) -> dict[str, Any]:
        """All fields, and ``passed``."""
        fields = {k: v for k, v in vars(self).items() if k not in ("outcome", "_seen")}
        return {"passed": self.passed} | {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()
        }

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        text = (
            f"verification {verdict}: worst output error {self.max_abs_error:.1e} ({self.max_rel_error:.1e} relative) at {self.where}; "
            f"worst pattern error {self.max_pattern_error:.1e} at {self.pattern_where}; {self.dtype}, tolerance {self.atol:.0e} + "
            f"{self.rtol:.1e} x magnitude + {self.allowance:.1e}; {self.sequences} sequences, "
            f"{self.patterns} patterns, each of {self.tokens_covered} tokens seen"
        )
        if self.tie_gap is not None:
            enough = "above" if self.tie_gap_sufficient else "NOT above"
            text += f"; smallest hard-attention gap {self.tie_gap:.1e}, {enough} ten tie widths"
        return text

    def __del__(self) -> None:
        if not self.outcome and not self._seen:
            self._seen.append(True)
            warnings.warn(f"nobody looked at a failed verdict: {self}", RuntimeWarning, stacklevel=2)


def verify(
    program: Program,
    target: nn.Module | Network,
    *,
    tokens: Int[Tensor, "batch n"] | None = None,
    sequences: int = 8,
    length: int = 32,
    seed: int = 0,
    tolerance: tuple[float, float] | None = None,
    dtype: torch.dtype | None = None,
) -> Verdict:
    """Compare a program on its machine with its target: outputs and all attention patterns.

    Inputs: ``sequences`` random ones of each length 1, 2 and ``length`` (at most what the position table and the machine hold); the
    longest again, padded on either side; every token row and every position row in order (the first 4096 sequences of them); and the
    given ``tokens``. Both run in ``dtype`` (default: the program's). ``tolerance`` is (atol, rtol), default the ladder's. Raises
    :class:`AnyformerError` where
    the target has no forward of its own, or does not fit the program.
    """
    source = target.source if isinstance(target, Network) else target
    own = None if source is None else registered(OWN_FORWARD, source)
    if source is None or own is None:
        what = (
            "this Network has no source"
            if source is None
            else f"a {type(source).__name__} has no registered forward with patterns"
        )
        raise AnyformerError(
            f"nothing to verify against: {what}; give the module that the program was compiled from, or register its forward in "
            "anyformer.verifying.OWN_FORWARD"
        )
    for name, value in (("sequences", sequences), ("length", length)):
        require_size("verify", name, value)
    if tolerance is not None and not (isinstance(tolerance, tuple) and len(tolerance) == 2):
        raise AnyformerError(f"tolerance must be a pair (atol, rtol), got {tolerance!r}")
    _check_against(program, source)
    dtype = program.dtype if dtype is None else dtype
    atol, rtol = tolerance or LADDER.get(dtype, (math.nan, math.nan))
    if not (atol >= 0 and rtol >= 0):
        raise AnyformerError(f"no tolerance is known for {dtype}; give tolerance=(atol, rtol)")
    module = copy.deepcopy(source).to(dtype).eval()
    program = program.detach().to(dtype)
    machine = program.machine()
    worst, worst_pattern = _Worst(), _Worst()
    magnitude = pattern_magnitude = rounding = pattern_rounding = 0.0
    precise = None if dtype == torch.float64 else copy.deepcopy(source).to(torch.float64).eval()
    gaps: list[float] = []
    count = compared = 0
    length = min(length, program.machine().longest or length)
    tokens_covered, positions_covered = _coverage(program, length)
    for batch, mask, positions in _batches(program, tokens, sequences, length, seed):
        with torch.no_grad():
            expected, patterns = own(module, batch, mask, positions)
            trace = machine.trace(batch, program, mask=mask, positions=positions)
            exact, exact_patterns = (expected, patterns) if precise is None else own(precise, batch, mask, positions)
        real = torch.ones_like(batch, dtype=torch.bool) if mask is None else mask
        assert trace.logits is not None
        if trace.logits.shape != expected.shape or len(trace.patterns) != len(patterns):
            raise AnyformerError(
                f"the program computes logits {tuple(trace.logits.shape)} and {len(trace.patterns)} attention layers, the target "
                f"{tuple(expected.shape)} and {len(patterns)}: this program is for another target"
            )
        error = (trace.logits - expected).abs() * real[..., None]
        magnitude = max(magnitude, float((expected * real[..., None]).abs().max()))
        rounding = max(rounding, float(((expected - exact) * real[..., None]).abs().max()))
        first = count + 1
        worst.update(
            error, lambda i, first=first: f"sequence {first + i[0]}, position {i[1] + 1}, output {_named(program, i[2])}"
        )
        for layer, (mine, theirs) in enumerate(zip(trace.patterns, patterns, strict=True), start=1):
            error = (mine - theirs).abs() * real[:, None, :, None]
            pattern_magnitude = max(pattern_magnitude, float(theirs.abs().max()))
            off = (theirs - exact_patterns[layer - 1]).abs() * real[:, None, :, None]
            pattern_rounding = max(pattern_rounding, float(off.max()))
            place = f"layer {layer}, head {{}}, sequence {{}}, query {{}}, key {{}}"
            worst_pattern.update(error, lambda i, p=place, first=first: p.format(i[1] + 1, first + i[0], i[2] + 1, i[3] + 1))
            compared += mine.shape[0] * mine.shape[1]
        if mask is None:
            gaps += trace.gaps
        count += batch.shape[0]
    condition = machine.condition if isinstance(machine, Random) else 0.0
    forecast = condition * torch.finfo(dtype).eps
    allowance = (4 + condition) * rounding + forecast * magnitude
    pattern_allowance = (4 + condition) * pattern_rounding + forecast * pattern_magnitude
    good = (
        math.isfinite(magnitude + pattern_magnitude)
        and worst.size <= atol + rtol * magnitude + allowance
        and worst_pattern.size <= atol + rtol * pattern_magnitude + pattern_allowance
    )
    gap = min(gaps) if gaps else None
    return Verdict(
        outcome=good,
        max_abs_error=worst.size,
        max_rel_error=worst.size / magnitude if magnitude else worst.size,
        where=worst.where,
        max_pattern_error=worst_pattern.size,
        pattern_where=worst_pattern.where,
        dtype=str(dtype).removeprefix("torch."),
        atol=atol,
        rtol=rtol,
        allowance=allowance,
        sequences=count,
        patterns=compared,
        tokens_covered=tokens_covered,
        positions_covered=positions_covered,
        tie_gap=gap,
        tie_gap_sufficient=None if gap is None else gap > 10 * TIE[0 if dtype == torch.float64 else 1],
    )


class _Worst:
    """The largest error so far, and where. NaN counts as infinite."""

    def __init__(self) -> None:
        self.size, self.where = -1.0, "nowhere"

    def update(self, error: Tensor, describe: Callable[[tuple[int, ...]], str]) -> None:
        error = error.nan_to_num(nan=math.inf)
        largest = float(error.max())
        if largest > self.size:
            index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
            self.size, self.where = largest, describe(index)


def _named(program: Program, output: int) -> str:
    names = program.token_names
    return f"{output + 1}" + (f" ({names[output]})" if names is not None and output < len(names) else "")


def _coverage(program: Program, length: int) -> tuple[int, int]:
    """How many token rows and position rows the covering batches visit."""
    most = COVERED_ROWS * length
    return min(program.vocab, most), 0 if program.positions is None else min(program.positions.shape[0], most)


def _batches(
    program: Program, tokens: Tensor | None, sequences: int, length: int, seed: int
) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    """(tokens, mask, positions): random batches of several lengths, a padded one, every token row and every position row in order, and
    the given tokens."""
    places = None if program.positions is None else program.positions.shape[0]
    length = length if places is None else min(length, places)
    for stream, n in enumerate(sorted({1, min(2, length), length})):
        yield torch.from_numpy(philox.integers(seed, stream, (sequences, n), program.vocab)), None, None
    if length >= 3:
        mask = torch.ones(sequences, length, dtype=torch.bool)
        mask[::2, :1], mask[1::2, -2:] = False, False
        yield torch.from_numpy(philox.integers(seed, 3, (sequences, length), program.vocab)), mask, None
    rows = min(COVERED_ROWS, -(-max(program.vocab, places or 0) // length))
    every = torch.arange(rows * length) % program.vocab
    starts = torch.arange(rows)[:, None] * length
    at = starts + torch.arange(length) + (0 if places is not None else 1)  # without a table: any positions will do
    if places is not None:
        at = torch.minimum(starts, torch.tensor(places - length)) + torch.arange(length)
    for first in range(0, rows, 32):
        block = slice(first, first + 32)
        yield every.view(rows, length)[block], None, at[block]
    if tokens is not None:
        yield tokens, None, None


def _check_against(program: Program, source: Any) -> None:
    """Raise where program and target differ in vocabulary, positions or token names: no outputs could tell."""
    problems = []
    try:
        known = network_class(source)
    except AnyformerError:
        return  # a target that only has a forward of its own
    places = None if program.positions is None else program.positions.shape[0]
    if known.vocab != program.vocab:
        problems.append(f"{program.vocab} tokens, the target has {known.vocab}")
    if known.max_positions != places:
        problems.append(f"{places} positions, the target has {known.max_positions}")
    names = getattr(source, "token_names", None)
    if names is not None and program.token_names is not None and tuple(names) != program.token_names:
        problems.append("other token names than the target")
    if problems:
        raise AnyformerError(f"this program is for another target: it has {'; '.join(problems)}")
