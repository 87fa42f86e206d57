"""A recipe: all that a fixed machine is made from, as a value. A program carries its machine's recipe, never its weights."""

from functools import lru_cache
from typing import Any, ClassVar

from anyformer.classes import NetworkClass
from anyformer.errors import AnyformerError
from anyformer.spec import Spec


class Recipe(Spec):
    """Base of recipes: frozen dataclasses with at least ``network_class``. ``machine_type`` is set when the machine that names this
    type as its ``recipe_type`` is registered."""

    network_class: NetworkClass
    machine_type: ClassVar[Any] = None

    def machine(self) -> Any:
        """The machine. The last few are kept, since equal recipes mean equal machines."""
        return _build(self)

    def machine_width(self) -> int:
        """The machine's width m; nothing is built."""
        return self._type().width_of(self)

    @classmethod
    def _type(cls) -> Any:
        if cls.machine_type is None:
            raise AnyformerError(
                f"no registered machine has a recipe of type {cls.__name__}; import the module that registers it"
            )
        return cls.machine_type


@lru_cache(maxsize=4)
def _build(recipe: Recipe) -> Any:
    return recipe._type()(recipe)
