"""A learned program: the trainable embedding and read-out of a frozen machine.

    minimise over E (vocab, m), positions (n_max, m), U (m, out)  [and the norms' weights]:  -log softmax(machine(tokens; E, U))[label]

The machine holds no parameter; gradients are taken block by block of rows, so that a block's state stays in the cache.

On a random machine of attention alone, E may be trained in the coordinates of its reads: ``E = W R_all^+``. The machine then reads W itself, so
a gradient step on W does on any random machine what it does on 0/1 maps, while a step on E is distorted by R_all R_all^T.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.backbones.frozen import Frozen, FrozenMasked, FrozenRandom
from anyformer.backbones.frozen.tables import Tables, backward, leaves_of
from anyformer.backbones.random_backbone import Random, Weights, required_reads
from anyformer.errors import AnyformerError, require_choice
from anyformer.network import check_positions, check_tokens
from anyformer.operators import Context
from anyformer.program import Program
from anyformer.tasks import IGNORED

READOUTS = ("free", "shared")
COORDINATES = ("embedding", "reads")


def _on(machine: Frozen, device: torch.device) -> Frozen:
    """The machine on a device, its maps in their dtype: itself, or a copy, as other learners may share it."""
    if all(held.device == device for held in machine.buffers()):
        return machine
    return copy.deepcopy(machine).to(device)


class LearnedProgram(nn.Module):
    """Parameters ``tokens`` (vocab, m), ``positions`` (n_max, m) or None, ``readout`` and ``norms`` (K, 2, m) or None, on a frozen machine.

    ``readout="free"``: U (m, out). ``readout="shared"``: one matrix (d_in, out) that every leaf of a masked machine shares, 0 on its other
    coordinates: a restriction of U. Called with tokens (batch, n) it gives logits (batch, n, out), ``rows`` rows at a time (None: 64 of a
    machine that folds, 16 of one whose stream is m wide). ``products`` is the dtype of products with dense frozen maps (None: that of E).
    """

    leaves: Tensor

    def __init__(
        self,
        machine: Frozen,
        vocab: int,
        max_positions: int | None,
        *,
        readout: str = "free",
        coordinates: str = "embedding",
        norms: bool = False,
        token_names: tuple[str, ...] | None = None,
        rows: int | None = None,
        products: torch.dtype | None = None,
    ):
        super().__init__()
        require_choice("LearnedProgram", "readout", readout, READOUTS)
        require_choice("LearnedProgram", "coordinates", coordinates, COORDINATES)
        out = machine.network_class.outputs
        self._machines = [machine, machine]  # in a list: a machine's maps are neither parameters nor buffers of the learner
        self.token_names, self.products = token_names, products
        self.rows = rows or (64 if machine.recipe.folds else 16)
        if coordinates == "reads":
            self._require_reads(machine, readout)
            machine = self._machines[1] = FrozenMasked(FrozenMasked.recipe_for(machine.network_class))
        m = machine.width
        self.tokens = nn.Parameter(torch.zeros(vocab, m))
        self.positions = None if max_positions is None else nn.Parameter(torch.zeros(max_positions, m))
        if readout == "shared":
            leaves = [block.start for block in machine.blocks() if block.what == "output"]
            if not leaves:
                raise AnyformerError(
                    f'readout="shared" needs a machine with leaves; a {machine.name} machine mixes them: use "free"'
                )
            self.register_buffer("leaves", torch.tensor(leaves), persistent=False)
        self.readout = nn.Parameter(torch.zeros(m if readout == "free" else out, out))
        trained = norms and machine.recipe.norms > 0
        self.norms = nn.Parameter(torch.tensor([1.0, 0.0])[:, None].repeat(machine.recipe.norms, 1, m)) if trained else None

    @staticmethod
    def _require_reads(machine: Frozen, readout: str) -> None:
        if not (isinstance(machine, FrozenRandom) and machine.recipe.programmable):
            raise AnyformerError(
                'coordinates="reads" need a frozen-random machine of attention alone, at least as wide as its required reads '
                f"({required_reads(machine.network_class)}); got {machine!r}"
            )
        if readout != "shared":
            raise AnyformerError(
                'coordinates="reads" keep the machine\'s own U up to one matrix (d_in, out): give readout="shared"'
            )

    @property
    def machine(self) -> Frozen:
        """The frozen machine."""
        return self._machines[0]

    @property
    def runs_on(self) -> Frozen:
        """The machine that runs while learning: the 0/1 machine of the same class where E is trained by its reads."""
        return self._machines[1]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        machine, runs_on = self._machines
        moved = _on(machine, self.tokens.device)
        self._machines = [moved, moved if runs_on is machine else _on(runs_on, self.tokens.device)]
        return self

    def full_readout(self) -> Float[Tensor, "m out"]:
        """U."""
        if not hasattr(self, "leaves"):
            return self.readout
        at = (self.leaves[:, None] + torch.arange(len(self.readout), device=self.readout.device)).flatten()
        spread = self.readout.repeat(len(self.leaves), 1)
        return self.readout.new_zeros(self.runs_on.width, self.readout.shape[1]).index_copy(0, at, spread)

    def tables(self) -> Tables:
        """What the machine's run reads."""
        return self.runs_on.tables(self.tokens, self.positions, self.full_readout(), self.norms, self.products)

    def _logits(self, tables: Tables, tokens: Tensor, queries: Tensor | None = None) -> Tensor:
        """Logits of some unpadded rows: one row of positions, and so one mask, for all of them."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        return self.runs_on.logits(tables, tokens, Context(positions), queries=queries, products=self.products)

    def forward(self, tokens: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n out"]:
        """Logits."""
        self._check(tokens)
        tables = self.tables()
        return torch.cat([self._logits(tables, part) for part in tokens.split(self.rows)])

    def gradients(self, inputs: Int[Tensor, "batch n"], labels: Int[Tensor, "batch n"], total: int | None = None) -> float:
        """The cross-entropy summed over scored positions over ``total`` of them (default: all of these), its gradients accumulated."""
        self._check(inputs)
        if labels.shape != inputs.shape:
            raise AnyformerError(f"labels must have the shape {tuple(inputs.shape)} of the inputs, got {tuple(labels.shape)}")
        check_tokens(torch.where(labels == IGNORED, 0, labels), self.readout.shape[1])
        total = int((labels != IGNORED).sum()) if total is None else total
        if total < 1:
            raise AnyformerError(f"gradients of {total} scored positions: there must be one or more")
        tables = self.tables()
        held = leaves_of(tables)
        loss = 0.0
        for part, wanted, queries in self._blocks(inputs, labels):
            logits = self._logits(held, part, queries)
            share = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum") / total
            share.backward()
            loss += share.item()
        backward(tables, held)
        return loss

    def _blocks(self, inputs: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """The batch in blocks of rows: inputs, labels, and the places that are scored where they are few (then the labels are theirs).
        Under a causal mask nothing after a row's last scored place counts: rows are sorted by it, and blocks cut there."""
        scored = labels != IGNORED
        ends = (scored * torch.arange(1, labels.shape[1] + 1, device=labels.device)).amax(1)
        causal = self.machine.recipe.attention.mask.causal
        for rows in (torch.argsort(ends, stable=True) if causal else torch.arange(len(ends))).split(self.rows):
            n = int(ends[rows].max()) if causal else labels.shape[1]
            most = int(scored[rows].sum(1).max())
            if most == 0:
                continue
            if 2 * most > n:
                yield inputs[rows, :n], labels[rows, :n], None
            else:
                queries = torch.argsort((~scored[rows, :n]).int(), dim=1, stable=True)[:, :most]
                yield inputs[rows, :n], labels[rows, :n].gather(1, queries), queries

    def _check(self, tokens: Tensor) -> None:
        check_tokens(tokens, len(self.tokens))
        if self.positions is not None:
            check_positions(torch.tensor([tokens.shape[1] - 1]), len(self.positions))

    def program(self) -> Program:
        """The program as it stands."""
        machine = self.machine
        tokens, places, readout = self.tokens.detach(), self.positions, self.full_readout().detach()
        places = None if places is None else places.detach()
        if self.runs_on is not machine:
            tokens, places, readout = self._embedding(tokens, places)
        return Program(
            recipe=machine.recipe,
            width=machine.width,
            tokens=tokens.clone(),
            token_at=torch.arange(machine.width),
            positions=None if places is None else places.clone(),
            position_at=None if places is None else torch.arange(machine.width),
            readout=readout.clone(),
            norms=None if self.norms is None else self.norms.detach().clone(),
            token_names=self.token_names,
            provenance={"made_by": "training"},
        )

    def _embedding(self, tokens: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """``E = W R_all^+`` and U times the trained matrix, in float64 on the way."""
        random = Random(self.machine.recipe.maps())
        rows = tokens if places is None else torch.cat((tokens, places))
        embedding = random.solve(rows.double().cpu()).to(rows)
        readout = Weights(random.recipe).readout(self.machine.network_class.outputs) @ self.readout.detach().double().cpu()
        split = embedding.split([len(tokens), len(rows) - len(tokens)])
        return split[0], None if places is None else split[1], readout.to(rows)
