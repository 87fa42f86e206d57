"""Random RASP programs of two fragments.

    categorical   tokens of a small vocabulary (letters, integers, fractions, Booleans, all mixed); numbers, words and truth values:
                  arithmetic, partial functions (division, remainder, tables that lack some values), where, min, max, comparisons,
                  selectors with any predicate, and, or, not of them over different keys and queries, widths, aggregates with a default,
                  hard maxima
    real-valued   tokens of an interval, or fractions; sums, products, quotients, exp, log, sqrt, ReLU, abs, min, max, where, comparisons
                  of inputs, means over selectors of positions, counts and inputs, running sums, softmax heads and maxima

A program is drawn from (seed, number) alone, with its vocabulary, largest length, dtype, attention, mode and dialect.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from anyformer.rasp.operations import OPERATIONS
from anyformer.rasp.sequences import (
    EQ,
    GEQ,
    GT,
    LEQ,
    LT,
    NEQ,
    Aggregate,
    Selector,
    Sequence,
    aggregate,
    apply,
    full,
    indices,
    length,
    lift,
    maximum,
    printed,
    select,
    selector_width,
    soft_aggregate,
    tokens,
    where,
)
from anyformer.rasp.sets import Reals

Fragment = Literal["categorical", "real-valued"]
COMPARISONS = (EQ, NEQ, LT, LEQ, GT, GEQ)
VOCABULARIES: tuple[tuple[Any, ...], ...] = (
    ("a", "b", "c"),
    ("a", "bc", "", "d"),
    (0, 1),
    (1, 2, 3),
    (-2, 0, 3),
    (0.5, 1.0, -1.5),
    (True, False),
    ("a", 1, 2.5, False),
    (7,),
)
INTERVALS = (Reals(-2, 2), Reals(0.25, 3), Reals(-1, 0), Reals(-2.5, 1.5), (-1.5, 0.25, 2.0), (1.0, 2.0, 4.0))


@dataclass(frozen=True)
class Case:
    """A program and how it is compiled."""

    program: Sequence
    vocab: tuple[Any, ...] | Reals
    max_length: int
    options: dict[str, Any]

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{printed(self.program)} on {self.vocab}, at most {self.max_length} tokens{options}"


def random_case(seed: int, number: int, fragment: Fragment) -> Case:
    """The program with this number."""
    draw = random.Random(f"{seed} {number} {fragment}")
    options: dict[str, Any] = {}
    if draw.random() < 0.2:
        options["causal"] = "dialect"
    if fragment == "categorical":
        vocab = draw.choice(VOCABULARIES)
        options |= draw.choice(({}, {}, {"attention": "softmax"}, {"dtype": "float32"}, {"mode": "standard"}))
        maker = Categorical(draw, vocab)
        program = maker.sequence(draw.choice(("number", "number", "word", "truth")), draw.randint(1, 4))
        return Case(program, vocab, draw.choice((1, 2, 3, 4, 5, 6, 8)), options)
    interval = draw.choice(INTERVALS)
    options |= draw.choice(({}, {}, {}, {"dtype": "float32"}))
    return Case(RealValued(draw, interval).sequence(draw.randint(1, 4)), interval, draw.choice((1, 2, 3, 5, 8)), options)


class Drawn(ABC):
    """What both fragments draw: selectors of parts that the fragment gives."""

    def __init__(self, draw: random.Random):
        self.draw = draw

    def one_of(self, *ways: Callable[[], Any]) -> Any:
        """One of several ways to go on."""
        return self.draw.choice(ways)()

    @abstractmethod
    def sides(self, depth: int) -> tuple[Any, Any, Any]:
        """Keys, queries and a predicate."""

    def selector(self, depth: int) -> Selector:
        """A selector, of compound ones down to a depth."""
        if depth > 0 and self.draw.random() < 0.35:
            a = self.selector(depth - 1)
            return self.one_of(lambda: a & self.selector(depth - 1), lambda: a | self.selector(depth - 1), lambda: ~a)
        if self.draw.random() < 0.15:
            return full
        return select(*self.sides(depth))

    def single(self, depth: int) -> Selector:
        """A selector of at most one key."""
        by = self.draw.choice((-2, -1, 1, 2))
        last = self.draw.choice((0, 1))
        return self.one_of(
            lambda: select(indices, indices + by, EQ),
            lambda: select(indices, length - 1 - indices, EQ),
            lambda: select(indices, length - 1 - last, EQ),
            lambda: select(indices, self.draw.choice((0, 1, 3)), EQ),
            lambda: self.selector(depth) & select(indices, indices + by, EQ),
        )


class Categorical(Drawn):
    """Programs of finite sets of values."""

    def __init__(self, draw: random.Random, vocab: tuple[Any, ...]):
        super().__init__(draw)
        self.vocab = vocab
        self.numeric = all(isinstance(v, (int, float)) for v in vocab)
        self.words = [v for v in vocab if isinstance(v, str)] or ["x", "y"]

    def sequence(self, kind: str, depth: int) -> Sequence:
        """A sequence of numbers, words or truth values."""
        if depth <= 0:
            return self.leaf(kind)
        return {"number": self.number, "word": self.word, "truth": self.truth}[kind](depth - 1)

    def leaf(self, kind: str) -> Sequence:
        """Tokens, positions, constants."""
        if kind == "number":
            own = [tokens, tokens] if self.numeric else [tokens.map(self.table((0, 1, 2, 5)))]
            return self.draw.choice([*own, indices, indices, length, lift(self.draw.choice((0, 1, 2, -1, 0.5)))])
        if kind == "word":
            words = lift(self.draw.choice(self.words))
            return self.draw.choice((tokens, tokens, words)) if isinstance(self.vocab[0], str) else words
        return tokens == lift(self.draw.choice(self.vocab))

    def table(self, values: tuple[Any, ...], partial: bool | None = None) -> Callable[[Any], Any]:
        """A function given by a table; a partial one lacks some values (then it raises)."""
        salt = self.draw.randrange(1000)
        partial = self.draw.random() < 0.2 if partial is None else partial

        def lookup(x: Any) -> Any:
            k = random.Random(f"{salt} {_plain(x)!r}").randrange(12)
            if partial and k == 0:
                raise KeyError(x)
            return values[k % len(values)]

        if salt % 4 == 0:  # a function of one's own may be called like an operation
            lookup.__name__ = list(OPERATIONS)[salt // 4 % len(OPERATIONS)]
        return lookup

    def number(self, depth: int) -> Sequence:
        """A sequence of numbers."""
        x = self.sequence("number", depth)

        def y() -> Sequence:
            return self.sequence("number", depth)

        return self.one_of(
            lambda: x + y(),
            lambda: x - y(),
            lambda: x * y(),
            lambda: x / y(),
            lambda: x % self.draw.choice((2, 3, -2, y())),
            lambda: x // self.draw.choice((2, 3, y())),
            lambda: apply(self.draw.choice(("min", "max")), x, y()),
            lambda: x.map(self.draw.choice(("neg", "abs", "relu", "floor", "ceil", "round", "exp", "sqrt"))),
            lambda: where(self.sequence("truth", depth), x, y()),
            lambda: where(x == 0, 0, 1 / x),
            lambda: self.sequence("word", depth).map(self.table((0, 1, 2, 3))),
            lambda: self.sequence("truth", depth).map("indicator"),
            lambda: selector_width(self.selector(depth)),
            lambda: selector_width(self.selector(depth)),
            lambda: aggregate(self.selector(depth), x, self.draw.choice((0, 0, 1, -3, 0.5))),
            lambda: aggregate(self.single(depth), x, self.draw.choice((0, 0, 1, -3, 0.5))),
            lambda: aggregate(self.selector(depth), self.sequence("truth", depth), 0),
            lambda: maximum(self.selector(depth), x, self.draw.choice((0, -1))),
            lambda: Aggregate(self.selector(depth), x, self.draw.choice((0, 2)), "max", indices),
        )

    def word(self, depth: int) -> Sequence:
        """A sequence of words."""
        x = self.sequence("word", depth)
        return self.one_of(
            lambda: where(self.sequence("truth", depth), x, self.sequence("word", depth)),
            lambda: self.sequence("number", depth).map(self.table(("p", "q", "rr"))),
            lambda: x + self.sequence("word", depth),
            lambda: aggregate(self.single(depth), x, self.draw.choice(("", "none", 0))),
            lambda: aggregate(self.single(depth), x, ""),
            lambda: aggregate(self.selector(depth), x, "?"),
            lambda: Aggregate(self.selector(depth), x, "", "max", indices),
        )

    def truth(self, depth: int) -> Sequence:
        """A sequence of truth values."""
        x = self.sequence("truth", depth)
        return self.one_of(
            lambda: ~x,
            lambda: x & self.sequence("truth", depth),
            lambda: x | self.sequence("truth", depth),
            lambda: self.compared(self.sequence("number", depth), self.sequence("number", depth)),
            lambda: self.compared(self.sequence("word", depth), self.sequence("word", depth)),
            lambda: self.sequence("number", depth).map(self.table((True, False))),
            lambda: aggregate(self.single(depth), x, False),
        )

    def compared(self, x: Sequence, y: Sequence) -> Sequence:
        """A comparison of two sequences."""
        return apply(self.draw.choice(COMPARISONS), x, y)

    def sides(self, depth: int) -> tuple[Any, Any, Any]:
        """Keys, queries and a predicate: a comparison, or any table of pairs."""
        kind = self.draw.choice(("number", "number", "word", "truth"))
        x, y = self.sequence(kind, depth - 1), self.sequence(kind, depth - 1)
        if self.draw.random() < 0.2:
            y = lift(self.draw.choice((0, 1, 2)) if kind == "number" else self.words[0] if kind == "word" else True)
        if self.draw.random() < 0.25:
            pairs = self.table((True, False), partial=False)
            return x, y, lambda key, query: pairs(f"{_plain(key)!r}, {_plain(query)!r}")
        return x, y, self.draw.choice((EQ, EQ, EQ, *COMPARISONS))


def _plain(value: Any) -> Any:
    """True, 1 and 1.0 are one value, -0.0 and 0.0 too; rounding is none."""
    return round(float(value), 9) + 0.0 if isinstance(value, (int, float)) else value


class RealValued(Drawn):
    """Programs of real numbers."""

    def __init__(self, draw: random.Random, vocab: tuple[Any, ...] | Reals):
        super().__init__(draw)
        self.vocab = vocab

    def sequence(self, depth: int) -> Sequence:
        """A sequence of real numbers."""
        if depth <= 0:
            return self.draw.choice((tokens, tokens, tokens, indices, length, lift(self.draw.choice((0.5, 1, -2, 0.1)))))
        depth -= 1
        x = self.sequence(depth)

        def y() -> Sequence:
            return self.sequence(depth)

        return self.one_of(
            lambda: x + y(),
            lambda: x - y(),
            lambda: x * y(),
            lambda: x / (1 + y() * y()),
            lambda: x / (1 + _squared(y())),
            lambda: apply(self.draw.choice(("min", "max")), x, y()),
            lambda: x.map(self.draw.choice(("abs", "relu", "neg"))),
            lambda: tokens.map(self.draw.choice(("floor", "ceil", "round"))),
            lambda: apply("exp", apply("min", x, 2)),
            lambda: apply(self.draw.choice(("log", "sqrt")), apply("max", x, 0.125)),
            lambda: apply("reciprocal_or_zero", tokens, self.draw.choice((0.1, 0.01))),
            lambda: apply("reciprocal_or_zero", x, 0.1),
            lambda: x ** self.draw.choice((2, 3)),
            lambda: where(self.condition(), x, y()),
            lambda: aggregate(self.selector(depth), x, self.draw.choice((0, 0, 1, -0.3))),
            lambda: aggregate(self.selector(depth), x, self.draw.choice((0, 0, 1, -0.3))),
            lambda: aggregate(self.single(depth), x, self.draw.choice((0, 2.5))),
            lambda: aggregate(select(indices, indices, LEQ), x) * (indices + 1),
            lambda: aggregate(full, x) * length,
            lambda: soft_aggregate(self.selector(0), x, y()),
            lambda: maximum(self.selector(0), x),
        )

    def condition(self) -> Sequence:
        """A comparison of inputs, positions and counts."""
        constant = lift(self.draw.choice((0, 1, 0.5)))
        x, y = self.draw.sample((tokens, tokens, indices, length, selector_width(select(indices, indices, LT))), 2)
        return apply(self.draw.choice(COMPARISONS), x, self.draw.choice((y, constant)))

    def sides(self, depth: int) -> tuple[Any, Any, Any]:
        """Keys, queries and a predicate: of positions, counts, or conditions on the input."""
        places = (indices, indices, length - 1 - indices, indices % 2, indices // 2, length // 2, lift(1))
        x, y = self.draw.choice(places), self.draw.choice(places)
        condition = self.condition()
        return self.one_of(
            lambda: (x, y, self.draw.choice(COMPARISONS)),
            lambda: (x, y, self.draw.choice(COMPARISONS)),
            lambda: (condition, True, EQ),
            lambda: (True, condition, EQ),
        )


def _squared(x: Sequence) -> Sequence:
    return x * x
