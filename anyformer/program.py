"""A program: what changes while the backbone stays. The embedding of a fixed transformer, and nothing of its weights.

    state_0[token t at position p] = token column t + position column p + constants       (m coordinates)

Columns that are the same for every token are stored once (``constants``); position columns only where a position reaches.
The file is a folder: ``config.json`` + ``model.safetensors`` + a card; it holds the *recipe* of its machine, never its weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.classes import NetworkClass
from anyformer.errors import AnyformerError, require_size
from anyformer.memory import approximate, human_bytes, require_memory
from anyformer.network import check_positions, check_tokens
from anyformer.operators import Context
from anyformer.recipe import Recipe
from anyformer.spec import Spec
from anyformer.storage import patiently, read_folder, write_folder

KIND = "anyformer-program"
DENSE_LIMIT = 2**31
"""``Program.embedding`` refuses to build a dense view above this many bytes."""


@dataclass(frozen=True)
class Placement(Spec):
    """Where a smaller target stands inside a larger machine: its stages are the machine's ``stages``, the branches of its banks the
    machine's ``branches`` (stage by stage and bank by bank; a number: so many of the first ones), its outputs the first ``outputs``."""

    stages: tuple[int, ...]
    branches: tuple[tuple[tuple[int, ...] | int, ...], ...]
    outputs: int

    def __post_init__(self) -> None:
        require_size("Placement", "outputs", self.outputs)
        if len(self.stages) != len(self.branches):
            raise AnyformerError(f"Placement: {len(self.stages)} stages, branches of {len(self.branches)}")
        for i in self.stages:
            require_size("Placement", "a stage", i, 0)
        for bank in (bank for stage in self.branches for bank in stage):
            for i in bank if isinstance(bank, tuple) else (bank,):
                require_size("Placement", "a branch", i, 0)
        if any(later <= earlier for earlier, later in zip(self.stages, self.stages[1:], strict=False)):
            raise AnyformerError(f"Placement: stages must increase, got {self.stages}")


@dataclass(frozen=True, eq=False)
class Program:
    """The embedding of a machine, in its columns.

    tokens (vocab, a) at coordinates ``token_at`` (a,); positions (n_max, b) at ``position_at`` (b,), or None; constants (c,) at
    ``constant_at`` (c,), None: at the first c; coordinates in none of them are 0. ``readout`` (width, out) is None where the
    read-out is the machine's own; ``norms`` (norms, 2, width) are gains and biases of norms that a machine leaves to its programs.
    ``recipe`` says which machine, ``fingerprint`` is its name. ``placement`` is None where the program fills its machine.
    """

    recipe: Recipe
    width: int
    tokens: Float[Tensor, "vocab a"]
    token_at: Int[Tensor, "a"]
    positions: Float[Tensor, "n_max b"] | None = None
    position_at: Int[Tensor, "b"] | None = None
    constants: Float[Tensor, "c"] | None = None
    constant_at: Int[Tensor, "c"] | None = None
    readout: Float[Tensor, "m out"] | None = None
    norms: Float[Tensor, "norms 2 m"] | None = None
    token_names: tuple[str, ...] | None = None
    placement: Placement | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise AnyformerError(f"this program is not well formed: {problem}")

    def __repr__(self) -> str:
        places = "" if self.positions is None else f" + {self.positions.shape[0]} positions"
        kind = str(self.dtype).removeprefix("torch.")
        machine = type(self.recipe).__name__.removesuffix("Recipe")
        return f"Program({self.vocab} tokens{places} x {self.width}, {kind}; for {machine} {self.fingerprint[:8]}...)"

    @property
    def fingerprint(self) -> str:
        """sha256 of the recipe: the name of the machine that this program is for."""
        return self.recipe.digest()

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.tokens.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the columns."""
        return self.tokens.dtype

    @property
    def parameters(self) -> int:
        """How many numbers the program stores."""
        return sum(t.numel() for t in (self.tokens, self.positions, self.constants, self.readout, self.norms) if t is not None)

    @property
    def embedding(self) -> Float[Tensor, "vocab m"]:
        """E, dense: token columns and constants. Refused above 2 GiB."""
        return self._dense(self.tokens, self.token_at, self.constants)

    @property
    def position_embedding(self) -> Float[Tensor, "n_max m"] | None:
        """The position rows, dense, or None."""
        return None if self.positions is None else self._dense(self.positions, self.position_at, None)

    def _dense(self, rows: Tensor, at: Tensor | None, constants: Tensor | None) -> Tensor:
        size = rows.shape[0] * self.width * rows.element_size()
        if size > DENSE_LIMIT:
            raise AnyformerError(
                f"the dense embedding needs {human_bytes(size)}, over the limit of 2 GiB; use the columns instead"
            )
        require_memory(size, "the dense embedding")
        return self._place(rows, at, constants)

    def _covers(self, at: Tensor) -> bool:
        """Whether columns ``at`` are all coordinates in their order."""
        return len(at) == self.width and bool((at == torch.arange(self.width, device=at.device)).all())

    def _place(self, rows: Tensor, at: Tensor | None, constants: Tensor | None) -> Tensor:
        assert at is not None
        if self._covers(at):
            return rows
        out = rows.new_zeros(*rows.shape[:-1], self.width)
        out = out.index_copy(-1, at, rows)
        if constants is None:
            return out
        if self.constant_at is None:
            return torch.cat((constants.expand(*rows.shape[:-1], -1), out[..., len(constants) :]), -1)
        return out.index_copy(-1, self.constant_at, constants.expand(*rows.shape[:-1], -1))

    def state(self, tokens: Int[Tensor, "batch n"], ctx: Context) -> Float[Tensor, "batch n m"]:
        """The machine's first stream for a batch. Raises for token ids or positions that have no row."""
        check_tokens(tokens, self.vocab)
        require_memory(tokens.numel() * self.width * self.tokens.element_size(), f"the stream of {tuple(tokens.shape)} tokens")
        state = self._place(F.embedding(tokens.long(), self.tokens), self.token_at, self.constants)
        if self.positions is None:
            return state
        assert self.position_at is not None
        check_positions(ctx.positions, self.positions.shape[0])
        rows = F.embedding(ctx.positions, self.positions)
        return state + rows if self._covers(self.position_at) else state.index_add(-1, self.position_at, rows)

    def to(self, target: torch.dtype | torch.device | str) -> "Program":
        """The same program with columns of another dtype, or on another device."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        if isinstance(target, torch.dtype):
            tensors = {name: value for name, value in tensors.items() if value.is_floating_point()}
        return replace(self, **{name: value.to(target) for name, value in tensors.items()})

    def detach(self) -> "Program":
        """The same numbers, outside of any gradient graph."""
        return replace(self, **{k: v.detach() for k, v in vars(self).items() if isinstance(v, Tensor)})

    def token_ids(self, text: str) -> list[int]:
        """Token names (or ids) separated by white space, as ids; raises with the names that exist."""
        names = {name: i for i, name in enumerate(self.token_names or ())}
        ids = []
        for word in text.split():
            if word in names:
                ids.append(names[word])
            elif word.isascii() and word.isdigit() and len(word) <= 18 and not self.token_names and int(word) < self.vocab:
                ids.append(int(word))
            else:
                known = " ".join(self.token_names) if self.token_names else f"ids 0..{self.vocab - 1}"
                raise AnyformerError(f"unknown token {word!r}; this program knows {known}")
        if not ids:
            raise AnyformerError("no tokens given; expected at least one, separated by spaces")
        return ids

    def save(self, folder: str | Path) -> None:
        """Write the program (detached) to a folder, atomically: a killed save leaves the old program whole."""
        tensors = {n: v for n in TENSORS if (v := getattr(self, n)) is not None}
        about = {
            "recipe": self.recipe.to_json(),
            "fingerprint": self.fingerprint,
            "width": self.width,
            "token_names": None if self.token_names is None else list(self.token_names),
            "placement": None if self.placement is None else self.placement.to_json(),
            "provenance": self.provenance,
            "report": self.report,
        }
        write_folder(folder, KIND, about, tensors, self._card())

    def _card(self) -> str:
        verified = "not verified" if self.report is None else f"verified: {self.report}"
        return (
            f"# An anyformer program\n\nThe input embedding of a fixed transformer ({type(self.recipe).__name__}, width {self.width}): "
            f"{self.parameters} numbers for {self.vocab} tokens. {verified}.\n\n"
            "```python\nimport anyformer as af\nprogram = af.load('this folder')\nmachine = program.machine()\n```\n"
        )

    def machine(self) -> Any:
        """Build the machine that this program is for, from its recipe."""
        return self.recipe.machine()


TENSORS = ("tokens", "token_at", "positions", "position_at", "constants", "constant_at", "readout", "norms")


@patiently
def load(folder: str | Path) -> Program:
    """Read a program. Format version, fingerprint, names, dtypes and shapes are checked before any tensor is read; then the
    checksum, finiteness and the coordinates. Raises :class:`AnyformerError` in one line."""
    stored = read_folder(folder, KIND)
    config = stored.config
    recipe = Recipe.from_json(config.get("recipe"))
    if recipe.digest() != config.get("fingerprint"):
        raise AnyformerError(f"{folder}: the recipe does not match its fingerprint; the file was changed, compile it again")
    if not isinstance(getattr(recipe, "network_class", None), NetworkClass):
        raise AnyformerError(f"{folder}: a {type(recipe).__name__} is not the recipe of a machine")
    width = recipe.machine_width()
    if width >= 2**62:
        raise AnyformerError(f"{folder}: a machine of width {approximate(width)} is past 64-bit integers")
    if width != config.get("width"):
        raise AnyformerError(f"{folder}: width {config.get('width')!r} is not the width {width} of its machine")
    floats = {stored.dtypes[n] for n in ("tokens", "positions", "constants", "readout", "norms") if n in stored.dtypes}
    if len(floats) != 1:
        raise AnyformerError(f"{folder}: columns must have one dtype, got {', '.join(sorted(map(str, floats))) or 'none'}")
    expected: dict[str, tuple[tuple[int | None, ...], torch.dtype | None]] = {}
    for name, at in (("tokens", "token_at"), ("positions", "position_at"), ("constants", "constant_at")):
        if name == "tokens" or name in stored.shapes or at in stored.shapes:
            count = (stored.shapes.get(name) or (0,))[-1]
            expected[name] = ((count,) if name == "constants" else (None, count), None)
            if name != "constants" or at in stored.shapes:
                expected[at] = ((count,), torch.int64)
    if "readout" in stored.shapes:
        expected["readout"] = ((width, None), None)
    if "norms" in stored.shapes:
        expected["norms"] = ((None, 2, width), None)
    stored.expect(expected)
    names = config.get("token_names")
    vocab = stored.shapes["tokens"][0]
    if names is not None and not (isinstance(names, list) and len(names) == vocab and all(isinstance(n, str) for n in names)):
        raise AnyformerError(f"{folder}: {vocab} token names expected")
    for name in ("provenance", "report"):
        if not isinstance(config.get(name), dict | None):
            raise AnyformerError(f"{folder}: its {name} is not a JSON object")
    require_memory(sum(8 * torch.Size(s).numel() for s in stored.shapes.values()), f"the program in {folder}")
    placement = None if config.get("placement") is None else Placement.from_json(config["placement"])
    tensors = stored.tensors()
    about: dict[str, Any] = tensors | {"provenance": config.get("provenance") or {}, "report": config.get("report")}
    try:
        return Program(
            recipe=recipe, width=width, token_names=None if names is None else tuple(names), placement=placement, **about
        )
    except AnyformerError as error:
        raise AnyformerError(f"{folder}: {error}") from None


def _problems(p: Program) -> Iterator[str]:
    """What does not fit together, the first one first."""
    if p.width != p.recipe.machine_width():
        yield f"width {p.width}, its machine has {p.recipe.machine_width()}"
    for name in ("tokens", "positions", "constants"):
        columns, at = getattr(p, name), getattr(p, f"{name.rstrip('s')}_at")
        yield from _column_problems(p, name, columns, at)
    written = [at for at in (p.token_at, p.constant_at) if at is not None]
    for what, at in (("coordinate", torch.cat(written)), ("position coordinate", p.position_at)):
        if at is not None and at.unique().numel() != at.numel():
            yield f"one {what} is written twice"
    if p.constants is not None and p.constant_at is None and bool((p.token_at < len(p.constants)).any()):
        yield "one coordinate is written twice"
    for name, shape in (("readout", (p.width, None)), ("norms", (None, 2, p.width))):
        value = getattr(p, name)
        if value is not None and not (
            value.dtype == p.tokens.dtype
            and value.ndim == len(shape)
            and all(want in (None, got) for want, got in zip(shape, value.shape, strict=True))
        ):
            yield f"{name} have shape {tuple(value.shape)} and dtype {value.dtype}, width is {p.width}, dtype {p.tokens.dtype}"
    names = p.token_names
    if names is not None and not (len(names) == p.vocab and all(isinstance(n, str) for n in names)):
        yield f"{p.vocab} token names expected, got {names!r:.80}"


def _column_problems(p: Program, name: str, columns: Tensor | None, at: Tensor | None) -> Iterator[str]:
    """What does not fit together in columns ``name`` and their coordinates."""
    if columns is None or (at is None and name != "constants"):
        if (columns is None) != (at is None):
            yield f"{name} and {name.rstrip('s')}_at go together"
        return
    if columns.ndim != (1 if name == "constants" else 2) or columns.shape[-1:] != (columns if at is None else at).shape[-1:]:
        yield f"{name} have shape {tuple(columns.shape)}" + ("" if at is None else f" for {tuple(at.shape)} coordinates")
    elif (at is None and len(columns) > p.width) or (
        at is not None and at.numel() and not 0 <= int(at.min()) <= int(at.max()) < p.width
    ):
        yield f"{name.rstrip('s')}_at points outside of the {p.width} coordinates"
    elif columns.dtype != p.tokens.dtype or not columns.is_floating_point():
        yield f"{name} are {columns.dtype}; all columns need one floating dtype"
