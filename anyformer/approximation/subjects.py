"""A module under examination: run in float64, in eval mode, one sequence at a time; what its state does is found out before anything is claimed.

stochastic       two calls on one input differ                        stateful        a buffer or an attribute changes in a call
batch-coupled    a sequence's output depends on its batch mates       at zero         the output is 0 at initialisation: parameters are
varied anyway
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from anyformer.approximation.tracing import Call, plain_attention
from anyformer.errors import AnyformerError

FLOOR = 1e-13
"""Noise of a float64 forward that shows none."""

SCALE = 0.4


@dataclass(frozen=True, eq=False)
class Subject:
    """A module, and how it is applied: ``call(module, x)`` for x (batch, n, d)."""

    module: nn.Module
    call: Call
    tokens: int
    dim: int
    name: str
    notes: tuple[str, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def trained(self) -> dict[str, Tensor]:
        """Its trained parameters."""
        return {k: p.detach() for k, p in self.module.named_parameters() if p.requires_grad}

    def draw(self, seed: int) -> dict[str, Tensor]:
        """Numbers for all trained parameters, 0.4 N(0, 1) and half of that for biases, on a grid of 2^-20."""
        generator = torch.Generator().manual_seed(seed)
        out = {}
        for name, p in self.trained.items():
            scale = SCALE if p.ndim > 1 else SCALE / 2
            numbers = torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale
            out[name] = (numbers * 2**20).round() / 2**20
        return out

    def run(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        """``g(x)`` (batch, n, d), one sequence after the other."""
        with plain_attention(), torch.no_grad():
            rows = [self._one(parameters, x[i : i + 1]) for i in range(len(x))]
        return torch.cat(rows)

    def _one(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        inner = _Applied(self.module, self.call)
        return functional_call(inner, {f"inner.{k}": v for k, v in parameters.items()}, (x,), tie_weights=True)


class _Applied(nn.Module):
    def __init__(self, module: nn.Module, call: Call):
        super().__init__()
        self.inner, self.call = module, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, x)


class _Narrow(TorchDispatchMode):
    """Notices results in floats shorter than 64 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and out.dtype != torch.float64:
            self.seen.add(str(out.dtype).removeprefix("torch."))
        return out


def examine(module: nn.Module, call: Call, n: int, d: int, name: str) -> Subject | str:
    """A private float64 copy in eval mode, and its state; a sentence where nothing can be claimed about such a module."""
    try:
        own = copy.deepcopy(module).double().eval()
    except Exception as error:
        return f"the module cannot be copied: {type(error).__name__}: {error}"
    x = torch.randn(2, n, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    subject = Subject(own, call, n, d, name)
    start = subject.draw(2)
    before, outputs = _fingerprint(own), []
    narrow = _Narrow()
    try:
        first = _call(own, call, x[:1])
        problem = _shape_problem(first, n, d)
        if problem:
            return problem
        zero = not bool(first.ne(0).any())
        with narrow:
            outputs = [subject.run(start, x[:1]) for _ in range(2)]
        pair = _pair(subject, start, x)
    except AnyformerError:
        raise
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0]
        return f"it cannot be run on (1, {n}, {d}): {type(error).__name__}: {said[:160]}"
    if any(not bool(torch.isfinite(o).all()) for o in (first, *outputs)):
        return "its output has NaN or infinite numbers"
    if not torch.equal(outputs[0], outputs[1]):
        largest = float((outputs[0] - outputs[1]).abs().max())
        return f"its forward is stochastic: two calls on one input differ by {largest:.1e} (in eval mode)"
    changed = [key for key, value in _fingerprint(own).items() if before.get(key) != value]
    if changed:
        return f"its state changes in a call: {', '.join(sorted(changed)[:3])}"
    size = float(outputs[0].abs().max())
    off = None if pair is None else float((pair[:1] - outputs[0]).abs().max())
    coupled = off is not None and off > 1e-9 * (1 + size)
    noise = _noise(own, call, subject, start, x[:1], outputs[0]) if narrow.seen else FLOOR * (1 + size)
    notes = ["judged in float64, eval mode, one sequence at a time, with parameters about 0.4 N(0, 1), never at initialisation"]
    notes += (
        [f"a sequence's output depends on its batch mates (by {off:.1e}): the verdict is for batches of one"] if coupled else []
    )
    notes += (
        [f"{', '.join(sorted(narrow.seen))} is used inside although the input is float64: noise {noise:.1e}"]
        if narrow.seen
        else []
    )
    notes += ["its output is 0 at initialisation"] if zero else []
    notes += [] if subject.trained else ["it has no trained parameters"]
    state = {
        "dtype": "float64",
        "eval": True,
        "batch": 1,
        "batch_coupled": coupled,
        "batch_difference": off,
        "narrow_dtypes": sorted(narrow.seen),
        "noise": noise,
        "zero_at_initialisation": zero,
        "parameters": len(subject.trained),
    }
    return Subject(own, call, n, d, name, tuple(notes), state)


def _pair(subject: Subject, parameters: dict[str, Tensor], x: Tensor) -> Tensor | None:
    """The output on two sequences at once; None where such a batch is refused."""
    try:
        with plain_attention(), torch.no_grad():
            return subject._one(parameters, x)
    except Exception:
        return None


def _call(module: nn.Module, call: Call, x: Tensor) -> Any:
    with plain_attention(), torch.no_grad():
        return call(module, x)


def _shape_problem(out: Any, n: int, d: int) -> str:
    if not isinstance(out, Tensor):
        return (
            f"it returns a {type(out).__name__}, a tensor (1, {n}, {d}) was expected; give call=lambda m, x: m(x)[0] or the like"
        )
    if tuple(out.shape) != (1, n, d):
        return f"it changes the shape: (1, {n}, {d}) became {tuple(out.shape)}; a map of tokens to as many tokens was expected"
    return ""


def _fingerprint(module: nn.Module) -> dict[str, Any]:
    """Buffers, and the plain attributes of every part."""
    found: dict[str, Any] = {
        f"buffer {k}": (tuple(b.shape), float(b.double().sum()) if b.numel() else 0.0) for k, b in module.named_buffers()
    }
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, (bool, int, float, str)) and not key.startswith("_"):
                found[f"attribute {name + '.' if name else ''}{key}"] = value
    return found


def _noise(own: nn.Module, call: Call, subject: Subject, start: dict[str, Tensor], x: Tensor, out: Tensor) -> float:
    """|float64 - float32|, scaled to the share of the forward that is narrow: an upper guess of what rounding inside does."""
    short = copy.deepcopy(own).float()
    parameters = {k: v.float() for k, v in start.items()}
    try:
        with plain_attention(), torch.no_grad():
            other = functional_call(
                _Applied(short, call), {f"inner.{k}": v for k, v in parameters.items()}, (x.float(),), tie_weights=True
            )
        return max(float((other.double() - out).abs().max()), FLOOR)
    except Exception:
        return 1e-6
