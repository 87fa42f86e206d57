"""The LayerNorm obstruction, and how a norm over D reads gets past it.

A stage of a target, ``f(x) = g * (x - mean x) / std x + b`` with trained g and b, against the stage of a fixed backbone that has a
*standard* LayerNorm over all its m coordinates and a fixed read-out U (arXiv 2605.31423, section on limits):

    y(x) = LN_m(x E) U,      LN_m(z) = gamma * (z - mean z) / sqrt(var z + eps) + beta          gamma, beta, U fixed; E the program

At x = 0 the stream is 0 and ``y(0) = beta U``, whatever E is: the error at 0 is ``|b - beta U|``. More: ``x E`` is odd in x, so
``y(x) + y(-x) = 2 beta U`` for every x, while ``f(x) + f(-x) = 2 b``. One of the two errors is at least ``|b - beta U|`` (ours). A
constant feature, ``z = x E + e``, repairs x = 0 but not this: for x -> infinity along a ray the constant drops out of LN_m(z), so the
largest error over a ray and its mirror image is still at least ``|b - beta U|`` in the limit (unless x E has m equal entries; then y does
not tell x from -x at all). In anyformer the norm is an operator that reads D coordinates, and the shift b comes on the constant feature, by
a branch that no norm scales.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anyformer.backbones import PathTree
from anyformer.compiling import compile
from anyformer.experiments.least_squares import minimise
from anyformer.targets.reading import read
from anyformer.targets.transformer import Transformer
from anyformer.verifying import verify

FEATURES = 4
WIDTHS = (8, 16, 32, 64)
SCALES = (0.1, 1.0, 10.0, 1000.0)
"""Lengths of the inputs, beside x = 0; every input comes with its mirror image."""
EPS = 1e-5

Tick = Callable[[], None]


def make_target(norm_position: str, seed: int) -> Transformer:
    """A random target with LayerNorm, one layer, residual, an MLP and biases everywhere; token 0 has all features 0."""
    module = Transformer(
        vocab=8, heads=2, layers=1, head_dim=2, features=FEATURES, residual=True, norm="layer", norm_position=norm_position,
        bias=True, mlp=3, norm_eps=EPS,
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / parameter.shape[-1] ** 0.5)
        module.embedding.weight[0] = 0
    return module


def inputs(seed: int) -> Float[Tensor, "points D"]:
    """x = 0, and Gaussian directions of every scale with their mirror images."""
    generator = torch.Generator().manual_seed(seed)
    rays = [scale * torch.randn(6, FEATURES, generator=generator, dtype=torch.float64) for scale in SCALES]
    x = torch.cat(rays)
    return torch.cat((torch.zeros(1, FEATURES, dtype=torch.float64), x, -x))


def fit(width: int, seed: int, constant: bool, starts: int, steps: int) -> dict[str, float]:
    """The best embedding that the optimiser finds for a standard LayerNorm over ``width`` coordinates: its largest ``error``, its error
    ``at_zero``, and the ``floor`` max |b - beta U| below which no embedding gets. ``constant``: with a constant feature."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    g, b = draw(FEATURES), draw(FEATURES)
    gamma, beta, U = draw(width), draw(width), draw(width, FEATURES) / width**0.5
    x = inputs(seed)
    wanted = F.layer_norm(x, (FEATURES,), g, b, EPS)
    fed = torch.cat((x, torch.ones(len(x), 1, dtype=torch.float64)), dim=1) if constant else x

    def error(E: Tensor) -> Tensor:
        return F.layer_norm(fed @ E, (width,), gamma, beta, EPS) @ U - wanted

    found = [minimise(error, draw(fed.shape[1], width), steps) for _ in range(starts)]
    best = error(min(found, key=lambda pair: pair[1])[0]).abs()
    return {"error": float(best.max()), "at_zero": float(best[0].max()), "floor": float((b - beta @ U).abs().max())}


def norm_operator(seed: int) -> float:
    """The largest error of a path tree on the same stage: its norm reads D coordinates. Same inputs, x = 0 among them."""
    module = make_target("post", seed)
    network, x = read(module), inputs(seed)
    table = torch.cat((x, torch.ones(len(x), 1, dtype=torch.float64)), dim=1)
    norm = replace(network, embedding=table, stages=network.stages[1:2], readout=None, source=None)
    machine = PathTree.for_class(norm)
    layer = module.blocks[0].attention_norm
    assert isinstance(layer, torch.nn.LayerNorm)
    with torch.no_grad():
        got = machine(torch.arange(len(x))[None], compile(norm, machine))[0]
        return float((got - layer(x)).abs().max())


def layer_norm(seeds: int, starts: int, steps: int, widths: tuple[int, ...], tick: Tick = lambda: None) -> dict[str, Any]:
    """The failing fits for every width and seed, and what succeeds: the norm operator alone, and whole targets, verified."""
    rows = []
    for width in widths:
        for seed in range(seeds):
            plain, constant = (fit(width, seed, c, starts, steps) for c in (False, True))
            rows.append(
                {
                    "width": width,
                    "seed": seed,
                    "floor": plain["floor"],
                    "error": plain["error"],
                    "error_at_zero": plain["at_zero"],
                    "error_with_constant": constant["error"],
                    "error_at_zero_with_constant": constant["at_zero"],
                }
            )
            tick()
    targets = {}
    for position in ("pre", "post"):
        target = make_target(position, 0)
        machine = PathTree.for_class(target)
        verdict = verify(compile(target, machine), target)
        targets[position] = {"passed": verdict.passed, "max_abs_error": verdict.max_abs_error, "width": machine.width}
    return {
        "features": FEATURES,
        "fits": rows,
        "norm_operator_error": max(norm_operator(seed) for seed in range(seeds)),
        "verified": targets,
    }
