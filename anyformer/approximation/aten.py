"""ATen operations: which are analytic, and how fixed and varying numbers pass through them (:mod:`anyformer.approximation.tracing`)."""

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_arg


def _aten(*names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names)


MOVES = _aten(
    "t.default", "view.default", "_unsafe_view.default", "permute.default", "transpose.int", "alias.default", "slice.Tensor",
    "unsqueeze.default", "expand.default", "clone.default", "detach.default", "cat.default", "stack.default", "split.Tensor",
    "split_with_sizes.default", "select.int", "squeeze.dim", "squeeze.default", "unbind.int", "reshape.default", "contiguous.default",
    "lift_fresh_copy.default", "flip.default", "roll.default", "_reshape_alias.default", "unflatten.int", "squeeze.dims", "repeat.default",
    "constant_pad_nd.default", "chunk.default", "narrow.default", "diagonal.default",
) | {"getitem"}  # fmt: skip
"""Moved without change: a mask of varying numbers is moved alike."""

SELECTIONS = _aten("index.Tensor", "gather.default", "embedding.default", "index_select.default")
"""Entries by integer places: moved without change where the places are fixed, a choice where they vary."""

COPIES = _aten("_to_copy.default", "copy.default")
SAME = _aten(
    "exp.default", "tanh.default", "erf.default", "sigmoid.default", "silu.default", "gelu.default", "neg.default",
    "cos.default", "sin.default", "softplus.default", "rsub.Scalar", "expm1.default", "atan.default"
)  # fmt: skip
SUMS = _aten("add.Tensor", "add_.Tensor", "sub.Tensor", "add.Scalar", "sub.Scalar")
TIMES = _aten("mul.Tensor", "mul_.Tensor", "mul.Scalar")
CONTRACTIONS = _aten("mm.default", "bmm.default", "addmm.default", "baddbmm.default", "matmul.default")
REDUCTIONS = _aten("sum.dim_IntList", "mean.dim", "sum.default", "mean.default", "cumsum.default")
SOFTMAX = _aten("_softmax.default", "_safe_softmax.default")
CHOICES = _aten("where.self", "masked_fill.Scalar", "masked_fill_.Scalar", "masked_fill.Tensor")
LINEAR = _aten(
    "_fft_c2c.default",
    "_fft_r2c.default",
    "view_as_real.default",
    "real.default",
    "convolution.default",
    "view_as_complex.default",
)
INTEGER_POWERS = _aten("pow.Tensor_Scalar", "square.default")

ALWAYS_ANALYTIC = MOVES | COPIES | SAME | SUMS | TIMES | CONTRACTIONS | REDUCTIONS | SOFTMAX | CHOICES | LINEAR
CONDITIONAL = _aten(
    "div.Tensor", "div.Scalar", "reciprocal.default", "sqrt.default", "rsqrt.default", "log.default", "pow.Tensor_Scalar",
    "native_layer_norm.default", "_fused_rms_norm.default", "div_.Tensor", "div_.Scalar", "var.correction", "square.default"
)  # fmt: skip
"""Analytic where an argument does not vanish."""
KINKS = _aten(
    "relu.default", "abs.default", "amax.default", "amin.default", "max.default", "max.dim", "maximum.default",
    "minimum.default", "clamp.default", "clamp_min.default", "clamp_max.default", "linalg_vector_norm.default",
    "acos.default", "elu.default", "leaky_relu.default", "hardtanh.default", "_cdist_forward.default", "logsumexp.default",
    "min.default", "_euclidean_dist.default"
)  # fmt: skip
HARD = _aten(
    "topk.default", "sort.default", "sort.stable", "argmax.default", "argmin.default", "argsort.default", "sign.default",
    "floor.default", "round.default", "ceil.default", "eq.Tensor", "eq.Scalar", "gt.Tensor", "ge.Tensor", "lt.Tensor",
    "le.Tensor", "gt.Scalar", "ge.Scalar", "lt.Scalar", "le.Scalar", "scatter.value", "scatter.src",
    "index_put.default", "one_hot.default", "ne.Scalar", "nonzero.default", "kthvalue.default",
    "median.default", "scatter_.value", "bucketize.Tensor", "trunc.default", "sgn.default"
)  # fmt: skip
"""A choice: on data that vary they are not continuous, and no theorem here speaks of them."""
RANDOM = _aten(
    "bernoulli.default", "rand.default", "randn.default", "randint.default", "randint.low", "randperm.default",
    "rand_like.default", "randn_like.default", "native_dropout.default", "normal_.default", "uniform_.default",
    "multinomial.default", "bernoulli.p", "bernoulli_.float", "randint_like.default", "exponential_.default",
    "random_.default"
)  # fmt: skip
CONSTANTS = _aten(
    "eye.default", "eye.m", "ones.default", "zeros.default", "full.default", "arange.default", "arange.start",
    "arange.start_step", "scalar_tensor.default", "empty.memory_format", "new_zeros.default", "new_ones.default",
    "new_full.default", "zeros_like.default", "ones_like.default", "full_like.default", "tril.default", "triu.default",
    "logical_not.default", "bitwise_not.default", "logical_and.default", "bitwise_and.Tensor", "bitwise_or.Tensor",
    "sym_size.int", "empty_like.default", "new_empty.default", "fill.Scalar", "any.dim", "all.default", "any.default"
)  # fmt: skip
"""Made from shapes, or Boolean arithmetic of masks."""


def name_of(node: Any) -> str:
    """``aten.mm.default``, ``getitem``, ..."""
    if node.op != "call_function":
        return node.op
    target = node.target
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


FIXED, VARIES, DEPENDS = 0.0, 1.0, 2.0
"""What a number of the graph is: the same whatever the free parameters and tokens; varying; varying with the tokens that are asked about."""


def taint(node: Any, known: dict[Any, Any], masked: float) -> tuple[Any, Any]:
    """(value, levels) of one operation, from those of its arguments; the highest level of all arguments where nothing better is known."""

    def values(x: Any) -> Any:
        return map_arg(x, lambda a: known[a][0])

    name = name_of(node)
    value = node.target(*values(node.args), **values(node.kwargs))
    highest = max((float(m.max()) for a in node.all_input_nodes for m in _leaves(known[a][1]) if m.numel()), default=FIXED)
    if name in SELECTIONS and not places_vary(node, known):
        return value, _moved(node, known)
    if highest == FIXED or name not in MOVES | _RULES.keys():
        return value, _map(value, lambda v: torch.full(v.shape, highest, dtype=torch.float64))
    if name in MOVES:
        return value, _moved(node, known)
    levels = _RULES[name](node, known, value, masked)
    if levels is None:
        return value, torch.full(value.shape, highest, dtype=torch.float64)
    forbidden = _forbidden(node, known, value, masked)
    if forbidden is not None:
        value, levels = torch.where(forbidden, -torch.inf, value), torch.where(forbidden, FIXED, levels)
    return value, levels


def places_vary(node: Any, known: dict[Any, Any]) -> bool:
    """Whether any integer argument varies."""
    whole = [known[a] for a in node.all_input_nodes if isinstance(known[a][0], Tensor) and not known[a][0].is_floating_point()]
    return any(bool(levels.any()) for _, levels in whole)


def _leaves(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [z for y in x for z in _leaves(y)]


def _map(x: Any, function: Any) -> Any:
    if isinstance(x, Tensor):
        return function(x)
    return type(x)(_map(y, function) for y in x) if isinstance(x, (tuple, list)) else torch.zeros((), dtype=torch.float64)


def _moved(node: Any, known: dict[Any, Any]) -> Any:
    def levels(a: Any) -> Any:
        value = known[a][0]
        if isinstance(value, Tensor) and not value.is_floating_point() and name_of(node) in SELECTIONS:
            return value
        return _map(known[a][1], lambda m: m.contiguous())

    return node.target(
        *map_arg(node.args, levels), **{k: v for k, v in node.kwargs.items() if k not in ("memory_format", "dtype")}
    )


def _pair(node: Any, known: dict[Any, Any], i: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Value and levels of argument i, where it is a tensor or a number."""
    x = node.args[i]
    if isinstance(x, torch.fx.Node):
        return known[x]
    return torch.as_tensor(x, dtype=like.dtype), torch.zeros((), dtype=torch.float64)


def _any_of(node: Any, known: dict[Any, Any], value: Tensor, masked: float) -> Tensor:
    total = torch.zeros(value.shape, dtype=torch.float64)
    for i, x in enumerate(node.args):
        if isinstance(x, torch.fx.Node):
            total = torch.maximum(total, _pair(node, known, i, value)[1])
    return total


def _product(node: Any, known: dict[Any, Any], value: Tensor, masked: float) -> Tensor:
    """Zero times anything is zero."""
    (a, la), (b, lb) = (_pair(node, known, i, value) for i in (0, 1))
    return torch.maximum(la * ((lb > 0) | (b != 0)), lb * ((la > 0) | (a != 0)))


def _contraction(node: Any, known: dict[Any, Any], value: Tensor, masked: float) -> Tensor:
    bias = len(node.args) == 3
    (a, la), (b, lb) = (_pair(node, known, i, value) for i in ((1, 2) if bias else (0, 1)))
    some_a, some_b = ((la > 0) | (a != 0)).double(), ((lb > 0) | (b != 0)).double()
    levels = torch.zeros(value.shape, dtype=torch.float64)
    for level in (VARIES, DEPENDS):
        touched = ((la >= level).double() @ some_b + some_a @ (lb >= level).double()) > 0
        levels = torch.where(touched, level, levels)
    return torch.maximum(levels, _pair(node, known, 0, value)[1]) if bias else levels


def _reduction(node: Any, known: dict[Any, Any], value: Tensor, masked: float) -> Tensor:
    levels = known[node.args[0]][1]
    if name_of(node) == "aten.cumsum.default":
        return levels.cummax(node.args[1]).values
    dims = node.args[1] if len(node.args) > 1 and node.args[1] else list(range(levels.ndim))
    return levels.amax(dims, keepdim=len(node.args) > 2 and bool(node.args[2]))


def _softmax(node: Any, known: dict[Any, Any], value: Tensor, masked: float) -> Tensor:
    scores, levels = known[node.args[0]]
    forbidden = (levels == 0) & (scores <= -masked)
    return torch.where(forbidden, FIXED, levels.amax(node.args[1], keepdim=True).expand(value.shape))


def _where(node: Any, known: dict[Any, Any], value: Tensor, masked: float) -> Tensor | None:
    order = (0, 1, 2) if name_of(node) == "aten.where.self" else (1, 2, 0)
    (condition, lc), (_, la), (_, lb) = (_pair(node, known, i, value) for i in order)
    return None if bool(lc.any()) else torch.where(condition, la, lb).expand(value.shape)


def _forbidden(node: Any, known: dict[Any, Any], value: Tensor, masked: float) -> Tensor | None:
    """Scores that a fixed summand (a finite mask) puts at or below ``-masked``: the mask is read as it is meant."""
    name = name_of(node)
    summands = (0, 1) if name in SUMS and ".sub" not in name else (0,) if name in CONTRACTIONS and len(node.args) == 3 else ()
    found = None
    for i in summands:
        x, levels = _pair(node, known, i, value)
        here = ((levels == 0) & (x <= -masked)).expand(value.shape)
        found = here if found is None else found | here
    return found


_RULES: dict[str, Any] = {
    **dict.fromkeys(SAME | COPIES | SUMS | INTEGER_POWERS, _any_of),
    **dict.fromkeys(
        _aten("relu.default", "abs.default", "clamp_min.default", "clamp.default", "acos.default", "elu.default"), _any_of
    ),
    **dict.fromkeys(
        _aten("div.Tensor", "div.Scalar", "reciprocal.default", "sqrt.default", "rsqrt.default", "log.default"), _any_of
    ),
    **dict.fromkeys(TIMES, _product),
    **dict.fromkeys(CONTRACTIONS, _contraction),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(SOFTMAX, _softmax),
    **dict.fromkeys(CHOICES, _where),
}
