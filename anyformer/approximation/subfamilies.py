"""Sub-families of a module's parameters: some at 0, the others free.

A theorem asks for one analytic family, not for all of them: W_Q = 0 makes a stabiliser's maximum a constant, W_V = 0 may make g = 0. What is
listed is tried: every block of weights (a matrix, a kernel, a third of a packed one) with all vectors (biases, scales of norms) at 0.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anyformer.approximation.tracing import Traced, Varying


@dataclass(frozen=True, eq=False)
class SubFamily:
    """Some parameters put to 0 (masks, True: at 0), the others free."""

    zeros: Mapping[str, Tensor]
    says: str = ""

    def apply(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The member at these numbers."""
        return {k: torch.where(self.zeros[k], 0.0, v) if k in self.zeros else v for k, v in values.items()}

    def vary(self, traced: Traced, values: Mapping[str, Tensor], asked: Tensor | None = None) -> Varying:
        """Constants propagated with these parameters at 0."""
        return traced.vary(self.apply(values), dict(self.zeros), asked)

    def holds(self, other: "SubFamily") -> bool:
        """Whether every member of the other one is a member."""
        zeros = {k: other.zeros.get(k) for k in self.zeros}
        return all(z is not None and bool(z[self.zeros[k]].all()) for k, z in zeros.items())

    def __and__(self, other: "SubFamily") -> "SubFamily":
        """What either puts to 0."""
        zeros = dict(self.zeros)
        for name, mask in other.zeros.items():
            zeros[name] = zeros[name] | mask if name in zeros else mask
        return SubFamily(zeros, f"{self.says}, {other.says}")


EVERYTHING = SubFamily({})


def sub_families(shapes: Mapping[str, tuple[int, ...]], sizes: tuple[int, ...] = (0, 1, 2)) -> Iterator[SubFamily]:
    """All vectors at 0, with so many blocks of weights at 0."""
    vectors = {k: torch.ones(s, dtype=torch.bool) for k, s in shapes.items() if len(s) <= 1}
    blocks = [block for name, shape in shapes.items() if len(shape) >= 2 for block in _blocks(name, shape)]
    for size in sizes:
        for chosen in itertools.combinations(blocks, size):
            family = SubFamily(vectors)
            for block in chosen:
                family &= block
            said = " = ".join(block.says for block in chosen)
            yield SubFamily(family.zeros, f"{said} = 0, biases 0" if chosen else "biases 0")


def _blocks(name: str, shape: tuple[int, ...]) -> list[SubFamily]:
    """The whole, and its thirds where q, k and v may be packed in it."""
    out = [SubFamily({name: torch.ones(shape, dtype=torch.bool)}, name)]
    if len(shape) == 2 and shape[0] % 3 == 0:
        third = shape[0] // 3
        for i in range(3):
            mask = torch.zeros(shape, dtype=torch.bool)
            mask[i * third : (i + 1) * third] = True
            out.append(SubFamily({name: mask}, f"{name}[part {i + 1} of 3]"))
    return out


def identity_reachable(traced: Traced, values: Mapping[str, Tensor], family: SubFamily) -> bool:
    """(H2) inside the family: vectors alone, or one block of weights with them, at 0 make g = 0, by constant propagation. False: not found."""
    return any((family & other).vary(traced, values).zero for other in sub_families(traced.shapes, (0, 1)))
