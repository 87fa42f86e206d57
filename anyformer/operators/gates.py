"""Gates: ``diag(f(z))``, one hidden unit of an MLP each, and the identity, which is the residual branch."""

from dataclasses import dataclass
from typing import Any

from anyformer.errors import require_size
from anyformer.operators.functions import scalar_function
from anyformer.operators.operator import Context, Operator, Scaling


@dataclass(frozen=True)
class Identity(Operator):
    """The identity on tokens: reads nothing. As a branch with the identity map it is the residual connection."""

    noun = "residual"

    @property
    def count(self) -> int:
        return 1

    @property
    def reads(self) -> int:
        return 0

    @property
    def stochastic(self) -> bool:
        return True

    @property
    def cacheable(self) -> bool:
        return True

    def __call__(self, shared: Any, own: Any, ctx: Context) -> Scaling:
        return Scaling()


@dataclass(frozen=True)
class Gate(Operator):
    """A bank of ``units`` gates ``diag(f(z_j))``; each reads one column z_j; ``function`` is a name of the registry.

    A gated unit has the map ``up_j down_j^T``; a plain unit reads its value from the constant feature: ``e_const w2_j^T``.
    """

    units: int
    function: str
    noun = "unit"

    def __post_init__(self) -> None:
        require_size("Gate", "units", self.units)
        scalar_function(self.function)

    @property
    def count(self) -> int:
        return self.units

    @property
    def reads(self) -> int:
        return 1

    @property
    def cacheable(self) -> bool:
        return True

    def read_name(self, i: int) -> str:
        return "gate"

    def __call__(self, shared: Any, own: Any, ctx: Context) -> Scaling:
        return Scaling(scalar_function(self.function)(own[..., 0]))
