"""A learned program: the trainable embedding and read-out of a frozen machine.

    minimise over E (vocab, m), positions (n_max, m), U (m, out)  [and the norms' weights]:  -log softmax(machine(tokens; E, U))[label]

The machine holds no parameter; gradients are taken block by block of rows, so that a block's state stays in the cache.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.backbones.frozen import Frozen
from anyformer.errors import AnyformerError, require_choice
from anyformer.network import check_positions, check_tokens
from anyformer.operators import Context
from anyformer.program import Program
from anyformer.tasks import IGNORED

READOUTS = ("free", "shared")


class LearnedProgram(nn.Module):
    """Parameters ``tokens`` (vocab, m), ``positions`` (n_max, m) or None, ``readout`` and ``norms`` (K, 2, m) or None, on a frozen machine.

    ``readout="free"``: U (m, out). ``readout="shared"``: one matrix (d_in, out) that every leaf of a masked machine shares, 0 on its other
    coordinates: a restriction of U. Called with tokens (batch, n) it gives logits (batch, n, out).
    """

    leaves: Tensor

    def __init__(
        self,
        machine: Frozen,
        vocab: int,
        max_positions: int | None,
        *,
        readout: str = "free",
        norms: bool = False,
        token_names: tuple[str, ...] | None = None,
        rows: int = 16,
    ):
        super().__init__()
        require_choice("LearnedProgram", "readout", readout, READOUTS)
        m, out = machine.width, machine.network_class.outputs
        self._machine = [machine]  # in a list: the machine's maps are neither parameters nor buffers of the learner
        self.token_names, self.rows = token_names, rows
        self.tokens = nn.Parameter(torch.zeros(vocab, m))
        self.positions = None if max_positions is None else nn.Parameter(torch.zeros(max_positions, m))
        if readout == "shared":
            leaves = [block.start for block in machine.blocks() if block.what == "output"]
            if not leaves:
                raise AnyformerError(f'readout="shared" needs a machine with leaves; a {machine.name} machine mixes them: use "free"')
            self.register_buffer("leaves", torch.tensor(leaves), persistent=False)
        self.readout = nn.Parameter(torch.zeros(m if readout == "free" else out, out))
        trained = norms and machine.recipe.norms > 0
        self.norms = nn.Parameter(torch.tensor([1.0, 0.0])[:, None].repeat(machine.recipe.norms, 1, m)) if trained else None

    @property
    def machine(self) -> Frozen:
        """The frozen machine."""
        return self._machine[0]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.machine.to(self.tokens.device)  # its maps keep their dtype
        return self

    def full_readout(self) -> Float[Tensor, "m out"]:
        """U."""
        if not hasattr(self, "leaves"):
            return self.readout
        at = (self.leaves[:, None] + torch.arange(len(self.readout), device=self.readout.device)).flatten()
        spread = self.readout.repeat(len(self.leaves), 1)
        return self.readout.new_zeros(self.machine.width, self.readout.shape[1]).index_copy(0, at, spread)

    def tables(self) -> tuple[Tensor | None, ...]:
        """What the machine's run reads."""
        return self.machine.tables(self.tokens, self.positions, self.full_readout(), self.norms)

    def forward(self, tokens: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n out"]:
        """Logits."""
        self._check(tokens)
        tables = self.tables()
        return torch.cat([self.machine.logits(tables, part, Context.of(part)) for part in tokens.split(self.rows)])

    def gradients(self, inputs: Int[Tensor, "batch n"], labels: Int[Tensor, "batch n"], total: int | None = None) -> float:
        """The cross-entropy summed over scored positions over ``total`` of them (default: all of these), its gradients accumulated."""
        self._check(inputs)
        total = int((labels != IGNORED).sum()) if total is None else total
        tables = self.tables()
        held = [None if t is None else t.detach().requires_grad_() for t in tables]
        loss = 0.0
        for part, wanted in zip(inputs.split(self.rows), labels.split(self.rows), strict=True):
            logits = self.machine.logits(tuple(held), part, Context.of(part))
            share = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum") / total
            share.backward()
            loss += share.item()
        pairs = [(t, h.grad) for t, h in zip(tables, held, strict=True) if t is not None and h is not None and h.grad is not None]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        return loss

    def _check(self, tokens: Tensor) -> None:
        check_tokens(tokens, len(self.tokens))
        if self.positions is not None:
            check_positions(torch.tensor([tokens.shape[1] - 1]), len(self.positions))

    def program(self) -> Program:
        """The program as it stands."""
        m = self.machine.width
        places = None if self.positions is None else self.positions.detach().clone()
        return Program(
            recipe=self.machine.recipe,
            width=m,
            tokens=self.tokens.detach().clone(),
            token_at=torch.arange(m),
            positions=places,
            position_at=None if places is None else torch.arange(m),
            readout=self.full_readout().detach().clone(),
            norms=None if self.norms is None else self.norms.detach().clone(),
            token_names=self.token_names,
            provenance={"made_by": "training"},
        )
