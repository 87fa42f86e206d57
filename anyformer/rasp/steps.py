"""Steps of a linear form z: ``height`` where z is past a gap, 0 before it.

    analytic    one unit, [z > middle]
    standard    relu(s (z - low)) - relu(s (z - low) - 1),      s a power of two, 1/s at most half of the gap, in its middle

Past the gap the standard step is a difference of two larger numbers, which floats know to ``eps`` of their size only. s is a power of two
and low a whole multiple of a power of two near eps |z|, so that ``s (z - low)`` itself is not rounded where z is one coordinate. What is
left is bounded for one step (:meth:`Steps.slip`), and for a staircase on a finite set it is computed in the dtype on every member, times
:data:`SAFETY`, since a matrix product may add up in another order (:meth:`Steps.measured`). It is carried along
(:meth:`~anyformer.rasp.plan.Plan.slip`), and refused where it comes near the distance of two values, or near the tie width of average-hard
attention where a score reads it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anyformer.rasp.options import Mode
from anyformer.rasp.plan import Form, Part, number
from anyformer.rasp.refusals import CannotCompile, Refusal

SAFETY = 8
"""Times the error that was measured."""


@dataclass(frozen=True)
class Step:
    """``height`` is added where z >= high, and nothing where z <= low."""

    low: float
    high: float
    height: float


class Steps:
    """How steps are written in a mode and a dtype."""

    def __init__(self, mode: Mode, eps: float):
        self.mode = mode
        self.eps = eps

    @property
    def single(self) -> bool:
        """Whether the dtype is float32."""
        return self.eps > 1e-10

    @property
    def coarse(self) -> bool:
        """Whether steps are differences in a dtype that holds seven digits."""
        return self.mode == "standard" and self.single

    def units(self, z: Form, step: Step, largest: float) -> list[Part]:
        """The units of one step; |z| is at most ``largest``."""
        if self.mode == "analytic":
            return [step.height * Part("step", z - number((step.low + step.high) / 2))]
        slope, low = self._ramp(step, largest)
        gate = slope * (z - number(low))
        return [step.height * Part("relu", gate), -step.height * Part("relu", gate - number(1.0))]

    def slip(self, z: Form, step: Step, largest: float) -> float:
        """A bound of the error that rounding leaves in a step."""
        if self.mode == "analytic":
            return 0.0
        slope, low = self._ramp(step, largest)
        size = slope * (max(0.0, largest - low) if len(z.terms) == 1 else largest + abs(low)) + 1.0
        return 4 * self.eps * abs(step.height) * size

    def measured(self, z: Sequence[np.ndarray], steps: Sequence[Step], levels: np.ndarray, largest: float) -> float:
        """The error of the sum of the steps where z is the sum of these terms and the sum should be ``levels``; 0 where it is rounding of
        the levels alone."""
        if self.mode == "analytic":
            return 0.0
        dtype = np.float32 if self.single else np.float64
        total = np.zeros(levels.shape, dtype)
        for step in steps:
            slope, low = self._ramp(step, largest)
            gate = sum((slope * term).astype(dtype) for term in z) - dtype(slope * low)
            for side, sign in ((gate, 1.0), (gate - dtype(1.0), -1.0)):
                total += dtype(sign * step.height) * np.maximum(side, dtype(0.0))
        error = float(np.abs(total.astype(np.float64) - levels).max(initial=0.0))
        return SAFETY * error if error > 16 * self.eps * float(np.abs(levels).max(initial=0.0)) else 0.0

    @property
    def advice(self) -> str:
        """What to do where rounding spoils a step."""
        return "use mode='analytic'" + (" or float64" if self.single else "")

    def require(self, slip: float, least: float) -> None:
        """Refuse what rounding may spoil: values that are ``least`` apart."""
        if slip > least / 64:
            raise CannotCompile(
                Refusal.ROUNDING,
                f"as differences of ReLU units it may be off by {slip:.1e} in {'float32' if self.single else 'float64'}; {self.advice}",
            )

    def _ramp(self, step: Step, largest: float) -> tuple[float, float]:
        """The slope, and where the slope begins."""
        slope = 2.0 ** math.ceil(math.log2(2.0 / (step.high - step.low)))
        grain = 2.0 ** math.ceil(math.log2(self.eps * max(largest, abs(step.low), abs(step.high), 1e-300)))
        return slope, round(((step.low + step.high) / 2 - 0.5 / slope) / grain) * grain
