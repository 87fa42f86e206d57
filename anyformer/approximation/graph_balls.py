"""The same traced graph in ball arithmetic: every operation of a module on exact balls instead of floats.

The proof is then about the operations that the module's own code was traced to, in exact real arithmetic; float32 islands are read as
exact, and scores that constant propagation found forbidden (:mod:`anyformer.approximation.levels`) have weight 0: those and no others.
Integers and Booleans stay tensors until a ball meets them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.node import map_arg

from anyformer.approximation.aten import CHOICES, COPIES, CREATED, MOVES, PAD, PLACES, SOFTMAX, is_whole, name_of
from anyformer.approximation.balls import Balls, Undecided, balls
from anyformer.approximation.tracing import Traced
from anyformer.errors import AnyformerError
from anyformer.operators import primitives as P

Rule = Callable[..., Any]
Forbidden = dict[Any, Tensor]
"""A softmax of the graph -> the scores (True) that have weight 0."""


class NoBallForm(AnyformerError):
    """An operation, or a use of one, that is not written in ball arithmetic."""


def evaluate(traced: Traced, parameters: dict[str, Tensor], x: Balls, forbidden: Forbidden) -> Balls:
    """``g(x)`` (batch, n, d) at these parameters: one row of the batch after the other."""
    given = [balls(parameters[k]) for k in traced.shapes]
    return np.concatenate([_run(traced, [*given, x[i : i + 1]], forbidden) for i in range(len(x))]).view(Balls)


def supported(traced: Traced) -> list[str]:
    """Operations of the graph that have no ball form here, on balls."""
    known = RULES.keys() | MOVES | PLACES.keys() | COPIES | CREATED | SOFTMAX
    varying = {node for node in traced.graph.graph.nodes if node.op == "placeholder"}
    missing = set()
    for node in traced.calls:
        if varying.isdisjoint(node.all_input_nodes):
            continue  # masks and positions stay tensors
        varying.add(node)
        if name_of(node) not in known:
            missing.add(name_of(node))
    return sorted(missing)


def _run(traced: Traced, inputs: list[Any], forbidden: Forbidden) -> Any:
    graph, known = traced.graph, {}
    given = iter(inputs)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(given)
        elif node.op == "get_attr":
            value = getattr(graph, node.target)
            known[node] = balls(value) if value.is_floating_point() else value
        elif node.op == "output":
            out = known[node.args[0][0] if isinstance(node.args[0], (tuple, list)) else node.args[0]]
            return balls(out) if isinstance(out, Tensor) else out
        else:
            args = map_arg(node.args, lambda a: known[a])
            kwargs = map_arg(node.kwargs, lambda a: known[a])
            try:
                known[node] = _apply(node, args, kwargs, traced.places, forbidden.get(node))
            except (Undecided, NoBallForm):
                raise
            except Exception as error:
                raise NoBallForm(f"no ball form of {name_of(node)} with these arguments: {type(error).__name__}") from error
    raise NoBallForm("a traced graph without an output")


def _apply(node: Any, args: Any, kwargs: Any, places: dict[Any, Any], forbidden: Tensor | None) -> Any:
    name = name_of(node)
    if not any(isinstance(a, Balls) for a in [*_flat(args), *_flat(list(kwargs.values()))]):  # shapes, masks, positions
        return _balls_of_floats(node.target(*args, **kwargs))
    if name in CREATED:  # from the shape of its argument alone
        return _balls_of_floats(node.target(*[_blank(a) for a in args], **kwargs))
    if name in MOVES or name in PLACES:
        return _move(node, args, kwargs, places)
    if name in COPIES:
        return _copy(*args, **kwargs) if name == "aten.copy.default" else _cast(args[0], **kwargs)
    if name in SOFTMAX:
        return _softmax(args[0], args[1], forbidden)
    if name not in RULES:
        raise NoBallForm(f"no ball form of {name}")
    if name in CHOICES:
        return RULES[name](*args, **kwargs)
    return RULES[name](*[balls(a) if isinstance(a, Tensor) else a for a in args], **kwargs)


def _flat(x: Any) -> list[Any]:
    return [z for y in x for z in _flat(y)] if isinstance(x, (tuple, list)) else [x]


def _balls_of_floats(x: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return type(x)(_balls_of_floats(y) for y in x)
    return balls(x) if isinstance(x, Tensor) and x.is_floating_point() else x


def _blank(x: Any) -> Any:
    return torch.zeros(x.shape, dtype=torch.float64) if isinstance(x, Balls) else x


def _cast(x: Balls, dtype: torch.dtype | None = None, **_: Any) -> Balls:
    if dtype is not None and not dtype.is_floating_point:
        raise NoBallForm(f"no ball form of a cast to {dtype}")
    return x


def _copy(target: Any, source: Any, *_: Any) -> Balls:
    """What stands in ``target`` is overwritten."""
    if is_whole(target):
        raise NoBallForm(f"no ball form of a cast to {target.dtype}")
    return np.broadcast_to(balls(source), tuple(target.shape)).view(Balls)


def _move(node: Any, args: Any, kwargs: Any, places: dict[Any, Any]) -> Any:
    """Move places instead of balls: the operation acts on the numbers 1, 2, .. of all entries, once for each shape. Entry 0 is what fills the
    rest: 0, or the number that a padding brings."""
    name, at, filling = name_of(node), PLACES.get(name_of(node)), 0.0
    args = list(args)
    if name == PAD and len(args) > 2:
        filling, args[2] = args[2], 0
    entries: list[Any] = []
    numbers = [a if i == at else _numbered(a, entries) for i, a in enumerate(args)]
    key = (node, tuple(e.shape for e in entries))
    if key not in places:
        places[key] = node.target(*numbers, **{k: v for k, v in kwargs.items() if k not in ("memory_format", "dtype")})
    whole = np.concatenate([np.array([balls(filling).item()], dtype=object), *(np.asarray(e).ravel() for e in entries)])
    return _taken(places[key], whole)


def _numbered(a: Any, entries: list[Any]) -> Any:
    """The numbers of an argument's entries in its place; the entries are appended to those before."""
    if isinstance(a, (tuple, list)):
        return type(a)(_numbered(b, entries) for b in a)
    if not isinstance(a, (Balls, Tensor)):
        return a
    start = 1 + sum(e.size for e in entries)
    entries.append(balls(a))
    return torch.arange(start, start + entries[-1].size).reshape(tuple(a.shape))


def _taken(m: Any, whole: np.ndarray) -> Any:
    """The entries with these numbers."""
    if m is None:
        return None
    return type(m)(_taken(p, whole) for p in m) if isinstance(m, (tuple, list)) else whole[m.numpy()].view(Balls)


def _softmax(x: Balls, dim: int, forbidden: Tensor | None) -> Balls:
    allowed = np.ones(x.shape, dtype=bool) if forbidden is None else ~forbidden.numpy()
    if any(not z.is_finite() for z in np.asarray(x)[np.broadcast_to(allowed, x.shape)]):
        raise Undecided("a score is not finite, and not known to be forbidden")
    moved, allowed = np.moveaxis(x, dim, -1), np.moveaxis(np.broadcast_to(allowed, x.shape), dim, -1)
    return np.moveaxis(P.normalised_exp(moved.view(Balls), allowed, False), -1, dim).view(Balls)


def _axes(x: Any, dims: Any) -> tuple[int, ...]:
    """All where none are named, as torch has it."""
    listed = [dims] if isinstance(dims, int) else dims
    return tuple(d % x.ndim for d in listed) if listed else tuple(range(x.ndim))


def _sum(x: Any, dims: Any = None, keepdim: bool = False, **_: Any) -> Balls:
    return np.asarray(x.sum(_axes(x, dims), keepdims=keepdim), dtype=object).view(Balls)


def _mean(x: Any, dims: Any = None, keepdim: bool = False, **_: Any) -> Balls:
    total = _sum(x, dims, keepdim)
    return (total / (x.size // max(total.size, 1))).view(Balls)


def _largest(x: Balls, dims: Any = None, keepdim: bool = False, **_: Any) -> Balls:
    out: Any = np.asarray(x)
    for axis in sorted(_axes(x, dims), reverse=True):
        out = np.frompyfunc(lambda a, b: a.max(b), 2, 1).reduce(out, axis=axis, keepdims=keepdim)
    return np.asarray(out, dtype=object).view(Balls)


def _power(x: Balls, exponent: Any) -> Balls:
    if exponent == 0:
        return balls(np.ones(x.shape))
    if exponent == 0.5:
        return P.sqrt(x)
    if exponent != int(exponent):
        raise NoBallForm(f"no ball form of the power {exponent}")
    out: Any = x
    for _ in range(abs(int(exponent)) - 1):
        out = out * x
    return (out if exponent > 0 else 1 / out).view(Balls)


def _each(name: str) -> Rule:
    return lambda x, *_, **__: np.frompyfunc(lambda z: getattr(z, name)(), 1, 1)(x).view(Balls)


def _addmm(bias: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1) -> Balls:
    return (beta * bias + alpha * (a @ b)).view(Balls)


def _gelu(x: Balls, approximate: str = "none") -> Balls:
    from anyformer.operators import FUNCTIONS

    return FUNCTIONS["gelu" if approximate == "none" else "gelu_tanh"](x)


def _norm(x: Balls, order: float = 2, dims: Any = None, keepdim: bool = False, **_: Any) -> Balls:
    if order != 2:
        raise NoBallForm(f"no ball form of a vector norm of order {order}")
    return P.sqrt(_sum(x * x, dims, keepdim))


def _chosen(condition: Any, a: Any, b: Any) -> Balls:
    return np.where(condition.numpy(), balls(a), balls(b)).view(Balls)


def _layer_norm(x: Balls, shape: list[int], weight: Any, bias: Any, eps: float) -> tuple[Balls, None, None]:
    axes = list(range(x.ndim - len(shape), x.ndim))
    centred = x - _mean(x, axes, True)
    out = centred / P.sqrt((_mean(centred * centred, axes, True) + eps).view(Balls))
    return (out * (1 if weight is None else weight) + (0 if bias is None else bias)).view(Balls), None, None


RULES: dict[str, Rule] = {
    f"aten.{name}": rule
    for names, rule in {
        ("mm.default", "bmm.default", "matmul.default"): lambda a, b: a @ b,
        ("addmm.default", "baddbmm.default"): _addmm,
        ("add.Tensor", "add.Scalar"): lambda a, b, alpha=1: a + alpha * b,
        ("sub.Tensor", "sub.Scalar"): lambda a, b, alpha=1: a - alpha * b,
        ("rsub.Scalar", "rsub.Tensor"): lambda a, b, alpha=1: b - alpha * a,
        ("mul.Tensor", "mul.Scalar"): lambda a, b: a * b,
        ("div.Tensor", "div.Scalar"): lambda a, b: a / b,
        ("neg.default",): lambda a: 0 - a,
        ("reciprocal.default",): lambda a: (1 / a).view(Balls),
        ("exp.default",): P.exp,
        ("tanh.default",): P.tanh,
        ("erf.default",): P.erf,
        ("sigmoid.default",): P.sigmoid,
        ("sqrt.default",): P.sqrt,
        ("rsqrt.default",): lambda a: (1 / P.sqrt(a)).view(Balls),
        ("log.default",): P.log,
        ("silu.default",): lambda a: a * P.sigmoid(a),
        ("gelu.default",): _gelu,
        ("cos.default",): _each("cos"),
        ("sin.default",): _each("sin"),
        ("acos.default",): _each("acos"),
        ("abs.default",): _each("__abs__"),
        ("relu.default",): lambda a: P.select(a, a > 0, 0.0),
        ("clamp_min.default",): lambda a, low: np.frompyfunc(lambda z: z.max(balls(low).item()), 1, 1)(a).view(Balls),
        ("pow.Tensor_Scalar",): _power,
        ("square.default",): lambda a: a * a,
        ("sum.dim_IntList", "sum.default"): _sum,
        ("mean.dim", "mean.default"): _mean,
        ("amax.default", "max.default"): _largest,
        ("linalg_vector_norm.default",): _norm,
        ("where.self",): _chosen,
        ("masked_fill.Scalar", "masked_fill.Tensor"): lambda a, m, v: _chosen(m, v, a),
        ("native_layer_norm.default",): _layer_norm,
    }.items()
    for name in names
}
