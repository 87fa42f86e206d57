"""Scopes: what a name means where. A function's scope lies in the one it was defined in; a loaded file's lies in the library's.

    library  <-  program (the prompt, or a file)  <-  functions and comprehensions, nested

A file that is loaded gives its names to the program that loads it, except those that begin with an underscore.
"""

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from lark import Tree

from anyformer.rasp.language.places import Place, RaspError
from anyformer.rasp.language.primitives import ADDED, RESERVED, WORDS

SHADOWED = ("length", "full_s", "selector_width")
"""Names of the language that belong to the published library: a function may have a variable of that name."""


@dataclass(eq=False)
class Scope:
    """Names and values; ``outer`` is asked for what is not here. ``receiver`` is who loads this file."""

    outer: "Scope | None" = None
    receiver: "Scope | None" = None
    is_program: bool = False
    is_library: bool = False
    names: dict[str, Any] = field(default_factory=dict)

    def find(self, name: str, place: Place) -> Any:
        """The value of a name."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        near = get_close_matches(name, self.visible(), n=1)
        raise RaspError(place, f"there is no {name!r} here" + (f"; did you mean {near[0]!r}?" if near else ""))

    def visible(self) -> list[str]:
        """Every name that has a value here."""
        scope, names = self, dict[str, None]()
        while scope is not None:
            names |= dict.fromkeys(scope.names)
            scope = scope.outer
        return list(names)

    def set(self, name: str, value: Any, place: Place) -> None:
        """Give a name a value; in a file also to those who load it."""
        self.require_free(name, place)
        if self.is_program and self._of_library(name):
            raise RaspError(place, f"{name!r} is a name of the standard library; choose another one (functions may use it)")
        self.names[name] = value
        if self.receiver is not None and not name.startswith("_"):
            self.receiver.set(name, value, place)

    @staticmethod
    def require_free(name: str, place: Place) -> None:
        """Raise where the language itself uses a name."""
        if name in WORDS or (name in RESERVED and name not in SHADOWED):
            raise RaspError(place, f"{name!r} is a reserved name; choose another one")

    def _of_library(self, name: str) -> bool:
        scope = self.outer
        while scope is not None:
            if scope.is_library and name in scope.names and name not in ADDED and name != "tokens":
                return True
            scope = scope.outer
        return False


@dataclass(frozen=True, eq=False)
class Function:
    """A function of a program: its body runs in a new scope inside the one where it was defined."""

    name: str
    parameters: tuple[str, ...]
    body: list[Tree]
    result: Tree
    scope: Scope
    file: str

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.parameters)})"
