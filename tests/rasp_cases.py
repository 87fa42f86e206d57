"""One table of RASP programs: (program, vocabulary, largest length, input, expected), for every level. Expected values are by hand, or plain
Python that shares nothing with the library. "report": what users of earlier software reported as wrong."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from anyformer.rasp import (
    EQ,
    GT,
    LEQ,
    LT,
    NEQ,
    OPERATIONS,
    TRUE,
    Reals,
    Sequence,
    aggregate,
    apply,
    full,
    indices,
    length,
    lift,
    maximum,
    select,
    selector_width,
    soft_aggregate,
    tokens,
    where,
)
from anyformer.rasp import library as L


@dataclass(frozen=True)
class Case:
    """``refused``: levels that refuse the program, and what they say."""

    name: str
    program: Sequence
    vocab: Any
    max_length: int
    given: list[Any]
    expected: list[Any]
    causal: bool = False
    refused: dict[str, str] = field(default_factory=dict)


CASES: list[Case] = []


def case(name: str, program: Any, vocab: Any, max_length: int, given: Any, expected: Any, **more: Any) -> None:
    """Add a row; one expected value stands for the same at every position."""
    given = list(given)
    values = list(expected) if isinstance(expected, (list, str, tuple)) else [expected] * len(given)
    CASES.append(Case(name, lift(program), vocab, max_length, given, values, **more))


before = select(indices, indices, LEQ)
same = select(tokens, tokens, EQ)
digit: Callable[[str], int] = int

# --- the standard programs -----------------------------------------------------------------------------------------------
case("length", length, "abcd", 3, "abc", 3)
case("length of one", length, "abcd", 3, "c", 1)
case("length, causal", length, "abcd", 5, "abcd", [1, 2, 3, 4], causal=True)
case("reverse", L.reverse(tokens), "abcd", 5, "abcd", "dcba")
case("reverse of three", L.reverse(tokens), "abcd", 5, "abc", "cba")
case("reverse of one", L.reverse(tokens), "abcd", 5, "c", "c")
case("frac_prevs l", L.frac_prevs(tokens == "l"), "helo", 5, "hello", [0, 0, 1 / 3, 1 / 2, 2 / 5])
case("frac_prevs (", L.frac_prevs(tokens == "("), "abc()", 10, "a()b(c))", [0, 1 / 2, 1 / 3, 1 / 4, 2 / 5, 2 / 6, 2 / 7, 2 / 8])
case("frac_prevs )", L.frac_prevs(tokens == ")"), "abc()", 10, "a()b(c))", [0, 0, 1 / 3, 1 / 4, 1 / 5, 1 / 6, 2 / 7, 3 / 8])
case("frac_prevs, causal", aggregate(full, tokens == "l"), "helo", 5, "hello", [0, 0, 1 / 3, 1 / 2, 2 / 5], causal=True)
case("pair_balance", L.pair_balance("(", ")"), "abc()", 10, "a()b(c))", [0, 1 / 2, 0, 0, 1 / 5, 1 / 6, 0, -1 / 8])
shuffle1, shuffle2, shuffle3 = (L.shuffle_dyck(["()", "{}", "[]"][:kinds]) for kinds in (1, 2, 3))
for word, right in (("({)}", True), ("(){)}", False), ("{}(", False), ("{(})", True), (")(", False)):
    case(f"shuffle_dyck 2 {word}", shuffle2, "(){}", 5, word, right)
for word, right in (("({)[}]", True), ("{}[(]", False), ("{(}[])", True)):
    case(f"shuffle_dyck 3 {word}", shuffle3, "(){}[]", 6, word, right)
for word, right in (("(())", True), (")(", False), ("())(", False), ("((", False)):
    case(f"shuffle_dyck 1 {word}", shuffle1, "()", 6, word, right)
dyck = L.dyck(["()", "{}"])
for word, right in (("({})", True), ("({)}", False), ("(a)", True), ("{}(", False), ("())(", False), ("a", True), ("}{", False)):
    case(f"dyck {word}", dyck, "(){}a", 6, word, right)
case("hist", L.histogram(), "abcd", 5, "abac", [2, 1, 2, 1])
case("hist abacb", L.histogram(), "abcd", 5, "abacb", [2, 2, 2, 1, 2])
case("sort_unique", L.sort_unique(tokens, tokens), (1, 2, 3, 4), 5, [2, 4, 3, 1], [1, 2, 3, 4])
case("sort_unique by position", L.sort_unique(tokens, 1 - indices), "abcd", 5, "abcd", "dcba")
case("sort", L.sort(tokens, tokens), (1, 2, 3, 4), 5, [2, 4, 1, 2], [1, 2, 2, 4])
case("sort by position", L.sort(tokens, 1 - indices), "abcd", 5, "abcd", "dcba")
case(
    "sort is stable", L.sort(tokens, tokens.map(lambda t: t % 10)), (1, 11, 21, 2, 12), 5, [12, 11, 2, 1, 21], [11, 1, 21, 12, 2]
)
case("sort_freq", L.sort_by_frequency(), (1, 2, 3, 4), 5, [2, 4, 2, 1], [2, 2, 4, 1])
count_a, rare = L.count(tokens == "a"), L.count_less_frequent(2)
for word, right in (("aaabbc", 3), ("cabc", 1), ("bbc", 0)):
    case(f"count a in {word}", count_a, "abc", 8, word, right)
case("count_less_freq", rare, "abcd", 6, "aaabbc", 3)
case("count_less_freq, all", rare, "abcd", 6, "aacbbc", 6)
case("n-ary x + y - z", apply(lambda x, y, z: x + y - z, tokens, tokens, indices), (1, 2, 3), 5, [1, 2, 3], [2, 3, 4])
case("n-ary x y / z", apply(lambda x, y, z: x * y / z, indices, indices, tokens), (1, 2, 3), 3, [1, 2, 3], [0, 1 / 2, 4 / 3])
case("shift_by", L.shift_by(1, tokens, ""), "abcd", 5, "abcd", ["", "a", "b", "c"])
case("shift_by, None", L.shift_by(2, tokens, None), "abcd", 5, "abcd", [None, None, "a", "b"])
case("shift back", L.shift_by(-1, tokens, 0), (5, 6), 4, [5, 6, 6], [6, 6, 0])
case("detect_pattern a", L.detect_pattern("a"), "abcd", 5, "bacd", [False, True, False, False])
case("detect_pattern ab", L.detect_pattern("ab"), "ab", 5, "aaba", [False, False, True, False])
case("detect_pattern abc", L.detect_pattern("abc"), "abc", 6, "abcabc", [False, False, True, False, False, True])

# --- more of the library -------------------------------------------------------------------------------------------------
case("induction", L.induction(""), "abc", 6, "abcab", ["", "", "", "b", "c"])
case("induction, the latest", L.induction("?"), "abc", 8, "abacaa", ["?", "?", "b", "?", "c", "a"])
case("sum", L.total(tokens), (1, 2, 5), 5, [5, 1, 1, 2], 9)
case("sum of reals", L.total(tokens), Reals(-2, 2), 5, [1.5, -0.25, 0.5], 1.75)
case("running sum of reals", L.running_sum(tokens), Reals(-2, 2), 5, [1.5, -0.25, 0.5], [1.5, 1.25, 1.75])
case("count_prevs", L.count_prevs(tokens == "a"), "ab", 5, "abaab", [1, 1, 2, 3, 3])
case("depth", L.depth(tokens == "(", tokens == ")"), "()", 5, "(()))", [1, 2, 1, 0, -1])
case("parity", L.parity(), (0, 1), 9, [1, 1, 0, 1], 1)
for k, right in (((), 0), ((0,), 1), ((0, 3), 0), ((0, 2, 3, 7), 0), ((1, 2, 4), 0), ((1, 3), 1)):
    case(f"k_parity {k}", L.k_parity(k), (0, 1), 9, [1, 0, 0, 1, 0], right)
case(
    "masked_parity",
    L.masked_parity(tokens.map(lambda t: t[0] == "m"), tokens.map(lambda t: t[1] == "1")),
    ("m0", "m1", "-0", "-1"),
    6,
    ["m1", "-1", "m1", "m0", "m1"],
    1,
)
pairs19, pairs10, others10, triples = L.match2(19), L.match2(10), L.match2(10, itself=False), L.match3(7)
case("match2", pairs19, tuple(range(0, 95)), 6, [63, 70, 77, 94, 67, 39], [1, 1, 1, 1, 0, 1])
case("match2 0 0", pairs19, (0, 1, 19), 4, [0, 0], [1, 1])
case("match2 0 19", pairs19, (0, 1, 19), 4, [0, 19], [1, 1])
case("match2 19 1", pairs19, (0, 1, 19), 4, [19, 1], [1, 0])
case("match2 19 1, others only", L.match2(19, itself=False), (0, 1, 19), 4, [19, 1], [0, 0])
case("match2 5 -5", pairs10, (5, -5), 4, [5, -5], [1, 1])
case("match2 5 alone", pairs10, (5, -5), 4, [5], [1])
case("match2 5 alone, others only", others10, (5, -5), 4, [5], [0])
case("match2 5 -5, others only", others10, (5, -5), 4, [5, -5], [1, 1])
case("match3", triples, tuple(range(8)), 5, [1, 2, 4], [1, 1, 1])
case("match3, none", triples, tuple(range(8)), 5, [1, 1, 2], [0, 0, 0])
case("match3, twice the same", triples, tuple(range(8)), 5, [5, 1, 6], [1, 1, 0])
case("maxmin", L.maxmin(), (3, 7, 12, 14, 18, 20), 7, [14, 18, 3, 12, 20, 7, 12], [18, 14, 12, 3, 20, 7, 12])
case("maxmin of reals", L.maxmin(), Reals(-1, 3), 5, [1, 2, 2.5], [2, 1, 2.5])
case("group_sort 3", L.group_sort(3), Reals(-9, 9), 8, [1, 2, 3, 2, -5, 4, 0, 7], [3, 2, 1, 4, 2, -5, 7, 0])
case("group_sort 3 of decimals", L.group_sort(3), (0.1, 0.2, 0.7), 5, [0.1, 0.2, 0.7, 0.1, 0.7], [0.7, 0.2, 0.1, 0.7, 0.1])
case("group_sort 1", L.group_sort(1), Reals(-9, 9), 3, [1, 2, 3], [1, 2, 3])
case("largest", L.largest(), (-3, 0, 7), 5, [0, -3, 0], 0)
case("latest", L.latest(L.holding(tokens == "a") & before, indices, -1), "ab", 5, "babba", [-1, 1, 1, 1, 4])

# --- reports -------------------------------------------------------------------------------------------------------------
case(
    "report: sum, not mean",
    L.total(tokens.map(digit) * apply(lambda n, i: 10 ** (n - 1 - i), length, indices)),
    tuple("0123456789"),
    5,
    "00056",
    56,
)
for n in (11, 29, 99):
    case(f"report: length {n}", length, (1, 2, 3), n + 1, [1, 2, 3] * (n // 3) + [1] * (n % 3), n)
case("report: length of abbbc", length, "abc", 5, "abbbc", 5)
case("report: fraction of x", L.frac_prevs(tokens == "x"), "abcx", 5, "abxxc", [0, 0, 1 / 3, 1 / 2, 2 / 5])
case("report: sort", L.sort(tokens, tokens), (2, 3, 5), 5, [3, 2, 3, 5, 2], [2, 2, 3, 3, 5])
case("report: mean times index + 1", aggregate(before, tokens) * (indices + 1), (1, 2, 3), 5, [3, 2, 1, 1], [3, 5, 6, 7])
case("report: running count", L.frac_prevs(tokens == "x") * (indices + 1), "axcd", 6, "axxcdx", [0, 1, 2, 2, 2, 3])
case("report: opens minus closes", L.pair_balance("(", ")") * (indices + 1), "()abc", 6, "((abc)", [1, 2, 2, 2, 2, 1])
width1 = selector_width(same)
mean1 = aggregate(select(tokens, tokens, NEQ), width1)
case("report: widths of widths", selector_width(select(length, mean1, LT)), (1, 2, 3, 4), 4, [1, 2, 3, 4], 0)
case(
    "report: nearly 1",
    aggregate(select(indices, indices * tokens, GT), (indices * (indices + 3)) > 2),
    (1, 2, 3, 4),
    4,
    [1, 2, 3, 4],
    [1, 1, 0, 0],
)
case("report: wide widths", selector_width(~select(tokens, 2, EQ)), (1, 2), 64, [1, 2] * 32, 32)
case("report: what may aggregate average", aggregate(L.holding(tokens != 2), tokens / 2), (1, 2, 3), 5, [1, 2, 3], 1.0)
case("report: reverse", L.reverse(tokens).named("reverse"), (1, 2, 3), 3, [1, 2, 3], [3, 2, 1])
case("report: compound selectors", selector_width(same & before), "ab", 5, "aabab", [1, 2, 1, 3, 2])
case("report: compound selectors, mean", aggregate(same & before, indices), "ab", 5, "aabab", [0, 0.5, 2, 4 / 3, 3])
case("report: numerical product", tokens * indices, (1, 2, 3), 3, [3, 1, 2], [0, 1, 4])
case("report: numerical mean", aggregate(full, tokens), (1, 2, 3), 3, [1, 2, 3], 2)
case("report: sort of near keys", L.sort(tokens, tokens), (0.8, 0.9, 1.0), 3, [1.0, 0.9, 0.8], [0.8, 0.9, 1.0])
case("report: no tokens", indices + 1, (1, 2, 3), 3, [1, 2, 3], [1, 2, 3])
case("report: annotated tokens", tokens.map(lambda t: t).named("x"), (1, 2), 3, [1, 2], [1, 2])
case("report: the first l", L.first_instance(tokens == "l"), "helo", 5, "hello", [False, False, True, False, False])
case(
    "report: 15 of 22",
    apply("round", L.frac_prevs(tokens == 1) * (indices + 1)) == 15,
    (0, 1),
    22,
    [0] * 7 + [1] * 15,
    [False] * 21 + [True],
)

# --- what tracr lists as unsupported -------------------------------------------------------------------------------------
everything = select(tokens, tokens, TRUE)
case("unsupported: mean", aggregate(everything, tokens), (1, 2, 3), 5, [1, 2, 3], 2)
case("unsupported: mean of reals", aggregate(everything, tokens), Reals(0, 3), 5, [1, 2, 3], 2)
case("unsupported: default 1", aggregate(select(indices, indices, EQ), tokens, 1), (1, 2, 3), 5, [1, 2, 3], [1, 2, 3])
case("unsupported: default 1, used", aggregate(select(indices, indices + 1, EQ), tokens, 1), (1, 2, 3), 5, [2, 2, 3], [2, 3, 1])
case("unsupported: width", selector_width(select(tokens, tokens, LT)), (1, 2, 3), 5, [1, 2, 3], [0, 1, 2])
case("unsupported: non-linear map", apply(lambda x, y: x + y, tokens, indices), (1, 2, 3), 5, [1, 2, 3], [1, 3, 5])
case("unsupported: linear map", tokens + indices, Reals(1, 3), 5, [1, 2, 3], [1, 3, 5])
case("unsupported: numerical tokens", tokens, Reals(1, 3), 5, [1, 2, 3], [1, 2, 3])
case("unsupported: numerical indices", indices, (1, 2, 3), 5, [1, 2, 3], [0, 1, 2])

# --- odd inputs ----------------------------------------------------------------------------------------------------------
case("a constant", lift(3.5), "ab", 4, "aba", 3.5)
case("a word", lift("w"), "ab", 4, "aba", ["w"] * 3)
case("one word", L.histogram(), "a", 4, "aaa", 3)
case("one token at most", L.reverse(tokens), "ab", 1, "b", "b")
case("True is 1", selector_width(same), (True, 2, "x", 0.5), 5, [1, True, "x", 0.5], [2, 2, 1, 1])
case(
    "mixed",
    where(tokens == "a", -1, where(tokens == 2.5, 0.5, tokens)),
    ("a", 1, 2.5, False),
    5,
    [False, "a", 2.5, 1],
    [0, -1, 0.5, 1],
)
case("negative fractions", tokens * tokens, (-0.5, -1.25, 3), 3, [-0.5, -1.25, 3], [0.25, 1.5625, 9])
case("all-false width", selector_width(select(tokens, 9, EQ)), (1, 2, 3), 3, [1, 2, 3], 0)
case("all-false mean", aggregate(~full, tokens, -7.5), (1, 2, 3), 3, [1, 2, 3], -7.5)
case("words, default 0", aggregate(select(indices, indices - 1, EQ), tokens), "ab", 3, "ab", [0, "a"])
case("constants select", selector_width(select(1, 2, LT)), "ab", 3, "ab", 2)
case("empty word", tokens + "", ("", "a"), 3, ["", "a"], ["", "a"])
case("where drops", where(indices == 0, 0, 1 / indices), "a", 4, "aaa", [0, 1, 0.5])
case("where drops, alone", where(indices == 0, 0, 1 / indices), "a", 1, "a", 0)
case("huge numbers", tokens * tokens, (10**8, -3), 3, [10**8, -3], [10**16, 9])
case("unused parts", where(True, tokens, L.sort(tokens, tokens)), "abc", 3, "cab", "cab")
case("default beside means", aggregate(select(tokens, 1, EQ) & before, indices, 0.3), (0, 1), 4, [0, 1, 0, 1], [0.3, 1, 1, 2])
case("self-contradiction", selector_width(select(tokens, tokens, LT) & select(tokens, tokens, GT)), (1, 2), 3, [1, 2], 0)
case("no distance, causal", aggregate(select(indices, indices + 1, EQ), tokens, "?"), "ab", 3, "ab", ["?", "?"], causal=True)
case(
    "input beside a count",
    where(tokens < length, 1, 0),
    Reals(0, 4),
    4,
    [1, 2.5, 3],
    [1, 1, 0],
    refused={"standard": "a jump at any real number is no ReLU table"},
)

# --- real numbers --------------------------------------------------------------------------------------------------------
near = {"standard": "a jump from 0 to 1/least is no ReLU table"}
case("max over the past", maximum(before, tokens), (-2, 1, 3), 5, [-2, 1, -2, 3], [-2, 1, 1, 3])
case("softmax head", soft_aggregate(full, indices * 0, tokens), Reals(0, 3), 4, [0, 1, 2], 1)
case(
    "softmax over the past",  # what is not selected has much larger scores
    soft_aggregate(before, tokens, indices),
    Reals(0, 30),
    4,
    [0, 30, 0],
    [0, 1 / (1 + math.exp(-30)), (math.exp(30) + 2) / (math.exp(30) + 2)],
)
case("product of sums", L.total(tokens) * L.running_sum(tokens), Reals(-1, 2), 4, [1, 2, -1], [2, 6, 4])
case("quotient", tokens / (1 + tokens * tokens), Reals(-2, 2), 3, [-2, 0, 1], [-0.4, 0, 0.5])
case("abs, relu, max", apply("max", abs(tokens), OPERATIONS["relu"](3)), Reals(-9, 9), 3, [-5, 1, 9], [5, 3, 9])
case("1/x or 0", apply("reciprocal_or_zero", tokens, 1e-3), Reals(-2, 2), 3, [0.5, 0, -2], [2, 0, -0.5], refused=near)
case("power", tokens**3, Reals(-2, 2), 3, [-2, 0.5, 1], [-8, 0.125, 1])
jump = {"standard": "a jump at any real number is no ReLU table"}
case("floor", apply("floor", tokens), Reals(-3, 3), 4, [-1.5, 2, -2, 2.75], [-2, 2, -2, 2], refused=jump)
case("ceil", apply("ceil", tokens), Reals(-3, 3), 4, [-1.5, 2, -2, 2.25], [-1, 2, -2, 3], refused=jump)
case("round", apply("round", tokens), Reals(-3, 3), 5, [-1.5, 0.5, 2.5, -0.5, 1.25], [-2, 1, 3, -1, 1], refused=jump)
case("round from a half", apply("round", tokens), Reals(-2.5, 2.5), 3, [-2.5, 2.5, -0.5], [-3, 3, -1], refused=jump)
case("round of a half", apply("round", tokens), Reals(-0.5, 0.5), 4, [-0.5, 0.5, -0.25, 0.25], [-1, 1, 0, 0], refused=jump)
case("floor from a half", apply("floor", tokens), Reals(-1.5, 1.5), 3, [-1.5, 1.5, -0.5], [-2, 1, -1], refused=jump)
case("ceil from a half", apply("ceil", tokens), Reals(-1.5, 1.5), 3, [-1.5, 1.5, -0.5], [-1, 2, 0], refused=jump)
case("round of halves", apply("round", tokens), (-2.5, -0.5, 0.5, 1.5), 4, [-2.5, -0.5, 0.5, 1.5], [-3, -1, 1, 2])
case(
    "where of reals",
    where(tokens > 0.5, tokens * 2, -tokens),
    Reals(0, 1),
    3,
    [0.25, 0.5, 0.75],
    [-0.25, -0.5, 1.5],
    refused={"standard": "a jump at any real number is no ReLU table"},
)
