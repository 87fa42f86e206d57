"""Named scalar functions of gates: one table, each entry a formula in the primitives.

A gate holds a function by *name* (a specification has no code). :func:`register_function` adds one of your own.
"""

import math
from collections.abc import Callable
from typing import Any

from anyformer.errors import AnyformerError
from anyformer.operators import primitives as P

ScalarFunction = Callable[[Any], Any]


def _relu(z: Any) -> Any:
    return P.select(z, z > 0, 0.0)


def _gelu(z: Any) -> Any:
    return 0.5 * z * (1.0 + P.erf(z * math.sqrt(0.5)))


def _gelu_tanh(z: Any) -> Any:
    return 0.5 * z * (1.0 + P.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z * z * z)))


def _reciprocal_or_zero(z: Any) -> Any:
    far = (z >= 1) | (z <= -1)
    return P.select(1.0 / P.select(z, far, 1.0), far, 0.0)


def _elu_plus_one(z: Any) -> Any:
    return P.select(z + 1.0, z > 0, 0.0) + P.select(P.exp(P.select(z, z <= 0, 0.0)), z <= 0, 0.0)


FUNCTIONS: dict[str, ScalarFunction] = {
    "identity": lambda z: z,
    "relu": _relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda z: z * P.sigmoid(z),
    "tanh": P.tanh,
    "sigmoid": P.sigmoid,
    "elu_plus_one": _elu_plus_one,
    "exp": P.exp,
    "log": P.log,
    "sqrt": P.sqrt,
    "rsqrt": lambda z: 1.0 / P.sqrt(z),
    "reciprocal": lambda z: 1.0 / z,
    "reciprocal_or_zero": _reciprocal_or_zero,
    "square": lambda z: z * z,
    "step": lambda z: P.select(z * 0.0 + 1.0, z > 0, 0.0),
}
"""``step`` is 1 for z > 0 and 0 otherwise; ``reciprocal_or_zero`` is 1/z for |z| >= 1 and 0 nearer to 0; ``gelu`` is the exact one (erf),
``gelu_tanh`` its usual approximation."""


POSITIVE = frozenset({"exp", "sigmoid", "elu_plus_one"})
"""Those that are above 0 everywhere: rows of attention with them always sum to 1."""


NON_NEGATIVE = {"relu", "sqrt", "rsqrt", "square", "step"} | POSITIVE
"""Those that are never negative: the feature maps of attention."""


def register_function(name: str, formula: ScalarFunction, *, non_negative: bool = False) -> None:
    """Add a scalar function under a new name; raises where the name is taken by another formula. ``non_negative`` says that it never is
    below 0, so that attention may use it as a feature map."""
    if FUNCTIONS.setdefault(name, formula) is not formula:
        raise AnyformerError(f"a scalar function called {name!r} exists already; choose another name")
    if non_negative:
        NON_NEGATIVE.add(name)


def scalar_function(name: str) -> ScalarFunction:
    """Look a function up; raises with the known names."""
    if name not in FUNCTIONS:
        raise AnyformerError(f"no scalar function {name!r}; known: {', '.join(sorted(FUNCTIONS))}")
    return FUNCTIONS[name]
