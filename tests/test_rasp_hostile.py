"""Inputs and functions chosen to make compiled programs wrong: near ties, close scores, odd numbers. Each was once wrong or a traceback."""

import math
import operator
import random

import pytest

from anyformer import rasp
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.rasp import (
    EQ,
    LEQ,
    OPERATIONS,
    Reals,
    aggregate,
    apply,
    indices,
    interpret,
    length,
    maximum,
    select,
    selector_width,
    tokens,
    where,
)
from anyformer.rasp import library as L
from anyformer.rasp.encoding import Layer
from anyformer.rasp.sequences import full
from anyformer.rasp.simulator import AttentionSimulator


def test_maximum_states_its_width():
    near = [0.8784, 0.87843, 0.87844, 0.878745, 0.87876, 0.8783]
    net = rasp.compile(maximum(full, tokens), Reals(-1, 1), 6, dtype="float32")
    assert 0 < abs(net(near)[0] - max(near)) <= net.error < 1e-3
    assert net.notes


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_softmax_heads_find_the_maximum_of_close_scores(dtype):
    words = (0, 0.01, 0.02, 0.03)
    net = rasp.compile(maximum(full, tokens), words, 4, attention="softmax", dtype=dtype, check=False)
    assert net([0.03, 0, 0.02, 0.03]) == [0.03] * 4


def test_softmax_heads_bound_the_maximum_of_real_numbers():
    near = [0.8350222455180585, -1, 1, 0.99, 1]
    for dtype in ("float64", "float32"):
        net = rasp.compile(maximum(full, tokens), Reals(-1, 1), 6, attention="softmax", dtype=dtype, check=False)
        assert abs(net(near)[0] - 1) <= net.error < 0.05


def test_softmax_heads_bound_what_leaks():
    program = aggregate(select(indices, indices % 2, EQ), tokens)
    net = rasp.compile(program, Reals(-1e6, 1e6), 6, attention="softmax", check=False)
    given = [924484.9730208383, -859341.0682472886, 1e6, 1e6]
    assert 0 < net.error < 1e-5
    assert all(abs(a - b) <= net.error + 1e-9 for a, b in zip(net(given), interpret(program, given), strict=True))


@pytest.mark.parametrize(
    "program", [aggregate(full, tokens) == 0.2, aggregate(full, tokens) < 0.2, aggregate(full, tokens).map(str)]
)
def test_averages_of_decimals_are_rounded_once(program):
    """0.1 + 0.2 + 0.3 is 0.6 and a third of it 0.2, where sums of floats give 0.19999999999999998."""
    net = rasp.compile(program, (0.1, 0.2, 0.3), 4, check=False)
    for given in ([0.2, 0.3, 0.1], [0.3, 0.1, 0.1], [0.1, 0.1, 0.3, 0.3]):
        assert net(given) == interpret(program, given)


def test_a_float_beside_a_simple_fraction_is_not_that_fraction():
    given, program = 0.1 + 0.2, aggregate(full, tokens) == 0.1 + 0.2
    assert interpret(program, [given] * 3) == [True] * 3
    with pytest.raises(AnyformerError, match="rounding decides"):
        rasp.compile(program, (given, 0.5), 4)


def test_integers_beyond_float64_are_refused():
    with pytest.raises(AnyformerError, match="does not tell apart"):
        rasp.compile(selector_width(select(tokens, tokens, EQ)), (2**53, 2**53 + 1), 3)


@pytest.mark.parametrize("token", [[1], {}, None, "1"])
def test_tokens_of_any_type_are_named(token):
    for vocab in ((1, 2), Reals(0, 1)):
        with pytest.raises(AnyformerError, match="position 0"):
            rasp.compile(tokens + 0, vocab, 3)([token])


@pytest.mark.parametrize("program", [tokens >= 0.5, tokens.map("floor")])
def test_float32_says_that_it_compares_rounded_tokens(program):
    for dtype, said in (("float64", 0), ("float32", 1)):
        net = rasp.compile(program, Reals(0, 1), 3, dtype=dtype)
        assert len([note for note in net.notes if "rounded to float32" in note]) == said


def test_a_number_between_two_values_is_neither():
    outputs = rasp.compiled.Outputs((0.0, 1e-4), (0.0, 1e-4))
    assert outputs.decode([0.0, 1.1e-4]) == [0.0, 1e-4]
    with pytest.raises(AnyformerError, match="code of no value"):
        outputs.decode([0.5e-4])


def test_a_simulator_beyond_the_memory_is_refused_at_once():
    with pytest.raises(AnyformerError, match="10,000,000,000 tokens"):
        AttentionSimulator.for_layer(Layer(100_000, 4, 3))


@pytest.mark.parametrize(
    "program, given",
    [
        (aggregate(select(indices, indices, LEQ), tokens).map(str), [2, 1, 2, 3]),
        (aggregate(select(indices, indices - 1, EQ), where(tokens == 1, 1, True)).map(str), [1, 2, 1]),
        ((tokens == 2).map(repr), [1, 2]),
    ],
)
def test_a_function_cannot_tell_equal_values_apart(program: rasp.Sequence, given: list[int]) -> None:
    assert rasp.compile(program, (1, 2, 3), 4)(given) == rasp.interpret(program, given)


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_a_function_is_no_operation_for_its_name(name: str) -> None:
    """As an operation, as a predicate (true but where the key is the query and 1), and on real numbers, where it has no rule."""

    def own(*values: float) -> float:
        return 10 * (values[0] - sum(values[1:]) - 1)

    own.__name__ = name
    for arguments in ((tokens,), (tokens, indices), (tokens, indices, tokens)):
        columns = [[3, 4] if a is tokens else [0, 1] for a in arguments]
        assert interpret(apply(own, *arguments), [3, 4]) == [own(*values) for values in zip(*columns, strict=True)]
    width = selector_width(select(tokens, tokens, own))
    assert interpret(width, [3, 4]) == [1, 2]
    both = apply(own, tokens, indices) + width
    assert rasp.compile(both, (3, 4), 2, check=False)([3, 4]) == [21, 22]
    with pytest.raises(OutsideClass, match=f"your function {name} is not an operation of real numbers"):
        rasp.compile(apply(own, tokens), Reals(0, 1), 2)


@pytest.mark.parametrize(
    "function, low, given, wanted",
    [
        (abs, -2, -1.5, 1.5),
        (math.exp, -2, 0, 1),
        (math.floor, -2, -0.5, -1),
        (math.ceil, -2, -0.5, 0),
        (float, -2, 0.25, 0.25),
        (operator.neg, -2, 0.25, -0.25),
    ],
)
def test_pythons_own_functions_have_their_rules(function, low, given, wanted):
    assert rasp.compile(tokens.map(function), Reals(low, 1), 2)([given]) == pytest.approx([wanted])


def test_pythons_round_goes_to_the_even_side_and_has_no_rule():
    assert rasp.compile(tokens.map(round), (0.5, 1.5), 2)([0.5, 1.5]) == interpret(tokens.map(round), [0.5, 1.5]) == [0, 2]
    with pytest.raises(OutsideClass, match="your function round is not an operation"):
        rasp.compile(tokens.map(round), Reals(0, 1), 2)


def test_an_operation_of_real_numbers_takes_so_many():
    with pytest.raises(OutsideClass, match="max of real numbers takes 2 values, got 3"):
        rasp.compile(apply(max, tokens, tokens, indices), Reals(0, 1), 2)


@pytest.mark.parametrize("mode", ["analytic", "standard"])
@pytest.mark.parametrize("name", ["floor", "ceil", "round"])
def test_halves_are_rounded_alike_on_either_side_of_zero(name: str, mode) -> None:
    """Sums of two of 150 halves: too many for a table, so that a staircase over their range rounds them."""
    halves = [k / 2 for k in range(-75, 75)]
    program = apply(name, tokens + aggregate(select(indices, 0, EQ), tokens))
    net = rasp.compile(program, halves, 2, mode=mode, check=False)
    inputs = [[-37.5, 37], [37, 37], [-37.5, -37.5]] + [[0.5, k / 2] for k in range(-8, 8)] + [[0, k / 2] for k in range(-8, 8)]
    assert net.batch(inputs) == [interpret(program, given) for given in inputs]


def test_round_is_exact_just_below_a_half_and_beyond_fractions():
    assert interpret(apply("round", tokens), [0.5 - 2**-54, -0.5 + 2**-54, 2.0**52 + 1, -(2.0**52) - 1]) == [
        0,
        0,
        2**52 + 1,
        -(2**52) - 1,
    ]
    assert rasp.compile(apply("round", tokens), Reals(0, 1), 2)([0.5 - 2**-54, 0.5]) == [0, 1]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sorting_alters_no_number(size: int) -> None:
    draw = random.Random(size)
    for n in (1, 2, 5, 8):
        given = [draw.uniform(-9, 9) for _ in range(n)]
        wanted = [x for i in range(0, n, size) for x in sorted(given[i : i + size], reverse=True)]
        assert interpret(L.group_sort(size), given) == wanted
        if size == 2:
            assert interpret(L.maxmin(), given) == wanted


def test_a_round_of_group_sort_is_one_layer():
    assert [rasp.compile(L.group_sort(size), Reals(-9, 9), 8, check=False).layers for size in (1, 2, 3, 4)] == [0, 1, 3, 4]


average_so_far = aggregate(select(indices, indices, LEQ), tokens)


@pytest.mark.parametrize("attention", ["hard", "softmax"])
@pytest.mark.parametrize(
    "program, vocab, n",
    [
        (where(average_so_far < tokens, average_so_far, tokens), (-2, 0.001, 3), 2),
        (where(average_so_far == tokens, 5, indices), (-2, 0.001, 3, 1), 2),
        (where(average_so_far < tokens, average_so_far, tokens), (0.01, 1, -2, 3), 3),
        (where(average_so_far < tokens, tokens, 0), tuple(range(0, 1000, 50)), 3),
        (where(average_so_far > tokens, 1, 0), (0.25, 1 / 3, 7), 3),
        (selector_width(select(tokens, tokens, EQ)), "abc", 12),
        (aggregate(select(indices, length - indices - 1, EQ), tokens), "abcd", 12),
        ((average_so_far < tokens).map(int), (-2, 3), 2),
    ],
)
def test_steps_of_relu_units_in_float32_are_right_or_refused(program, vocab, n, attention):
    """A standard step is a difference of two numbers of size |z| / gap: float32 may not hold it. Without the check after compilation."""
    try:
        compiled = rasp.compile(program, vocab, n, mode="standard", dtype="float32", attention=attention, check=False)
    except OutsideClass as refused:
        assert "differences of ReLU units" in str(refused) and vocab[0] in (-2, 0.01, 0.25)  # the others compile
        return
    rng = random.Random(0)
    for size in (*range(1, n + 1), *[n] * 20):
        given = [rng.choice(vocab) for _ in range(size)]
        for got, wanted in zip(compiled(given), interpret(program, given), strict=True):
            assert got == wanted or abs(got - wanted) < 1e-4 * (1 + abs(wanted))


def test_a_refused_step_says_what_to_do():
    with pytest.raises(OutsideClass, match=r"may be off by .* in float32; use mode='analytic' or float64"):
        rasp.compile(where(average_so_far == tokens, 5, indices), (-2, 0.001, 3, 1), 2, mode="standard", dtype="float32")
