"""Below N: the smallest attention error that an optimiser reaches on a random backbone that is too narrow to be compiled for.

    E_best(m) = argmin over E of  sum over training inputs, layers, heads  |A_machine(X E) - A_target(X)|^2

E is any matrix (d_in x m): the paper's embedding of real-valued inputs X, here rows of a table of Gaussian vectors. The machine runs
as random machines do, the folded tree on ``E R_all``, with R_all (m x N) of a backbone of width m; errors are the largest |difference|
of any pattern entry on inputs that were not trained on. What an optimiser does not find may still exist: only the lower bound
(:mod:`anyformer.experiments.lower_bound`) and the exact solutions from ``attention_reads`` on are theorems.

*A count* (no theorem) of the numbers that attention alone depends on: for each layer l and head h the product of the stacked columns of
queries (H^(l-1) d_in x d) and keys, which a change of basis of the head leaves alone: ``2 H^(l-1) d_in d - d^2``. E has m d_in entries, so
a generic system of that size is solvable from

    m  >=  counted_width  =  ceil(attention_reads - H L d^2 / d_in),        attention_reads = 2 H d (H^L - 1) / (H - 1)        (d <= d_in)
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.backbones.folding import Trace, fold, routing_table, tree_plan
from anyformer.backbones.random_backbone import RandomRecipe, build_reads, required_reads
from anyformer.backbones.tree import Tree
from anyformer.classes import NetworkClass
from anyformer.costs import lower_bound
from anyformer.experiments.least_squares import minimise
from anyformer.experiments.lower_bound import our_bound
from anyformer.network import Network
from anyformer.operators import Context
from anyformer.targets.reading import read
from anyformer.targets.transformer import Transformer
from anyformer.unrolling import unroll

HEADS, LAYERS, HEAD_DIM, FEATURES = 2, 2, 2, 4
"""The class of the figure."""
WIDTHS = (2, 3, 4, 6, 8, 12, 16, 19, 20, 21, 22, 24, 28, 32, 40, 50)
OTHER_CLASSES = ((2, 2, 1, 3), (2, 2, 2, 3), (3, 2, 1, 2))
"""Classes at which the count is tried, one below ``counted_width``, at it, and one above."""
SEQUENCES, LENGTH = 12, 6
SOLVED = 1e-9
"""A largest pattern error below this is called exact."""

Tick = Callable[[], None]


def attention_reads(network: NetworkClass) -> int:
    """The columns of R_all that attention alone needs: N without the output columns."""
    leaves = 1
    for stage in network.stages:
        leaves *= stage.count
    return required_reads(network) - leaves * network.outputs


def counted_width(heads: int, layers: int, head_dim: int, features: int) -> int:
    """``ceil(attention_reads - H L d^2 / d_in)``, for d <= d_in."""
    reads = 2 * head_dim * sum(heads**layer for layer in range(1, layers + 1))
    return -((heads * layers * head_dim**2 - features * reads) // features)


def make_target(heads: int, layers: int, head_dim: int, features: int, seed: int) -> Network:
    """A random attention-only target, bidirectional, whose tokens are 2 * SEQUENCES * LENGTH Gaussian vectors and whose outputs are its
    features. Queries and keys are 1.2 times, values 1.5 times N(0, 1/fan-in): in both layers patterns are on
    average about 0.1 away from uniform, and not yet one-hot."""
    module = Transformer(vocab=features, heads=heads, layers=layers, head_dim=head_dim, features=features, causal=False).double()
    module.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        scale = (1.2 if "W_Q" in name or "W_K" in name else 1.5) / parameter.shape[-1] ** 0.5
        parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    table = torch.randn(2 * SEQUENCES * LENGTH, features, generator=generator, dtype=torch.float64)
    return replace(read(module), embedding=table, readout=None, source=None)


class NarrowMachine:
    """A random backbone of any width m, at least 1, as a function of E (d_in, m); ``reads`` is its R_all (m, N)."""

    def __init__(self, network_class: NetworkClass, width: int, seed: int):
        self.tree = Tree.of(network_class)
        self.plan = tree_plan(self.tree, routing_table(self.tree))
        self.reads, _ = build_reads(RandomRecipe(network_class.for_tree(), width, "gaussian", seed))

    def patterns(self, E: Float[Tensor, "d_in m"], X: Float[Tensor, "batch n d_in"]) -> Float[Tensor, "batch layers heads n n"]:
        """Every pattern of the machine on inputs X with the program E."""
        trace = Trace()
        positions = torch.arange(X.shape[1]).expand(X.shape[:2])
        fold(self.plan, X @ (E @ self.reads), Context(positions), trace)
        return torch.stack(trace.patterns, dim=1)


def _one(sizes: tuple[int, int, int, int], width: int, seed: int, starts: int, steps: int) -> dict[str, float]:
    """Errors of one target on one backbone: by the optimiser, and by the two linear systems (least squares, minimum norm)."""
    network = make_target(*sizes, seed)
    tokens = torch.arange(2 * SEQUENCES * LENGTH).reshape(2 * SEQUENCES, LENGTH)
    found: list[Tensor] = []
    network.run(tokens, patterns=found)
    wanted, X, required = torch.stack(found, dim=1), network.embedding[tokens], unroll(network)
    machine = NarrowMachine(network.network_class, width, seed)
    train, held_out = slice(0, SEQUENCES), slice(SEQUENCES, None)

    def error(E: Tensor) -> float:
        return float((machine.patterns(E, X[held_out]) - wanted[held_out]).abs().max())

    def linear(columns: Tensor) -> Tensor:
        return required[:, columns] @ torch.linalg.pinv(machine.reads[:, columns])

    reads = torch.cat([torch.arange(b.start, b.start + b.count) for b in machine.tree.blocks() if b.what != "output"])
    assert len(reads) == attention_reads(network.network_class)
    compiled, by_attention = linear(torch.arange(machine.tree.width)), linear(reads)
    best, least = by_attention, float("inf")
    for start in range(starts):
        generator = torch.Generator().manual_seed(1000 * seed + start)
        E = by_attention if start == 0 else torch.randn(by_attention.shape, generator=generator, dtype=torch.float64) / 2
        E, rms = minimise(lambda e: machine.patterns(e, X[train]) - wanted[train], E, steps)
        if rms < least:
            best, least = E, rms
        if error(best) < SOLVED:
            break
    return {"optimised": error(best), "compiled": error(compiled), "attention_only": error(by_attention)}


def _summary(errors: list[float]) -> dict[str, float]:
    return {"min": min(errors), "median": statistics.median(errors), "max": max(errors)}


def below_width(seeds: int, starts: int, steps: int, widths: tuple[int, ...], tick: Tick = lambda: None) -> dict[str, Any]:
    """The curve of the figure: for each width the least, median and largest error over the seeds (a seed draws target and backbone;
    each seed's error is its best over the starts)."""
    sizes = (HEADS, LAYERS, HEAD_DIM, FEATURES)
    known = make_target(*sizes, 0).network_class
    curve = []
    for width in widths:
        rows = []
        for seed in range(seeds):
            rows.append(_one(sizes, width, seed, starts, steps))
            tick()
        curve.append({"width": width} | {name: _summary([r[name] for r in rows]) for name in rows[0]})
    exact = [row["width"] for row in curve if row["optimised"]["min"] < SOLVED]
    return {
        "heads": HEADS,
        "layers": LAYERS,
        "head_dim": HEAD_DIM,
        "features": FEATURES,
        "seeds": seeds,
        "starts": starts,
        "lower_bound": lower_bound(HEADS, LAYERS),
        "our_bound": our_bound(*sizes),
        "counted_width": counted_width(*sizes),
        "attention_reads": attention_reads(known),
        "required_reads": required_reads(known),
        "narrowest_exact": min(exact, default=None),
        "curve": curve,
    }


def counts(
    seeds: int, starts: int, steps: int, classes: tuple[tuple[int, int, int, int], ...] = OTHER_CLASSES, tick: Tick = lambda: None
) -> list[dict[str, Any]]:
    """The count at other classes: the least error over the seeds at ``counted_width``, one below and one above."""
    rows = []
    for sizes in classes:
        width, names = counted_width(*sizes), ("heads", "layers", "head_dim", "features")
        row: dict[str, Any] = dict(zip(names, sizes, strict=True))
        row |= {"counted_width": width, "attention_reads": attention_reads(make_target(*sizes, 0).network_class)}
        for name, m in (("one_below", width - 1), ("at_count", width), ("one_above", width + 1)):
            row[name] = min(_one(sizes, m, seed, starts, steps)["optimised"] for seed in range(seeds))
            tick()
        rows.append(row)
    return rows
