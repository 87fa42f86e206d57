"""Inputs chosen to make compiled programs wrong: near ties, close scores, odd numbers. Each was once wrong or a traceback."""

import pytest

from anyformer import rasp
from anyformer.errors import AnyformerError
from anyformer.rasp import EQ, LEQ, Reals, aggregate, indices, interpret, maximum, select, selector_width, tokens, where
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


def test_a_length_beyond_the_memory_is_refused_at_once():
    with pytest.raises(AnyformerError, match="99,999,999,999 tokens"):
        rasp.compile(tokens + 0, (0, 1), 99_999_999_999)


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
