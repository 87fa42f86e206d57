"""The table of machines: name -> class. Registering a machine also ties its recipe to it, which is all that loading a program needs."""

from anyformer.backbones.chain import Chain
from anyformer.backbones.composed import Composed
from anyformer.backbones.frozen import FrozenMasked, FrozenRandom
from anyformer.backbones.looped import Looped
from anyformer.backbones.machine import Machine
from anyformer.backbones.path_tree import PathTree
from anyformer.backbones.random_backbone import Random
from anyformer.backbones.stored import StoredProgram
from anyformer.errors import AnyformerError

MACHINES: dict[str, type[Machine]] = {}


def register_machine(machine: type[Machine]) -> type[Machine]:
    """Add a machine under its name (usable as a decorator)."""
    if MACHINES.setdefault(machine.name, machine) is not machine:
        raise AnyformerError(f"a machine called {machine.name!r} is registered already; choose another name")
    machine.recipe_type.machine_type = machine
    return machine


for _machine in (PathTree, Looped, Chain, Composed, Random, StoredProgram, FrozenMasked, FrozenRandom):
    register_machine(_machine)
