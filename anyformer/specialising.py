"""Specialise: a backbone is an interpreter, a program its input; fixing the program gives back an ordinary transformer.

    program  ->  the smallest Network that unrolls to it (:mod:`anyformer.factoring`)  ->  a module of our own family

(a stored program holds its network's own numbers: they are read back)

(the first Futamura projection), from the program alone, at the target's own size and speed.
"""

import math
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from anyformer import philox
from anyformer.errors import AnyformerError
from anyformer.factoring import factor, feature_widths, rank_threshold
from anyformer.network import Network
from anyformer.program import Program
from anyformer.targets.reading import READERS
from anyformer.targets.writing import write_transformer

CURVE = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4, 1e-5)
"""Relative singular-value cut-offs of the rank-error curve; the last point is always the dtype's own threshold."""


@dataclass(frozen=True)
class CurvePoint:
    """One cut-off: ``features`` (largest rank of the stream) and the relative output error against the program."""

    cutoff: float
    features: int
    error: float


@dataclass(frozen=True)
class Specialization:
    """What was found: rank of the stream after every stage, relative output error against the program, whether the result is
    a plain :class:`Transformer`, and for learned programs the curve of rank against error."""

    features: tuple[int, ...]
    error: float
    ordinary: bool
    curve: tuple[CurvePoint, ...] = ()


class NetworkModule(nn.Module):
    """A Network as a module, for results that no ordinary transformer can hold (ranks too large, unusual operators)."""

    def __init__(self, network: Network):
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, *, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        return self.network.run(tokens, mask=mask, positions=positions)


READERS[NetworkModule] = lambda module: module.network


def specialize(program: Program, *, max_error: float | None = None, sequences: int = 4, length: int = 16) -> nn.Module:
    """An ordinary module that computes what ``program`` computes; ``module.report`` is a :class:`Specialization`.

    A compiled program gives back the target's ranks. For a learned one, or with ``max_error`` (relative to the largest output), the curve
    of rank against error is measured on ``sequences`` random sequences of ``length``; the smallest module within ``max_error`` (default
    1e-3) is returned. Raises :class:`AnyformerError` where none is.
    """
    if not isinstance(program, Program):
        raise AnyformerError(
            f"a program is needed, got {type(program).__name__}; make one with anyformer.compile or anyformer.load"
        )
    program = program.detach()
    samples = _samples(program, sequences, length)
    expected = program.to(torch.float64).machine()(samples, program.to(torch.float64))
    scale = max(float(expected.abs().max()), 1e-30)

    def attempt(cutoff: float | None) -> tuple[nn.Module, Network, float]:
        network = network_of(program, cutoff)
        written = (
            write_transformer(network, program.token_names, cutoff or rank_threshold(program), bias) for bias in (False, True)
        )
        errors = []
        for candidate in chain(written, [NetworkModule(network)]):
            if candidate is not None:
                with torch.no_grad():
                    error = float((candidate(samples) - expected).abs().max()) / scale
                errors.append((error, candidate))
                if error <= 1e3 * rank_threshold(program):
                    break
        error, best = min(errors, key=lambda e: e[0] if math.isfinite(e[0]) else math.inf)
        return best, network, error

    curve: list[CurvePoint] = []
    tries: list[tuple[nn.Module, Network, float]] = []
    factored = program.machine().network(program) is None
    if factored and (max_error is not None or program.provenance.get("made_by") != "compile"):
        for cutoff in CURVE:
            tries.append(attempt(cutoff))
            curve.append(CurvePoint(cutoff, max(feature_widths(tries[-1][1])), tries[-1][2]))
    tries.append(attempt(None))
    curve.append(CurvePoint(rank_threshold(program), max(feature_widths(tries[-1][1])), tries[-1][2]))
    bound = 1e-3 if max_error is None else max_error
    module, network, error = next((t for t in tries[:-1] if t[2] <= bound), tries[-1])
    if not error <= bound:
        advice = "give a larger max_error" + (
            "" if program.dtype == torch.float64 else ", or compile the program with dtype=torch.float64"
        )
        raise AnyformerError(f"specialising lost too much precision: relative output error {error:.1e} > {bound:.1e}; {advice}")
    module = module.to(program.dtype)
    ordinary = not isinstance(module, NetworkModule)
    if not ordinary:
        module = NetworkModule(network.to(program.dtype))
    module.report = Specialization(feature_widths(network), error, ordinary, tuple(curve) if len(curve) > 1 else ())  # type: ignore[assignment]
    return module


def network_of(program: Program, cutoff: float | None = None) -> Network:
    """The network (float64) that a program is: what a stored program stores, else the smallest that unrolls to it."""
    return program.machine().network(program.detach().to(torch.float64)) or factor(program, cutoff)


def _samples(program: Program, sequences: int, length: int) -> Tensor:
    if program.positions is not None:
        length = min(length, program.positions.shape[0])
    longest = program.machine().longest
    length = length if longest is None else min(length, longest)
    return torch.from_numpy(philox.integers(0, 0, (sequences, length), program.vocab))
