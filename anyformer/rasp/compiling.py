"""RASP to weights: ``compile(program, vocab, max_length)``.

    graph        equal parts are one node                                   :mod:`anyformer.rasp.graph`
    values       which values every node can have                           :mod:`anyformer.rasp.values`
    realisation  nodes become linear forms, selectors scores: a plan        :mod:`anyformer.rasp.realising`
    assembly     the plan becomes a network                                 :mod:`anyformer.rasp.assembling`
    check        the network against the interpreter, on inputs at the edges and at random

What cannot be built is refused with all reasons at once, each naming its expression; what is built is checked.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch

from anyformer.errors import AnyformerError, OutsideClass, require_choice, require_number, require_size
from anyformer.memory import require_memory
from anyformer.rasp.assembling import assemble, prune
from anyformer.rasp.compiled import CompiledProgram, Outputs, check_against_interpreter
from anyformer.rasp.graph import Graph
from anyformer.rasp.merging import merge
from anyformer.rasp.plan import Form, Plan, number
from anyformer.rasp.realising import Realisation
from anyformer.rasp.sequences import LIFTED, Sequence, printed, restricted
from anyformer.rasp.tabulating import CannotCompile
from anyformer.rasp.values import JOINT, Finite, Inference, Reals, finite

DTYPES = {"float64": (np.float64, torch.float64), "float32": (np.float32, torch.float32)}
SMALLER = 2**8
"""The number of combinations of sources in one table, where :data:`~anyformer.rasp.values.JOINT` cannot be."""

CAUSAL = ("no", "strict", "dialect")
DEEPEST = 50_000
"""The most nested Python calls of one compilation."""


def compile(
    program: Sequence,
    vocab: Iterable[Any] | Reals,
    max_length: int,
    *,
    mode: Literal["analytic", "standard"] = "analytic",
    tolerance: int | float = 1e-3,
    causal: Literal["no", "strict", "dialect"] = "no",
    attention: Literal["hard", "softmax"] = "hard",
    dtype: Literal["float64", "float32"] = "float64",
    check: bool = True,
) -> CompiledProgram:
    """The network that computes ``program`` on up to ``max_length`` tokens, each one of ``vocab`` or a number in ``Reals(low, high)``.

    ``mode``: in "analytic" exp, 1/x, .. are units with that function (exact to rounding); in "standard" they are tables of ReLU units
    whose interpolation error is at most ``tolerance`` each, and :attr:`CompiledProgram.error` bounds what becomes of it in the output.
    ``causal``: "strict" gives a causal network and refuses programs whose selectors look ahead; "dialect" restricts every selector to keys
    at or before the query (which may change what the program means). ``attention``: average-hard heads, or softmax heads with their scores
    times a number that leaves at most 1e-12 of the weight to other keys. Raises :class:`OutsideClass` with every reason why it cannot.
    """
    began = time.perf_counter()
    if not isinstance(program, Sequence):
        raise AnyformerError(f"compile needs a sequence, got a {type(program).__name__}; aggregate a selector first")
    require_size("compile", "max_length", max_length)
    require_memory(64 * max_length, f"the positions of {max_length:,} tokens")
    require_choice("compile", "mode", mode, ("analytic", "standard"))
    require_choice("compile", "causal", causal, CAUSAL)
    require_choice("compile", "attention", attention, ("hard", "softmax"))
    require_choice("compile", "dtype", dtype, tuple(DTYPES))
    require_number("compile", "tolerance", tolerance)
    if tolerance <= 0:
        raise AnyformerError(f"compile: tolerance must be positive, got {tolerance!r}")
    words = vocab if isinstance(vocab, Reals) else _words(vocab)
    wanted = restricted(program) if causal == "dialect" else program
    numbers, kind = DTYPES[dtype]
    scale = 2 * (float(np.log(max_length + 1)) + 28.0) if attention == "softmax" else None
    realisation, output = _first_way(wanted, program, words, max_length, mode, numbers, tolerance, scale)
    plan, graph, inference = realisation.plan, realisation.graph, realisation.inference
    root = graph.roots[0]
    forms = [output] if realisation.fault == number(0.0) else [output, realisation.fault]
    prune(plan, forms)
    forms = merge(plan, forms)
    if causal == "strict":
        _require_causal(plan, program)
    network, stream = assemble(
        plan,
        forms,
        vocab=1 if isinstance(words, Reals) else len(words),
        max_length=max_length,
        dtype=kind,
        causal=causal != "no",
        softmax=scale,
    )
    found = inference.of(root)
    outputs = Outputs(found.values, tuple(found.codes().tolist())) if isinstance(found, Finite) else Outputs()
    place = None if plan.token_input is None else stream.place.get(plan.token_input)
    compiled = CompiledProgram(
        network=network,
        vocab=words,
        max_length=max_length,
        outputs=outputs,
        text=printed(program),
        token_place=place,
        names=stream.names,
        written=stream.written,
        mode=mode,
        error=realisation.error(root),
        causal=causal != "no",
        notes=tuple(dict.fromkeys(realisation.notes)),
        seconds=time.perf_counter() - began,
    )
    if check:
        check_against_interpreter(compiled, wanted)
    return compiled


def _words(vocab: Iterable[Any]) -> tuple[Any, ...]:
    words = tuple(vocab)
    if not words:
        raise AnyformerError("compile: the vocabulary is empty; give the tokens, or Reals(low, high)")
    for word in words:
        if not isinstance(word, LIFTED) or (isinstance(word, float) and word - word != 0):
            raise AnyformerError(f"compile: a token must be a finite number, a Boolean or a string, got {word!r}")
    if len(set(words)) < len(words):
        raise AnyformerError(f"compile: the vocabulary holds a token twice: {sorted(map(repr, words))}")
    return finite(words).values


def _first_way(
    wanted: Sequence,
    program: Sequence,
    vocab: Any,
    max_length: int,
    mode: Any,
    numbers: Any,
    tolerance: float,
    softmax: float | None,
) -> tuple[Realisation, Form]:
    """Where a table explodes or float cannot tell its combinations apart: another way to count, then smaller tables one after the other."""
    reasons: list[OutsideClass] = []
    graphs = [Graph.of(wanted)]
    graphs += [split for split in [Graph.of(wanted, split_widths=True)] if split.nodes != graphs[0].nodes]
    for joint in (JOINT, SMALLER):
        for graph in graphs:
            try:
                return _realised(graph, program, vocab, max_length, mode, numbers, tolerance, softmax, joint)
            except OutsideClass as reason:
                reasons.append(reason)
                if "explodes" not in str(reason) and "to tell apart" not in str(reason):
                    raise reasons[0] from None
    raise reasons[0]


def _realised(
    graph: Graph,
    program: Sequence,
    vocab: Any,
    max_length: int,
    mode: Any,
    numbers: Any,
    tolerance: int | float,
    softmax: float | None,
    joint: int,
) -> tuple[Realisation, Form]:
    """The plan and the form of the output; every part that cannot be built is asked for, so that all reasons are known at once."""
    inference = Inference(graph, vocab, max_length, joint)
    if inference.problems:
        raise OutsideClass(f"{printed(program)} cannot be compiled", inference.problems)
    realisation = Realisation(graph, inference, mode=mode, dtype=numbers, tolerance=tolerance, softmax=softmax)
    try:
        with _deep(len(graph.nodes)):
            output = realisation.form(graph.roots[0])
            realisation.watch(graph.roots[0])
            for k in range(len(graph.nodes)):  # a part that may fail fails the run, whether or not its value is used
                realisation.watch_aggregate(k)
        return realisation, output
    except CannotCompile as first:
        reasons = {str(first)}
    for r in range(len(graph.relations)):
        try:
            realisation.selectors.score(r)
        except CannotCompile as reason:
            reasons.add(str(reason))
    for k in range(len(graph.nodes)):
        try:
            realisation.form(k)
        except CannotCompile as reason:
            reasons.add(str(reason))
    inner = {reason for reason in reasons if any(reason != other and other in reason for other in reasons)}
    raise OutsideClass(f"{printed(program)} cannot be compiled", sorted(reasons - inner))


@contextmanager
def _deep(nodes: int) -> Iterator[None]:
    """Room for forms that ask for forms, a few calls for every node on the longest path."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, min(before + 40 * nodes, DEEPEST)))
    try:
        yield
    except RecursionError:
        raise AnyformerError(
            f"compile: the program of {nodes:,} parts has too many dependent steps; compile it in pieces"
        ) from None
    finally:
        sys.setrecursionlimit(before)


def _require_causal(plan: Plan, program: Sequence) -> None:
    ahead = sorted(
        {h.name for h in plan.heads if h.score.offsets is None or any(high is None or high > 0 for _, high in h.score.offsets)}
    )
    if ahead:
        raise OutsideClass(
            f"{printed(program)} is not causal (causal='dialect' restricts its selectors, which may change its meaning)",
            [f"{name} may select later keys" for name in ahead],
        )
