"""A compiled program: the network, how tokens enter it, what its outputs mean, and how large it is."""

import contextlib
import random
from collections.abc import Hashable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anyformer.errors import AnyformerError
from anyformer.network import Network
from anyformer.operators import Context
from anyformer.rasp.interpreter import interpret
from anyformer.rasp.layers import layers
from anyformer.rasp.plan import FAULT
from anyformer.rasp.sequences import Sequence
from anyformer.rasp.sets import Reals

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative difference of numbers from the interpreter's at which the check after compilation fails (beside a stated error)."""

NEAR, SAME = 1e-3, 1e-12
"""Relative distances: of an output from the code that it means at most NEAR (and a quarter of the distance to another code); codes within
SAME are two floats for one number."""


@dataclass(frozen=True)
class Outputs:
    """The set of output values and their codes; empty for real numbers."""

    values: tuple[Any, ...] = ()
    codes: tuple[float, ...] = ()

    def decode(self, numbers: List[float]) -> list[Any]:
        """The value that each number means; of a set the nearest one."""
        if not self.values:
            return list(numbers)
        out = []
        for number in numbers:
            nearest = min(range(len(self.codes)), key=lambda i: abs(self.codes[i] - number))
            away = abs(self.codes[nearest] - number)
            same = SAME * max(1.0, abs(number))
            apart = min((d for c in self.codes if (d := abs(c - self.codes[nearest])) > same), default=1.0)
            if not away <= min(NEAR * max(1.0, abs(number)), 0.25 * apart):
                raise AnyformerError(
                    f"the network's output {number:.6g} is the code of no value; the nearest is {self.values[nearest]!r}"
                )
            out.append(self.values[nearest])
        return out


@dataclass(frozen=True, eq=False)
class CompiledProgram:
    """``compiled(tokens)`` runs the network and decodes its output.

    ``error`` bounds the difference from the interpreter (rounding aside; 0 unless functions are tabulated or a softmax head leaks).
    ``names[p]`` says what place p of the stream holds, in the order of time.
    """

    network: Network
    vocab: tuple[Any, ...] | Reals
    max_length: int
    outputs: Outputs
    text: str
    token_place: int | None
    names: tuple[tuple[str, ...], ...]
    mode: str = "analytic"
    error: float = 0.0
    causal: bool = False
    notes: tuple[str, ...] = ()
    """Where the network is right up to the tie width of average-hard attention only, or decides on tokens as the dtype rounds them."""
    seconds: float = 0.0
    written: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    """Of every coordinate by name: its place in the stream, and after how many stages it is there (not kept in a folder)."""
    _ids: dict[Any, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.vocab, Reals):
            self._ids.update({word: i for i, word in enumerate(self.vocab)})

    def __call__(self, tokens: List[Any]) -> list[Any]:
        """The values of the program at every position of one input."""
        return self.batch([tokens])[0]

    def batch(self, inputs: List[List[Any]]) -> list[list[Any]]:
        """The values on several inputs of any lengths."""
        found: list[list[Any]] = [[] for _ in inputs]
        for n in sorted({len(tokens) for tokens in inputs}):
            rows = [i for i, tokens in enumerate(inputs) if len(tokens) == n]
            for i, row in zip(rows, self.run([inputs[i] for i in rows]), strict=True):
                found[i] = self.decode(row)
        return found

    def run(self, inputs: List[List[Any]], patterns: list[Tensor] | None = None, streams: list[Tensor] | None = None) -> Tensor:
        """The network's outputs (inputs, n, 1 or 2): the code, and the fault where the program has one. All inputs have one length."""
        tokens, x = self.first_stream(inputs)
        ctx = Context.of(tokens)
        with torch.no_grad():
            return self.network.run_stream(x, ctx, patterns=patterns, streams=streams)

    def run_numbers(self, numbers: Float[Tensor, "batch n"], streams: list[Tensor] | None = None) -> Float[Tensor, "batch n out"]:
        """The network's outputs on real-valued tokens, a differentiable function of them. They are not checked against the vocabulary."""
        ids, x = self._stream_of(numbers)
        return self.network.run_stream(x, Context.of(ids), streams=streams)

    def first_stream(self, inputs: List[List[Any]]) -> tuple[Tensor, Tensor]:
        """Token ids (inputs, n), all 0 where tokens are real numbers, and the stream before the first layer."""
        encoded = self.encode(inputs)
        if isinstance(self.vocab, Reals):
            return self._stream_of(encoded)
        return encoded, self.network.first_stream(encoded, Context.of(encoded))

    def _stream_of(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Ids (all 0) and the first stream of real-valued tokens: the embedding of nothing, and each number in its place."""
        ids = torch.zeros(numbers.shape, dtype=torch.int64)
        x = self.network.first_stream(ids, Context.of(ids))
        if self.token_place is not None:
            x = x + numbers.to(x.dtype)[..., None] * F.one_hot(torch.tensor(self.token_place), x.shape[-1]).to(x.dtype)
        return ids, x

    def encode(self, inputs: List[List[Any]]) -> Tensor:
        """Inputs of one length as a tensor (inputs, n): token ids, or float64 where tokens are real numbers."""
        for tokens in inputs:
            self.require(tokens)
        if isinstance(self.vocab, Reals):
            return torch.tensor([list(map(float, tokens)) for tokens in inputs], dtype=torch.float64)
        return torch.tensor([[self._ids[t] for t in tokens] for tokens in inputs])

    def save(self, folder: str | Path) -> None:
        """Write the program to a folder that :func:`anyformer.rasp.load` reads (safetensors and JSON)."""
        from anyformer.rasp.saving import save

        save(self, folder)

    def draw(self, path: str | Path, tokens: List[Any] | None = None) -> None:
        """Draw the computation flow on an example input (:func:`anyformer.rasp.drawing.draw`): PNG, PDF or SVG by the suffix; extra ``viz``."""
        from anyformer.rasp.drawing import draw

        draw(self, path, tokens)

    def require(self, tokens: List[Any]) -> None:
        """Raise unless this is an input that the program was compiled for."""
        if not 1 <= len(tokens) <= self.max_length:
            raise AnyformerError(
                f"the program was compiled for 1 to {self.max_length} tokens, got {len(tokens)}; compile it for more"
            )
        for place, token in enumerate(tokens):
            if isinstance(self.vocab, Reals):
                number = isinstance(token, (int, float)) and self.vocab.low <= token <= self.vocab.high
                if not number:
                    wanted = f"a number in [{self.vocab.low:g}, {self.vocab.high:g}]"
                    raise AnyformerError(f"the token at position {place} must be {wanted}, got {token!r}")
            elif not isinstance(token, Hashable) or token not in self._ids:
                known = ", ".join(map(repr, self.vocab[:20])) + (", ..." if len(self.vocab) > 20 else "")
                raise AnyformerError(f"the token {token!r} at position {place} is not in the vocabulary: {known}")

    def decode(self, out: Tensor) -> list[Any]:
        """Values of one input from the network's outputs (n, 1 or 2)."""
        if out.shape[1] == 2 and not float(out[:, 1].detach().abs().max()) < FAULT:
            raise AnyformerError(f"{self.text} has no value on this input: it averages, compares or outputs something undefined")
        numbers = out[:, 0].tolist()
        if not bool(torch.isfinite(out[:, 0]).all()):
            raise AnyformerError(f"{self.text}: the network's output is not finite on this input")
        return self.outputs.decode(numbers)

    @property
    def layers(self) -> int:
        """Transformer layers: attention with the feed-forward part after it."""
        return len(self.heads)

    @property
    def heads(self) -> tuple[int, ...]:
        """Heads of each layer (0: a feed-forward part alone)."""
        return tuple(layer.heads for layer in layers(self.network))

    @property
    def units(self) -> tuple[int, ...]:
        """Hidden units of each layer."""
        return tuple(layer.units for layer in layers(self.network))

    @property
    def width(self) -> int:
        """Numbers in the stream of one position, the constant included."""
        return self.network.embedding.shape[1]

    @property
    def parameters(self) -> int:
        """Numbers in the embedding, position table, probes, maps and read-out."""
        return sum(t.numel() for t in self.network.tensors())

    def __str__(self) -> str:
        claim = f"error at most {self.error:.3g}" if self.error else "exact to rounding"
        kind = str(self.network.embedding.dtype).removeprefix("torch.")
        return (
            f"{self.text}: {self.layers} layers, heads {list(self.heads)}, units {list(self.units)}, width {self.width}, "
            f"{self.parameters:,} numbers, {kind}, {self.mode} mode, {claim}, compiled in {self.seconds:.3g} s"
        )


def check_against_interpreter(compiled: CompiledProgram, program: Sequence, rows: int = 6) -> None:
    """Raise where the network and the interpreter differ: on one token, on the longest inputs (all equal, the extremes, random) and between."""
    for tokens in edge_inputs(compiled, rows):
        wanted: Any = None
        with contextlib.suppress(AnyformerError):
            wanted = interpret(program, tokens)
        try:
            got: Any = compiled(tokens)
        except AnyformerError as reason:
            if wanted is not None:
                raise AnyformerError(f"the compiled {compiled.text} fails on {shown(tokens)}: {reason}") from None
            continue
        if wanted is None or not agree(got, wanted, compiled.error, TOLERANCE[compiled.network.embedding.dtype]):
            meant = "no value" if wanted is None else shown(wanted)
            raise AnyformerError(
                f"the compiled {compiled.text} differs from its meaning on {shown(tokens)}: {shown(got)} for {meant}"
            )


def edge_inputs(compiled: CompiledProgram, rows: int, longest: int = 64) -> list[list[Any]]:
    """Inputs at the edges of what the program was compiled for, and random ones between, from a fixed seed."""
    draw = random.Random(0)
    n, vocab = min(compiled.max_length, longest), compiled.vocab

    def token() -> Any:
        return draw.uniform(vocab.low, vocab.high) if isinstance(vocab, Reals) else draw.choice(vocab)

    ends = [vocab.low, vocab.high] if isinstance(vocab, Reals) else [vocab[0], vocab[-1]]
    found = [[end] for end in ends] + [[end] * n for end in ends]
    lengths = [n] + [draw.randint(1, n) for _ in range(rows - 1)]
    return found + [[token() for _ in range(k)] for k in lengths]


def agree(got: list[Any], wanted: list[Any], error: float = 0.0, rounding: float = 1e-9) -> bool:
    """Whether two lists of values are the same: words exactly, numbers up to an error and rounding."""
    if len(got) != len(wanted):
        return False
    for a, b in zip(got, wanted, strict=True):
        if isinstance(a, (int, float)) and isinstance(b, (int, float)):
            if not abs(a - b) <= error + rounding * (1.0 + abs(b)):
                return False
        elif a != b:
            return False
    return True


def shown(values: List[Any], most: int = 12) -> str:
    """A few values as text."""
    text = ", ".join(f"{v:.6g}" if isinstance(v, float) else repr(v) for v in values[:most])
    return f"[{text}{', ...' if len(values) > most else ''}]"
