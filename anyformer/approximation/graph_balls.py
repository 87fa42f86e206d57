"""The same traced graph in ball arithmetic: every operation of a module on exact balls instead of floats.

The proof is then about the operations that the module's own code was traced to, in exact real arithmetic; float32 islands are read as
exact, fixed scores at or below -1e4 as forbidden. Integers and Booleans stay tensors.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.node import map_arg

from anyformer.approximation.aten import CONSTANTS, COPIES, MOVES, SELECTIONS, name_of
from anyformer.approximation.balls import Balls, balls
from anyformer.approximation.tracing import MASKED, Traced
from anyformer.errors import AnyformerError
from anyformer.operators import primitives as P

Rule = Callable[..., Any]


def evaluate(traced: Traced, parameters: dict[str, Tensor], x: Balls) -> Balls:
    """``g(x)`` (batch, n, d) at these parameters: one row of the batch after the other."""
    given = [balls(parameters[k]) for k in traced.shapes]
    return np.concatenate([_run(traced, [*given, x[i : i + 1]]) for i in range(len(x))]).view(Balls)


def supported(traced: Traced) -> list[str]:
    """Operations of the graph that have no ball form here."""
    known = set(RULES) | MOVES | SELECTIONS | COPIES | CONSTANTS
    names = (name_of(node) for node in traced.graph.graph.nodes if node.op == "call_function")
    return sorted({name for name in names if name not in known})


def _run(traced: Traced, inputs: list[Any]) -> Any:
    graph, known = traced.graph, {}
    given = iter(inputs)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(given)
        elif node.op == "get_attr":
            value = getattr(graph, node.target)
            known[node] = balls(value) if value.is_floating_point() else value
        elif node.op == "output":
            return known[node.args[0][0] if isinstance(node.args[0], (tuple, list)) else node.args[0]]
        else:
            args = map_arg(node.args, lambda a: known[a])
            kwargs = map_arg(node.kwargs, lambda a: known[a])
            known[node] = _apply(node, args, kwargs, traced.places)
    raise AnyformerError("a traced graph without an output")


def _apply(node: Any, args: Any, kwargs: Any, places: dict[Any, Any]) -> Any:
    name = name_of(node)
    arrays = [a for a in _flat(args) if isinstance(a, Balls)]
    if not arrays:  # shapes, masks, positions
        out = node.target(*args, **kwargs)
        return balls(out) if isinstance(out, Tensor) and out.is_floating_point() else out
    if name in CONSTANTS:
        raise AnyformerError(f"{name} has no ball form")
    if name in MOVES | SELECTIONS:
        return _move(node, args, kwargs, places)
    if name in COPIES:
        return args[0]
    if name not in RULES:
        raise AnyformerError(f"{name} has no ball form")
    return RULES[name](*[balls(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args], **kwargs)


def _flat(x: Any) -> list[Any]:
    return [z for y in x for z in _flat(y)] if isinstance(x, (tuple, list)) else [x]


def _move(node: Any, args: Any, kwargs: Any, places: dict[Any, Any]) -> Any:
    """Move places instead of balls: the operation acts on the numbers 0, 1, 2, .. of all entries, once for each shape."""
    arrays = [balls(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in _flat(args)]
    arrays = [a for a in arrays if isinstance(a, Balls)]
    key = (node, tuple(a.shape for a in arrays))
    if key not in places:
        count = 1

        def numbered(a: Any) -> Any:
            nonlocal count
            if isinstance(a, (tuple, list)):
                return type(a)(numbered(b) for b in a)
            if isinstance(a, Balls) or (isinstance(a, Tensor) and a.is_floating_point()):
                size = int(np.prod(a.shape))
                count += size
                return torch.arange(count - size, count).reshape(tuple(a.shape))
            return a

        places[key] = node.target(*numbered(args), **{k: v for k, v in kwargs.items() if k not in ("memory_format", "dtype")})
    whole = np.concatenate([np.array([balls(0.0).item()], dtype=object), *(np.asarray(a).ravel() for a in arrays)])

    def back(m: Any) -> Any:
        if m is None:
            return None
        return type(m)(back(p) for p in m) if isinstance(m, (tuple, list)) else whole[m.numpy()].view(Balls)

    return back(places[key])


def _softmax(x: Balls, dim: int, half: bool = False) -> Balls:
    moved = np.moveaxis(x, dim, -1)
    allowed = np.array([not bool(z <= -MASKED) for z in np.ravel(moved)]).reshape(moved.shape)
    return np.moveaxis(P.normalised_exp(moved.view(Balls), allowed, False), -1, dim).view(Balls)


def _sum(x: Any, dims: Any = None, keepdim: bool = False, **_: Any) -> Balls:
    axes = (
        tuple(range(x.ndim)) if dims is None else tuple(d % x.ndim for d in (dims if isinstance(dims, (list, tuple)) else [dims]))
    )
    return np.asarray(x.sum(axes, keepdims=keepdim), dtype=object).view(Balls)


def _mean(x: Any, dims: Any = None, keepdim: bool = False, **_: Any) -> Balls:
    total = _sum(x, dims, keepdim)
    return (total / (x.size // max(total.size, 1))).view(Balls)


def _largest(x: Balls, dims: Any = None, keepdim: bool = False, **_: Any) -> Balls:
    axes = (
        range(x.ndim)
        if dims is None or dims == []
        else [d % x.ndim for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
    )
    out: Any = np.asarray(x)
    for axis in sorted(axes, reverse=True):
        out = np.frompyfunc(lambda a, b: a.max(b), 2, 1).reduce(out, axis=axis, keepdims=keepdim)
    return np.asarray(out, dtype=object).view(Balls)


def _power(x: Balls, exponent: Any) -> Balls:
    if exponent == 0.5:
        return P.sqrt(x)
    if exponent != int(exponent) or exponent == 0:
        raise AnyformerError(f"power {exponent} has no ball form")
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
        raise AnyformerError(f"a vector norm of order {order} has no ball form")
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
        ("add.Tensor", "add_.Tensor", "add.Scalar"): lambda a, b, alpha=1: a + alpha * b,
        ("sub.Tensor", "sub.Scalar"): lambda a, b, alpha=1: a - alpha * b,
        ("rsub.Scalar",): lambda a, b, alpha=1: b - alpha * a,
        ("mul.Tensor", "mul_.Tensor", "mul.Scalar"): lambda a, b: a * b,
        ("div.Tensor", "div.Scalar", "div_.Tensor", "div_.Scalar"): lambda a, b: a / b,
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
        ("_softmax.default", "_safe_softmax.default"): _softmax,
        ("where.self",): _chosen,
        ("masked_fill.Scalar", "masked_fill_.Scalar", "masked_fill.Tensor"): lambda a, m, v: _chosen(m, v, a),
        ("native_layer_norm.default",): _layer_norm,
    }.items()
    for name in names
}
