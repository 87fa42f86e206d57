"""What is learned on a frozen machine: its choices, as a value (:class:`~anyformer.learning.models.Model`)."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from anyformer import philox
from anyformer.backbones.frozen import Frozen, FrozenMasked, FrozenRecipe
from anyformer.backbones.frozen.unfolded import block_maps
from anyformer.errors import AnyformerError, require_choice
from anyformer.learning.learner import COORDINATES, READOUTS, LearnedProgram
from anyformer.learning.models import FIRST_STREAM, Model, draw_tables, require_std
from anyformer.memory import require_memory
from anyformer.tasks import Task

SELF_TOKENS = 0.1
"""Standard deviation of token rows in a head that starts by attending to itself."""


@dataclass(frozen=True, kw_only=True)
class FrozenMachine(Model):
    """A program for the machine of ``recipe``: E, and where stated position rows, and U are trained; nothing else.

    What the paper leaves open:

    * ``positions``: learned position rows, or none (a causal mask alone orders tokens, but nothing here learned k-hop so).
    * ``readout``: "free" (U, m x out), or "shared": one matrix on the sum of the leaves, on masked machines and in "reads".
    * ``coordinates``: E itself, or its "reads" (random machines of attention alone; :mod:`anyformer.learning.learner`).
    * ``train_norms``: also the gains and biases of LayerNorms, which are 1 and 0 otherwise.
    * All is drawn normal: token rows with ``embedding_std``, position rows with ``position_std`` (None: the same), U with
      ``readout_std`` (None: 1/sqrt(its rows)).
    * ``self_heads``: where it is not 0, the last head of every layer starts by attending to its own position, its key rows equal to
      its query rows (positions with this standard deviation, tokens with SELF_TOKENS): attention alone then starts as something
      like a residual network, and deep paths carry a signal. Masked machines, and "reads".
    * ``products``: dtype of products with dense frozen maps; "bfloat16" is faster where the processor has it.
    """

    recipe: FrozenRecipe
    positions: bool = True
    readout: str = "free"
    coordinates: str = "embedding"
    train_norms: bool = False
    embedding_std: float = 0.5
    position_std: float | None = None
    readout_std: float | None = None
    self_heads: float = 0.0
    products: str = "float32"

    def __post_init__(self) -> None:
        owner = "FrozenMachine"
        if not isinstance(self.recipe, FrozenRecipe):
            raise AnyformerError(f"{owner}: recipe must be that of a frozen machine, got {type(self.recipe).__name__}")
        require_choice(owner, "readout", self.readout, READOUTS)
        require_choice(owner, "coordinates", self.coordinates, COORDINATES)
        require_choice(owner, "products", self.products, ("float32", "bfloat16"))
        if self.products != "float32" and self.coordinates == "reads":
            raise AnyformerError(
                f'{owner}: products="{self.products}" has no effect with coordinates="reads", which multiply by no dense map: leave it out'
            )
        for name in ("positions", "train_norms"):
            require_choice(owner, name, getattr(self, name), (True, False))
        for name in ("embedding_std", "position_std", "readout_std"):
            require_std(owner, name, getattr(self, name))
        if self.self_heads != 0:
            require_std(owner, "self_heads", self.self_heads)
            if not self.positions:
                raise AnyformerError(f"{owner}: self_heads needs positions, by which a head finds its own place")

    def build(self, task: Task, seed: int) -> LearnedProgram:
        out = self.recipe.network_class.outputs
        if out != task.vocab:
            raise AnyformerError(
                f"FrozenMachine for {type(task).__name__}: the machine's leaves have {out} columns, the task {task.vocab} tokens; give both one"
            )
        places = task.length if self.positions else 0
        require_memory(16 * self.recipe.m * (2 * task.vocab + places), "training this program")
        learner = LearnedProgram(
            _machine(self.recipe),
            task.vocab,
            places or None,
            readout=self.readout,
            coordinates=self.coordinates,
            norms=self.train_norms,
            token_names=task.token_names,
            products=None if self.products == "float32" else torch.bfloat16,
        )
        positions = self.embedding_std if self.position_std is None else self.position_std
        readout = len(learner.readout) ** -0.5 if self.readout_std is None else self.readout_std
        draw_tables(seed, [(learner.tokens, self.embedding_std), (learner.positions, positions), (learner.readout, readout)])
        if self.self_heads:
            self._attend_to_self(learner, seed)
        return learner

    @torch.no_grad()
    def _attend_to_self(self, learner: LearnedProgram, seed: int) -> None:
        """Give the last head of every node keys that are its queries."""
        machine, d = learner.runs_on, self.recipe.attention.head_dim
        if not isinstance(machine, FrozenMasked):
            raise AnyformerError("FrozenMachine: self_heads needs a masked machine, or coordinates='reads' on a random one")
        nodes = [at for layer in block_maps(machine.recipe) for at in layer.read_at]
        for i, (table, std) in enumerate(((learner.tokens, SELF_TOKENS), (learner.positions, self.self_heads))):
            assert table is not None
            drawn = torch.from_numpy(philox.gaussian(seed, FIRST_STREAM + 8 + i, (len(nodes), len(table), d), std))
            for at, rows in zip(nodes, drawn, strict=True):
                query = at + 2 * d * (self.recipe.attention.heads - 1)
                table[:, query : query + d] = table[:, query + d : query + 2 * d] = rows.to(table)

    def save(self, learner: nn.Module, folder: str | Path) -> None:
        assert isinstance(learner, LearnedProgram)
        learner.program().save(folder)


@lru_cache(maxsize=2)
def _machine(recipe: FrozenRecipe) -> Frozen:
    """The machine; programs of one recipe share it while they are trained side by side (a learner that moves to a device takes a copy along)."""
    return recipe.machine_type(recipe)
