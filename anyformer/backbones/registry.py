"""The table of machines: name -> class. Commands, costs and the loader of programs read this table and nothing else."""

from anyformer.backbones.machine import Machine
from anyformer.backbones.path_tree import Chain, Looped, PathTree
from anyformer.backbones.random_backbone import Random
from anyformer.errors import AnyformerError

MACHINES: dict[str, type[Machine]] = {}


def register_machine(machine: type[Machine]) -> type[Machine]:
    """Add a machine under its name (usable as a decorator)."""
    if MACHINES.setdefault(machine.name, machine) is not machine:
        raise AnyformerError(f"a machine called {machine.name!r} is registered already; choose another name")
    return machine


for _machine in (PathTree, Looped, Chain, Random):
    register_machine(_machine)
