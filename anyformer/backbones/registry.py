"""The table of machines: name -> class. Commands, costs and the loader of programs read this table and nothing else."""

from functools import lru_cache

from anyformer.backbones.machine import Machine
from anyformer.backbones.path_tree import Chain, Looped, PathTree
from anyformer.backbones.random_backbone import Random
from anyformer.errors import AnyformerError
from anyformer.spec import Spec

MACHINES: dict[str, type[Machine]] = {}


def register_machine(machine: type[Machine]) -> type[Machine]:
    """Add a machine under its name (usable as a decorator)."""
    if MACHINES.setdefault(machine.name, machine) is not machine:
        raise AnyformerError(f"a machine called {machine.name!r} is registered already; choose another name")
    return machine


for _machine in (PathTree, Looped, Chain, Random):
    register_machine(_machine)


def _machine_of(recipe: Spec) -> type[Machine]:
    for machine in MACHINES.values():
        if type(recipe) is machine.recipe_type:
            return machine
    raise AnyformerError(f"no registered machine has a recipe of type {type(recipe).__name__}; import the module that defines it")


@lru_cache(maxsize=4)
def build_machine(recipe: Spec) -> Machine:
    """The machine of a recipe; the last few are kept, since equal recipes mean equal machines."""
    return _machine_of(recipe)(recipe)


def recipe_width(recipe: Spec) -> int:
    """The width of a recipe's machine; nothing is built."""
    return _machine_of(recipe).width_of(recipe)
