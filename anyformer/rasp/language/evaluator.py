"""The evaluator: statements of a program, one after the other. It computes atoms, lists and dictionaries at once; of sequences and
selectors it builds the expression, which :func:`anyformer.rasp.interpret` runs and the compiler compiles.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lark import Token, Tree

from anyformer.rasp.language.kinds import (
    MOST_ITEMS,
    Argument,
    Predicate,
    Primitive,
    Ran,
    as_input,
    as_integer,
    as_selector,
    as_sequence,
    calculate,
    is_atom,
    kind,
    parsed_number,
    within,
)
from anyformer.rasp.language.places import Place, RaspError
from anyformer.rasp.language.running import Places, run
from anyformer.rasp.language.scopes import Function, Scope
from anyformer.rasp.operations import OPERATIONS, Operation
from anyformer.rasp.sequences import EQ, Elementwise, Selector, Sequence, aggregate, full, indices, length, select, where

OPERATORS = {
    "+": "add", "-": "sub", "*": "mul", "/": "div", "%": "mod", "^": "pow",
    "==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge", "and": "and", "or": "or",
}  # fmt: skip
MOST_CALLS = 50


@dataclass(frozen=True)
class Drawing:
    """What ``draw(program, input)`` gives to a prompt: the run, and the matrix of every selector in it."""

    ran: Ran
    selected: Callable[[Selector], Any]


@dataclass
class Trace:
    """What all evaluators of a session share: where every expression was written, and how deep calls are nested."""

    places: Places = field(default_factory=dict)
    labelled: set[int] = field(default_factory=set)
    calls: int = 0
    anchor: Place | None = None
    """The call of a library function that is being evaluated: what happens in it is said to happen there."""


class Evaluator:
    """Statements and expressions in one scope. ``example`` gives the tokens to draw on."""

    def __init__(self, scope: Scope, trace: Trace, example: Callable[[], list[Any]], file: str = ""):
        self.scope = scope
        self.trace = trace
        self.example = example
        self.file = file

    # statements: each returns what a prompt shows, a list of (name, value)

    def execute(self, statement: Tree) -> list[tuple[str, Any]]:
        """Run one statement."""
        return getattr(self, f"_run_{statement.data}")(statement)

    def _run_evaluate(self, statement: Tree) -> list[tuple[str, Any]]:
        tree = _tree(statement.children[0])
        value = self.value(tree)
        named = _tree(tree.children[0]) if isinstance(value, Ran) else tree
        return [(str(named.children[0]) if named.data == "name" else "out", value)]

    def _run_assign(self, statement: Tree) -> list[tuple[str, Any]]:
        names, trees = (_tree(child) for child in statement.children)
        values = [self.value(_tree(tree)) for tree in trees.children]
        value = values[0] if len(values) == 1 else values
        return self._bind(names, Argument(value, self.place(_tree(trees.children[0]))))

    def _bind(self, names: Tree, argument: Argument) -> list[tuple[str, Any]]:
        """Names get a value, or each an item of a list."""
        shown = []
        if len(names.children) == 1:
            values = [argument.value]
        else:
            values = argument.value
            if not isinstance(values, (list, str)):
                raise RaspError(argument.place, f"{len(names.children)} names need as many values, got {kind(values)}")
            if len(values) != len(names.children):
                raise RaspError(argument.place, f"{len(names.children)} names need as many values, got {len(values)}")
        for token, value in zip(names.children, values, strict=True):
            self.scope.set(str(token), value, self.place(token))
            self._label(str(token), value)
            shown.append((str(token), value))
        return shown

    def _label(self, name: str, value: Any) -> None:
        """An expression is known by the first name that a program gives it; before that, by one from inside a function."""
        if isinstance(value, (Sequence, Selector)) and id(value) in self.trace.places and id(value) not in self.trace.labelled:
            if self.scope.is_program:
                self.trace.labelled.add(id(value))
            elif value.label:
                return
            value.label = name

    def _run_draw(self, statement: Tree) -> list[tuple[str, Any]]:
        _, tree, given = statement.children
        program = self.value(_tree(tree))
        if not isinstance(program, (Sequence, Selector)):
            raise RaspError(self.place(_tree(tree)), f"{kind(program)} cannot be drawn; draw a sequence or a selector")
        tokens = self.example() if given is None else as_input(self._argument(_tree(given)))
        place = self.place(_tree(tree))
        selected = partial(run, tokens=tokens, places=self.trace.places, place=place)
        return [(program.label or "out", Drawing(self._ran(program, tokens, place), selected))]

    def _run_function(self, statement: Tree) -> list[tuple[str, Any]]:
        name, names, body, result = statement.children
        parameters = tuple(str(token) for token in _tree(names).children) if names is not None else ()
        for i, parameter in enumerate(parameters):
            place = self.place(_token(_tree(names).children[i]))
            self.scope.require_free(parameter, place)
            if parameter in parameters[:i]:
                raise RaspError(place, f"{parameter!r} is a parameter twice")
        statements = [_tree(child) for child in _tree(body).children]
        function = Function(str(name), parameters, statements, _tree(result), self.scope, self.file)
        self.scope.set(str(name), function, self.place(_token(name)))
        return [(str(name), function)]

    def _run_loop(self, statement: Tree) -> list[tuple[str, Any]]:
        names, tree, body = (_tree(child) for child in statement.children)
        for item in self._items(tree):
            self._bind(names, Argument(item, self.place(tree)))
            for inner in body.children:
                self.execute(_tree(inner))
        return []

    def _run_load(self, statement: Tree) -> list[tuple[str, Any]]:
        raise RaspError(self.place(statement), "load stands at the top of a program, not in a function or a loop")

    # expressions

    def value(self, tree: Tree) -> Any:
        """The value of an expression; new sequences and selectors remember their place."""
        try:
            value = getattr(self, f"_{tree.data}")(tree)
        except RecursionError:
            raise RaspError(self.place(tree), "expressions and calls are nested too deeply here") from None
        if tree.data != "name" and isinstance(value, (Sequence, Selector)):
            operator = next((child for child in tree.children if isinstance(child, Token)), tree)
            self.trace.places.setdefault(id(value), (value, self.place(operator)))
        return value

    def place(self, part: Tree | Token) -> Place:
        """Where a part of the program stands; what a library function does happens where it was called."""
        if self.trace.anchor is not None:
            return self.trace.anchor
        where = part.meta if isinstance(part, Tree) else part
        return Place(where.line or 1, where.column or 1, self.file)

    def _argument(self, tree: Tree) -> Argument:
        return Argument(self.value(tree), self.place(tree))

    def _number(self, tree: Tree) -> int | float:
        return parsed_number(str(tree.children[0]), self.place(tree))

    def _string(self, tree: Tree) -> str:
        return str(tree.children[0])[1:-1]

    def _name(self, tree: Tree) -> Any:
        return self.scope.find(str(tree.children[0]), self.place(tree))

    def _predicate(self, tree: Tree) -> Predicate:
        return Predicate(OPERATIONS[OPERATORS[str(tree.children[0])]])

    def _list(self, tree: Tree) -> list[Any]:
        return [] if tree.children[0] is None else [self.value(_tree(item)) for item in _tree(tree.children[0]).children]

    def _dictionary(self, tree: Tree) -> dict[Any, Any]:
        entries = [_tree(child).children for child in tree.children if child is not None]
        return {self._key(_tree(key)): self.value(_tree(value)) for key, value in entries}

    def _list_of(self, tree: Tree) -> list[Any]:
        value, names, items = (_tree(child) for child in tree.children)
        return [inner.value(value) for inner in self._each(names, items)]

    def _dictionary_of(self, tree: Tree) -> dict[Any, Any]:
        key, value, names, items = (_tree(child) for child in tree.children)
        return {inner._key(key): inner.value(value) for inner in self._each(names, items)}

    def _each(self, names: Tree, items: Tree) -> Any:
        """An evaluator for each round of a comprehension, whose names are its own."""
        for item in self._items(items):
            inner = Evaluator(Scope(self.scope), self.trace, self.example, self.file)
            inner._bind(names, Argument(item, self.place(items)))
            yield inner

    def _items(self, tree: Tree) -> list[Any]:
        items = self.value(tree)
        if not isinstance(items, (list, dict)):
            raise RaspError(self.place(tree), f"for goes through a list or the keys of a dictionary, got {kind(items)}")
        return list(items)

    def _key(self, tree: Tree) -> Any:
        key = self.value(tree)
        if not is_atom(key):
            raise RaspError(self.place(tree), f"a key of a dictionary is a number, a Boolean or a string, got {kind(key)}")
        return key

    def _unary(self, tree: Tree) -> Any:
        sign, argument = _token(tree.children[0]), self._argument(_tree(tree.children[1]))
        value = argument.value
        if sign == "not" and isinstance(value, Selector):
            return ~value
        sequence = as_sequence(argument)
        if sign == "+" and not isinstance(value, str):
            return value
        name = {"not": "not", "-": "neg", "+": "abs"}[sign]  # + of a string fails as abs does
        return (
            Elementwise(OPERATIONS[name], (sequence,))
            if isinstance(value, Sequence)
            else calculate(self.place(sign), name, value)
        )

    def _binary(self, tree: Tree) -> Any:
        left, sign, right = (
            self._argument(_tree(tree.children[0])),
            _token(tree.children[1]),
            self._argument(_tree(tree.children[2])),
        )
        name, values = OPERATORS[sign], (left.value, right.value)
        if name in ("and", "or") and any(isinstance(value, Selector) for value in values):
            x, y = as_selector(left), as_selector(right)
            return x & y if name == "and" else x | y
        if name == "add" and all(isinstance(value, list) for value in values):
            if len(left.value) + len(right.value) > MOST_ITEMS:
                raise RaspError(self.place(sign), f"a list of more than {MOST_ITEMS:,} items is too long")
            return left.value + right.value
        x, y = as_sequence(left), as_sequence(right)
        if any(isinstance(value, Sequence) for value in values):
            return Elementwise(OPERATIONS[name], (x, y))
        if name in ("and", "or"):
            return (left.value and right.value) if name == "and" else (left.value or right.value)
        return calculate(self.place(sign), name, *values)

    def _conditional(self, tree: Tree) -> Any:
        then, condition, otherwise = (_tree(child) for child in tree.children)
        choice = self._argument(condition)
        as_sequence(choice)
        if not isinstance(choice.value, Sequence):
            return self.value(then if choice.value else otherwise)
        return where(choice.value, as_sequence(self._argument(then)), as_sequence(self._argument(otherwise)))

    def _contains(self, tree: Tree) -> Any:
        item, items = self._argument(_tree(tree.children[0])), self._argument(_tree(tree.children[2]))
        value, container = item.value, items.value
        if not isinstance(value, Sequence) and not is_atom(value):
            raise RaspError(item.place, f"{kind(value)} in ...: a sequence or an atom is needed before 'in'")
        if isinstance(container, Sequence) and is_atom(value):
            return aggregate(full, (container == value).map("indicator")) > 0
        if not isinstance(container, list) or (isinstance(value, Sequence) and not all(map(is_atom, container))):
            raise RaspError(
                items.place, f"{kind(container)} after 'in': a list of atoms is needed (or a sequence, to look for an atom)"
            )
        if is_atom(value):
            return any(is_atom(other) and other == value for other in container)
        chosen = tuple(container)
        return Elementwise(Operation(f"in {chosen}", lambda x: x in chosen, f"({{0}} in {_escaped(container)})"), (value,))

    def _index(self, tree: Tree) -> Any:
        items, index = self._argument(_tree(tree.children[0])), self._argument(_tree(tree.children[1]))
        container = items.value
        if isinstance(container, Sequence):
            position = as_integer(index)
            return aggregate(select(indices, position if position >= 0 else length + position, EQ), container)
        if not isinstance(container, (list, dict, str)):
            raise RaspError(items.place, f"{kind(container)} has no items; only lists, dictionaries, strings and sequences have")
        if isinstance(index.value, Sequence):
            values = container.values() if isinstance(container, dict) else container
            for value in values:
                if not is_atom(value):
                    raise RaspError(items.place, f"a sequence chooses among atoms, but this holds {kind(value)}")
            table = container.copy() if isinstance(container, (dict, list)) else container
            name = f"{_escaped(container)}[{{0}}]"
            return Elementwise(Operation(f"item of {container!r}", lambda i: _item(table, i), name), (index.value,))
        if isinstance(container, dict) and not is_atom(index.value):
            raise RaspError(index.place, f"a key of a dictionary is a number, a Boolean or a string, got {kind(index.value)}")
        if not isinstance(container, dict):
            as_integer(index)
        try:
            return _item(container, index.value)
        except LookupError as error:
            raise RaspError(index.place, str(error.args[0])) from None

    def _call(self, tree: Tree) -> Any:
        called = self._argument(_tree(tree.children[0]))
        trees = [] if tree.children[1] is None else [_tree(child) for child in _tree(tree.children[1]).children]
        arguments = [self._argument(argument) for argument in trees]
        function, place = called.value, called.place
        if isinstance(function, (Sequence, Selector)):
            if len(arguments) != 1:
                raise RaspError(place, f"{kind(function)} runs on one input, got {len(arguments)}")
            return self._ran(function, as_input(arguments[0]), place)
        if isinstance(function, Primitive):
            least, most = function.least, function.most
            if not least <= len(arguments) <= most:
                many = f"{least}" if least == most else f"{least} to {most}" if most < 100 else f"at least {least}"
                raise RaspError(place, _arity(function.name, many, function.parameters, len(arguments)))
            return within(place, function.function, *arguments)
        if not isinstance(function, Function):
            raise RaspError(place, f"{kind(function)} cannot be called; only functions, sequences and selectors can")
        if len(arguments) != len(function.parameters):
            many = str(len(function.parameters))
            raise RaspError(place, _arity(function.name, many, ", ".join(function.parameters), len(arguments)))
        return self._called(function, arguments, place)

    def _called(self, function: Function, arguments: list[Argument], place: Place) -> Any:
        trace = self.trace
        if trace.calls >= MOST_CALLS:
            raise RaspError(place, f"calls of {function.name} are nested more than {MOST_CALLS} deep: it may never end")
        scope = Scope(function.scope)
        inner = Evaluator(scope, trace, self.example, function.file)
        for name, argument in zip(function.parameters, arguments, strict=True):
            scope.set(name, argument.value, place)
        before = trace.calls, trace.anchor
        trace.calls += 1
        enters_library = _in_library(function.scope) and trace.anchor is None
        if enters_library:
            trace.anchor = place
        try:
            for statement in function.body:
                inner.execute(statement)
            values = [inner.value(_tree(result)) for result in function.result.children]
        except RaspError as error:
            if enters_library:
                raise RaspError(place, f"in {function.name}: {error.message}") from None
            raise
        finally:
            trace.calls, trace.anchor = before
        return values[0] if len(values) == 1 else values

    def _ran(self, program: Sequence | Selector, tokens: list[Any], place: Place | None = None) -> Ran:
        return Ran(program, tokens, run(program, tokens, self.trace.places, place))


def _arity(name: str, many: str, parameters: str, got: int) -> str:
    return f"{name} takes {many} argument{'' if many == '1' else 's'} ({parameters}), got {got}"


def _in_library(scope: Scope | None) -> bool:
    while scope is not None and not scope.is_program:
        if scope.is_library:
            return True
        scope = scope.outer
    return False


def _item(container: Any, index: Any) -> Any:
    if isinstance(container, dict):
        if index not in container:
            raise LookupError(f"the dictionary has no {index!r}")
        return container[index]
    if not isinstance(index, int) or isinstance(index, bool):
        raise LookupError(f"{index!r} is no position in a list: an integer is needed")
    if not -len(container) <= index < len(container):
        raise LookupError(f"position {index} lies outside the {len(container)} items")
    return container[index]


def _escaped(container: Any) -> str:
    """A constant as text, for a template of ``str.format``."""
    text = repr(container)
    return (text if len(text) <= 40 else text[:37] + "...").replace("{", "{{").replace("}", "}}")


def _tree(part: Any) -> Tree:
    assert isinstance(part, Tree)
    return part


def _token(part: Any) -> Token:
    assert isinstance(part, Token)
    return part
