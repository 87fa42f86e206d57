"""An architecture: which token mixing in which order, between feed-forward layers of any number.

    X <- X + sum_b Op_b(phi(X) P) phi(X) M_b        one attention layer: banks of heads, phi = identity or a norm in front
    X <- X + FFN(psi(X))                            any number of these, anywhere

Probes P and maps M are the trained parameters; what an operator holds (mask, kernel, slopes) is fixed. A :class:`ColourBias` is the exception: a
learned bias, one number for every colour of pairs.
"""

from dataclasses import dataclass, field
from typing import Any

from anyformer.approximation.feedforward import FeedForward
from anyformer.errors import AnyformerError, require_choice, require_numbers, require_size
from anyformer.operators import LayerNorm, Norm, Operator, RMSNorm, TableBias
from anyformer.spec import Spec


@dataclass(frozen=True)
class ColourBias(TableBias):
    """A learned bias ``B_ij = beta_{c(i,j)}``: ``colours[i][j]`` names the number of the pair; ``rows`` holds generic values of them, at which
    witnesses are looked for. Positions with equal colours share their number for ever (T5, Swin, orbits of a group)."""

    colours: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        n = len(self.rows[0])
        if len(self.colours) != n or any(len(row) != n for row in self.colours):
            raise AnyformerError(f"ColourBias: colours must be {n} rows of {n}, as the values are; got {self.colours!r}")

    @classmethod
    def of(cls, colours: Any) -> "ColourBias":
        """Distinct values in (0, 1): multiples of the golden ratio without their integer parts."""
        table = tuple(tuple(int(c) for c in row) for row in colours)
        order = {c: k for k, c in enumerate(sorted({c for row in table for c in row}))}
        values = tuple(tuple(((order[c] + 1) * 0.6180339887498949) % 1.0 for c in row) for row in table)
        return cls((values,), table)


@dataclass(frozen=True)
class Layer(Spec):
    """One attention layer: banks of heads that act side by side. ``maps`` are the matrices (d, d) of the banks where they are fixed
    (FNet); None: trained."""

    operators: tuple[Operator, ...]
    maps: tuple[tuple[tuple[float, ...], ...], ...] | None = None

    def __post_init__(self) -> None:
        if not self.operators or not all(isinstance(op, Operator) for op in self.operators):
            raise AnyformerError(f"Layer: at least one operator is needed, got {self.operators!r}")
        if self.maps is not None and len(self.maps) != len(self.operators):
            raise AnyformerError(f"Layer: {len(self.operators)} banks need as many maps, or None; got {len(self.maps)}")


@dataclass(frozen=True)
class Positions(Spec):
    """Position vectors: ``where`` they are added (``input`` of the stack, or ``attention``: inside every attention layer, in front of its probes
    and values), and whether they are ``trained`` or ``fixed``."""

    where: str = "input"
    kind: str = "trained"

    def __post_init__(self) -> None:
        require_choice("Positions", "where", self.where, ("input", "attention"))
        require_choice("Positions", "kind", self.kind, ("trained", "fixed"))


@dataclass(frozen=True)
class Architecture(Spec):
    """``layers`` in their order, on tokens of ``dim`` features, with parameters of their own each. ``skip`` is ``residual`` or ``none`` (around
    attention). Norms are in front of each part; ``output_norm`` is a norm with a frozen affine part behind everything."""

    layers: tuple[Layer, ...]
    dim: int
    feed_forward: FeedForward = field(default_factory=FeedForward)
    skip: str = "residual"
    attention_norm: Norm | None = None
    feed_forward_norm: Norm | None = None
    output_norm: Norm | None = None
    positions: Positions | None = None
    name: str = "this architecture"

    def __post_init__(self) -> None:
        require_size("Architecture", "dim", self.dim)
        require_choice("Architecture", "skip", self.skip, ("residual", "none"))
        for field_name in ("attention_norm", "feed_forward_norm", "output_norm"):
            norm = getattr(self, field_name)
            if norm is not None and norm.dim != self.dim:
                raise AnyformerError(f"Architecture: {field_name} is for {norm.dim} features, the tokens have {self.dim}")
        if not isinstance(self.layers, tuple) or not all(isinstance(layer, Layer) for layer in self.layers):
            raise AnyformerError(f"Architecture: layers must be a tuple of Layer, got {self.layers!r}")
        if not isinstance(self.feed_forward, FeedForward):
            raise AnyformerError(f"Architecture: feed_forward must be a FeedForward, got {self.feed_forward!r}")
        for matrix in (matrix for layer in self.layers for matrix in layer.maps or ()):
            if len(matrix) != self.dim or any(len(row) != self.dim for row in matrix):
                shape = f"{len(matrix)} rows of {sorted({len(row) for row in matrix})}"
                raise AnyformerError(f"Architecture: a fixed map must be {self.dim} x {self.dim}, as the features; got {shape}")
            for row in matrix:
                require_numbers("Architecture", "a row of a fixed map", row)

    @classmethod
    def of(cls, *operators: Operator, dim: int, **others: Any) -> "Architecture":
        """One bank a layer."""
        return cls(tuple(Layer((op,)) for op in operators), dim, **others)

    @property
    def good_norm(self) -> bool:
        """Whether Theorem 4 holds behind the norm in front of attention: none, or one that is a homeomorphism (of more than a point)."""
        norm = self.attention_norm
        if norm is None:
            return True
        return norm.eps > 0 and (isinstance(norm, RMSNorm) or (isinstance(norm, LayerNorm) and self.dim >= 2))

    @property
    def homogeneous(self) -> bool:
        """Whether all layers are of one kind."""
        return len(set(self.layers)) <= 1
