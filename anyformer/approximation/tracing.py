"""The traced graph of a module: what is computed, which parts are not analytic, and what depends on what, whatever the parameters are.

A module ``g: (1, n, d) -> (1, n, d)`` is traced to ATen operations without running data through it (fake tensors: control flow that
depends on data cannot be traced). Every number of the graph is then *fixed* or *varying* (it depends on tokens or on free parameters):
constants are propagated element by element, and zero times anything is zero. So parameters put to 0 (W_Q = 0) make whatever they feed
fixed, kinks included; and an output that stays untouched when a token varies does not depend on it, for all parameters: a structural fact.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from anyformer.approximation.aten import (
    ALWAYS_ANALYTIC,
    CONDITIONAL,
    CONSTANTS,
    DEPENDS,
    HARD,
    KINKS,
    RANDOM,
    SELECTIONS,
    VARIES,
    name_of,
    places_vary,
    taint,
)
from anyformer.errors import AnyformerError

Call = Callable[[nn.Module, Tensor], Any]
"""How a module is applied to tokens (batch, n, d)."""

MASKED = 1e4
"""Scores at or below minus this are read as forbidden, as the masks of real models mean them."""


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
    def unknown(self) -> list[str]:
        """Operations that nothing is known about."""
        known = ALWAYS_ANALYTIC | CONDITIONAL | KINKS | HARD | RANDOM | CONSTANTS | SELECTIONS
        names = (name_of(node) for node in self.graph.graph.nodes if node.op == "call_function")
        return sorted({name for name in names if name not in known})

    @property
    def random(self) -> list[str]:
        """Operations that draw random numbers."""
        return sorted({name for node in self.graph.graph.nodes if (name := name_of(node)) in RANDOM})

    def vary(self, values: dict[str, Tensor], fixed: dict[str, Tensor], asked: Tensor | None = None) -> "Varying":
        """Propagate constants. ``values`` are numbers for all parameters, ``fixed`` masks (True: fixed at that value) for some of them;
        ``asked`` (n,) are the tokens that are asked about (all, where it is None)."""
        asked = torch.ones(self.tokens, dtype=torch.bool) if asked is None else asked
        x = torch.randn(1, self.tokens, self.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        known: dict[Any, Any] = {}
        given = [(values[k], (~fixed[k]).double() if k in fixed else torch.ones(s).double()) for k, s in self.shapes.items()]
        placeholders = iter([*given, (x, torch.where(asked, DEPENDS, VARIES)[None, :, None].expand(1, -1, self.dim).double())])
        doubts: dict[str, list[str]] = {"kinks": [], "hard": [], "conditions": []}
        output: Any = None
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(placeholders)
            elif node.op == "get_attr":
                value = getattr(self.graph, node.target)
                known[node] = (value, torch.zeros(value.shape, dtype=torch.float64))
            elif node.op == "output":
                output = known[_first(node.args[0])]
            else:
                known[node] = taint(node, known, MASKED)
                _note(node, known, doubts)
        return Varying(output[0], output[1], *(tuple(dict.fromkeys(doubts[k])) for k in doubts))


def _note(node: torch.fx.Node, known: dict[Any, Any], doubts: dict[str, list[str]]) -> None:
    """Write down an operation that is not analytic, or only where an argument does not vanish, and acts on numbers that vary."""
    name = name_of(node)
    said = name.removeprefix("aten.").split(".")[0]
    if any(isinstance(known[a][1], Tensor) and bool(known[a][1].any()) for a in node.all_input_nodes):
        for group, kind in ((KINKS, "kinks"), (HARD, "hard")):
            if name in group:
                doubts[kind].append(said)
        if name in SELECTIONS and places_vary(node, known):
            doubts["hard"].append(said)
    if name in CONDITIONAL and bool(_condition_levels(node, known).any()):
        doubts["conditions"].append(said)


@dataclass(frozen=True, eq=False)
class Varying:
    """What a propagation showed: the output's numbers and their levels; operations of each doubtful kind that act on varying numbers."""

    value: Tensor
    levels: Tensor
    kinks: tuple[str, ...]
    hard: tuple[str, ...]
    conditions: tuple[str, ...]

    @property
    def zero(self) -> bool:
        """Whether the output is exactly 0, whatever the free parameters and tokens."""
        return not bool(self.levels.any()) and not bool(self.value.ne(0).any())

    @property
    def depends(self) -> Tensor:
        """(n,): which output tokens may depend on the tokens that were asked about."""
        return (self.levels[0] >= DEPENDS).any(-1)


def _condition_levels(node: torch.fx.Node, known: dict[Any, Any]) -> Tensor:
    """Levels of the argument that must not vanish: a divisor, or the argument of a root, a logarithm, or a power that is no natural number."""
    name = name_of(node)
    nothing = torch.zeros(1)
    if (name.startswith("aten.pow") and isinstance(node.args[1], int) and node.args[1] >= 0) or name.startswith("aten.square"):
        return nothing
    argument = node.args[1] if name.startswith("aten.div") else node.args[0]
    return known[argument][1] if isinstance(argument, torch.fx.Node) else nothing


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

    class Applied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Any:
            return call(self.inner, x)

    applied = Applied()
    names = [k for k, p in module.named_parameters() if p.requires_grad]
    trained = dict(module.named_parameters())

    def run(parameters: list[Tensor], x: Tensor) -> Any:
        given = {f"inner.{k}": v for k, v in zip(names, parameters, strict=True)}
        return functional_call(applied, given, (x,), tie_weights=True)

    x = torch.zeros(1, n, d, dtype=torch.float64)
    try:
        with plain_attention(), torch.no_grad():
            traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)([trained[k].detach() for k in names], x)
    except AnyformerError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"it cannot be traced: {type(error).__name__}: {first[:160]}"
    return Traced(traced, {k: tuple(trained[k].shape) for k in names}, n, d)
