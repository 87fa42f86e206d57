"""Programs in the ``.rasp`` language as a whole: files that load files, the names they define, and the expression they end in."""

import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from lark import Tree

from anyformer.errors import AnyformerError
from anyformer.rasp.language.evaluator import Evaluator, Trace
from anyformer.rasp.language.kinds import Argument, Ran, as_input, is_atom, kind, parsed_number
from anyformer.rasp.language.parser import parse, parse_expression
from anyformer.rasp.language.places import Place, RaspError
from anyformer.rasp.language.primitives import ADDED, RESERVED
from anyformer.rasp.language.running import run
from anyformer.rasp.language.scopes import Function, Scope
from anyformer.rasp.sequences import Selector, Sequence, lift, tokens

SUFFIX = ".rasp"
EXAMPLE = "hello"


class Left(Exception):
    """``exit`` was said."""


@cache
def _library() -> list[Tree]:
    return parse(files("anyformer.rasp.language").joinpath("library.rasp").read_text(encoding="utf-8"), "library.rasp")


class Environment:
    """What a program defines. ``environment["name"]`` is a sequence or a selector (or an atom, a list, a dictionary, a function);
    ``result`` is the last sequence or selector that the program evaluated or assigned; ``example`` the input that it set, or "hello"."""

    def __init__(self, folder: Path | None = None) -> None:
        self.trace = Trace()
        self._stood: dict[int, tuple[Sequence | Selector, Place]] = {}
        self.examples: dict[str, list[Any]] = {"s-op": list(EXAMPLE), "selector": list(EXAMPLE)}
        self.shows = {"s-op": True, "selector": True}
        self.wide = False
        self.result: Sequence | Selector | None = None
        self.folder = folder or Path()
        self._loading: list[Path] = []
        self._base = Scope(is_library=True, names=RESERVED | ADDED | {"tokens": tokens})
        library = Evaluator(self._base, self.trace, self._example, "library.rasp")
        for statement in _library():
            library.execute(statement)
        self._scope = Scope(self._base, is_program=True)

    def _example(self) -> list[Any]:
        return self.examples["s-op"]

    @property
    def example(self) -> list[Any]:
        """The tokens that the program set with ``set example``."""
        return list(self._example())

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the program defines, in the order in which it first does."""
        return tuple(name for name in self._scope.names if name != "out")

    def __getitem__(self, name: str) -> Any:
        """The value of a name of the program or of the library."""
        return self._scope.find(name, Place(1, 1))

    def __contains__(self, name: str) -> bool:
        return name in self._scope.visible()

    def evaluate(self, expression: str, file: str = "") -> Any:
        """The value of an expression of the language, in which the program's names hold. Errors say that it stands in ``file``."""
        value = Evaluator(self._scope, self.trace, self._example, file).value(parse_expression(expression, file))
        self._stands(value, Place(1, 1, file))
        return value

    def _stands(self, value: Any, place: Place) -> None:
        """Where an expression is asked for: it fails there if the program does not build it (``tokens_int;``)."""
        if isinstance(value, (Sequence, Selector)):
            self._stood[id(value)] = (value, place)

    def place(self, expression: Sequence | Selector) -> Place | None:
        """Where the program builds a sequence or a selector; None for those of the language itself."""
        known = self.trace.places.get(id(expression))
        return None if known is None else known[1]

    def run(self, program: Sequence | Selector, tokens: list[Any], *, causal: bool = False) -> Any:
        """The values of a sequence on some tokens, or the matrix (queries, keys) of a selector, in float64."""
        _, place = self._stood.get(id(program), (program, None))
        return run(program, tokens, self.trace.places, place, causal=causal)

    def execute(self, statement: Tree) -> list[tuple[str, Any]]:
        """Run one statement of the program itself; returns what a prompt shows of it, names and values."""
        return self._execute(statement, Evaluator(self._scope, self.trace, self._example), self.folder)

    def execute_file(self, path: Path) -> None:
        """Run a file as the program itself."""
        self._file(path, self._scope)

    def _execute(self, statement: Tree, evaluator: Evaluator, folder: Path) -> list[tuple[str, Any]]:
        if statement.data == "load":
            return self._load(statement, evaluator, folder)
        if str(statement.data) in _COMMANDS:
            return _COMMANDS[str(statement.data)](self, statement, evaluator)
        shown = evaluator.execute(statement)
        if statement.data in ("evaluate", "assign"):
            value = shown[-1][1]
            if isinstance(value, Ran):
                value = value.program
            else:
                evaluator.scope.names["out"] = value
            self._stands(value, evaluator.place(cast(Tree, statement.children[-1])))
            if evaluator.scope is self._scope and isinstance(value, (Sequence, Selector)):
                self.result = value
        return shown

    def _load(self, statement: Tree, evaluator: Evaluator, folder: Path) -> list[tuple[str, Any]]:
        place, name = evaluator.place(statement), str(statement.children[1])[1:-1]
        choices = list(dict.fromkeys(base / f"{name}{SUFFIX}" for base in (folder, Path())))
        path = next((choice for choice in choices if choice.is_file()), None)
        if path is None:
            raise RaspError(place, f"there is no file {' or '.join(map(str, choices))} to load")
        if path.resolve() in self._loading:
            chain = " loads ".join(p.name for p in [*self._loading[self._loading.index(path.resolve()) :], path])
            raise RaspError(place, f"files load each other in a circle: {chain}")
        shows = dict(self.shows)
        try:
            shown = self._file(path, Scope(self._base, evaluator.scope, is_program=True))
        finally:
            self.shows = shows
        return list({name: (name, value) for name, value in shown if not name.startswith("_") and name != "out"}.values())

    def _file(self, path: Path, scope: Scope) -> list[tuple[str, Any]]:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise AnyformerError(f"{path} is no UTF-8 text") from None
        self._loading.append(path.resolve())
        shown: list[tuple[str, Any]] = []
        evaluator = Evaluator(scope, self.trace, self._example, str(path))
        try:
            for statement in parse(text, str(path)):
                shown += self._execute(statement, evaluator, path.parent)
        except Left:
            pass
        finally:
            self._loading.pop()
        return shown

    # commands to the prompt, which a file may hold too

    def _set_example(self, statement: Tree, evaluator: Evaluator) -> list[tuple[str, Any]]:
        tree = statement.children[1]
        assert isinstance(tree, Tree)
        example = as_input(Argument(evaluator.value(tree), evaluator.place(tree)))
        for which in _subset(statement):
            self.examples[which] = example
        return []

    def _show_example(self, statement: Tree, evaluator: Evaluator) -> list[tuple[str, Any]]:
        return [(f"{which} example", self.examples[which]) for which in _subset(statement)]

    def _set_examples(self, statement: Tree, evaluator: Evaluator) -> list[tuple[str, Any]]:
        for which in _subset(statement):
            self.shows[which] = str(statement.children[0]).endswith("on")
        return []

    def _set_display(self, statement: Tree, evaluator: Evaluator) -> list[tuple[str, Any]]:
        self.wide = str(statement.children[0]).endswith("on")
        return []

    def _leave(self, statement: Tree, evaluator: Evaluator) -> list[tuple[str, Any]]:
        raise Left


_COMMANDS = {
    "set_example": Environment._set_example,
    "show_example": Environment._show_example,
    "examples": Environment._set_examples,
    "display": Environment._set_display,
    "leave": Environment._leave,
}


def _subset(statement: Tree) -> tuple[str, ...]:
    words = str(statement.children[0]).split()
    return tuple(which for which in ("s-op", "selector") if which in words) or ("s-op", "selector")


NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")


def read_input(text: str) -> list[Any]:
    """Tokens from a command line: numbers (or True and False) where commas separate such (one number: ``7,``), else every character is
    a token."""
    words = [word.strip() for word in text.strip().removesuffix(",").split(",")]
    if not text:
        raise AnyformerError("an input needs at least one token, got none")
    if "," in text and all(map(NUMBER.fullmatch, words)):
        return [parsed_number(word, Place(1, 1, "the input")) for word in words]
    if "," in text and all(word in ("True", "False") for word in words):
        return [word == "True" for word in words]
    return list(text)


def load_rasp(program: Path | str) -> Environment:
    """Read a program in the ``.rasp`` language: a file (a ``Path``, or a string that ends in ".rasp"), or the text itself."""
    if isinstance(program, str) and not program.endswith(SUFFIX):
        environment = Environment()
        try:
            for statement in parse(program):
                environment.execute(statement)
        except Left:
            pass
        return environment
    path = Path(program)
    environment = Environment(path.parent)
    environment.execute_file(path)
    return environment


def run_rasp(program: Path | str, tokens: Any, name: str | None = None, *, causal: bool = False) -> Any:
    """Read a program (see :func:`load_rasp`) and run on ``tokens`` (a string, or a list) what it ends in, or the expression ``name``. Returns a
    list of values, or the matrix (queries, keys) of a selector."""
    environment = load_rasp(program)
    given = Argument(list(tokens) if isinstance(tokens, (list, tuple, str)) else tokens, Place(1, 1))
    return environment.run(chosen(environment, name), as_input(given), causal=causal)


def chosen(environment: Environment, name: str | None) -> Sequence | Selector:
    """What the program ends in, or the expression ``name``; an atom is the same value everywhere."""
    if name is None:
        if environment.result is None:
            functions = [key for key in environment.names if isinstance(environment[key], Function)]
            hint = f", for instance {environment[functions[-1]]}" if functions else ""
            raise AnyformerError(f"the program ends in no sequence and no selector; name an expression{hint}")
        return environment.result
    value = environment.evaluate(name, repr(name))
    if isinstance(value, Ran):
        return value.program
    if is_atom(value):
        return lift(value)
    if not isinstance(value, (Sequence, Selector)):
        raise AnyformerError(f"{name} is {kind(value)}; a sequence or a selector is needed")
    return value
