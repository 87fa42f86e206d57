"""A module under examination: run in float64, in eval mode, one sequence at a time; what its state does is found out before anything is claimed.

stochastic       two calls on one input differ                        stateful        a buffer or an attribute changes in a call
batch-coupled    a sequence's output depends on its batch mates       at zero         the output is 0 at initialisation: parameters are
varied anyway
"""

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode

from anyformer.approximation.models import SCALE, Draw
from anyformer.approximation.tracing import Applied, Call, plain_attention
from anyformer.errors import AnyformerError

FLOOR = 1e-13
"""Noise of a float64 forward that shows none."""

START = 2
"""Seed of the parameters at which a module is examined."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A module, and how it is applied: ``call(module, x)`` for x (batch, n, d). ``seen`` are the input it was examined at, and its output."""

    module: nn.Module
    call: Call
    tokens: int
    dim: int
    name: str
    notes: tuple[str, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)
    seen: tuple[Tensor, Tensor] | None = None

    @property
    def trained(self) -> dict[str, Tensor]:
        """Its trained parameters."""
        return {k: p.detach() for k, p in self.module.named_parameters() if p.requires_grad}

    def draw(self, seed: int) -> dict[str, Tensor]:
        """Numbers on the grid for all trained parameters, half as large for biases."""
        draw = Draw(seed)
        return {k: draw(*p.shape, scale=SCALE if p.ndim > 1 else SCALE / 2) for k, p in self.trained.items()}

    def run(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        """``g(x)`` (batch, n, d), one sequence after the other."""
        return torch.cat([self.apply(parameters, x[i : i + 1]) for i in range(len(x))])

    def apply(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        """``g(x)`` on the whole batch at once."""
        given = {f"inner.{k}": v for k, v in parameters.items()}
        with plain_attention(), torch.no_grad():
            return functional_call(Applied(self.module, self.call), given, (x,), tie_weights=True)

    @property
    def changed(self) -> str:
        """Whether it computes something else now than when it was examined, in a sentence; empty if not."""
        assert self.seen is not None
        try:
            same = torch.equal(self.apply(self.draw(START), self.seen[0]), self.seen[1])
        except (Exception, SystemExit) as error:
            return f"its forward failed after some calls: {_said(error)}"
        return "" if same else "its forward changed after some calls: it has a state that is not seen from outside"


class _Narrow(TorchDispatchMode):
    """Notices results in floats shorter than 64 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and out.dtype != torch.float64:
            self.seen.add(out.dtype)
        if isinstance(out, Tensor) and out.dtype in (torch.complex64, torch.complex32):
            self.seen.add(torch.float32 if out.dtype is torch.complex64 else torch.float16)
        return out


@dataclass(frozen=True, eq=False)
class _Trial:
    """What a few calls showed: the outputs at initialisation and (twice) at drawn parameters, on two sequences at once (None: refused), the
    floats seen, and the names of state that changed."""

    first: Tensor
    outputs: tuple[Tensor, Tensor]
    pair: Tensor | None
    narrow: frozenset[torch.dtype]
    changed: tuple[str, ...]


def examine(module: nn.Module, call: Call, n: int, d: int, name: str) -> Subject | str:
    """A private float64 copy in eval mode, and its state; a sentence where nothing can be claimed about such a module."""
    if any(isinstance(p, (UninitializedParameter, UninitializedBuffer)) for p in (*module.parameters(), *module.buffers())):
        return "it has parameters without a shape yet (a lazy module); run it once on tokens first"
    try:
        subject = Subject(copy.deepcopy(module).double().eval(), call, n, d, name)
    except Exception as error:
        return f"the module cannot be copied: {_said(error)}"
    x = torch.randn(2, n, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    try:
        trial = _try(subject, x)
    except AnyformerError:
        raise
    except (Exception, SystemExit) as error:
        return f"it cannot be run on (1, {n}, {d}): {_said(error)}"
    problem = trial if isinstance(trial, str) else _problem(trial)
    if problem or isinstance(trial, str):
        return problem
    state = _state(subject, trial, x[:1])
    return replace(subject, notes=_notes(state), state=state, seen=(x[:1], trial.outputs[0]))


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def _try(subject: Subject, x: Tensor) -> _Trial | str:
    """Call it a few times; a sentence where what it returns is no map of tokens."""
    one = x[:1].clone()
    before = _fingerprint(subject.module)
    with plain_attention(), torch.no_grad():
        first = subject.call(subject.module, one)
    problem = _shape_problem(first, subject.tokens, subject.dim)
    if problem:
        return problem
    if not torch.equal(one, x[:1]):
        return "it changes its input in place"
    settled, start, narrow = _fingerprint(subject.module), subject.draw(START), _Narrow()
    with narrow:
        outputs = subject.run(start, x[:1]), subject.run(start, x[:1])
    pair = _pair(subject, start, x)
    after = _fingerprint(subject.module)
    changed = [k for k, v in after.items() if settled.get(k) != v or (not _private(k) and before.get(k) != v)]
    return _Trial(first, outputs, pair, frozenset(narrow.seen), tuple(sorted(changed)))


def _problem(trial: _Trial) -> str:
    """What forbids any claim, in a sentence; empty where nothing does."""
    if any(not bool(torch.isfinite(o).all()) for o in (trial.first, *trial.outputs)):
        return "its output has NaN or infinite numbers"
    if not torch.equal(*trial.outputs):
        largest = float((trial.outputs[0] - trial.outputs[1]).abs().max())
        return f"its forward is stochastic: two calls on one input differ by {largest:.1e} (in eval mode)"
    return f"its state changes in a call: {', '.join(trial.changed[:3])}" if trial.changed else ""


def _state(subject: Subject, trial: _Trial, x: Tensor) -> dict[str, Any]:
    """What is known of the module's state, as plain data. ``batch_difference`` is None where a batch is refused or gives no numbers."""
    out, pair = trial.outputs[0], trial.pair
    size = float(out.abs().max())
    off = 0.0 if pair is None else float((pair[:1] - out).abs().max())
    return {
        "dtype": "float64",
        "eval": True,
        "batch": 1,
        "batch_coupled": not off <= 1e-9 * (1 + size),
        "batch_difference": off if pair is not None and math.isfinite(off) else None,
        "narrow_dtypes": sorted(str(t).removeprefix("torch.") for t in trial.narrow),
        "noise": _noise(subject, trial, x) if trial.narrow else FLOOR * (1 + size),
        "zero_at_initialisation": not bool(trial.first.ne(0).any()),
        "parameters": len(subject.trained),
    }


def _notes(state: dict[str, Any]) -> tuple[str, ...]:
    """The state in sentences."""
    notes = ["judged in float64, eval mode, one sequence at a time, with parameters about 0.4 N(0, 1), never at initialisation"]
    if state["batch_coupled"]:
        off = state["batch_difference"]
        by = "a batch of two gives no numbers" if off is None else f"by {off:.1e}"
        notes.append(f"a sequence's output depends on its batch mates ({by}): the verdict is for batches of one")
    if state["narrow_dtypes"]:
        inside = ", ".join(state["narrow_dtypes"])
        notes.append(f"{inside} is used inside although the input is float64: noise {state['noise']:.1e}")
    notes += ["its output is 0 at initialisation"] if state["zero_at_initialisation"] else []
    notes += [] if state["parameters"] else ["it has no trained parameters"]
    return tuple(notes)


def _pair(subject: Subject, parameters: dict[str, Tensor], x: Tensor) -> Tensor | None:
    """The output on two sequences at once; None where such a batch is refused."""
    try:
        return subject.apply(parameters, x.clone())
    except Exception:  # somebody else's forward: whatever it raises, it refuses batches
        return None


def _shape_problem(out: Any, n: int, d: int) -> str:
    if not isinstance(out, Tensor):
        return (
            f"it returns a {type(out).__name__}, a tensor (1, {n}, {d}) was expected; give call=lambda m, x: m(x)[0] or the like"
        )
    if tuple(out.shape) != (1, n, d):
        return f"it changes the shape: (1, {n}, {d}) became {tuple(out.shape)}; a map of tokens to as many tokens was expected"
    if not out.is_floating_point():
        return f"it returns {str(out.dtype).removeprefix('torch.')} numbers; tokens of floats were expected"
    return ""


def _private(key: str) -> bool:
    """Whether this is state that Python code marks as its own, and torch's caches as well: it may settle in the first call."""
    return key.startswith("size ") or key.split(" ")[-1].split(".")[-1].startswith("_")


def _fingerprint(module: nn.Module) -> dict[str, Any]:
    """Buffers, the plain attributes of every part, and the sizes of their containers."""
    found: dict[str, Any] = {f"buffer {k}": _print(b) for k, b in module.named_buffers()}
    for name, part in module.named_modules():
        where = name + "." if name else ""
        for key, value in vars(part).items():
            if isinstance(value, (bool, int, float, str)):
                found[f"attribute {where}{key}"] = value
            elif isinstance(value, Tensor) and not value.requires_grad:
                found[f"attribute {where}{key}"] = _print(value)
            elif isinstance(value, (list, dict, set)):
                found[f"size {where}{key}"] = len(value)
    return found


def _print(x: Tensor) -> tuple[Any, ...]:
    """A tensor in short: its shape, its sum, and a sum that tells its entries apart."""
    y = (torch.view_as_real(x) if x.is_complex() else x).detach().double().reshape(-1)
    sums = (y.sum(), (y * torch.arange(1, len(y) + 1)).sum())
    return (tuple(x.shape), *(float(s) if bool(torch.isfinite(s)) else str(float(s)) for s in sums))


def _noise(subject: Subject, trial: _Trial, x: Tensor) -> float:
    """|float64 - float32|, an upper guess of what rounding inside does; never less than the rounding of the shortest float that is used."""
    out = trial.outputs[0]
    least = max(torch.finfo(t).eps for t in trial.narrow) * (1 + float(out.abs().max()))
    short = replace(subject, module=copy.deepcopy(subject.module).float())
    try:
        other = short.apply({k: v.float() for k, v in subject.draw(START).items()}, x.float())
        return max(float((other.double() - out).abs().max()), least)
    except Exception:  # somebody else's forward: whatever it raises, it does not run in float32
        return max(1e-6, least)
