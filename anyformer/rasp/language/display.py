"""Values as a person reads them: literals of the language, sequences beside their input, selectors as small matrices.

same("hello") =
      h e l l o
    h 1 . . . .          rows are queries, columns are keys
    e . 1 . . .
"""

from typing import Any

from anyformer.rasp.language.evaluator import Drawing
from anyformer.rasp.language.kinds import MOST_ITEMS, Primitive, Ran
from anyformer.rasp.language.scopes import Function
from anyformer.rasp.sequences import Aggregate, Selector, SelectorWidth, Sequence, children, full, in_order, printed

INDENT = "    "
MOST_PIECES = 4 * MOST_ITEMS
"""The most items, brackets and commas of a value that are shown: more than the longest flat list has."""


class _Said(str):
    """Text as it is to be shown."""


def literal(value: Any) -> str:
    """A value of the language as it would be written; after :data:`MOST_PIECES` of a list of lists, three dots."""
    out: list[str] = []
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if len(out) >= MOST_PIECES:
            return "".join([*out, "..."])
        if isinstance(part, (list, tuple)):
            waiting += reversed([_Said("["), *_separated([[item] for item in part]), _Said("]")])
        elif isinstance(part, dict):
            waiting += reversed([_Said("{"), *_separated([[k, _Said(": "), v] for k, v in part.items()]), _Said("}")])
        else:
            out.append(_literal(part))
    return "".join(out)


def _separated(groups: list[list[Any]]) -> list[Any]:
    """The groups one after the other, commas between."""
    return [part for i, group in enumerate(groups) for part in ([_Said(", ")] if i else []) + group]


def _literal(value: Any) -> str:
    if isinstance(value, _Said):
        return value
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (Sequence, Selector)):
        return "full_s" if value is full else value.label or printed(value)
    if isinstance(value, Primitive):
        return f"{value.name}({value.parameters})"
    return str(value)


def written(tokens: list[Any]) -> str:
    """An input: a string where every token is one character."""
    if all(isinstance(token, str) and len(token) == 1 for token in tokens):
        return literal("".join(tokens))
    return literal(tokens)


def matrix(tokens: list[Any], rows: Any) -> list[str]:
    """A selector on an input: a line a query, a column a key."""
    names = [token if isinstance(token, str) else literal(token) for token in tokens]
    width = max(map(len, names))

    def line(head: str, cells: list[str]) -> str:
        return INDENT + " ".join(cell.rjust(width) for cell in [head, *cells]).rstrip()

    cells = [["1" if cell else "." for cell in row] for row in rows]
    return [line("", names), *(line(name, row) for name, row in zip(names, cells, strict=True))]


def ran(name: str, result: Ran, wide: bool = False) -> list[str]:
    """What a sequence or a selector gave on an input."""
    head = f"{name}({written(result.tokens)}) ="
    if isinstance(result.program, Selector):
        return [head, *matrix(result.tokens, result.values)]
    if not wide:
        return [f"{head} {literal(result.values)}"]
    columns = [[token if isinstance(token, str) else literal(token) for token in line] for line in (result.tokens, result.values)]
    width = max(len(cell) for line in columns for cell in line)
    heads = (f"{INDENT}input  ", f"{INDENT}output ")
    return [f"{name}:", *(h + " ".join(cell.rjust(width) for cell in line) for h, line in zip(heads, columns, strict=True))]


def drawing(name: str, drawn: Drawing) -> list[str]:
    """A run and every selector in it, each under the layer whose attention it is."""
    result, lines = drawn.ran, []
    nodes = in_order((result.program,))
    layer: dict[int, int] = {}
    for node in nodes:
        below = max((layer[id(child)] for child in children(node)), default=0)
        layer[id(node)] = below + isinstance(node, (Aggregate, SelectorWidth))
    used = {id(node.selector): node.selector for node in nodes if isinstance(node, (Aggregate, SelectorWidth))}
    for selector in sorted(used.values(), key=lambda s: layer[id(s)]):
        lines.append(f"layer {layer[id(selector)] + 1}: {literal(selector)}")
        lines += matrix(result.tokens, drawn.selected(selector))
    return [*lines, *ran(name, result)]


def value(name: str, given: Any) -> list[str]:
    """A value that is no expression, or holds expressions inside."""
    if isinstance(given, Function):
        return [f"function {given}"]
    if isinstance(given, Primitive):
        return [f"function {literal(given)} of the language"]
    return [f"{name} = {literal(given)}"]
