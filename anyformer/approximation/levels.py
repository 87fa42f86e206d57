"""How fixed and varying numbers pass through the operations of a traced graph: what is known of every entry of every tensor.

    level     the same for all free parameters and tokens (FIXED); varying; or varying with the tokens that are asked about (DEPENDS)
    nonzero   0.0 where the entry is surely 0 in exact arithmetic, 1.0 elsewhere: an underflow is no zero
    offset    a fixed summand of the entry, as large as a mask's: x = (something that varies) + offset; of a fixed entry the number itself

Zero times anything is fixed at zero. Scores of a softmax whose offset lies :data:`MASKED` below the largest offset of their row are read as
forbidden: adding one number to a whole row changes nothing, in softmax and here. Where nothing better is known, an output has the highest
level of all arguments, and is not known to be 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Node, map_arg

from anyformer.approximation.aten import (
    BOOLEAN,
    CHOICES,
    CONTRACTIONS,
    COPIES,
    CREATED,
    LINEAR,
    MASKED,
    MOVES,
    PAD,
    PLACES,
    REDUCTIONS,
    SOFTMAX,
    SUMS,
    TIMES,
    is_whole,
    name_of,
)

FIXED, VARIES, DEPENDS = 0.0, 1.0, 2.0
FIELDS = ("levels", "nonzero", "offset")
SOFTLY = 30.0
"""A summand of scores of this size is a mask that leaks (exp(-30) = 1e-13); a smaller one is a number as any other."""
EXACT = 2**24
"""Sums and products of whole numbers up to this are exact in every float."""


@dataclass(frozen=True, eq=False)
class Seen:
    """What is known of the result of one operation: a tensor each, or tuples of them. ``exact``: whether fixed entries are free of rounding."""

    value: Any
    levels: Any
    nonzero: Any
    offset: Any
    exact: bool = False
    forbidden: Tensor | None = None

    @classmethod
    def of(cls, value: Tensor, levels: Tensor, exact: bool) -> "Seen":
        """Numbers that are read, not computed."""
        fixed = levels == FIXED
        nonzero = (~fixed | (value != 0)).double()
        return cls(value, levels, nonzero, torch.where(fixed, _real(value), 0.0), exact)


Known = dict[Any, Seen]
Fields = tuple[Tensor, Tensor, Tensor]
Rule = Callable[[Node, Known, Tensor], Fields | None]


def propagate(node: Node, known: Known) -> Seen:
    """The result of one operation from those of its arguments."""
    name = name_of(node)
    value: Any = node.target(*map_arg(node.args, lambda a: known[a].value), **map_arg(node.kwargs, lambda a: known[a].value))  # type: ignore[operator]
    inputs = [known[a] for a in node.all_input_nodes]
    exact = _is_exact(name, value, inputs)
    if name in MOVES or (name in PLACES and not places_vary(node, known)):
        levels, nonzero, offset = (_moved(node, known, field) for field in FIELDS)
        return Seen(value, levels, nonzero, offset, exact)
    highest = max((float(m.max()) for s in inputs for m in _leaves(s.levels) if m.numel()), default=FIXED)
    highest = FIXED if name in CREATED else highest
    forbidden = _forbidden(node, known) if name in SOFTMAX else None
    rule = RULES.get(name)
    found = rule(node, known, value) if rule is not None else None
    if forbidden is not None and found is not None:
        levels, nonzero = (torch.where(forbidden, 0.0, f) for f in found[:2])
        found = levels, nonzero, found[2]
    if not isinstance(value, Tensor):  # several results, or a size
        levels, nonzero, offset = (_filled(value, x) for x in (highest, 1.0, 0.0))
        if found is not None:  # a rule for the first of them
            levels, nonzero, offset = ((f, *rest[1:]) for f, rest in zip(found, (levels, nonzero, offset), strict=True))
        return Seen(value, levels, nonzero, offset, exact)
    levels, nonzero, offset = found or (_filled(value, highest), _filled(value, 1.0), _filled(value, 0.0))
    levels, nonzero, offset = (f.expand(value.shape) for f in (levels, nonzero, offset))
    levels = torch.where((nonzero == 0) | (offset == -torch.inf), FIXED, levels)
    fixed = levels == FIXED
    if exact:
        nonzero = torch.where(fixed, (value != 0).double(), nonzero)
    offset = torch.where(
        fixed, _real(value), torch.where(offset.abs() >= SOFTLY, offset, 0.0)
    )  # 1 - x is no mask, nor is 1e5 (1 - x)
    return Seen(value, levels, nonzero, torch.nan_to_num(offset, 0.0, torch.inf, -torch.inf), exact, forbidden)


def places_vary(node: Node, known: Known) -> bool:
    """Whether the integer places of an operation of :data:`PLACES` vary with the data."""
    found: list[bool] = []
    map_arg(node.args[PLACES[name_of(node)]], lambda a: found.append(bool(known[a].levels.any())))
    return any(found)


def _moved(node: Node, known: Known, field: str) -> Any:
    """One field of all entries, moved as the entries are."""
    name, places = name_of(node), PLACES.get(name_of(node))

    args = [map_arg(a, lambda b, f="value" if i == places else field: _part(known[b], f)) for i, a in enumerate(node.args)]
    if name == PAD and len(args) > 2:
        args[2] = {"levels": FIXED, "nonzero": float(args[2] != 0), "offset": float(args[2])}[field]  # type: ignore[arg-type]
    return node.target(*args, **{k: v for k, v in node.kwargs.items() if k not in ("memory_format", "dtype")})  # type: ignore[operator]


def _part(seen: Seen, field: str) -> Any:
    """One field; the moves ask for tensors without gaps."""
    part = getattr(seen, field)
    return part if field == "value" else _map(part, Tensor.contiguous)


def _is_exact(name: str, value: Any, inputs: list[Seen]) -> bool:
    """Whether no rounding took place in fixed entries: moves, choices and comparisons of exact numbers, arithmetic of whole ones."""
    if name in CREATED:
        return "empty" not in name
    if not all(s.exact for s in inputs):
        return False
    if name in MOVES or name in PLACES or name in CHOICES or name in BOOLEAN or is_whole(value):
        return True
    arithmetic = name in SUMS or name in TIMES or name in CONTRACTIONS or name in REDUCTIONS or name in COPIES
    return arithmetic and all(_whole_numbers(x) for x in (value, *(s.value for s in inputs)))


def _whole_numbers(x: Any) -> bool:
    if not isinstance(x, Tensor) or x.is_complex():
        return False
    y = x.double()
    return bool(((y.round() == y) & (y.abs() <= EXACT) | y.isinf()).all())


def _real(x: Tensor) -> Tensor:
    """As a factor or summand of an offset; complex numbers have none."""
    return torch.zeros(x.shape, dtype=torch.float64) if x.is_complex() else x.double()


def _leaves(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [z for y in x for z in _leaves(y)]


def _map(x: Any, function: Any) -> Any:
    return function(x) if isinstance(x, Tensor) else type(x)(_map(y, function) for y in x)


def _filled(value: Any, x: float) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(v, x) for v in value)
    return torch.full(value.shape if isinstance(value, Tensor) else (), x, dtype=torch.float64)


def _argument(node: Node, known: Known, i: int) -> Seen:
    """What is known of argument i, a tensor or a number."""
    x = node.args[i]
    if isinstance(x, Node):
        return known[x]
    return Seen.of(
        torch.as_tensor(x, dtype=torch.float64 if isinstance(x, float) else None), torch.zeros((), dtype=torch.float64), True
    )  # type: ignore[arg-type]


def _sum(node: Node, known: Known, value: Tensor) -> Fields:
    a, b = _argument(node, known, 0), _argument(node, known, 1)
    alpha: Any = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    name = name_of(node)
    left, right = (-alpha, 1.0) if ".rsub" in name else (1.0, -alpha if ".sub" in name else alpha)
    return torch.maximum(a.levels, b.levels), torch.maximum(a.nonzero, b.nonzero), left * a.offset + right * b.offset


def _scaled(a: Seen, b: Seen, factor: Tensor) -> Tensor:
    """The offset of a product with fixed numbers; 0 where both factors vary."""
    return torch.where(b.levels == FIXED, a.offset * factor, 0.0)


def _product(node: Node, known: Known, value: Tensor) -> Fields:
    a, b = _argument(node, known, 0), _argument(node, known, 1)
    offset = torch.where(b.levels == FIXED, _scaled(a, b, _real(b.value)), _scaled(b, a, _real(a.value)))
    return torch.maximum(a.levels * b.nonzero, b.levels * a.nonzero), a.nonzero * b.nonzero, offset


def _quotient(node: Node, known: Known, value: Tensor) -> Fields:
    a, b = _argument(node, known, 0), _argument(node, known, 1)
    return torch.maximum(a.levels, b.levels), a.nonzero + 0 * b.nonzero, _scaled(a, b, 1 / _real(b.value))


def _contraction(node: Node, known: Known, value: Tensor) -> Fields:
    biased = len(node.args) == 3
    a, b = (_argument(node, known, i) for i in ((1, 2) if biased else (0, 1)))
    levels = torch.zeros(value.shape, dtype=torch.float64)
    for level in (VARIES, DEPENDS):
        touched = ((a.levels >= level).double() @ b.nonzero + a.nonzero @ (b.levels >= level).double()) > 0
        levels = torch.where(touched, level, levels)
    nonzero = ((a.nonzero @ b.nonzero) > 0).double()
    if not biased:
        return levels, nonzero, torch.zeros(value.shape, dtype=torch.float64)
    bias, beta = _argument(node, known, 0), node.kwargs.get("beta", 1)
    return torch.maximum(levels, bias.levels), torch.maximum(nonzero, bias.nonzero), (beta * bias.offset).expand(value.shape)  # type: ignore[operator]


def _reduction(node: Node, known: Known, value: Tensor) -> Fields:
    x = _argument(node, known, 0)
    if name_of(node) == "aten.cumsum.default":
        levels, nonzero = (f.cummax(node.args[1]).values for f in (x.levels, x.nonzero))  # type: ignore[arg-type]
    else:
        dims: Any = node.args[1] if len(node.args) > 1 and node.args[1] not in (None, []) else list(range(x.levels.ndim))
        keep = len(node.args) > 2 and bool(node.args[2])
        levels, nonzero = (f.amax(dims, keepdim=keep) for f in (x.levels, x.nonzero))
    return levels, nonzero, torch.zeros(value.shape, dtype=torch.float64)


def _forbidden(node: Node, known: Known) -> Tensor:
    """Scores that a fixed summand puts far below the rest of their row."""
    offset, dim = known[node.args[0]].offset, node.args[1]
    top = offset.amax(dim, keepdim=True)
    nothing = top == -torch.inf  # softmax of such a row is not a number; _safe_softmax makes it 0
    below = (offset == -torch.inf) | (offset - top <= -MASKED)
    return below & ~nothing | (nothing & ("safe" in name_of(node))).expand(below.shape)


def leaks(node: Node, known: Known) -> bool:
    """Whether varying scores of a softmax have fixed summands of two sizes, :data:`SOFTLY` or more apart, that are not read as forbidden: a
    finite mask of which something may pass."""
    seen, dim = known[node.args[0]], node.args[1]
    below = seen.offset - seen.offset.amax(dim, keepdim=True)
    between = (below <= -SOFTLY) & (below > -MASKED) & (seen.levels > FIXED)
    return bool(between.any()) and below[below > -MASKED].unique().numel() <= 2


def unbounded(node: Node, known: Known) -> bool:
    """Whether something that varies meets a fixed factor that is infinite, or a fixed divisor that is 0: a step, or no number."""
    name = name_of(node)
    divides = name.startswith("aten.div")
    if not (divides or name in TIMES or name in CONTRACTIONS):
        return False
    sides = [_argument(node, known, i) for i in ((1, 2) if name in CONTRACTIONS and len(node.args) == 3 else (0, 1))]
    wild = [
        (s.levels == FIXED) & ~torch.isfinite(1 / s.value.double() if divides and i else _real(s.value))
        for i, s in enumerate(sides)
    ]
    if name in CONTRACTIONS:
        return any(bool(w.any()) and bool(o.levels.any()) for w, o in zip(wild, reversed(sides), strict=True))
    return any(bool((w & (o.levels > FIXED)).any()) for w, o in zip(wild, reversed(sides), strict=True))


def _softmax(node: Node, known: Known, value: Tensor) -> Fields:
    levels = torch.where(_forbidden(node, known), FIXED, known[node.args[0]].levels)
    spread = levels.amax(node.args[1], keepdim=True).expand(value.shape)  # type: ignore[arg-type]
    return spread, torch.ones(value.shape, dtype=torch.float64), torch.zeros(value.shape, dtype=torch.float64)


def _where(node: Node, known: Known, value: Tensor) -> Fields | None:
    order = (0, 1, 2) if name_of(node) == "aten.where.self" else (1, 2, 0)
    condition, a, b = (_argument(node, known, i) for i in order)
    if bool(condition.levels.any()):
        return None
    levels, nonzero, offset = (torch.where(condition.value, getattr(a, f), getattr(b, f)) for f in FIELDS)
    return levels, nonzero, offset


def _copied(node: Node, known: Known, value: Tensor) -> Fields:
    x = _argument(node, known, 1 if name_of(node) == "aten.copy.default" else 0)
    return x.levels, x.nonzero, x.offset


def _through_zero(node: Node, known: Known, value: Tensor) -> Fields:
    """f(0) = 0, entry by entry."""
    x = _argument(node, known, 0)
    return x.levels, x.nonzero, -x.offset if name_of(node) == "aten.neg.default" else 0 * x.levels


def _each(node: Node, known: Known, value: Tensor) -> Fields:
    """Entry by entry; exp and sigmoid of -inf are 0."""
    x = _argument(node, known, 0)
    gone = (x.offset == -torch.inf) & (name_of(node) in ("aten.exp.default", "aten.sigmoid.default"))
    return x.levels, (~gone).double(), 0 * x.levels


def _power(node: Node, known: Known, value: Tensor) -> Fields:
    if node.args[1] == 0:
        return _filled(value, FIXED), _filled(value, 1.0), _filled(value, 0.0)
    return (_through_zero if isinstance(node.args[1], (int, float)) and node.args[1] > 0 else _each)(node, known, value)


def _linear(node: Node, known: Known, value: Tensor) -> Fields | None:
    """Linear in its first argument, and in its second (a convolution's weight); 0 where one of them is, and the bias."""
    inputs = [known[a] for a in node.args if isinstance(a, Node)]
    if any(bool(s.nonzero.any()) for s in inputs[2:]) or all(bool(s.nonzero.any()) for s in inputs[:2]):
        return None
    return _filled(value, FIXED), _filled(value, 0.0), _filled(value, 0.0)


def _layer_norm(node: Node, known: Known, value: Any) -> Fields:
    """Each token by itself: the affine part may make it fixed."""
    x, (_, shape, weight, bias) = _argument(node, known, 0), node.args[:4]
    dims = list(range(x.levels.ndim - len(shape), x.levels.ndim))  # type: ignore[arg-type]
    levels, nonzero = (f.amax(dims, keepdim=True).expand(value[0].shape) for f in (x.levels, 0 * x.nonzero + 1))
    if isinstance(weight, Node):
        levels = torch.maximum(levels, known[weight].levels) * known[weight].nonzero
        nonzero = nonzero * known[weight].nonzero
    if isinstance(bias, Node):
        levels, nonzero = torch.maximum(levels, known[bias].levels), torch.maximum(nonzero, known[bias].nonzero)
    return levels, nonzero, 0 * levels


def _names(*names: str) -> list[str]:
    return [f"aten.{name}.default" for name in names]


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        _names("neg", "abs", "relu", "tanh", "erf", "sin", "silu", "gelu", "expm1", "atan", "sqrt", "square"), _through_zero
    ),
    **dict.fromkeys(
        _names("exp", "sigmoid", "cos", "softplus", "log", "rsqrt", "reciprocal", "acos", "elu", "clamp_min", "clamp"), _each
    ),
    **dict.fromkeys(COPIES, _copied),
    **dict.fromkeys(SUMS, _sum),
    **dict.fromkeys(TIMES, _product),
    **dict.fromkeys(("aten.div.Tensor", "aten.div.Scalar"), _quotient),
    **dict.fromkeys(CONTRACTIONS, _contraction),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(SOFTMAX, _softmax),
    **dict.fromkeys(CHOICES, _where),
    **dict.fromkeys(LINEAR, _linear),
    "aten.pow.Tensor_Scalar": _power,
    "aten.native_layer_norm.default": _layer_norm,
}
