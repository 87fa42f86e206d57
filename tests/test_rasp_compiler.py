"""Compiled programs are what they mean: the golden table at every level, random programs, and refusals that say why."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from rasp_cases import CASES, Case

from anyformer.errors import AnyformerError, OutsideClass
from anyformer.rasp import (
    EQ,
    LEQ,
    LT,
    Reals,
    aggregate,
    apply,
    compile,
    full,
    indices,
    interpret,
    length,
    maximum,
    select,
    selector_width,
    soft_aggregate,
    tokens,
    where,
)
from anyformer.rasp.comparing import Report, check_case, check_random_programs
from anyformer.rasp.library import histogram, latest, reverse
from anyformer.rasp.plan import Part, number
from anyformer.rasp.random_programs import Case as RandomCase
from anyformer.rasp.random_programs import random_case
from anyformer.rasp.steps import Steps

LEVELS: dict[str, dict[str, Any]] = {
    "float64": {},
    "float32": {"dtype": "float32"},
    "softmax": {"attention": "softmax"},
    "standard": {"mode": "standard", "tolerance": 1e-4},
}


def same(got: list[Any], expected: list[Any], rtol: float, atol: float) -> None:
    """Words and truth values are equal, numbers close; True is 1."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        if isinstance(a, (int, float)) and isinstance(b, (int, float)):
            assert math.isclose(a, b, rel_tol=rtol, abs_tol=atol), (got, expected)
        else:
            assert a == b, (got, expected)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_interpreter_gives_the_expected_values(case: Case) -> None:
    same(interpret(case.program, case.given, causal=case.causal), case.expected, 1e-12, 1e-12)


COMPILED: dict[tuple, Any] = {}


def compiled_at(case: Case, level: str) -> Any:
    """The program at a level, once for all rows of the table that have it."""
    key = id(case.program), case.vocab, case.max_length, case.causal, level
    if key not in COMPILED:
        causal, check = "dialect" if case.causal else "no", level == "float64"
        COMPILED[key] = compile(case.program, case.vocab, case.max_length, causal=causal, check=check, **LEVELS[level])
    return COMPILED[key]


def agrees(case: Case, level: str) -> None:
    """A row of the table at one level, its refusal included."""
    if level in case.refused:
        with pytest.raises(OutsideClass, match=case.refused[level]):
            compiled_at(case, level)
        return
    compiled = compiled_at(case, level)
    rtol, atol = (1.3e-6, 1e-5) if level == "float32" else (1e-10, 1e-10)
    same(compiled(case.given), case.expected, rtol, atol + compiled.error)
    assert compiled.network.embedding.dtype is (torch.float32 if level == "float32" else torch.float64)


@pytest.mark.parametrize("case", CASES[::9], ids=lambda c: c.name)
def test_the_network_gives_the_expected_values_with_types_checked(case: Case) -> None:
    agrees(case, "float64")


TABLE = """
import sys
sys.path.insert(0, sys.argv[1])
from rasp_cases import CASES
from test_rasp_compiler import LEVELS, agrees
for case in CASES:
    for level in LEVELS:
        try:
            agrees(case, level)
        except Exception as error:
            print(case.name, level, error)
print(len(CASES), "cases")
"""


def test_the_table_holds_at_every_level() -> None:
    """In a process of its own, without the type checks of the tests, which would take four fifths of the time."""
    run = subprocess.run([sys.executable, "-c", TABLE, str(Path(__file__).parent)], capture_output=True, text=True, check=True)
    assert run.stdout == f"{len(CASES)} cases\n"


SCRIPT = """
import json, sys
from anyformer.rasp.comparing import check_random_programs
for fragment in ("categorical", "real-valued"):
    report = check_random_programs(int(sys.argv[1]), seed=0, fragment=fragment)
    print(json.dumps([report.programs, report.inputs, report.undefined, report.refused_share, report.mismatches, report.refused]))
"""


def test_random_programs_are_what_they_mean() -> None:
    """In a process of its own too: 120 of each fragment, 1,000 under HYPOTHESIS_PROFILE=all."""
    count = 120 if settings().max_examples < 100 else 1000
    run = subprocess.run([sys.executable, "-c", SCRIPT, str(count)], capture_output=True, text=True, check=True)
    for most, line in zip((0.05, 0.2), run.stdout.splitlines(), strict=True):
        programs, inputs, undefined, refused, mismatches, reasons = json.loads(line)
        assert mismatches == []
        assert programs == count and inputs > 8 * count and undefined < 0.2 * inputs
        assert refused <= most, reasons


def test_a_few_random_programs_with_types_checked() -> None:
    for fragment in ("categorical", "real-valued"):
        assert check_random_programs(8, seed=1, fragment=fragment).mismatches == []


def test_a_random_program_is_its_number() -> None:
    first, again = (random_case(3, 4, "categorical") for _ in range(2))
    assert str(first) == str(again) != str(random_case(3, 5, "categorical"))


def test_a_mismatch_is_reported() -> None:
    """The comparison sees a network that is wrong: an interpreter with another meaning of ``indices``."""
    report = Report("categorical", 0)
    wrong = where(tokens == "a", indices, indices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anyformer.rasp.comparing.Evaluation.of", lambda *_: [9, 9])
        check_case(RandomCase(wrong, ("a", "b"), 2, {}), report, "name")
    assert len(report.mismatches) == 1 and "the network says [0" in report.mismatches[0]


x = aggregate(select(indices, indices, LEQ), tokens)
REFUSED: list[tuple[Any, Any, int, dict[str, Any], str]] = [
    # program, vocabulary, largest length, options, message
    (lambda: length > 0.5 / tokens, Reals(-1, 1), 3, {}, r"it divides by values in \[-1, 1\], which holds 0"),
    (lambda: x > tokens, Reals(-1, 1), 3, {}, "compares real numbers that may come as near to each other as they like"),
    (lambda: selector_width(select(tokens, tokens, LT)), Reals(-1, 1), 3, {}, "tokens is real-valued; only equality"),
    (lambda: selector_width(select(x, tokens, EQ)), Reals(-1, 1), 3, {}, "compares real numbers that may come as near"),
    (lambda: aggregate(full, tokens), (1, 2, "a"), 3, {}, "tokens mixes words and numbers, which have a mean"),
    (lambda: aggregate(~full, tokens, "none"), (1, 2), 3, {}, "the default 'none' is no number, the values are"),
    (lambda: selector_width(select(tokens, "b", LT)), ("a", 1), 3, {}, "predicate has no value for the key 1 and the query 'b'"),
    (lambda: 1 / (tokens - tokens), (1, 2), 3, {}, "has no value at all: division by zero"),
    (lambda: apply("log", tokens), Reals(-1, 1), 3, {}, r"its argument lies in \[-1, 1\], it must be above 0"),
    (lambda: apply("exp", tokens), Reals(0, 1000), 3, {}, "too large for a float"),
    (lambda: (tokens * 1e200) ** 2, Reals(0, 1), 3, {}, "may be too large for a float"),
    (lambda: tokens.map(lambda t: t + 1), Reals(0, 1), 3, {}, "<lambda> is not an operation of real numbers"),
    (lambda: apply(divmod, tokens, aggregate(select(indices, 0, EQ), tokens)), tuple(range(200)), 3, {}, r"explodes \(40,000"),
    (lambda: x**7 > 3, tuple(range(40)), 40, {}, "compares real numbers that may come as near"),
    (lambda: soft_aggregate(full, tokens, tokens), Reals(-1e18, 1), 3, {}, "do not fit the score of this dtype"),
    (lambda: soft_aggregate(full, tokens, tokens), ("a", "b"), 3, {}, "the values are no numbers"),
    (lambda: maximum(full, tokens), (1.0, 1.0000001), 3, {"dtype": "float32"}, "are ties in this dtype"),
    (lambda: reverse(tokens), (1, 2, 3), 3, {"causal": "strict"}, "is not causal .*may select later keys"),
]


@pytest.mark.parametrize("program, vocab, n, options, message", REFUSED)
def test_what_cannot_be_compiled_is_refused_with_the_reason(program: Any, vocab: Any, n: int, options: Any, message: str) -> None:
    with pytest.raises(OutsideClass, match=message):
        compile(program(), vocab, n, **options)


def test_all_reasons_are_given_at_once() -> None:
    with pytest.raises(OutsideClass, match=r"length / tokens.*; .*log") as error:
        compile(length / tokens + apply("log", tokens), Reals(-1, 1), 3)
    assert len(error.value.reasons) == 2


def test_positions_beyond_the_length_are_not_reckoned_with() -> None:
    """1 / (length - index) is never 1/0, so that no fault is watched for: one output."""
    assert compile(1 / (length - indices), "a", 4).run([["a"]]).shape[-1] == 1
    assert compile(1 / (length - 1 - indices), "a", 4).run([["a"]]).shape[-1] == 2


def test_one_number_among_words_is_averaged_by_itself() -> None:
    program = aggregate(select(tokens, tokens, EQ), tokens)
    assert compile(program, (1, "a"), 3)([1, "a", "a"]) == [1, "a", "a"]


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"program": select(tokens, tokens, EQ)}, "compile needs a sequence, got a Select"),
    ({"max_length": 0}, "max_length must be an integer >= 1"),
    ({"max_length": 2.0}, "max_length must be an integer >= 1"),
    ({"vocab": ()}, "the vocabulary is empty"),
    ({"vocab": (1, True)}, "holds a token twice"),
    ({"vocab": (1, math.nan)}, "a token must be a finite number"),
    ({"vocab": (1, math.inf)}, "a token must be a finite number"),
    ({"vocab": (1, (2,))}, "a token must be a finite number, a Boolean or a string"),
    ({"mode": "exact"}, "mode must be one of 'analytic', 'standard'"),
    ({"causal": True}, "causal must be one of"),
    ({"attention": "soft"}, "attention must be one of"),
    ({"dtype": "float16"}, "dtype must be one of"),
    ({"tolerance": 0}, "tolerance must be a finite number >= 1e-15, got 0"),
    ({"max_length": 10**8}, "max_length must be at most 131,072 tokens, got 100,000,000"),
    ({"tolerance": math.nan}, "tolerance must be a finite number"),
]


@pytest.mark.parametrize("options, message", UNUSABLE)
def test_unusable_arguments_are_named(options: dict[str, Any], message: str) -> None:
    unchecked = getattr(compile, "__wrapped__", compile)  # without the type checker of the tests
    with pytest.raises(AnyformerError, match=message):
        unchecked(**{"program": tokens, "vocab": (1, 2), "max_length": 3} | options)


@pytest.mark.parametrize(
    "given, message",
    [
        ([1, 2, 1, 2], "compiled for 1 to 3 tokens, got 4"),
        ([], "compiled for 1 to 3 tokens, got 0"),
        ([1, 7], "the token 7 at position 1 is not in the vocabulary: 1, 2"),
        (["1"], "the token '1' at position 0 is not in the vocabulary"),
    ],
)
def test_inputs_that_the_program_was_not_compiled_for(given: list[Any], message: str) -> None:
    with pytest.raises(AnyformerError, match=message):
        compile(tokens, (1, 2), 3, check=False)(given)


@pytest.mark.parametrize("token", [1.5, -0.1, "a", math.nan])
def test_real_tokens_lie_in_their_interval(token: Any) -> None:
    with pytest.raises(AnyformerError, match=r"must be a number in \[0, 1\]"):
        compile(tokens, Reals(0, 1), 3, check=False)([0.5, token])


FAILING: list[tuple[Any, Any, list[Any]]] = [
    # program, vocabulary, an input on which it has no value
    (aggregate(full, tokens), "ab", [*"ab"]),
    (aggregate(full, tokens), "abc", [*"ac"]),  # the mean of their codes is the code of b
    (1 / tokens, (0, 1), [1, 0]),
    (aggregate(full, 1 / tokens), (0, 1), [1, 0]),
    (maximum(full, indices / tokens), (0, 1), [1, 0]),
    (latest(full, 1 / tokens), (0, 1), [0, 1]),
    (selector_width(select(1 / tokens, 1, EQ)), (0, 1), [1, 0]),
    (selector_width(select(1, 1 / tokens, LT)), (0, 1), [1, 0]),
    (where(True, 1, aggregate(full, 1 / tokens)), (0, 1), [1, 0]),
    (tokens.map(lambda t: {1: 2}[t]), (0, 1), [1, 0]),
    (selector_width(select(aggregate(full, 1 / tokens), 5, LT)), (0, 1), [1, 0]),  # whose value is 1 or none: no coordinate
]


@pytest.mark.parametrize("program, vocab, given", FAILING)
def test_what_has_no_value_fails_in_the_interpreter_and_in_the_network(program: Any, vocab: Any, given: list[Any]) -> None:
    compiled = compile(program, vocab, 4)
    for run in (lambda tokens: interpret(program, tokens), compiled):
        with pytest.raises(AnyformerError, match=r"no value|no mean"):
            run(given)


def test_the_check_after_compilation_sees_a_wrong_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A staircase with its levels shifted compiles, and is refused by the check."""
    monkeypatch.setattr(Steps, "units", lambda self, z, step, largest: [step.height * Part("step", z - number(step.high + 0.01))])
    with pytest.raises(AnyformerError, match=r"differs from its meaning|fails on"):
        compile(histogram(), "abc", 5)


@pytest.mark.parametrize("n, dtype", [(99, "float64"), (99, "float32")])
def test_long_inputs_need_no_exactness_to_be_set(n: int, dtype: Any) -> None:
    assert compile(length, "a", n, dtype=dtype, check=False)(["a"] * n) == [n] * n
    assert compile(reverse(tokens), "abc", n, dtype=dtype, check=False)(["a"] * (n - 1) + ["c"])[0] == "c"


def test_what_float32_cannot_count_is_refused_and_float64_counts_it() -> None:
    with pytest.raises(OutsideClass, match="1,000 combinations are too close to each other for float32 to tell apart"):
        compile(length, "a", 1000, dtype="float32")
    assert compile(length, "a", 1000, check=False)(["a"] * 999) == [999] * 999


def test_address_4096_of_8192_in_float32() -> None:
    """Parabolic addresses tie with their neighbours there; the score is whole numbers, or refused."""
    compiled = compile(aggregate(select(indices, 4096, EQ), tokens), (0, 1, 2), 8192, dtype="float32", check=False)
    given = [0] * 4096 + [1] + [2] * 3
    assert compiled(given)[:2] == [1, 1]
