"""What is learned on a frozen machine: its choices, as a value (:class:`~anyformer.learning.models.Model`)."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from anyformer.backbones.frozen import Frozen, FrozenRecipe
from anyformer.errors import AnyformerError, require_choice
from anyformer.learning.learner import READOUTS, LearnedProgram
from anyformer.learning.models import Model, draw_tables, require_std
from anyformer.memory import require_memory
from anyformer.tasks import Task


@dataclass(frozen=True, kw_only=True)
class FrozenMachine(Model):
    """A program for the machine of ``recipe``: E, and where stated position rows, and U are trained; nothing else.

    What the paper leaves open: ``positions``: whether there are learned position rows (with a causal mask alone, tokens can be ordered,
    but slowly: our prototypes did not learn k-hop without). ``readout``: "free" (U, m x out) or "shared" (one matrix on the sum of
    the leaves, masked machines only). ``train_norms``: also the gains and biases of LayerNorms. All is drawn normal: token rows with
    ``embedding_std`` (0.5: small rows make attention flat, and an attention-only product of L flat layers has no gradient to
    speak of), position rows with ``position_std`` (None: the same), U with ``readout_std`` (None: 1/sqrt(rows of the matrix)).
    ``products`` is the dtype of products with dense frozen maps: "bfloat16" is faster where the processor has it.
    """

    recipe: FrozenRecipe
    positions: bool = True
    readout: str = "free"
    train_norms: bool = False
    embedding_std: float = 0.5
    position_std: float | None = None
    readout_std: float | None = None
    products: str = "float32"

    def __post_init__(self) -> None:
        owner = "FrozenMachine"
        if not isinstance(self.recipe, FrozenRecipe):
            raise AnyformerError(f"{owner}: recipe must be that of a frozen machine, got {type(self.recipe).__name__}")
        require_choice(owner, "readout", self.readout, READOUTS)
        require_choice(owner, "products", self.products, ("float32", "bfloat16"))
        for name in ("positions", "train_norms"):
            require_choice(owner, name, getattr(self, name), (True, False))
        for name in ("embedding_std", "position_std", "readout_std"):
            require_std(owner, name, getattr(self, name))

    def build(self, task: Task, seed: int) -> LearnedProgram:
        out = self.recipe.network_class.outputs
        if out != task.vocab:
            raise AnyformerError(
                f"{owner_and(task)}: the machine's leaves have {out} columns, the task {task.vocab} tokens; give both one"
            )
        places = task.length if self.positions else 0
        require_memory(16 * self.recipe.m * (2 * task.vocab + places), "training this program")
        machine = _machine(self.recipe, self.products)
        learner = LearnedProgram(
            machine,
            task.vocab,
            places or None,
            readout=self.readout,
            norms=self.train_norms,
            token_names=task.token_names,
        )
        positions = self.embedding_std if self.position_std is None else self.position_std
        readout = len(learner.readout) ** -0.5 if self.readout_std is None else self.readout_std
        draw_tables(seed, [(learner.tokens, self.embedding_std), (learner.positions, positions), (learner.readout, readout)])
        return learner

    def save(self, learner: nn.Module, folder: str | Path) -> None:
        assert isinstance(learner, LearnedProgram)
        learner.program().save(folder)


def owner_and(task: Task) -> str:
    """For an error: who met which task."""
    return f"FrozenMachine for {type(task).__name__}"


@lru_cache(maxsize=2)
def _machine(recipe: FrozenRecipe, products: str) -> Frozen:
    """The machine; programs of one recipe share it while they are trained side by side."""
    machine = type(recipe)._type()(recipe)
    machine.products = None if products == "float32" else torch.bfloat16
    return machine
