"""What a compiled program may cost: sizes that passes of the compiler are there to save."""

import itertools
from typing import Literal

import pytest

from anyformer import rasp
from anyformer.errors import AnyformerError
from anyformer.operators import Attention
from anyformer.rasp import EQ, LEQ, aggregate, indices, length, select, selector_width, tokens

reverse = aggregate(select(indices, length - 1 - indices, EQ), tokens)


@pytest.mark.parametrize("attention", ["hard", "softmax"])
def test_a_query_that_always_finds_its_key_needs_no_square(attention: Literal["hard", "softmax"]) -> None:
    """``length - 1 - index`` is a linear form: the units are those of the length alone."""
    program = rasp.compile(reverse, "abc", 5, attention=attention)
    assert (program.layers, program.heads, program.units) == (2, (1, 1), (5, 0))
    words = [list(word) for n in range(1, 5) for word in itertools.product("abc", repeat=n)]
    assert program.batch(words) == [word[::-1] for word in words]


def test_squares_stay_where_nothing_may_be_selected() -> None:
    """Positions 2 i are beyond the end for half of all queries: without their squares the sink would lose."""
    program = rasp.compile(aggregate(select(indices, 2 * indices, EQ), tokens, default="-"), "abc", 6)
    assert program(list("abcab")) == ["a", "c", "b", "-", "-"]
    counted = rasp.compile(selector_width(select(tokens, tokens, EQ)), (0, 5, 9), 4)  # a count ties with the sink
    assert counted([9, 9, 0, 5]) == [2, 2, 1, 1]


@pytest.mark.parametrize("dtype, vocab", [("float64", (0, 99_998, 99_999)), ("float32", (0, 199, 200))])
def test_squares_stay_where_the_tie_width_would_reach_other_keys(
    dtype: Literal["float64", "float32"], vocab: tuple[int, ...]
) -> None:
    program = rasp.compile(aggregate(select(tokens, tokens, EQ), indices), vocab, 4, dtype=dtype)
    zero, near, last = vocab
    assert program([last, near, last, zero]) == pytest.approx([1, 1, 1, 3])
    assert program([near, last, near, near]) == pytest.approx([5 / 3, 1, 5 / 3, 5 / 3])


def test_a_part_of_a_selector_may_be_lifted_too() -> None:
    """The mean position of the same token so far: ``and`` of a distance and an equality that every query satisfies with itself."""
    program = rasp.compile(aggregate(select(indices, indices, LEQ) & select(tokens, tokens, EQ), indices), (1, 2, 7), 6)
    assert program([7, 1, 7, 7, 2, 1]) == pytest.approx([0, 1, 1, 5 / 3, 4, 3])
    bank = program.network.stages[0].branches[1].operator
    assert isinstance(bank, Attention) and bank.head_dim == 2  # 2 q k and 1/2 - k^2


def counted(times: int) -> rasp.Sequence:
    """How many tokens equal how many tokens equal .. the token: selectors that wait for selectors."""
    out = tokens
    for _ in range(times):
        out = selector_width(select(out, tokens, EQ))
    return out


def test_long_programs_compile() -> None:
    """Two hundred counts, one after the other, are more nested calls than Python allows by itself."""
    program = rasp.compile(counted(200), (0, 1), 2, check=False)
    assert program.layers == 200 and program.width <= 8 and program([1, 0]) == rasp.interpret(counted(200), [1, 0])


def test_programs_that_are_too_deep_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from anyformer.rasp import compiling

    monkeypatch.setattr(compiling, "DEEPEST", 0)
    with pytest.raises(
        AnyformerError, match=r"^compile: the program of 301 parts has too many dependent steps; compile it in pieces$"
    ):
        rasp.compile(counted(300), (0, 1), 2)
