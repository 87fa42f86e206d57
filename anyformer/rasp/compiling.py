"""RASP to weights: ``compile(program, vocab, max_length)``.

    graph        equal parts are one node                                   :mod:`anyformer.rasp.graph`
    values       which values every node can have                           :mod:`anyformer.rasp.inference`
    plan         nodes become linear forms, selectors scores                :mod:`anyformer.rasp.realising`
    merged       coordinates that are only read together are one            :mod:`anyformer.rasp.merging`
    network      coordinates get places, heads and units their layers       :mod:`anyformer.rasp.assembling`
    check        the network against the interpreter, on inputs at the edges and at random

What cannot be built is refused with all reasons at once, each naming its expression; what is built is checked.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from anyformer.errors import AnyformerError
from anyformer.rasp.assembling import assemble, prune
from anyformer.rasp.compiled import CompiledProgram, Outputs, check_against_interpreter
from anyformer.rasp.graph import Graph
from anyformer.rasp.inference import JOINT, infer
from anyformer.rasp.merging import merge
from anyformer.rasp.options import Options
from anyformer.rasp.plan import Form, Plan, number
from anyformer.rasp.realising import Realisation
from anyformer.rasp.refusals import CannotCompile, NotCompiled, Refusal
from anyformer.rasp.sequences import Sequence, printed, restricted
from anyformer.rasp.sets import Finite, Reals

SMALLER = 2**8
"""The number of combinations of sources in one table, where :data:`~anyformer.rasp.inference.JOINT` cannot be."""

TOO_MANY = {Refusal.EXPLODES, Refusal.COMBINATIONS}
"""Reasons that another way to count, or smaller tables, may do away with."""

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
    options = Options.of(vocab, max_length, mode=mode, tolerance=tolerance, causal=causal, attention=attention, dtype=dtype)
    meant = restricted(program) if options.causal == "dialect" else program
    text = printed(program)
    realisation = _planned(meant, text, options)
    plan, outputs = realisation.plan, [realisation.form(realisation.graph.roots[0])]
    if realisation.fault != number(0.0):
        outputs.append(realisation.fault)
    prune(plan, outputs)
    outputs = merge(plan, outputs)
    if options.causal == "strict":
        _require_causal(plan, text)
    compiled = replace(_network(realisation, outputs, text, options), seconds=time.perf_counter() - began)
    if check:
        check_against_interpreter(compiled, meant)
    return compiled


def _planned(program: Sequence, text: str, options: Options) -> Realisation:
    """The plan. Where a table explodes or float cannot tell its combinations apart: another way to count, then smaller tables."""
    first: NotCompiled | None = None
    graphs = [Graph.of(program)]
    graphs += [split for split in [Graph.of(program, split_widths=True)] if split.nodes != graphs[0].nodes]
    for joint in (JOINT, SMALLER):
        for graph in graphs:
            try:
                return _realised(graph, text, options, joint)
            except NotCompiled as refused:
                first = first or refused
                if TOO_MANY.isdisjoint(refused.kinds):
                    raise first from None
    assert first is not None
    raise first


def _realised(graph: Graph, text: str, options: Options, joint: int) -> Realisation:
    """The plan of a graph; every part that cannot be built is asked for, so that all reasons are known at once."""
    known = infer(graph, options.vocab, options.max_length, joint)
    if known.problems:
        raise NotCompiled(f"{text} cannot be compiled", known.problems)
    realisation = Realisation(known, options)
    parts, root = range(len(graph.nodes)), graph.roots[0]
    try:
        with _deep(len(graph.nodes)):
            realisation.form(root)
            realisation.watch(root)
            realisation.output_error(root)
            for k in parts:  # a part that may fail fails the run, whether or not its value is used
                realisation.watch_aggregate(k)
        return realisation
    except CannotCompile as first:
        refusals = {first.text: first}
    wanted = [(realisation.selectors.score, r) for r in range(len(graph.relations))] + [(realisation.form, k) for k in parts]
    for ask, part in wanted:
        refusals |= _refused(ask, part)
    outer = [reason for reason in sorted(refusals) if not any(reason != other and reason in other for other in refusals)]
    raise NotCompiled(f"{text} cannot be compiled", [refusals[reason] for reason in outer])


def _refused(ask: Callable[[int], object], part: int) -> dict[str, CannotCompile]:
    try:
        ask(part)
    except CannotCompile as reason:
        return {reason.text: reason}
    return {}


def _network(realisation: Realisation, outputs: list[Form], text: str, options: Options) -> CompiledProgram:
    """The plan as a network, and what its outputs mean."""
    plan, root = realisation.plan, realisation.graph.roots[0]
    causal = options.causal != "no"
    network, stream = assemble(
        plan,
        outputs,
        vocab=options.tokens,
        max_length=options.max_length,
        dtype=options.dtype,
        causal=causal,
        softmax=options.softmax,
    )
    found = realisation.known.of(root)
    return CompiledProgram(
        network=network,
        vocab=options.vocab,
        max_length=options.max_length,
        outputs=Outputs(found.values, tuple(found.codes().tolist())) if isinstance(found, Finite) else Outputs(),
        text=text,
        token_place=None if plan.token_input is None else stream.place.get(plan.token_input),
        names=stream.names,
        written=stream.written,
        mode=options.mode,
        error=realisation.output_error(root),
        causal=causal,
        notes=tuple(dict.fromkeys(realisation.notes)),
    )


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


def _require_causal(plan: Plan, text: str) -> None:
    ahead = sorted(
        {h.name for h in plan.heads if h.score.offsets is None or any(high is None or high > 0 for _, high in h.score.offsets)}
    )
    if ahead:
        raise NotCompiled(
            f"{text} is not causal (causal='dialect' restricts its selectors, which may change its meaning)",
            [CannotCompile(Refusal.LOOKS_AHEAD, f"{name} may select later keys") for name in ahead],
        )
