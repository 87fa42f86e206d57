"""Why random weights are universal almost surely: a witness, condition numbers, and the MLP that has too few units.

A program for a random backbone solves ``E R_all = W_all``; every target has one if R_all (m x N) has full column rank. The determinant of
its first N rows is a polynomial in the weights of the backbone. If it is not the zero polynomial, its zero set has measure 0, so weights
with any density are universal with probability 1 (arXiv 2605.31423, section on random backbones). One point where it is not 0 is enough:
the 0/1 machine, for which R_all is a permutation of the identity. :func:`witness` reads R_all off the *dense matrices* of that machine and
computes its determinant in integers.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.backbones import LiteralTransformer, PathTree, Random
from anyformer.backbones.literal import LiteralBank, LiteralLayer
from anyformer.backbones.random_backbone import recommended_width, required_reads
from anyformer.targets.reading import network_class, read
from anyformer.targets.transformer import Transformer, TransformerConfig
from anyformer.unrolling import unroll

WITNESS = dict(vocab=2, heads=2, layers=3, head_dim=1, features=2)
"""A class small enough for determinants in integers."""
CONDITIONED = dict(vocab=30, heads=2, layers=2, head_dim=28, features=30)
"""The paper's 1-hop sizes: N = 456."""
QUICK = dict(vocab=4, heads=2, layers=2, head_dim=2, features=4)
MLP = dict(vocab=8, heads=2, layers=1, head_dim=2, features=8, residual=True, mlp=4, gated=True)

Tick = Callable[[], None]


def read_matrix(machine: LiteralTransformer) -> Float[Tensor, "m N"]:
    """R_all of a dense machine, from its matrices, right to left (no norms: they share columns):

        R_S = U,      R_s = [ own reads of each branch , R_(s+1) if there is a skip , Route_b R_(s+1) for each branch b ]

    A target's unit routes by ``up down`` over its hidden units.
    """
    reads = machine.U
    for layer in reversed(machine.order):
        own = [column for bank in layer.banks for column in bank.own.permute(1, 0, 2, 3).flatten(2)]  # type: ignore[union-attr]
        children = [reads] if layer.skip else []
        for bank in layer.banks:
            assert isinstance(bank, LiteralBank)
            if "up" in dict(bank.named_buffers()):
                units = zip(bank.up.chunk(bank.op.count, dim=1), bank.down.chunk(bank.op.count), strict=True)
                children += [up @ (down @ reads) for up, down in units]
            else:
                children += [route @ reads for route in bank.R_V]
        reads = torch.cat((*own, *children), dim=1)
    return reads


def integer_determinant(matrix: list[list[int]]) -> int:
    """The determinant of an integer matrix, exactly (fraction-free elimination, Bareiss 1968)."""
    a, sign, before = [row[:] for row in matrix], 1, 1
    for k in range(len(a) - 1):
        pivot = next((i for i in range(k, len(a)) if a[i][k]), None)
        if pivot is None:
            return 0
        if pivot != k:
            a[k], a[pivot], sign = a[pivot], a[k], -sign
        for i in range(k + 1, len(a)):
            if a[i][k] or a[k][k] != before:
                a[i] = [(a[i][j] * a[k][k] - a[i][k] * a[k][j]) // before for j in range(len(a))]
        before = a[k][k]
    return sign * a[-1][-1]


def witness(residual: bool) -> dict[str, Any]:
    """The determinant of R_all of the 0/1 machine (the paper's masks; folded with a residual), exactly, and its ``slogdet``."""
    config = TransformerConfig(**WITNESS, residual=residual)  # type: ignore[arg-type]
    machine = PathTree.for_class(config)
    reads = read_matrix(machine.literal("folded" if residual else "masked")).double()
    sign, logarithm = torch.linalg.slogdet(reads)
    exact = integer_determinant([[int(x) for x in row] for row in reads.tolist()])
    return {"reads": reads.shape[1], "determinant": exact, "slogdet": [float(sign), float(logarithm)]}


def conditions(seeds: int, quick: bool, tick: Tick = lambda: None) -> dict[str, Any]:
    """log10 cond(R_all) of ``seeds`` random backbones at m = N and m = 1.25 N."""
    known = network_class(TransformerConfig(**(QUICK if quick else CONDITIONED)))  # type: ignore[arg-type]
    needed = required_reads(known)
    out: dict[str, Any] = {"required_reads": needed, "seeds": seeds}
    for name, width in (("least", needed), ("recommended", recommended_width(needed))):
        logs = []
        for seed in range(seeds):
            logs.append(math.log10(Random.for_class(known, width=width, seed=seed).condition))
            tick()
        ordered = sorted(logs)
        out[name] = {
            "width": width,
            "log10_condition": logs,
            "smallest": ordered[0],
            "median": (ordered[(seeds - 1) // 2] + ordered[seeds // 2]) / 2,
            "largest": ordered[-1],
        }
    return out


def ordinary_units(machine: LiteralTransformer) -> LiteralTransformer:
    """The same dense machine with one hidden unit for each unit of the target: an ordinary MLP of r units."""

    def thin(bank: Any) -> LiteralBank:
        if "up" not in dict(bank.named_buffers()):
            return bank
        copies = bank.own.shape[2]
        return LiteralBank(bank.op, bank.own[:, :, :1], up=bank.up[:, ::copies], down=bank.down[::copies])

    layers = [LiteralLayer([thin(bank) for bank in layer.banks], layer.shared, layer.skip) for layer in machine.order]
    return LiteralTransformer(layers, machine.U)


def random_mlp(seed: int = 0) -> dict[str, Any]:
    """A gated MLP of random weights: with r ordinary units the rank of R_all stays below the reads that a target requires; with r * width
    units, whose gates all read the target's z_j, it is full. ``residual``: relative error of the best E, by least squares."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        target = Transformer(**MLP).double()  # type: ignore[arg-type]
    machine = Random.for_class(target, seed=seed)
    dense = machine.literal()
    with torch.no_grad():
        required = unroll(read(target))

    def solvable(reads: Tensor, wanted: Tensor) -> dict[str, Any]:
        misses = wanted - wanted @ torch.linalg.pinv(reads) @ reads
        rank = int(torch.linalg.matrix_rank(reads))
        return {"reads": reads.shape[1], "rank": rank, "residual": float(misses.norm() / wanted.norm())}

    units = sum(bank.up.shape[1] for layer in dense.order for bank in layer.banks if "up" in dict(bank.named_buffers()))  # type: ignore
    return {
        "width": machine.width,
        "ordinary": {"units": MLP["mlp"]} | solvable(read_matrix(ordinary_units(dense)), required),
        "enough": {"units": units} | solvable(read_matrix(dense), required[:, machine.meaning]),
    }


def random_weights(seeds: int, quick: bool, tick: Tick = lambda: None) -> dict[str, Any]:
    """All of the above."""
    return {
        "witness": {"attention_only": witness(False), "residual": witness(True)},
        "condition": conditions(seeds, quick, tick),
        "random_mlp": random_mlp(),
    }
