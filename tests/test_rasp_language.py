"""The .rasp language: what programs mean, what is wrong with others and where, the prompt, and ``anyformer rasp``."""

import io
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from anyformer import rasp
from anyformer.cli import main
from anyformer.errors import AnyformerError
from anyformer.rasp import Environment, RaspError, load_rasp, run_rasp
from anyformer.rasp.language import display
from anyformer.rasp.language.environment import read_input
from anyformer.rasp.language.parser import parse
from anyformer.rasp.language.prompt import Prompt

ROOT = Path(__file__).parent.parent

PROGRAMS = [
    # values of the language
    ("indices;", "abc", [0, 1, 2]),
    ("tokens;", "abc", ["a", "b", "c"]),
    ("tokens;", [3, 1], [3, 1]),
    ("tokens_int + tokens_float;", "12", [2.0, 4.0]),
    ("tokens_str + tokens_str;", [1, 2], ["11", "22"]),
    ("tokens_bool;", [0, 3], [False, True]),
    ("tokens = tokens_int; tokens * 2;", "31", [6, 2]),
    ("length;", "abc", [3, 3, 3]),
    ("1.5e1 * indices;", "ab", [0, 15]),
    # precedence: published order, everything from the left
    ("-2^2 + 0*indices;", "a", [4]),
    ("2^3^2 + 0*indices;", "a", [64]),
    ("(indices + 7)%2*3;", "ab", [1, 2]),
    ("not indices == 1;", "abc", [True, False, False]),
    ("not (indices == 1);", "abc", [True, False, True]),
    ("indices == 0 or indices == 1 and indices == 2;", "abc", [False, False, False]),
    ("1 if True else 2 if False else 3 + indices;", "ab", [3, 4]),
    ('tokens + "b" in ["ab"];', "ab", [True, False]),
    ('tokens == "a" and tokens in [True];', "ab", [True, False]),
    ("indices < 2 == True;", "abc", [True, True, False]),
    ("- -indices - -1;", "ab", [1, 2]),
    ("+indices;", "ab", [0, 1]),
    ("indices != 1;", "abc", [True, False, True]),
    # conditionals, choice, membership
    ('"x" if indices % 2 == 1 else tokens;', "abcd", ["a", "x", "c", "x"]),
    ("1/indices if indices > 0 else 0;", "abc", [0, 1, 0.5]),
    ("0 if 1 == 1 else 1/0; indices;", "a", [0]),
    ('{"a": 1, "b": 2}[tokens];', "aba", [1, 2, 1]),
    ("[5, 6, 7][indices];", "abc", [5, 6, 7]),
    ('"xyz"[indices];', "abc", ["x", "y", "z"]),
    ("tokens[1];", "abc", ["b", "b", "b"]),
    ("tokens[-1];", "abc", ["c", "c", "c"]),
    ("indices[7];", "abc", [0, 0, 0]),
    ('"b" in tokens;', "abc", [True, True, True]),
    ('"z" in tokens;', "abc", [False, False, False]),
    ('tokens in ["a", "{c}"];', "abc", [True, False, False]),
    ("indicator(3 in [1, 3]) + indices;", "ab", [1, 2]),
    # selectors
    ("select(tokens, tokens, ==);", "aba", [[1, 0, 1], [0, 1, 0], [1, 0, 1]]),
    ("select(indices, indices, <);", "abc", [[0, 0, 0], [1, 0, 0], [1, 1, 0]]),
    ("select(indices, 1, >);", "abc", [[0, 0, 1], [0, 0, 1], [0, 0, 1]]),
    ("select(1, indices, >=);", "abc", [[1, 1, 1], [1, 1, 1], [0, 0, 0]]),
    ("select(indices, indices, !=) and not select(indices, 0, ==);", "abc", [[0, 1, 1], [0, 0, 1], [0, 1, 0]]),
    ("select(indices, 0, ==) or select(1, indices, ==);", "abc", [[1, 0, 0], [1, 1, 1], [1, 0, 0]]),
    ("full_s;", "ab", [[1, 1], [1, 1]]),
    ("selector_width(select(tokens, tokens, ==));", "abac", [2, 1, 2, 1]),
    ("aggregate(select(indices, indices, <), indices);", "abcd", [0, 0, 0.5, 1]),
    ('aggregate(select(indices, indices + 1, ==), tokens, "-");', "abc", ["b", "c", "-"]),
    ("round(aggregate(full_s, indices) * 1.2);", "abcd", [2, 2, 2, 2]),
    ("maximum(select(indices, indices, <=), tokens);", [2, 5, 1], [2, 5, 5]),
    ("soft_aggregate(full_s, 0 * indices, indices);", "abc", [1, 1, 1]),
    ("floor(sqrt(indices)) + abs(-indices) + relu(-1 * indices);", "abcde", [0, 2, 3, 4, 6]),
    # functions, loops, lists, dictionaries
    ("def f(a, b) { c = a + b; return c, a; } x, y = f(indices, 2); x * y;", "abc", [0, 3, 8]),
    ("def f() { # nothing\n return indices; # and nothing more\n } f() + f();", "ab", [0, 2]),
    ("def f(x) { def g(y) { return x + y; } return g(1); } f(indices);", "ab", [1, 2]),
    ("def f(x) { return 0 if x == 0 else 1 + f(x - 1); } f(9) + indices;", "a", [9]),
    ("def f(sort, max) { length = sort + max; return length; } f(indices, 1);", "ab", [1, 2]),
    ("def f() { return late; } late = indices + 1; f();", "ab", [1, 2]),
    ("def f(c) { return selector_width(select(indices, indices, c)); } f(<=) - f(<);", "abc", [1, 1, 1]),
    ("x = indices; for i in range(4) { x = x + i; } x + i;", "ab", [9, 10]),
    ("x = 0; for a, b in zip([1, 2], [3, 4]) { for c in [a, b] { x = x * 10 + c; } } x + indices;", "a", [1324]),
    ('x = ""; for k in {"p": 1, "q": 2} { x = x + k; } x + tokens;', "a", ["pqa"]),
    ("x = [i * i for i in range(1, 6, 2)] + [7]; x[2] + x[-1] + len(x) + indices;", "a", [36]),
    ("d = {k: v + indices for k, v in zip([1, 2], [3, 4])}; d[1] * d[2];", "ab", [12, 20]),
    ("a, b = [indices, 2]; a + b;", "ab", [2, 3]),
    ("x = 1, 2; x[0] + indices;", "a", [1]),
    ("a = indices; b = a; a = a + 1; b;", "ab", [0, 1]),
    ("[[indices]][0][0];", "ab", [0, 1]),
    ("1 + 2; out + indices;", "a", [3]),
    ("indices(\"abc\");", "ab", [0, 1]),
    ("set example [1,\n2]\n-indices;", "ab", [0, -1]),
    ('set example "x"; examples off\ns-op examples on\nfull seq display off\nshow example\nindices;', "ab", [0, 1]),
    ("indices + 1; exit\nnonsense;", "ab", [1, 2]),
    ("exp = 2.718; exp + indices;", "a", [2.718]),
    # the standard library
    ("has_focus(select(indices, indices, <));", "abc", [False, True, True]),
    ("average(indices);", "abc", [1, 1, 1]),
    ('count(tokens, "a");', "abca", [2, 2, 2, 2]),
    ('contains(tokens, "z");', "ab", [False, False]),
    ("max(indices, 1) + min(indices, 1);", "abc", [1, 2, 3]),
    ("max(2, 3) + min(2, 3) + indices;", "a", [5]),
    ("load_from_location(tokens, length - 1 - indices);", "abc", ["c", "b", "a"]),
    ('shift(tokens, 1, "-");', "abc", ["-", "a", "b"]),
    ('shift(tokens, -2, "-");', "abc", ["c", "-", "-"]),
    ('mark_first_instance(tokens, "l");', "hello", [False, False, True, False, False]),
    ('mark_last_instance(tokens, "l");', "hello", [False, False, False, True, False]),
    ('aggregate(select_from_first(tokens, "l"), indices);', "hello", [2, 2, 2, 2, 2]),
    ('aggregate(select_from_last(tokens, "l"), indices);', "hello", [3, 3, 3, 3, 3]),
    ("sort(tokens, tokens);", "hello", ["e", "h", "l", "l", "o"]),
    ("sort(indices, tokens);", [2, 1, 2, 1], [1, 3, 0, 2]),
    ("aggregate(select_next_identical(tokens), indices, -1);", "abaab", [2, 4, 3, -1, -1]),
    # programs: reversal, fractions, balanced brackets, addition with carries
    ("aggregate(select(indices, length - 1 - indices, ==), tokens);", "abcd", ["d", "c", "b", "a"]),
    ('aggregate(select(indices, indices, <=), indicator(tokens == "l"));', "hello", [0, 0, 1 / 3, 0.5, 0.4]),
    (
        """def depth(open, close) {
            before = select(indices, indices, <=);
            return round((indices + 1) * aggregate(before, indicator(tokens == open) - indicator(tokens == close)));
        }
        def state(pairs) {
            balances = [depth(p[0], p[1]) for p in pairs];
            bad = False; whole = True;
            for b in balances { bad = bad or b < 0; whole = whole and b == 0; }
            before = select(indices, indices, <=);
            return "F" if aggregate(before, indicator(bad)) > 0 else ("T" if whole else "P");
        }
        state(["()", "{}"]);""",
        "({)}}(",
        ["P", "P", "P", "T", "F", "F"],
    ),
    (
        """digit = {"0": 0, "1": 1, "2": 2, "3": 3, "4": 4, "5": 5, "6": 6, "7": 7, "8": 8, "9": 9, "+": 0};
        plus = aggregate(select(tokens, "+", ==), indices);
        value = digit[tokens];
        right = value if indices > plus else 0;
        left = aggregate(select(indices + length - plus, indices, ==), value);
        sum = left + right;
        generates, passes = sum > 9, sum == 9;
        stops = selector_width(select(indices, indices, <) and select(passes, False, ==));
        carry = aggregate(select(indices, indices, >) and select(passes, False, ==)
            and select(stops, stops + indicator(not passes), ==), indicator(generates)) > 0;
        (sum + indicator(carry)) % 10;""",
        "199+002",
        [0, 0, 0, 0, 2, 0, 1],
    ),
]  # fmt: skip


@pytest.mark.parametrize("program, tokens, expected", PROGRAMS, ids=lambda x: x if isinstance(x, str) else repr(x))
def test_programs_mean_what_they_say(program: str, tokens: object, expected: list) -> None:
    values = run_rasp(program, tokens)
    if isinstance(values, np.ndarray):
        assert values.astype(int).tolist() == expected
    else:
        assert values == pytest.approx(expected) if isinstance(expected[0], float) else values == expected
        assert [type(v) is bool for v in values] == [type(v) is bool for v in expected]


ERRORS = [
    # syntax
    ("a = 1", r"line 1, column 6: the text ends here, but an operator or ',' or ';' is expected"),
    ("a = 1\nb = 2;", r"line 1, column 6: ';' is missing at the end of this statement"),
    ("indices;\na = ;", r"line 2, column 5: expected a value, got ';'"),
    ("x = 1 if a = b;", r"line 1, column 12: expected an operator or 'else', got '='; compare with =="),
    ("x = 'a';", r"line 1, column 5: \"'\" has no meaning in this language; a string stands in double quotes"),
    ('x = "abc;\n', r"line 1, column 5: this string does not end; close it with \" on the same line"),
    ("f(1,,2);", r"line 1, column 5: expected a value, got ','"),
    ("def f( {", r"line 1, column 8: expected a name or '\)', got '{'"),
    ("def f(x) {\n  y = 1;\n}", r"line 3, column 1: expected a statement or 'return', got '}'"),
    ("if = 3;", r"line 1, column 1: expected a statement, got 'if'; 'if' is a reserved word"),
    ("1 @ 2;", r"line 1, column 3: '@' has no meaning in this language$"),
    ("set example 1 +\nindices;", r"line 1, column 16: the line ends here, but a value is expected"),
    # names
    ("x = 1;\ny = x + lenght;", r"line 2, column 9: there is no 'lenght' here; did you mean 'length'\?"),
    ("zzzzzz;", r"line 1, column 1: there is no 'zzzzzz' here$"),
    ("x = 1;\n indices = 3;", r"line 2, column 2: 'indices' is a reserved name; choose another one"),
    ("out = 3;", r"line 1, column 1: 'out' is a reserved name"),
    ("a, True = 3, 4;", r"line 1, column 4: 'True' is a reserved name"),
    ("sort = 3;", r"line 1, column 1: 'sort' is a name of the standard library; choose another one"),
    ("def selector_width(s) { return s; }", r"line 1, column 5: 'selector_width' is a name of the standard library"),
    ("def f(a, tokens_int) { return a; }", r"line 1, column 10: 'tokens_int' is a reserved name"),
    ("def f(a, a) { return a; }", r"line 1, column 10: 'a' is a parameter twice"),
    ("x = [i for i in [1]]; i;", r"line 1, column 23: there is no 'i' here"),
    # kinds
    ("indices + full_s;", r"line 1, column 11: a selector where a sequence is needed; aggregate it, or take its selector_width"),
    (
        "full_s and tokens;",
        r"line 1, column 12: a sequence where a selector is needed; make one with select\(keys, queries, ==\)",
    ),
    ("1 if full_s else 2;", r"line 1, column 6: a selector where a sequence is needed"),
    ("aggregate(tokens, 1);", r"line 1, column 11: a sequence where a selector is needed"),
    ("aggregate(full_s,\n  full_s);", r"line 2, column 3: a selector where a sequence is needed"),
    ("aggregate(full_s, 1, tokens);", r"line 1, column 22: a sequence where a number, a Boolean or a string is needed"),
    ("select(tokens, tokens, tokens);", r"line 1, column 24: a sequence where a comparison \(== != < <= > >=\) is needed"),
    ("== ;", r"line 1, column 1: expected a statement, got '=='"),
    ("range(3) + 6;", r"line 1, column 1: a list where a sequence is needed"),
    ("not {};", r"line 1, column 5: a dictionary where a sequence is needed"),
    ("len(tokens);", r"line 1, column 5: len counts the items of a list, got a sequence; length is the number of tokens"),
    ("range(1.5);", r"line 1, column 7: 1.5 where an integer is needed"),
    ("range(1, 2, 0);", r"line 1, column 13: the step of a range must not be 0"),
    ("zip([1], [1, 2]);", r"line 1, column 10: zip needs lists of equal length, got 1 and 2 items"),
    ("zip(tokens);", r"line 1, column 5: a sequence where a list is needed"),
    ("for i in 3 { x = i; }", r"line 1, column 10: for goes through a list or the keys of a dictionary, got a number"),
    ("a, b = 3;", r"line 1, column 8: 2 names need as many values, got a number"),
    ("a, b = 1, 2, 3;", r"line 1, column 8: 2 names need as many values, got 3"),
    ("{tokens: 1};", r"line 1, column 2: a key of a dictionary is a number, a Boolean or a string, got a sequence"),
    ("[1, 2][3];", r"line 1, column 8: position 3 lies outside the 2 items"),
    ('{"a": 1}["b"];', r"line 1, column 10: the dictionary has no 'b'"),
    ("{1: 2}[[1]];", r"line 1, column 8: a key of a dictionary is .*, got a list"),
    ("[1]['a'];", r"line 1, column 5: \"'\" has no meaning"),
    ('[1]["a"];', r"line 1, column 5: a string where an integer is needed"),
    ("tokens[indices];", r"line 1, column 8: a sequence where an integer is needed"),
    ("full_s[0];", r"line 1, column 1: a selector has no items; only lists, dictionaries, strings and sequences have"),
    ("[full_s, 1][indices];", r"line 1, column 1: a sequence chooses among atoms, but this holds a selector"),
    ("tokens in 3;", r"line 1, column 11: a number after 'in': a list of atoms is needed"),
    ("full_s in [1];", r"line 1, column 1: a selector in ...: a sequence or an atom is needed before 'in'"),
    ("draw(3);", r"line 1, column 6: a number cannot be drawn"),
    ('def f() { load "x"; return 1; } f();', r"line 1, column 11: load stands at the top of a program"),
    # calls
    ("sort(tokens);", r"line 1, column 1: sort takes 2 arguments \(seq, key\), got 1"),
    ("selector_width(tokens, tokens, ==);", r"line 1, column 1: selector_width takes 1 argument \(selector\), got 3"),
    ("aggregate(full_s);", r"line 1, column 1: aggregate takes 2 to 3 arguments \(selector, values, default\), got 1"),
    ("zip();", r"line 1, column 1: zip takes at least 1 argument"),
    ("sort(tokens, full_s);", r"line 1, column 1: in sort: a selector where a sequence is needed"),
    ("x = 3;\nx(1);", r"line 2, column 1: a number cannot be called; only functions, sequences and selectors can"),
    ("def f(x) { return f(x); }\nf(1);", r"line 1, column 19: calls of f are nested more than 50 deep: it may never end"),
    ("indices(1, 2);", r"line 1, column 1: a sequence runs on one input, got 2"),
    ('indices("");', r"line 1, column 9: an input is a string or a list of tokens that is not empty, got an empty one"),
    ('tokens(["a", 3]);', r"line 1, column 8: the tokens of an input are of one kind, got a string and a number"),
    ("tokens([[1]]);", r"line 1, column 8: a token is a number, a Boolean or a string, got a list"),
    ("set example 3", r"line 1, column 13: an input is a string or a list of tokens that is not empty, got a number"),
    # atoms are computed at once
    ("x = indices;\ny = 1 / (2 - 2);", r"line 2, column 7: division by zero in \(1 / 0\)"),
    ('1 + "a";', r"line 1, column 3: .*'a' is no number"),
    ('-"a";', r"line 1, column 1: .*'a' is no number"),
    ('+"a";', r"line 1, column 1: .*'a' is no number"),
    ("2 ^ 100000000;", r"line 1, column 3: .*OverflowError: the result has more than 1023 bits"),
    ("x = 3; for i in range(40) { x = x * x; }", r"line 1, column 35: mul gives an integer of more than 1023 bits"),
    ('x = "a"; for i in range(40) { x = x + x; }', r"line 1, column 37: add gives a string of more than 100,000 characters"),
    ("1" * 5000 + ";", r"line 1, column 1: an integer of 5000 digits is too long"),
    ("1e999;", r"line 1, column 1: .* is inf"),
    ("range(1000000000);", r"line 1, column 7: a range of 1,000,000,000 numbers is too long"),
    ("x = [1]; for i in range(40) { x = x + x; }", r"line 1, column 37: a list of more than 100,000 items is too long"),
    (f"x = {'+'.join(['1'] * 3000)};", r"line 1, column \d+: expressions and calls are nested too deeply here"),
    ('load "nowhere";', r"line 1, column 1: there is no file nowhere.rasp to load"),
]


@pytest.mark.parametrize("program, message", ERRORS, ids=[re.sub(r"\s+", " ", program)[:40] for program, _ in ERRORS])
def test_errors_say_where_and_what(program: str, message: str) -> None:
    with pytest.raises(RaspError, match=f"^{message}") as caught:
        load_rasp(program)
    assert "\n" not in str(caught.value) and isinstance(caught.value, AnyformerError)
    assert str(caught.value).startswith(f"line {caught.value.line}, column {caught.value.column}: ")


@pytest.mark.parametrize(
    "program, tokens, message",
    [
        ("x = 1 / (indices - 2);\nx + 1;", "abc", r"line 1, column 7: division by zero in \(1 / 0\) \(position 2 of the input\)"),
        ("def f(x) {\n  return 1 / x;\n}\nf(indices);", "a", r"line 2, column 12: division by zero"),
        ("aggregate(full_s, tokens);", "ab", r"line 1, column 1: .* different values that have no mean"),
        ("2 * aggregate(full_s,\n 1 / indices);", "ab", r"line 1, column 5: .*position 0 selects position 0, which has no value"),
        ("1 + sort(tokens, 1 / indices);", "ab", r"line 1, column 5: .*the key at position 0 has no value: division by zero"),
        ("x = tokens_int;\nx + 1;", "1b", r"line 2, column 3: int\('b'\) raises ValueError.*position 1"),
        ("tokens < 3;", "a", r"line 1, column 8: .*numbers and strings have no order"),
        ("1 if 1 / indices > 2 else 0;", "a", r"line 1, column 8: division by zero"),
        ("(1 / indices) if indices == 0 else 0;", "ab", r"line 1, column 4: division by zero.*position 0"),
        ("[4, 5][indices];", "abc", r"line 1, column 1: .*position 2 lies outside the 2 items"),
        ('{"a": 1}[tokens];', "ab", r"line 1, column 1: .*the dictionary has no 'b'"),
        ("[4][indices / 2];", "ab", r"line 1, column 1: .*0.5 is no position in a list"),
        ("(indices + 9) ^ (9 ^ 9);", "a", r"line 1, column 15: .*the result has more than 1023 bits"),
        ("soft_aggregate(full_s, tokens, indices);", "ab", r"line 1, column 1: soft_aggregate.*position 0: unsupported operand"),
        ("maximum(full_s, tokens if indices == 0 else 1);", "ab", r"line 1, column 1: maximum.*position 0: '>' not supported"),
        ("exp(1000 * indices);", "ab", r"line 1, column 1: exp\(1000\) raises OverflowError"),
    ],
)  # fmt: skip
def test_what_has_no_value_is_found_when_it_runs(program: str, tokens: str, message: str) -> None:
    environment = load_rasp(program)
    with pytest.raises(RaspError, match=f"^{message}"):
        environment.run(environment.result, list(tokens))


def test_damaged_programs_raise_no_other_error() -> None:
    """Words of the tables' programs deleted, inserted and exchanged: each still loads, or is an error of ours."""
    draw, outcomes = random.Random(0), {True: 0, False: 0}
    texts = [program for program, *_ in PROGRAMS + ERRORS if len(program) < 1000]
    split = [re.findall(r'\w+|"[^"]*"|[^\w\s]|\s+', text) for text in texts]
    words = [word for text in split for word in text]
    for _ in range(400):
        text = list(draw.choice(split))
        for _ in range(draw.randint(1, 3)):
            start = draw.randrange(len(text) + 1)
            text[start : start + draw.randint(0, 1)] = draw.choices(words, k=draw.randint(0, 1))
        try:
            environment = load_rasp("".join(text))
            if environment.result is not None:
                environment.run(environment.result, draw.choice([[1, 2, 0.5], list("a1+")]))
            outcomes[True] += 1
        except AnyformerError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 20


def test_an_environment_gives_names_expressions_and_places() -> None:
    environment = load_rasp(
        'set example "abab"\nsame = select(tokens, tokens, ==);\n_w = selector_width(same);\nk = 3; def f(x) { return x; }'
    )
    assert (
        environment.names == ("same", "_w", "k", "f") and environment["k"] == 3 and "f" in environment and "g" not in environment
    )
    assert isinstance(environment["same"], rasp.Selector) and environment["same"].label == "same"
    assert environment.result is environment["_w"] and environment.example == list("abab")
    assert environment["tokens"] is rasp.tokens and environment["indices"] is rasp.indices and rasp.indices.label is None
    place = environment.place(environment["_w"])
    assert place is not None and (place.line, place.column) == (3, 6) and environment.place(rasp.tokens) is None
    assert rasp.interpret(environment["_w"], list("aab")) == environment.run(environment["_w"], list("aab")) == [2, 2, 1]
    assert environment.run(environment.evaluate("f(_w) + k"), list("aab"), causal=True) == [4, 5, 4]
    with pytest.raises(RaspError, match="there is no 'sam' here; did you mean 'same'"):
        environment["sam"]


def test_names_are_those_that_the_program_gives() -> None:
    environment = load_rasp("def f(x) { inner = x + 1; return inner; }\na = f(indices); b = a; c = f(indices);")
    assert [environment[name].label for name in "abc"] == ["a", "a", "c"]


def test_run_rasp_takes_an_expression_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "p.rasp").write_text("a = indices + 1;\ndef twice(x) { return x * 2; }")
    assert run_rasp(tmp_path / "p.rasp", "ab") == [1, 2]
    assert run_rasp(str(tmp_path / "p.rasp"), [5, 6], "twice(a)") == [2, 4]
    assert run_rasp("a = 1;", "abc", '"x"') == ["x", "x", "x"]
    assert run_rasp("indices;", "ab", 'tokens("xyz")') == ["a", "b"]
    with pytest.raises(AnyformerError, match=r"ends in no sequence and no selector; name an expression, for instance f\(x\)"):
        run_rasp("a = 1; def f(x) { return x; }", "abc")
    with pytest.raises(AnyformerError, match=r"^a is a list; a sequence or a selector is needed"):
        run_rasp("a = [indices];", "abc", "a")
    with pytest.raises(RaspError, match="an input is a string or a list of tokens"):
        run_rasp("indices;", "")


def test_files_load_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.rasp").write_text('tokens = tokens_int; load "deep/b"; c = b + tokens; examples off')
    (tmp_path / "deep" / "b.rasp").write_text('load "private"; b = _hidden; set example "12"')
    (tmp_path / "deep" / "private.rasp").write_text("_hidden = 3; seen = tokens;")
    with pytest.raises(
        RaspError, match=rf"^{re.escape(str(Path('deep', 'b.rasp')))}, line 1, column 21: there is no '_hidden' here"
    ):
        load_rasp(tmp_path.relative_to(tmp_path) / "a.rasp")
    (tmp_path / "deep" / "b.rasp").write_text('_hidden = 4; load "private"; b = _hidden; set example "12"')
    environment = load_rasp('load "a";')
    assert environment.names == ("tokens", "seen", "b", "c") and environment.example == ["1", "2"]
    assert environment.run(environment["c"], list("12")) == [5, 6] and environment.run(environment["seen"], ["1"]) == ["1"]
    (tmp_path / "deep" / "private.rasp").write_text('load "b";')
    with pytest.raises(
        RaspError, match=r"line 1, column 1: files load each other in a circle: b.rasp loads private.rasp loads b.rasp"
    ):
        load_rasp('load "a";')
    (tmp_path / "a.rasp").write_text("sort = 1;")
    with pytest.raises(RaspError, match=r"^a.rasp, line 1, column 1: 'sort' is a name of the standard library"):
        load_rasp('load "a";')
    (tmp_path / "a.rasp").write_bytes(b"\xff\xfe")
    with pytest.raises(AnyformerError, match=r"a\.rasp is no UTF-8 text"):
        load_rasp("a.rasp")


def test_the_library_is_written_in_the_language() -> None:
    text = (ROOT / "anyformer" / "rasp" / "language" / "library.rasp").read_text()
    defined = {str(statement.children[0]) for statement in parse(text)}
    assert len(defined) == 15 and all(name in Environment() for name in defined)


@pytest.mark.parametrize(
    "text, tokens",
    [
        ("hello", list("hello")), ("3,1,2", [3, 1, 2]), ("-1, 2.5,1e2", [-1, 2.5, 100.0]), ("7,", [7]), ("7", ["7"]), ("12", ["1", "2"]),
        ("a,b", ["a", ",", "b"]), ("True,False", [True, False]), (",", [","]), ("1,a", ["1", ",", "a"]), (" ", [" "]), ("1,,2", list("1,,2")),
    ],
)  # fmt: skip
def test_inputs_of_the_command_line(text: str, tokens: list) -> None:
    assert read_input(text) == tokens and list(map(type, read_input(text))) == list(map(type, tokens))


def test_numbers_of_an_input_are_finite() -> None:
    for text in ("1e999,2", "1" * 400 + ",2"):
        with pytest.raises(RaspError, match=r"^the input, line 1, column 1: "):
            read_input(text)
    with pytest.raises(RaspError, match=r": an integer token has at most 1023 bits, got 4001"):
        run_rasp("indices;", [2**4000])


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["rasp", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_runs_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reverse = ROOT / "examples" / "reverse.rasp"
    assert call(capsys, reverse, "--input", "abc") == (0, 'reverse("abc") = ["c", "b", "a"]\n', "")
    code, out, err = call(capsys, reverse, "--input", "3,1,2", "--json")
    assert code == 0 and err == "" and json.loads(out) == {"output": [2, 1, 3], "interpreted": [2, 1, 3]}
    code, out, _ = call(capsys, reverse, "--input", "ab", "--name", "opposite", "--json")
    assert json.loads(out) == {"output": [[0, 1], [1, 0]], "interpreted": [[0, 1], [1, 0]]}
    code, out, _ = call(capsys, reverse, "--input=-10,2", "--name", "opposite")
    assert (code, out) == (0, "opposite([-10, 2]) =\n        -10   2\n    -10   .   1\n      2   1   .\n")
    assert call(capsys, ROOT / "examples" / "running_sum.rasp")[1] == "total([3, 2, 1, 1]) = [3, 5, 6, 7]\n"
    bad = tmp_path / "bad.rasp"
    bad.write_text("x = indices;\ny = x + full_s;\n")
    for arguments, message in [
        ((bad, "--input", "a"), r"bad.rasp, line 2, column 9: a selector where a sequence is needed"),
        (
            (reverse, "--input", "a", "--name", "revers"),
            r"^anyformer: 'revers', line 1, column 1: there is no 'revers' here; did you mean 'reverse'",
        ),
        ((reverse, "--input", "a", "--name", "1 +"), r"'1 \+', line 1, column 4: the text ends here, but a value is expected"),
        (
            (reverse, "--input", "1,0", "--compiled", "--vocab", "True,False"),
            r"the input holds 1 where the vocabulary has True; write both as Booleans \(True,False\) or as numbers \(1,0\)",
        ),
        ((reverse, "--input", "True,False", "--compiled", "--vocab", "1,0"), r"the input holds True where the vocabulary has 1"),
        ((reverse, "--input", "ab", "--compiled", "--max-length", 10**8), r"max_length must be at most 131,072 tokens"),
        ((reverse, "--input", ""), r"an input needs at least one token"),
        ((tmp_path / "none.rasp", "--input", "a"), r"No such file"),
        ((tmp_path, "--input", "a"), r"Is a directory"),
        (("--json",), r"--json and --name need a FILE"),
    ]:
        code, out, err = call(capsys, *arguments)
        assert (code, out) == (2, "") and err.count("\n") == 1 and re.search(message, err), err


def test_the_prompt_through_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "indices + 1;\ndef f(x) {\n  return x;\n}\nf(\n2);\nindices + full_s;\nf;\n1 +"
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    code, out, err = call(capsys, "--input", "ab")
    assert (code, err) == (2, "") and out.splitlines() == [
        'out("ab") = [1, 2]',
        "function f(x)",
        "out = 2",
        "indices + full_s;",
        "          ^",
        "error: line 7, column 11: a selector where a sequence is needed; aggregate it, or take its selector_width",
        "function f(x)",
        "1 +",
        "   ^",
        "error: line 9, column 4: the text ends here, but a value is expected",
    ]  # fmt: skip


@pytest.mark.parametrize("text, code", [("1;\nexit;\n", 0), ("foo;\n", 2), ("1;\n1 +", 2), ("tokens_int;\n1;\n", 2)])
def test_a_pipe_with_errors_exits_with_code_2(
    text: str, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert call(capsys)[0] == code


def test_a_sequence_of_the_language_itself_fails_where_it_is_asked_for() -> None:
    assert converse("x = 1;", "y = tokens_int;")[1:3] == ["y = tokens_int;", "    ^"]
    with pytest.raises(RaspError, match=r"^line 2, column 1: int\('a'\) raises"):
        run_rasp("1;\ntokens_int;", "a")
    with pytest.raises(RaspError, match=r"^'tokens_int', line 1, column 1: int\('a'\) raises"):
        run_rasp("1;", "a", "tokens_int")


def test_a_list_of_lists_is_shown_up_to_a_stated_length(as_shipped) -> None:
    wide = converse("x = [1];", "for i in range(40) { x = [x, x]; }", "x;")[-1]
    deep = converse("x = [1];", "for i in range(20000) { x = [x]; }", "x;")[-1]
    assert wide.endswith("...") and len(wide) < 10 * display.MOST_PIECES and deep == f"x = {'[' * 20001}1{']' * 20001}"
    assert converse('[{1: "a", 2: [0.5]}, []];') == ['out = [{1: "a", 2: [0.5]}, []]']


def converse(*lines: str | type[BaseException]) -> list[str]:
    """What a prompt shows that is given these lines; exceptions stand for Ctrl-C and Ctrl-D."""
    said, given = [], iter([*lines, EOFError])

    def read(_: str) -> str:
        line = next(given)
        if isinstance(line, str):
            return line
        raise line

    Prompt(read, said.append, quiet=True).start()
    return said


def test_the_prompt_shows_values_selectors_and_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert converse("select(tokens, tokens, ==);") == [
        'out("hello") =', "      h e l l o", "    h 1 . . . .", "    e . 1 . . .", "    l . . 1 1 .", "    l . . 1 1 .", "    o . . . . 1",
    ]  # fmt: skip
    assert converse("set example [10, 2]", "x = tokens > 5;", "full seq display on", "x;", "show s-op example") == [
        "x([10, 2]) = [True, False]", "x:", "    input     10     2", "    output  True False", "s-op example = [10, 2]",
    ]  # fmt: skip
    assert converse("a, b = 1.5, [1, \"x\", indices];", 'c = {"k": full_s};', "sort;", "select;", "True;") == [
        "a = 1.5", 'b = [1, "x", indices]', 'c = {"k": full_s}', "function sort(seq, key)",
        "function select(keys, queries, comparison) of the language", "True = True",
    ]  # fmt: skip
    assert converse("examples off", "y = indices;", "full_s;", "selector examples on", "full_s(\"a\");") == [
        "sequence y", "selector full_s", 'full_s("a") =', "      a", "    a 1",
    ]  # fmt: skip
    (tmp_path / "p.rasp").write_text('_a = 1; b = indices;\nb("xy"); b = b + 1; examples off\nc = full_s; def d() { return 1; }')
    assert converse('load "p";', "b;") == ["sequence b", "selector c", "function d()", 'b("hello") = [1, 2, 3, 4, 5]']


def test_the_prompt_draws_the_selectors_of_a_program() -> None:
    assert converse(
        "before = select(indices, indices, <);", "n = selector_width(before);", "m = aggregate(select(n, indices, ==), tokens);",
        'draw(m, "ab");',
    )[-9:] == [
        "layer 1: before", "      a b", "    a . .", "    b 1 .", "layer 2: select(n, indices, eq)", "      a b", "    a 1 .", "    b . 1",
        'm("ab") = ["a", "b"]',
    ]  # fmt: skip


def test_the_prompt_survives_errors_and_points_at_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.rasp").write_text("x = 1;\n\ty = nothing;")
    (tmp_path / "half.rasp").write_text("x = (1 +")
    assert converse("x = 3;", "y = x +", "  zz;", "x; x + y; x;", "\t@", 'load "bad";', 'load "half";', "x;") == [
        "x = 3",
        "  zz;", "  ^", "error: line 3, column 3: there is no 'zz' here",
        "x = 3", "x; x + y; x;", "       ^", "error: line 4, column 8: there is no 'y' here",
        "\t@", "\t^", "error: line 5, column 2: '@' has no meaning in this language",
        "\ty = nothing;", "\t    ^", "error: bad.rasp, line 2, column 6: there is no 'nothing' here",
        "x = (1 +", "        ^", "error: half.rasp, line 1, column 9: the text ends here, but a value is expected",
        "x = 1",
    ]  # fmt: skip
    assert converse("x = 1 / indices;", "2;", "x;")[-3:] == [
        "x = 1 / indices;", "      ^", 'error: line 1, column 7: division by zero in (1 / 0) (position 0 of the input)',
    ]  # fmt: skip


def test_ctrl_c_drops_what_is_half_written_and_ctrl_d_leaves() -> None:
    assert converse("def f(x) {", KeyboardInterrupt, "1;", "exit()", "2;") == ["", "out = 1"]
    assert converse("1;", EOFError, "2;") == ["out = 1"]


def test_the_prompt_greets_and_asks_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, said, given = [], [], iter(["f(", "1", ""])

    def read(prompt: str) -> str:
        asked.append(prompt)
        line = next(given)
        if line:
            return line
        raise EOFError

    Prompt(read, said.append).start(["a", "bc"])
    assert asked == [">> ", ".. ", ".. "] and said[0].endswith('Example: ["a", "bc"]') and "the text ends here" in said[-1]


def test_the_history_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    from anyformer.rasp.language import prompt

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def read(self: Prompt, example: object) -> None:
        readline.add_history("indices;")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(Prompt, "start", read)
    prompt.prompt()
    assert "indices;" in (tmp_path / "anyformer" / "rasp_history").read_text()
