"""A new operator is one small file: define it, and every machine runs it. Here: a gate that squashes ``z`` to ``z / (1 + |z|)``,
and a token mixer that averages each token with its right neighbour.

    python examples/custom_operator.py
"""

from dataclasses import dataclass
from typing import Any

import torch

import anyformer as af
from anyformer.operators import primitives as P
from anyformer.operators import register_function
from anyformer.operators.mixing import FixedMixing

register_function("softsign", lambda z: z / (1.0 + P.select(z, z > 0, 0.0) - P.select(z, z <= 0, 0.0)))


@dataclass(frozen=True)
class RingOfNeighbours(FixedMixing):
    """``y_i = (x_i + x_(i+1)) / 2`` (the last token: half of itself)."""

    def weights(self, like: Any, query: Any, key: Any, length: Any) -> Any:
        return 0.5 * P.constant(like, (key == query) | (key == query + 1))


op = af.operators
generator = torch.Generator().manual_seed(0)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# X <- X + mix(X) A + sum_j diag(softsign(X p_j)) X up_j down_j^T
residual = af.Branch(op.Identity(), None, af.IdentityMap(4))
mixer = af.Branch(RingOfNeighbours(), None, af.DenseMap(draw(1, 4, 4)))
units = af.Branch(op.Gate(3, "softsign"), draw(4, 3), af.LowRankMap(draw(3, 4, 1), draw(3, 1, 4)))
network = af.Network(draw(6, 4), (af.Stage((residual, mixer, units)),) * 2, draw(4, 6))

machine = af.PathTree.for_class(network)
program = af.compile(network, machine)
tokens = torch.randint(6, (2, 5), generator=generator)
print(machine)
print("on the path tree:", f"{(machine(tokens, program) - network.run(tokens)).abs().max():.0e}")
print("on the dense 0/1 machine:", f"{(machine.literal()(tokens, program) - network.run(tokens)).abs().max():.0e}")
