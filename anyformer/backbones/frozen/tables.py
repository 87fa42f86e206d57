"""What a run reads, made of a program's tensors once for many rows: the tables of a tree's reads where nothing looks at the whole stream,
else the program's own.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.backbones.frozen.products import product
from anyformer.backbones.frozen.recipe import FrozenRecipe
from anyformer.backbones.tree import Tree


@dataclass(frozen=True, eq=False)
class FoldedTables:
    """``reads`` (vocab, N) of each token and ``places`` (n_max, N) of each position, in the tree's order, U multiplied in."""

    reads: Float[Tensor, "vocab N"]
    places: Float[Tensor, "n_max N"] | None


@dataclass(frozen=True, eq=False)
class StreamTables:
    """The program's rows and read-out; ``norms`` are gains and biases, in the order of the run (None: 1 and 0)."""

    tokens: Float[Tensor, "vocab m"]
    positions: Float[Tensor, "n_max m"] | None
    readout: Float[Tensor, "m out"]
    norms: Float[Tensor, "norms 2 m"] | None


Tables = FoldedTables | StreamTables


def leaves_of(tables: Tables) -> Tables:
    """The same numbers, as tensors that collect gradients of their own."""
    parts: dict[str, Any] = {f.name: getattr(tables, f.name) for f in dataclasses.fields(tables)}
    return dataclasses.replace(tables, **{name: t.detach().requires_grad_() for name, t in parts.items() if t is not None})


def backward(tables: Tables, leaves: Tables) -> None:
    """Carry what the leaves collected back to what the tables were made of."""
    pairs = [(getattr(tables, f.name), getattr(leaves, f.name)) for f in dataclasses.fields(tables)]
    known = [(t, leaf.grad) for t, leaf in pairs if leaf is not None and leaf.grad is not None]
    torch.autograd.backward([t for t, _ in known], [gradient for _, gradient in known])


def node_columns(recipe: FrozenRecipe) -> tuple[int, int]:
    """How many columns a node has for its reads, and how many for what U reads of them at the end."""
    probes = recipe.attention.heads * recipe.attention.reads
    return probes, recipe.network_class.outputs if recipe.residual else 0


def masked_table(recipe: FrozenRecipe, rows: Float[Tensor, "rows m"], readout: Float[Tensor, "m out"]) -> Float[Tensor, "rows N"]:
    """The reads of the masked machine's tree: its coordinates are the tree's, the leaves are multiplied by their rows of U, and with a skip each
    node has what U reads of its own columns."""
    tree, heads = Tree.of(recipe.network_class), recipe.attention.heads
    probes, kept = node_columns(recipe)
    sizes: list[int] = []

    def walk(s: int) -> None:
        sizes.append(probes if s < recipe.layers else tree.outputs)
        for _ in range(heads if s < recipe.layers else 0):
            walk(s + 1)

    walk(0)
    blocks = zip(rows.split(sizes, dim=1), readout.split(sizes, dim=0), strict=True)

    def node(s: int) -> list[Tensor]:
        columns, outputs = next(blocks)
        if s == recipe.layers:
            return [columns @ outputs]
        own = [columns, columns @ outputs] if kept else [columns]
        return own + [part for _ in range(heads) for part in node(s + 1)]

    return torch.cat(node(0), dim=1)


def random_table(
    rows: Float[Tensor, "rows m"],
    readout: Float[Tensor, "m out"],
    reads: Float[Tensor, "m reads"],
    routes: Sequence[Sequence[Float[Tensor, "m m"]]],
    order: Int[Tensor, "N"],
) -> Float[Tensor, "rows N"]:
    """``rows R_all`` in the tree's order: of R_all only the leaves depend on U, ``R_V[1,p1] .. R_V[L,pL] U``, and are rebuilt, right to left;
    ``reads`` are its other columns."""
    leaves = readout
    for layer in reversed(routes):
        leaves = torch.cat([product(leaves.mT, route.mT).mT for route in layer], dim=1)
    return torch.cat((product(rows, reads), rows @ leaves), dim=1)[:, order]
