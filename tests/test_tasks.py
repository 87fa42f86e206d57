"""Tasks: against slow oracles written from the definitions, and against published facts about them."""

import hashlib
import itertools
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from anyformer.conformance import TaskConformance
from anyformer.errors import AnyformerError
from anyformer.philox import integers, raw
from anyformer.tasks import (
    HELD_OUT,
    IGNORED,
    TASKS,
    Addition,
    Batch,
    Curriculum,
    Dyck,
    KHop,
    Memorisation,
    ModularAddition,
    Needle,
    Task,
    Text,
    baselines,
)
from anyformer.tasks.dyck import _balanced
from anyformer.tasks.khop import answers
from anyformer.tasks.task import below, geometric

LICENSE = str(Path(__file__).parent.parent / "LICENSE")


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


class TestDyck(TaskConformance):
    task = Dyck()
    sha256 = "875f55d44a9bf7aa84f31f64c41dc5d562ac3ce59cbcba9e6577dddf8f1794db"


class TestKHop(TaskConformance):
    task = KHop()
    sha256 = "b5473cbc90a644e97b7d5af361a2990f2016cabc111f56e084331445fa3a42b4"


class TestOneHop(TaskConformance):
    task = KHop(hops=1)
    sha256 = "63fca4772a6b669e5da22772a378761b4f0a019ae1881d96e1844363d7798d8f"


class TestCopies(TaskConformance):
    task = KHop(vocab=23, hops=0)
    sha256 = "12699365a3fbd7a5d70c438ef5a2804ec29cea5acdddd3128f50fdbea5f23853"


class TestSixteenHops(TaskConformance):
    task = KHop(hops=16)
    sha256 = "9f572319ee70db90f69384a02f5ce1658c13103136d1afa3daabce07ef90c7ab"


class TestCurriculum(TaskConformance):
    """Its first batches are one hop; what measures is two."""

    task = Curriculum(tasks=(KHop(hops=1), KHop(hops=2)), until=(3,))
    sha256 = "489b0f727b8779257e0ed56152067af9e860b0413dd10a2e03e2576b278a3bf0"


class TestNeedle(TaskConformance):
    task = Needle()
    sha256 = "3e6d8f7462d051e5e85565a23835c94f4b13d97179e20370f6b46410802c6c43"


class TestSmallNeedle(TaskConformance):
    task = Needle(pairs=3, values=9, vocab=0)
    sha256 = "8dbf046a01ee21ed9a9026d542b8d795aaf88c92074b7cd39f561dc428b503fe"


class TestAddition(TaskConformance):
    task = Addition()
    sha256 = "79f887a1d33d9abd449ecae0a8d3bf9e44c48fd545ba79d6954397b2827ebe88"


class TestSmallAddition(TaskConformance):
    task = Addition(digits=1)
    sha256 = "904da22ae8ec64d7f0a7dcbd23bf882f8195424a6c567f2657a7ca19b049c270"


class TestModularAddition(TaskConformance):
    task = ModularAddition()
    sha256 = "499ca443ebe112a657d5e01f8a747cb5d461a3b5670b27f70eba3073bc4083f1"


class TestSmallModularAddition(TaskConformance):
    task = ModularAddition(modulus=7, train_share=0.5)
    sha256 = "a1d416a2ab42031d095c4b232448c00fc070fadffe58490bda3017c46f596fc5"


class TestMemorisation(TaskConformance):
    task = Memorisation()
    sha256 = "af135a44c2542d325793e02bbfb32be437f74be730300aaf99ad179385630359"


class TestSmallMemorisation(TaskConformance):
    task = Memorisation(symbols=3, places=3, data_seed=5)
    sha256 = "6e7839b4bbacd3ec5ca5364b0f496c30ecaa03ac013a79cce7bb7bde42e7e7d2"


class TestText(TaskConformance):
    task = Text(file=LICENSE)
    sha256 = "944815d29c518bcc2c782d9bd6e0f60555028f3ae7848e3241a258e57c0ec27e"


def test_every_task_is_registered_and_documented():
    tested = {type(v.task) for v in globals().values() if isinstance(v, type) and hasattr(v, "task")}
    assert tested - {Curriculum} == set(TASKS.values())  # a curriculum is made of them


def test_vocabularies():
    """As many as the task needs, or what the published runs were configured with."""
    sizes = {
        Dyck(): 4, KHop(): 30, Needle(): 256, Needle(vocab=0): 188, Needle(pairs=2, values=3, vocab=0): 8, Addition(): 31,
        ModularAddition(): 199, ModularAddition(vocab=256): 256, Memorisation(): 1024, Memorisation(symbols=3, places=3): 9,
        Text(file=LICENSE): 256,
    }  # fmt: skip
    assert [task.vocab for task in sizes] == list(sizes.values())


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


# --- the literal rows of the docstrings, and the same oracles for whole batches ----------------------------------------------


def needle_labels(inputs: list[str]) -> list[str]:
    """The value beside the key that is asked for, found by reading from left to right."""
    query = next(i for i, word in enumerate(inputs) if word.startswith("q"))
    pairs = list(zip(inputs[0:query:2], inputs[1:query:2], strict=True))
    assert all(key.startswith("k") and value.isdigit() for key, value in pairs)
    assert len(dict(pairs)) == len(pairs) >= 1 and set(inputs[query + 1 :]) == {"_"}
    return ["·"] * query + [dict(pairs)["k" + inputs[query][1:]]] + ["·"] * (len(inputs) - query - 1)


def addition_row(inputs: list[str]) -> tuple[list[str], list[str]]:
    """What the whole row must be, from the two terms of this one."""
    equals = inputs.index("=")
    terms = "".join(inputs[:equals]).split("+")
    total = str(sum(int(term[::-1]) for term in terms))
    assert all(len(term) == (equals - 1) / 2 and not term.endswith("0") for term in terms)
    words = [*terms[0], "+", *terms[1], "=", *("s" + digit for digit in reversed(total)), "."]
    labels = ["·"] * equals + words[equals + 1 :] + ["·"]
    longest = 3 * len(terms[0]) + 4
    return words + ["_"] * (longest - len(words)), labels + ["·"] * (longest - len(labels))


def modular_labels(inputs: list[str], modulus: int) -> list[str]:
    total = int(inputs[0]) + int(inputs[1])
    while total >= modulus:
        total -= modulus
    return ["·", str(total)]


def literal_row(task: Task) -> tuple[list[str], list[str]]:
    """The first row shown in the docstring of the task's module."""
    text = sys.modules[type(task).__module__].__doc__ or ""
    found = re.search(r"^    inputs +(.*)\n    labels +(.*)$", text, re.M)
    assert found, f"{type(task).__name__} shows no literal row"
    inputs, labels = (re.split(r" {6,}", line)[0].split() for line in found.groups())
    assert len(inputs) == len(labels) and set(inputs) <= set(task.token_names) and set(labels) <= {*task.token_names, "·"}
    return inputs, labels


def shown(task: Task, batch: Batch) -> list[tuple[list[str], list[str]]]:
    """The first 300 rows as words, by :meth:`Task.show`."""
    rows = [task.show(batch, row).splitlines() for row in range(min(300, len(batch.inputs)))]
    assert all(a.startswith("inputs    ") and b.startswith("labels    ") for a, b in rows)
    return [(a.split()[1:], b.split()[1:]) for a, b in rows]


def draw(word: int, high: int) -> int:
    return (word >> 32) * high >> 32


def test_the_literal_rows_are_right():
    inputs, labels = literal_row(Needle())
    assert labels == needle_labels(inputs)
    assert literal_row(Addition()) == addition_row(literal_row(Addition())[0])
    inputs, labels = literal_row(ModularAddition())
    assert labels == modular_labels(inputs, 7)
    assert literal_row(Memorisation()) == (["0:2", "1:0"], ["·", "0:3"])
    inputs, labels = literal_row(Text(file=LICENSE))
    assert "".join(inputs + labels[-1:]).replace("\\x20", " ") in "To be, or not" and inputs[1:] == labels[:-1]


@pytest.mark.parametrize("task", [Needle(), Needle(pairs=3, values=9), Needle(pairs=1, values=1, vocab=0)], ids=str)
def test_needles(task):
    m = task.pairs
    rows = shown(task, task.batch(11, 3, 300))
    for (inputs, labels), words in zip(rows, raw(11, 3, 300 * task.words).reshape(300, -1).tolist(), strict=True):
        count = 1 + draw(words[0], m)
        keys = sorted(range(m), key=lambda k: words[2 + k])[:count]
        values = [1 + draw(word, task.values) for word in words[2 + m :]][:count]
        expected = [word for k, v in zip(keys, values, strict=True) for word in (f"k{k}", f"{v}")]
        expected.append(f"q{keys[draw(words[1], count)]}")
        assert inputs == expected + ["_"] * (2 * m + 3 - len(expected))
        assert labels == needle_labels(inputs)


def test_needle_ids_are_the_published_ones():
    inputs = Needle().batch(0, 0, 500).inputs
    count = (inputs != 0).sum(1) // 2
    for row, c in zip(inputs.tolist(), count.tolist(), strict=True):
        assert all(128 <= key < 158 for key in row[0 : 2 * c : 2]) and all(1 <= v < 128 for v in row[1 : 2 * c : 2])
        assert 158 <= row[2 * c] < 188
    assert inputs.shape == (500, 63) and count.min() == 1 and count.max() == 30


def test_needle_draws_are_uniform():
    size = 20_000
    inputs = Needle(pairs=4, values=3, vocab=0).batch(0, 0, size).inputs
    count = (inputs != 0).sum(1) // 2
    queries = inputs.gather(1, 2 * count[:, None])[:, 0] - 8
    for values, kinds in ((count - 1, 4), (queries, 4), (inputs[:, 0] - 4, 4), (inputs[:, 1] - 1, 3)):
        shares = torch.bincount(values, minlength=kinds) / size
        assert len(shares) == kinds and (shares - 1 / kinds).abs().max() < 5 * (1 / kinds / size) ** 0.5


@pytest.mark.parametrize("task", [Addition(), Addition(digits=2), Addition(digits=1), Addition(digits=25)], ids=str)
def test_additions(task):
    m = task.digits
    rows = shown(task, task.batch(11, 3, 300))
    for (inputs, labels), words in zip(rows, raw(11, 3, 600 * m).reshape(300, -1).tolist(), strict=True):
        a, b = ([draw(w, 10) for w in term[:-1]] + [1 + draw(term[-1], 9)] for term in (words[:m], words[m:]))
        assert inputs[: 2 * m + 2] == [*map(str, a), "+", *map(str, b), "="]
        assert (inputs, labels) == addition_row(inputs)
    assert len({len([word for word in labels if word != "·"]) for _, labels in rows}) == 2  # sums of m and of m + 1 digits


def test_addition_ids_are_the_published_ones():
    batch = Addition().batch(0, 0, 200)
    assert batch.inputs.shape == (200, 34) and (batch.inputs[:, 10] == 10).all() and (batch.inputs[:, 21] == 11).all()
    assert batch.inputs[:, :10].max() == 9 and batch.inputs[:, 22:].max() == 30
    assert ((batch.inputs[:, 22:] >= 20) | (batch.inputs[:, 22:] == 12)).all()
    longer = batch.inputs[:, -1] == 30
    assert (batch.scored.sum(1) == 11 + longer.int()).all() and batch.scored[:, 21].all()
    short = Addition().batch(0, 0, 20_000).inputs[:, -1] == 12
    assert short.double().mean().item() == pytest.approx(0.3951, abs=0.02)  # P(a + b < 10^10), a and b from 10^9 on: 32 / 81


def test_addition_counts_whole_answers():
    task = Addition(digits=2)
    batch = task.batch(0, 0, 4)
    predicted = batch.labels.clamp(min=0)
    predicted[0, 5], predicted[1, 0] = 0, 7  # one wrong first digit; a position that nobody looks at
    scores = task.scores(predicted, batch)
    assert scores == {"accuracy": pytest.approx(1 - 1 / batch.scored.sum().item()), "answers": 0.75}


@pytest.mark.parametrize(
    "task", [ModularAddition(), ModularAddition(modulus=7, train_share=0.5), ModularAddition(modulus=2)], ids=str
)
def test_modular_additions(task):
    p = task.modulus
    trained, held_out = task.training_rows(p * p), task.held_out(p * p)
    for batch in (trained, held_out, task.batch(11, 3, 300)):
        for inputs, labels in shown(task, batch):
            assert labels == modular_labels(inputs, p)
    pairs = [tuple(row) for batch in (trained, held_out) for row in batch.inputs.tolist()]
    assert sorted(pairs) == list(itertools.product(range(p), repeat=2))
    assert len(trained.inputs) == int(task.train_share * p * p)
    order = sorted(range(p * p), key=raw(HELD_OUT, 0, p * p).tolist().__getitem__)
    assert [a * p + b for a, b in pairs] == order
    words = raw(11, 3, 300).tolist()
    drawn = [a * p + b for a, b in task.batch(11, 3, 300).inputs.tolist()]
    assert drawn == [order[draw(word, len(trained.inputs))] for word in words]


def test_the_published_split_of_modular_addition():
    assert len(ModularAddition().training_rows(10**6).inputs) == 37_620 and len(ModularAddition().held_out(10**6).inputs) == 1_981


@pytest.mark.parametrize(
    "task", [Memorisation(), Memorisation(symbols=4), Memorisation(symbols=3, places=3, data_seed=5)], ids=str
)
def test_memorisation(task):
    n, d = task.symbols, task.places
    values = integers(task.data_seed, 0, (n**d,), n).tolist()
    everything = task.held_out(n**d)
    assert torch.equal(everything.inputs, task.training_rows(n**d).inputs) and len(everything.inputs) == n**d
    facts = everything.inputs.tolist()
    assert len(set(map(tuple, facts))) == n**d
    assert (everything.labels[:, :-1] == IGNORED).all()
    for batch in (everything, task.batch(11, 3, 300)):
        for inputs, labels in shown(task, batch):
            key = [word.split(":") for word in inputs]
            assert [int(place) for place, _ in key] == list(range(d))
            number = sum(int(symbol) * n**place for place, (_, symbol) in enumerate(key))
            assert labels == ["·"] * (d - 1) + [f"0:{values[number]}"]
    order = sorted(range(n**d), key=raw(HELD_OUT, 0, n**d).tolist().__getitem__)
    numbers = [order[draw(word, n**d)] for word in raw(11, 3, 300).tolist()]
    assert task.batch(11, 3, 300).inputs.tolist() == [[n * p + r // n**p % n for p in range(d)] for r in numbers]


def test_other_data_seeds_are_other_facts_under_the_same_keys():
    one, other = Memorisation(symbols=8), Memorisation(symbols=8, data_seed=1)
    assert torch.equal(one.held_out(64).inputs, other.held_out(64).inputs)
    assert not torch.equal(one.held_out(64).labels, other.held_out(64).labels)


# --- text -----------------------------------------------------------------------------------------------------------------


def test_text_windows(tmp_path):
    data = bytes(raw(0, 0, 1008).astype(np.uint8))
    (tmp_path / "book").write_bytes(data)
    task = Text(file=str(tmp_path / "book"), length=7, held_out_share=0.25)
    assert task.sha256 == hashlib.sha256(data).hexdigest()
    batch = task.batch(11, 3, 200)
    for word, inputs, labels in zip(raw(11, 3, 200).tolist(), batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        start = draw(word, 749)
        assert inputs == list(data[start : start + 7]) and labels == list(data[start + 1 : start + 8])
    held_out = task.held_out(10**6)
    windows = [
        data[start : start + 8] for start in range(756, 1001, 7)
    ]  # 252 bytes: 36 times 7, but the last byte has no successor
    found = [
        bytes([*inputs, labels[-1]]) for inputs, labels in zip(held_out.inputs.tolist(), held_out.labels.tolist(), strict=True)
    ]
    assert sorted(found) == sorted(windows) and found != windows
    assert torch.equal(held_out.labels[:, :-1], held_out.inputs[:, 1:])
    all_starts = Text(file=task.file, length=7, held_out_share=0.99).batch(0, 0, 500).inputs  # 11 bytes: 4 windows
    assert set(map(tuple, all_starts.tolist())) == {tuple(data[s : s + 7]) for s in range(4)}


def test_text_names(tmp_path):
    (tmp_path / "book").write_bytes(b"To be, or not\n" * 4)
    task = Text(file=str(tmp_path / "book"), length=5, held_out_share=0.2)
    assert task.names[10] == "\\x0a" and task.names[92] == "\\" and task.names[255] == "\\xff"


def test_a_changed_or_lost_file_is_noticed(tmp_path):
    book = tmp_path / "book"
    book.write_bytes(b"a" * 2000)
    task = Text(file=str(book))
    book.write_bytes(b"b" * 2000)
    assert (task.batch(0, 0, 1).inputs == 97).all()  # read once: what was read is what the task says
    other = Text(file=str(book))
    assert other != task and other.digest() != task.digest() and (other.batch(0, 0, 1).inputs == 98).all()
    book.write_bytes(b"c" * 2000)
    old = Text.from_json(other.to_json() | {"sha256": "0" * 64})  # nothing is read yet
    with pytest.raises(AnyformerError, match=r"book has changed: sha256 0{64} expected, got [0-9a-f]{64}; make a new task"):
        old.batch(0, 0, 1)
    book.unlink()
    with pytest.raises(AnyformerError, match=r"book cannot be read \(No such file or directory\); name a text file"):
        old.held_out(1)


@pytest.mark.parametrize(
    ("data", "fields", "message"),
    [
        (None, {}, r"Text: .*book cannot be read \(No such file or directory\); name a text file"),
        (b"", {}, r"Text: .*book must hold 1 to 2147483647 bytes, got 0"),
        (b"a" * 640, {}, r"book is too short: both parts need more than 64 bytes, got 576 to train on and 64 held out"),
        (b"a" * 20, {"length": 9, "held_out_share": 0.6}, r"need more than 9 bytes, got 8 to train on and 12 held out"),
        (b"a" * 640, {"length": 0}, r"Text: length must be an integer >= 1, got 0"),
        (b"a" * 640, {"held_out_share": 1.0}, r"Text: held_out_share must be between 0 and 1, got 1.0"),
        (b"a" * 640, {"held_out_share": float("nan")}, r"Text: held_out_share must be a finite number"),
        (b"a" * 640, {"vocab": 255}, r"Text: vocab must be an integer >= 256, got 255"),
    ],
)
def test_unusable_files_are_one_line(tmp_path, data, fields, message):
    if data is not None:
        (tmp_path / "book").write_bytes(data)
    with pytest.raises(AnyformerError, match=message) as error:
        Text(file=str(tmp_path / "book"), **fields)
    assert "\n" not in str(error.value)


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(AnyformerError, match=r"cannot be read \(Is a directory\)"):
        Text(file=str(tmp_path))


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
        (lambda: Needle(pairs=0), r"Needle: pairs must be an integer >= 1, got 0"),
        (lambda: Needle(values=0), r"Needle: values must be an integer >= 1, got 0"),
        (lambda: Needle(pairs=99), r"Needle: vocab must be an integer >= 326, got 256"),
        (lambda: Addition(digits=0), r"Addition: digits must be an integer >= 1, got 0"),
        (lambda: ModularAddition(modulus=1), r"ModularAddition: modulus must be an integer >= 2, got 1"),
        (lambda: ModularAddition(modulus=3, train_share=1.0), r"train_share must leave rows .* hold out, got 9 and 0 of 9"),
        (lambda: ModularAddition(modulus=3, train_share=0.1), r"got 0 and 9 of 9"),
        (lambda: ModularAddition(modulus=5000), r"ModularAddition: at most 16777216 rows are possible, got 25000000"),
        (lambda: ModularAddition(train_share=float("nan")), r"ModularAddition: train_share must be a finite number, got nan"),
        (lambda: Memorisation(symbols=1), r"Memorisation: symbols must be an integer >= 2, got 1"),
        (lambda: Memorisation(places=0), r"Memorisation: places must be an integer >= 1, got 0"),
        (lambda: Memorisation(data_seed=-1), r"Memorisation: data_seed must be an integer >= 0, got -1"),
        (lambda: Memorisation(places=9), r"Memorisation: at most 16777216 keys are possible, got 512\^9"),
        (lambda: Memorisation(symbols=2, places=20_000), r"Memorisation: at most 16777216 keys are possible, got 2\^20000"),
        (lambda: Memorisation(symbols=200_000_000, places=1), r"at most 16777216 keys are possible, got 200000000\^1"),
        (lambda: ModularAddition().held_out(0), r"ModularAddition: size must be an integer >= 1, got 0"),
        (lambda: baselines(Dyck(), 10, seed=HELD_OUT), r"Dyck: seed 12345 is the held-out set's, choose another"),
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
