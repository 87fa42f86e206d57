"""The kernel condition of arXiv 2506.23551, symbolically: sufficient for token distinguishability, and no more.

    lim_{t -> inf} k(x, t W_K y1) / k(x, t W_K y2)  is 0 or infinity, for y1 != y2 and generic W_K

Write ``a_i = x . W_K y_i`` and ``b_i = |W_K y_i|^2`` (for features: their values). Generic W_K makes a1 != a2, b1 != b2.
The limit is taken by sympy.
Kernels that fail it may be universal all the same: polynomial ones and ReLU features are (Proposition 6.1).
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from anyformer.errors import AnyformerError
from anyformer.operators import RBF, FeatureMap, Performer, Polynomial, Softmax

KERNELS = ("softmax", "gaussian", "positive-random-features", "polynomial", "relu-features", "elu-plus-one")


@dataclass(frozen=True)
class KernelLimit:
    """``limits``: of the ratio, in each generic case; ``holds`` if all of them are 0 or infinity."""

    kernel: str
    ratio: str
    limits: tuple[str, ...]
    holds: bool
    status: str = "a sufficient condition only: failing it says nothing"

    @property
    def sentence(self) -> str:
        """What was found, in a line."""
        found = "holds" if self.holds else "fails"
        return (
            f"the kernel condition of arXiv 2506.23551 {found} for {self.kernel} (limits {', '.join(self.limits)}): {self.status}"
        )


def name_of_kernel(kernel: Any) -> str | None:
    """The name in :data:`KERNELS` of a kernel of the language; None where it has none."""
    if isinstance(kernel, FeatureMap):
        return {"relu": "relu-features", "elu_plus_one": "elu-plus-one"}.get(kernel.function)
    names = {Softmax: "softmax", RBF: "gaussian", Performer: "positive-random-features", Polynomial: "polynomial"}
    return names.get(type(kernel))


@cache
def kernel_limit(kernel: str) -> KernelLimit:
    """Check the condition for a named kernel."""
    import sympy as sp

    if kernel not in KERNELS:
        raise AnyformerError(f"kernel_limit: kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    t, gap = sp.symbols("t gap", positive=True)
    a, b, x2 = sp.symbols("a b x2", positive=True)  # the smaller of each pair; the larger is it plus the gap
    cases: list[Any]
    if kernel == "softmax":
        cases = [sp.exp(t * (a + gap)) / sp.exp(t * a), sp.exp(t * a) / sp.exp(t * (a + gap)), sp.exp(-t * a) / sp.exp(t * gap)]
    elif kernel in ("gaussian", "positive-random-features"):

        def value(inner: Any, square: Any) -> Any:
            return sp.exp(-x2 / 2 + t * inner - t**2 * square / 2)

        cases = [value(u, b + gap) / value(v, b) for u, v in ((a, a), (a + gap, a), (-a, a))]
        cases += [1 / case for case in cases]
    elif kernel == "polynomial":
        p, c = sp.Integer(3), sp.symbols("c", positive=True)
        cases = [(t * (a + gap) + c) ** p / (t * a + c) ** p]
    elif kernel == "relu-features":
        cases = [sp.Max(t * (a + gap), 0) / sp.Max(t * a, 0)]
    else:  # elu + 1 at positive arguments
        cases = [(t * (a + gap) + 1) / (t * a + 1)]
    limits = [sp.limit(sp.simplify(case), t, sp.oo) for case in cases]
    holds = all(limit == 0 or limit == sp.oo for limit in limits)
    return KernelLimit(kernel, str(sp.simplify(cases[0])), tuple(str(limit) for limit in limits), holds)
