"""The traced graph of a module: what is computed, which parts are not analytic, and what depends on what, whatever the parameters are.

A module ``g: (1, n, d) -> (1, n, d)`` is traced to ATen operations without running data through it (fake tensors: control flow that
depends on data cannot be traced), with writes in place, also those through views, turned into values (functionalisation). Every number of
the graph is then *fixed* or *varying* (it depends on tokens or on free parameters): constants are propagated element by element
(:mod:`anyformer.approximation.levels`), and zero times anything is zero. So parameters put to 0 (W_Q = 0) make whatever they feed
fixed, kinks included; and an output that stays untouched when a token varies does not depend on it, for all parameters: a structural fact.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, functionalize

from anyformer.approximation.aten import (
    CONDITIONAL,
    HARD,
    KINKS,
    KNOWN,
    MASKED,
    PLACES,
    RANDOM,
    SOFTMAX,
    is_whole,
    name_of,
    writes_in_place,
)
from anyformer.approximation.levels import DEPENDS, VARIES, Known, Seen, leaks, places_vary, propagate, unbounded
from anyformer.errors import AnyformerError

Call = Callable[[nn.Module, Tensor], Any]
"""How a module is applied to tokens (batch, n, d)."""

SATURATING = ("exp", "expm1", "sigmoid", "tanh", "softplus", "logsumexp")
"""What a finite mask may meet besides softmax; then it is neither read as forbidden nor as a number."""


class Applied(nn.Module):
    """A module with the way it is applied: what is traced, and what is run."""

    def __init__(self, module: nn.Module, call: Call):
        super().__init__()
        self.inner, self.call = module, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.inner, x)


@dataclass(frozen=True, eq=False)
class Traced:
    """A module's graph for n tokens of d features; ``shapes`` are those of the trained parameters."""

    graph: torch.fx.GraphModule
    shapes: dict[str, tuple[int, ...]]
    tokens: int
    dim: int
    places: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Where operations move entries, found once for each shape (:mod:`anyformer.approximation.graph_balls`)."""

    @property
    def calls(self) -> list[torch.fx.Node]:
        """The operations."""
        return [node for node in self.graph.graph.nodes if node.op == "call_function"]

    @property
    def unknown(self) -> list[str]:
        """Operations that nothing is known about."""
        return sorted({name_of(node) for node in self.calls if _unknown(node)})

    @property
    def rounded(self) -> bool:
        """Whether it holds tables of numbers that are not whole: rounded, maybe, and so not as symmetric as what they stand for."""
        held = (getattr(self.graph, node.target) for node in self.graph.graph.nodes if node.op == "get_attr")
        return any(t.numel() > 1 and t.is_floating_point() and bool((t != t.round()).any()) for t in held)

    @property
    def random(self) -> list[str]:
        """Operations that draw random numbers."""
        return sorted({name_of(node) for node in self.calls if _random(node)})

    @property
    def in_place(self) -> list[str]:
        """Operations that write into what was there before (the input, a buffer); writes into what the forward makes are none."""
        return sorted({name_of(node) for node in self.calls if writes_in_place(node)})

    def vary(self, values: dict[str, Tensor], fixed: dict[str, Tensor], asked: Tensor | None = None) -> "Varying":
        """Propagate constants. ``values`` are numbers for all parameters, ``fixed`` masks (True: fixed at that value) for some of them;
        ``asked`` (n,) are the tokens that are asked about (all, where it is None)."""
        asked = torch.ones(self.tokens, dtype=torch.bool) if asked is None else asked
        x = torch.randn(1, self.tokens, self.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        known: Known = {}
        given = [(values[k], (~fixed[k]).double() if k in fixed else torch.ones(s).double()) for k, s in self.shapes.items()]
        placeholders = iter([*given, (x, torch.where(asked, DEPENDS, VARIES)[None, :, None].expand(1, -1, self.dim).double())])
        doubts: dict[str, list[str]] = {"kinks": [], "hard": [], "conditions": [], "unknown": [], "masks": []}
        output: Any = None
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                known[node] = Seen.of(*next(placeholders), exact=False)
            elif node.op == "get_attr":
                value = getattr(self.graph, node.target)
                known[node] = Seen.of(value, torch.zeros(value.shape, dtype=torch.float64), exact=True)
            elif node.op == "output":
                output = known[_first(node.args[0])]
            else:
                known[node] = propagate(node, known)
                _note(node, known, doubts)
        forbidden = {node: seen.forbidden for node, seen in known.items() if seen.forbidden is not None}
        said = {kind: tuple(dict.fromkeys(found)) for kind, found in doubts.items()}
        finite = bool(torch.isfinite(output.value).all())
        return Varying(output.levels, output.nonzero, forbidden=forbidden, finite=finite, **said)


def _unknown(node: torch.fx.Node) -> bool:
    name = name_of(node)
    accumulates = name == "aten.index_put.default" and len(node.args) > 3 and bool(node.args[3])
    return name not in KNOWN or accumulates


def _random(node: torch.fx.Node) -> bool:
    seeded = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    return seeded or name_of(node) in RANDOM


def _note(node: torch.fx.Node, known: Known, doubts: dict[str, list[str]]) -> None:
    """Write down an operation that is not analytic, or only where an argument does not vanish, and acts on numbers that vary."""
    name = name_of(node)
    said = name.removeprefix("aten.").split(".")[0]
    inputs = [known[a] for a in node.all_input_nodes]
    if any(isinstance(s.levels, Tensor) and bool(s.levels.any()) for s in inputs):
        for found, kind in ((name in KINKS, "kinks"), (name in HARD, "hard"), (_unknown(node), "unknown")):
            if found:
                doubts[kind].append(said)
        if name in PLACES and places_vary(node, known):
            doubts["hard"].append(said)
        if said in SATURATING and any(bool(((s.offset <= -MASKED) & (s.levels > 0)).any()) for s in inputs):
            doubts["masks"].append(said)
        if name in SOFTMAX and leaks(node, known):
            doubts["masks"].append(f"{said}, which lets something of it pass")
        if unbounded(node, known):
            doubts["hard"].append(f"{said} by infinity")
    out = known[node]
    made_whole = is_whole(out.value) and not any(is_whole(s.value) and bool(s.levels.any()) for s in inputs)
    if made_whole and bool(out.levels.any()):  # a cast, a comparison, an index: not continuous
        doubts["hard"].append(f"{name_of(node.args[0])[5:].split('.')[0]} indices" if name == "getitem" else said)  # type: ignore[arg-type]
    if name in CONDITIONAL and bool(_condition_levels(node, known).any()):
        doubts["conditions"].append(said)


@dataclass(frozen=True, eq=False)
class Varying:
    """What a propagation showed: levels of the output's numbers and which are not surely 0; operations of each doubtful kind that act on
    varying numbers; the scores that are read as forbidden, for each softmax."""

    levels: Tensor
    nonzero: Tensor
    kinks: tuple[str, ...]
    hard: tuple[str, ...]
    conditions: tuple[str, ...]
    unknown: tuple[str, ...]
    masks: tuple[str, ...]
    forbidden: dict[Any, Tensor]
    finite: bool

    @property
    def zero(self) -> bool:
        """Whether the output is exactly 0, whatever the free parameters and tokens."""
        return self.finite and not bool(self.nonzero.any())

    @property
    def depends(self) -> Tensor:
        """(n,): which output tokens may depend on the tokens that were asked about."""
        return (self.levels[0] >= DEPENDS).any(-1)


def _condition_levels(node: torch.fx.Node, known: Known) -> Tensor:
    """Levels of the argument that must not vanish: a divisor, or the argument of a root, a logarithm, or a power that is no natural number."""
    name = name_of(node)
    nothing = torch.zeros(1)
    if (name.startswith("aten.pow") and isinstance(node.args[1], int) and node.args[1] >= 0) or name.startswith("aten.square"):
        return nothing
    argument = node.args[1] if name.startswith("aten.div") else node.args[0]
    return known[argument].levels if isinstance(argument, torch.fx.Node) else nothing


def _first(x: Any) -> Any:
    return x[0] if isinstance(x, (tuple, list)) else x


@contextmanager
def plain_attention() -> Iterator[None]:
    """Without fused kernels and native fast paths: the operations themselves."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def trace(module: nn.Module, call: Call, n: int, d: int) -> Traced | str:
    """The graph of ``call(module, x)``; a sentence where it cannot be traced."""
    from torch.fx.experimental.proxy_tensor import make_fx

    applied = Applied(module, call)
    names = [k for k, p in module.named_parameters() if p.requires_grad]
    trained = dict(module.named_parameters())

    def run(parameters: list[Tensor], x: Tensor) -> Any:
        given = {f"inner.{k}": v for k, v in zip(names, parameters, strict=True)}
        return functional_call(applied, given, (x,), tie_weights=True)

    given = [trained[k].detach() for k in names], torch.zeros(1, n, d, dtype=torch.float64)
    problems = []
    for form in (functionalize(run, remove="mutations"), run):  # some autograd functions go through the second alone
        try:
            with plain_attention(), torch.no_grad():
                traced = make_fx(form, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
            held = (getattr(traced, node.target) for node in traced.graph.nodes if node.op == "get_attr")
            if any(isinstance(t, Tensor) and t.requires_grad for t in held):
                return "its forward reads trained parameters that are not the module's own (a closure?): they cannot be varied"
            return Traced(traced, {k: tuple(trained[k].shape) for k in names}, n, d)
        except AnyformerError:
            raise
        except (Exception, SystemExit) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            problems.append(f"it cannot be traced: {type(error).__name__}: {first[:160]}")
    return problems[0]
