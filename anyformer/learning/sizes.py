"""What a learner trains, what it leaves as it is, and the memory that training takes.

    bytes = 16 per trained number (itself, its gradient, AdamW's two memories) + frozen tensors + what is kept for the backward pass

The last is counted, not modelled: a forward pass of one row and one of two rows say what a row keeps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anyformer.backbones.frozen import FrozenRandom
from anyformer.learning.learner import LearnedProgram
from anyformer.memory import human_bytes
from anyformer.tasks import Task


@dataclass(frozen=True)
class Sizes:
    """``trained``: shapes by name; ``frozen``: how many numbers never move (of a 0/1 machine: the ones); ``machine``: what they are, or None;
    ``bytes``: about how much memory training takes."""

    trained: dict[str, tuple[int, ...]]
    frozen: int
    machine: str | None
    bytes: int
    by: str = ""
    """How E is trained, where there are two ways."""
    unit: str = "numbers"
    """What of the machine is counted."""

    @property
    def numbers(self) -> int:
        """How many are trained."""
        return sum(torch.Size(shape).numel() for shape in self.trained.values())

    def __str__(self) -> str:
        parts = [f"{name} {' x '.join(map(str, shape))}" for name, shape in self.trained.items()]
        more = f" and {len(parts) - 4} more" if len(parts) > 5 else ""
        shown = ", ".join(parts[: 4 if more else 5])
        frozen = (
            "nothing" if not self.frozen else f"{self.frozen:,} {self.unit}" + (f" of {self.machine}" if self.machine else "")
        )
        return f"trained: {self.numbers:,} numbers ({shown}{more}){self.by}\nfrozen: {frozen}\nmemory: about {human_bytes(self.bytes)}"


def sizes(learner: nn.Module, task: Task, rows: int) -> Sizes:
    """The sizes of training ``learner`` with batches of ``rows`` rows."""
    trained = {name: tuple(p.shape) for name, p in learner.named_parameters() if p.requires_grad}
    everything = learner.state_dict(keep_vars=True).values()
    frozen = sum(t.numel() for t in everything if not t.requires_grad)
    held = [*learner.parameters(), *learner.buffers()]
    machine, by, unit = None, "", "numbers"
    if isinstance(learner, LearnedProgram):
        if isinstance(learner.machine, FrozenRandom):
            by = "; E itself" if learner.runs_on is learner.machine else "; E by its reads, E R_all"
        elif not learner.machine.recipe.mlp:
            unit = "ones"
        frozen, machine = learner.machine.cost().nonzero_weights, repr(learner.machine)
        held += [*learner.machine.buffers()]
        rows = min(rows, learner.rows)
    elif frozen:
        machine = type(getattr(learner, "backbone", learner)).__name__
    inputs = task.batch(0, 0, 2).inputs.to(next(learner.parameters()).device)
    one, two = (_kept(learner, inputs[:n], held) for n in (1, 2))
    numbers = sum(torch.Size(shape).numel() for shape in trained.values())
    tensors = sum(t.numel() * t.element_size() for t in held if not t.requires_grad)
    return Sizes(trained, frozen, machine, 16 * numbers + tensors + max(0, one + (rows - 1) * (two - one)), by, unit)


def _kept(learner: nn.Module, inputs: Tensor, held: list[Tensor]) -> int:
    """Bytes that a forward pass keeps for the backward pass, beside the tensors that are there anyway."""
    kept: dict[int, int] = {}
    there = {t.untyped_storage().data_ptr() for t in held}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    state = torch.get_rng_state()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        learner(inputs)
    torch.set_rng_state(state)
    return sum(kept.values())
