"""A few compiled programs that the tests of modules, folders, drawings and embedding programs share: every kind of head, unit and mask."""

from functools import cache
from typing import Any

from anyformer import rasp
from anyformer.rasp import CompiledProgram, Sequence, aggregate, indices, select, selector_width, tokens, where

before = select(indices, indices, rasp.LEQ)
same = select(tokens, tokens, rasp.EQ)
opposite = select(indices, (rasp.length - 1 - indices).named("opposite"), rasp.EQ)
smaller = select(tokens, tokens, rasp.LT)

# name: program, vocabulary, inputs, options of the compiler
EXAMPLES: dict[str, tuple[Sequence, Any, list[list[Any]], dict[str, Any]]] = {
    "reverse": (aggregate(opposite, tokens).named("reverse"), "abcd", [list("abcd"), list("c"), list("dba")], {}),
    "histogram": (selector_width(same), "abc", [list("abac"), list("cccccc")], {}),
    "sort unique": (
        aggregate(select(selector_width(smaller), indices, rasp.EQ), tokens),
        (1, 2, 3, 4),
        [[2, 4, 3, 1], [3, 1]],
        {},
    ),
    "running count": (selector_width(before & same), "ab", [list("aabab")], {}),
    "fraction": (aggregate(before, where(tokens == "l", 1, 0)), "helo", [list("hello"), list("lll")], {"causal": "strict"}),
    "others": (selector_width(~same & select(indices, indices, rasp.NEQ)), "abc", [list("abca"), ["b"]], {}),
    "booleans": (selector_width(select(tokens, True, rasp.EQ)) > 1, (False, True), [[True, False, True], [False]], {}),
    "previous": (aggregate(select(indices, indices - 1, rasp.EQ), tokens, default="-"), "abc", [list("cab"), ["a"]], {}),
    "running sum": (aggregate(before, tokens) * (indices + 1), rasp.Reals(-10.0, 10.0), [[3, 2, 1, 1], [-1.5]], {}),
    "products": (tokens * aggregate(rasp.full, tokens) + abs(tokens), rasp.Reals(-2.0, 2.0), [[1.5, -2, 0.25]], {}),
    "soft": (rasp.soft_aggregate(before, tokens, tokens * tokens), rasp.Reals(-3.0, 3.0), [[1, 2.5, -3], [0.5]], {}),
    "both kernels": (
        rasp.soft_aggregate(before, tokens, tokens) + aggregate(before, tokens),
        rasp.Reals(-3.0, 3.0),
        [[1, 2.5, -3]],
        {},
    ),
    "largest": (rasp.maximum(rasp.full, tokens), (1, 5, 7), [[1, 5, 1], [7, 7, 1, 5]], {}),
    "largest real": (rasp.maximum(before, tokens), rasp.Reals(-2.0, 2.0), [[0.5, -1, 1.25]], {}),
    "exp": ((tokens / 2).map("exp"), rasp.Reals(-1.0, 1.0), [[0.5, -1]], {}),
    "table": ((tokens / 2).map("exp"), rasp.Reals(-1.0, 1.0), [[0.5, -1]], {"mode": "standard"}),
    "root": ((tokens + 2).map("sqrt") + 1 / (tokens + 3) + (tokens + 4).map("log"), rasp.Reals(-1.0, 1.0), [[0.5, -1]], {}),
    "constant": (indices + 1, "ab", [list("ab")], {}),
    "undefined": (6 // tokens, (0, 1, 2), [[1, 2, 1]], {}),
    "soft reverse": (aggregate(opposite, tokens).named("reverse"), (1, 2, 3), [[1, 2, 3], [2]], {"attention": "softmax"}),
    "float32": (selector_width(same), "abc", [list("abac")], {"dtype": "float32"}),
}
MAX_LENGTH = 6


@cache
def compiled(name: str) -> CompiledProgram:
    """The compiled example."""
    program, vocab, _, options = EXAMPLES[name]
    return rasp.compile(program, vocab, MAX_LENGTH, **options)


def inputs(name: str) -> list[list[Any]]:
    """Inputs of the example."""
    return EXAMPLES[name][2]
