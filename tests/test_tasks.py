"""Tasks: against slow oracles written from the definitions, and against published facts about them."""

import hashlib
import itertools
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from anyformer.errors import AnyformerError
from anyformer.philox import raw
from anyformer.spec import Spec
from anyformer.tasks import IGNORED, TASKS, Batch, Dyck, KHop, Task
from anyformer.tasks.dyck import _balanced
from anyformer.tasks.khop import answers
from anyformer.tasks.task import below, geometric

ALL = [Dyck(), Dyck(vocab=23), KHop(), KHop(vocab=23, hops=1), KHop(hops=0), KHop(hops=16)]


def is_balanced(string: str) -> bool:
    stack = []
    for bracket in string:
        if bracket == "(":
            stack.append(bracket)
        elif not stack:
            return False
        else:
            stack.pop()
    return not stack


def hop(text: str, start: int, k: int) -> str:
    """hop_k at ``start``, word for word from the definition."""
    place, letter = start, text[start]
    for _ in range(k):
        earlier = [j for j in range(place) if text[j] == letter]
        if not earlier:
            return "~"
        place = earlier[-1] + 1
        letter = text[place]
    return letter


def spelled(task: Task, row: torch.Tensor) -> list[str]:
    names = task.token_names
    return ["" if i == IGNORED else names[i] for i in row.tolist()]


def strings(batch: Batch) -> list[str]:
    """The brackets of each row of a Dyck batch, up to the question mark; checks the layout on the way."""
    found = []
    for inputs in batch.inputs.tolist():
        row = "".join("_()?"[i] for i in inputs)
        string, padding = row.split("?")
        assert set(string) <= set("()") and set(padding) <= set("_") and 1 <= len(string) <= 60 and len(row) == 63
        found.append(string)
    return found


# --- every task -----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ALL, ids=str)
def test_every_task_keeps_the_contract(task):
    batch = task.batch(3, 5, 16)
    assert batch.inputs.shape == batch.labels.shape == (16, task.length)
    assert batch.inputs.dtype == batch.labels.dtype == torch.int64
    assert batch.inputs.min() >= 0 and batch.inputs.max() < task.vocab
    assert all(label == IGNORED or 0 <= label < task.vocab for label in batch.labels.flatten().tolist())
    assert batch.scored.any(dim=1).all()
    assert len(task.token_names) == len(set(task.token_names)) == task.vocab
    assert Spec.from_json(task.to_json()) == task and type(task) in TASKS.values()


@pytest.mark.parametrize("task", ALL, ids=str)
def test_a_row_depends_on_seed_index_and_row_only(task):
    small, large = task.batch(3, 5, 4), task.batch(3, 5, 9)
    assert torch.equal(small.inputs, large.inputs[:4]) and torch.equal(small.labels, large.labels[:4])
    assert not torch.equal(small.inputs, task.batch(3, 6, 4).inputs)
    assert not torch.equal(small.inputs, task.batch(4, 5, 4).inputs)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (Dyck(), "875f55d44a9bf7aa84f31f64c41dc5d562ac3ce59cbcba9e6577dddf8f1794db"),
        (KHop(), "b5473cbc90a644e97b7d5af361a2990f2016cabc111f56e084331445fa3a42b4"),
        (KHop(hops=1), "63fca4772a6b669e5da22772a378761b4f0a019ae1881d96e1844363d7798d8f"),
    ],
    ids=str,
)
def test_batches_are_the_same_bytes_for_ever(task, expected):
    batch = task.batch(seed=2, index=7, size=64)
    data = torch.stack((batch.inputs, batch.labels)).numpy().astype("<i8").tobytes()
    assert hashlib.sha256(data).hexdigest() == expected


def test_the_vocabulary_does_not_change_the_data():
    for small, large in ((Dyck(), Dyck(vocab=23)), (KHop(vocab=23, hops=2), KHop(vocab=40, hops=2))):
        assert torch.equal(small.batch(0, 0, 8).inputs, large.batch(0, 0, 8).inputs)
        assert torch.equal(small.batch(0, 0, 8).labels, large.batch(0, 0, 8).labels)


def test_accuracy_counts_scored_positions_only():
    task = Dyck(vocab=5)
    labels = torch.tensor([[IGNORED, 1, 2], [2, IGNORED, IGNORED]])
    batch = Batch(torch.zeros(2, 3, dtype=torch.int64), labels)
    logits = torch.zeros(2, 3, 5)
    logits[0, 1, 1] = logits[0, 2, 1] = logits[1, 0, 2] = 1.0
    assert task.accuracy(logits, batch) == pytest.approx(2 / 3)
    perfect = torch.nn.functional.one_hot(KHop().batch(0, 0, 4).labels, 30).float()
    assert KHop().accuracy(perfect, KHop().batch(0, 0, 4)) == 1.0


def test_token_names():
    assert Dyck(vocab=6).token_names == ("_", "(", ")", "?", "_4", "_5")
    assert KHop(vocab=24).token_names == (*map(str, range(17)), "a", "b", "c", "d", "~", ".", "_23")


# --- random integers ------------------------------------------------------------------------------


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**31 - 1))
def test_below_is_the_floor_of_the_scaled_word(word, high):
    assert below(np.array([word], dtype=np.uint64), high).tolist() == [(word // 2**32) * high // 2**32]


@given(st.integers(0, 2**64 - 1), st.integers(1, 64))
@example(2**63, 32)
@example(2**40, 64)
@example(0, 64)
def test_geometric_counts_leading_zeros(word, limit):
    zeros = 64 - word.bit_length()
    assert geometric(np.array([word], dtype=np.uint64), limit).tolist() == [min(zeros + 1, limit)]


def test_geometric_has_its_law():
    counts = Counter(geometric(raw(0, 0, 40_000), 32).tolist())
    for r in range(1, 6):
        assert counts[r] / 40_000 == pytest.approx(2.0**-r, abs=0.01)


# --- Dyck -----------------------------------------------------------------------------------------


def slow_dyck(words: list[int]) -> tuple[str, bool]:
    """One string from one row of random words: the four steps of the definition, by recursion and loops."""

    def draw(word: int, high: int) -> int:
        return (word >> 32) * high >> 32

    def bal(t: int, node: int) -> str:
        if t == 1:
            return "()"
        choice = draw(tree[node], 2 * (t - 1))
        if choice < t - 1:
            return "(" + bal(t - 1, node + 1) + ")"
        u = choice - (t - 1) + 1
        return bal(u, node + 1) + bal(t - u, node + u)

    few, tree, swaps, flips = words[:9], words[9:38], words[38:102], words[102:]
    mutation = draw(few[4], 4)
    if draw(few[0], 3) == 0:
        string = ["(" if few[5] >> i & 1 else ")" for i in range(1 + draw(few[2], 60))]
    else:
        string = list(bal(1 + draw(few[1], 30), 0))
        if draw(few[3], 2) == 0:
            mutation = 0
    if mutation in (1, 3):
        for k in range(min(32, 65 - few[6].bit_length())):
            p, q = draw(swaps[2 * k], len(string)), draw(swaps[2 * k + 1], len(string))
            if p < q:
                string[p], string[q] = string[q], string[p]
    if mutation in (2, 3):
        times = min(32, 65 - few[7].bit_length())
        for k in range(2 * times if draw(few[8], 3) < 2 else times):
            p = draw(flips[k], len(string))
            string[p] = ")" if string[p] == "(" else "("
    return "".join(string), is_balanced("".join(string))


def test_dyck_agrees_with_the_slow_generator():
    batch = Dyck().batch(11, 3, 500)
    words = raw(11, 3, 500 * Dyck.words).reshape(500, Dyck.words)
    for row, string, labels in zip(words.tolist(), strings(batch), batch.labels, strict=True):
        expected, balanced = slow_dyck(row)
        assert string == expected
        want = [IGNORED] * 63
        want[len(string)] = 2 if balanced else 1
        assert labels.tolist() == want


def test_dyck_has_the_published_distribution():
    batch = Dyck().batch(0, 0, 40_000)
    opens, closes = (batch.inputs == 1).sum(1), (batch.inputs == 2).sum(1)
    balanced = (batch.labels == 2).any(1)
    assert balanced.double().mean().item() == pytest.approx(0.526, abs=0.008)
    assert (opens + closes).double().mean().item() == pytest.approx(30.8, abs=0.3)
    assert (opens + closes).max() == 60
    assert ((opens == closes) == balanced).double().mean().item() == pytest.approx(0.930, abs=0.004)
    first, last = batch.inputs[:, 0], batch.inputs.gather(1, (opens + closes - 1)[:, None])[:, 0]
    rule = (opens == closes) & (first == 1) & (last == 2)
    assert (rule == balanced).double().mean().item() == pytest.approx(0.977, abs=0.003)


def test_balanced_strings_have_the_law_of_the_recursion():
    size = 40_000
    opens = _balanced(raw(5, 0, size * 2).reshape(size, 2), np.full(size, 3))
    counts = Counter("".join("(" if o else ")" for o in row[:6]) for row in opens)
    law = {"((()))": 1 / 4, "(()())": 1 / 4, "()()()": 1 / 4, "()(())": 1 / 8, "(())()": 1 / 8}
    assert set(counts) == set(law)
    for string, share in law.items():
        assert counts[string] / size == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("pairs", [1, 2, 30])
def test_balanced_strings_are_balanced(pairs):
    opens = _balanced(raw(6, pairs, 100 * 29).reshape(100, 29), np.full(100, pairs))
    for row in opens:
        assert is_balanced("".join("(" if o else ")" for o in row[: 2 * pairs]))
        assert not row[2 * pairs :].any()


# --- k-hop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (0, "a c b a b c a b"),
        (1, "~ ~ ~ c a b b c"),
        (2, "~ ~ ~ ~ c ~ a b"),
        (3, "~ ~ ~ ~ ~ ~ c ~"),
    ],
)
def test_the_reference_example(k, expected):
    names = KHop().token_names
    text = np.array([["abcd".index(letter) for letter in "acbabcab"]])
    got = answers(text, np.array([[k]]))
    assert " ".join(names[i] for i in got[0]) == expected
    assert " ".join(hop("acbabcab", i, k) for i in range(8)) == expected


@pytest.mark.parametrize("task", [KHop(), KHop(hops=1), KHop(hops=4), KHop(hops=16), KHop(hops=0)], ids=str)
def test_khop_agrees_with_the_definition(task):
    batch = task.batch(1, 2, 40)
    for inputs, labels in zip(batch.inputs, batch.labels, strict=True):
        first, *text = spelled(task, inputs)
        k = int(first)
        assert task.hops in (None, k) and 0 <= k <= 16
        assert len(text) == 98 and set(text) == set("abcd")
        assert all(a != b for a, b in itertools.pairwise(text))
        assert spelled(task, labels) == ["."] + [hop("".join(text), i, k) for i in range(98)]


def test_khop_letters_are_uniform():
    def shares(values: torch.Tensor, kinds: int) -> torch.Tensor:
        return torch.bincount(values.flatten(), minlength=kinds) / values.numel()

    inputs = KHop().batch(0, 0, 6000).inputs
    assert (shares(inputs[:, 0], 17) - 1 / 17).abs().max() < 0.012
    for place in (1, 2, 50, 98):
        assert (shares(inputs[:, place] - 17, 4) - 1 / 4).abs().max() < 0.03
    follows = shares((inputs[:, 2:] - inputs[:, 1:-1]).remainder(4), 4)
    assert follows[0] == 0 and (follows[1:] - 1 / 3).abs().max() < 0.003


@pytest.mark.parametrize(("k", "floor", "missing"), [(1, 28.1, 4.1), (2, 30.0, 7.1), (3, 32.0, 10.2), (4, 34.0, 13.3)])
def test_khop_has_the_published_floors(k, floor, missing):
    labels = KHop(hops=k).batch(0, 0, 4000).labels
    counts = torch.nn.functional.one_hot(labels, 30).double().mean(0)  # (99, vocab)
    assert 100 * counts.amax(1).mean().item() == pytest.approx(floor, abs=0.5)
    assert 100 * (labels == 21).double().mean().item() == pytest.approx(missing, abs=0.3)


def test_khop_makes_a_batch_in_under_ten_milliseconds():
    task, times = KHop(), []
    for index in range(10):
        start = time.perf_counter()
        task.batch(0, index, 64)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.010


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dyck(vocab=3), r"Dyck: vocab must be an integer >= 4, got 3"),
        (lambda: KHop(vocab=22), r"KHop: vocab must be an integer >= 23, got 22"),
        (lambda: KHop(hops=17), r"KHop: hops must be None or at most 16, got 17"),
        (lambda: KHop(hops=-1), r"KHop: hops must be an integer >= 0, got -1"),
        (lambda: KHop(hops=True), r"KHop: hops must be an integer >= 0, got True"),
        (lambda: Dyck().batch(0, 0, 0), r"Dyck: size must be an integer >= 1, got 0"),
        (lambda: Dyck().batch(-1, 0, 1), r"Dyck: seed must be an integer >= 0, got -1"),
        (lambda: Dyck().batch(0, 2**64, 1), r"Dyck: index must be below 2\*\*64, got 18446744073709551616"),
        (
            lambda: Dyck().accuracy(torch.zeros(2, 63, 5), Dyck().batch(0, 0, 2)),
            r"\(2, 63, 4\) expected, got \(2, 63, 5\)",
        ),
        (
            lambda: Dyck().accuracy(torch.zeros(1, 1, 4), Batch(torch.tensor([[0]]), torch.tensor([[IGNORED]]))),
            r"the batch has no scored position",
        ),
        (
            lambda: Batch(torch.zeros(2, 3), torch.zeros(2, 3)),
            r"inputs must be int64 .* got float32 \(2, 3\)",
        ),
        (
            lambda: Batch(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)),
            r"labels must be int64 \(batch, n\), both of one shape; got int64 \(2, 4\)",
        ),
        (
            lambda: Task.from_json({"type": "KHop", "depth": 3}),
            r"KHop has no field depth; it has hops, vocab",
        ),
    ],
)
def test_errors_say_what_was_expected_and_got(make, message):
    with pytest.raises(AnyformerError, match=message):
        make()


def test_a_task_without_data_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Task(vocab=3)
