"""Pictures of compiled programs: who reads whom, files that are pictures, texts that do not overlap, bad input."""

import itertools
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from rasp_examples import EXAMPLES, compiled, inputs

from anyformer import rasp
from anyformer.errors import AnyformerError
from anyformer.rasp.drawing import LARGEST, _Score, draw_attention
from anyformer.rasp.flow import Flow

plt = pytest.importorskip("matplotlib.pyplot")

tokens, indices = rasp.tokens, rasp.indices


def named(compiled: rasp.CompiledProgram, places: tuple[int, ...]) -> list[str]:
    return [compiled.names[p][0] for p in places]


def test_the_flow_of_reverse() -> None:
    """Written down by hand: the length from a head that looks at everything, five steps, and the head that reads position length - 1 - i."""
    program = compiled("reverse")
    flow = Flow.of(program, list("abcd"))
    assert [title for title, _ in flow.parts] == ["layer 1: attention", "layer 1: feed-forward", "layer 2: attention"]
    first, steps, erase, second = flow.workers
    assert first.reads == {"query": (), "key": (), "value": ()} and named(program, first.writes) == ["length as w/(w+1)"]
    assert steps.title == "5 units: step" and program.units[0] == 6  # one more erases
    assert steps.reads == {"gate": first.writes}
    assert erase.erases == first.writes == second.writes == flow.read_out
    assert named(program, second.reads["key"]) == ["indices", "indices, squared"] and named(program, second.reads["value"]) == [
        "tokens"
    ]
    assert set(named(program, second.reads["query"])) == {"indices", "(length - 1)"}
    assert second.pattern is not None and torch.equal(second.pattern, torch.eye(4, 5).double().flip(0))
    place = flow.lives[first.writes[0]]
    assert [(life.name, life.first, life.last) for life in place] == [("length as w/(w+1)", 0, 2), ("reverse", 3, None)]
    assert place[0].values == pytest.approx([0.8] * 4) and place[1].values == (3, 2, 1, 0)
    assert flow.output == ("d", "c", "b", "a")


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_every_read_finds_something_alive(name: str) -> None:
    """What a worker reads was written before it and not erased yet; what it writes begins a life or adds to one."""
    flow = Flow.of(compiled(name), inputs(name)[0])
    for c, worker in enumerate(flow.workers):
        for place in itertools.chain(*worker.reads.values(), worker.erases):
            assert any(
                (life.first is None or life.first < c) and (life.last is None or c <= life.last) for life in flow.lives[place]
            )
        for place in worker.writes:
            assert any(life.first is not None and life.first <= c for life in flow.lives[place])
    for place in flow.read_out:
        assert flow.lives[place][-1].last is None


def test_several_kinds_of_heads_and_units() -> None:
    titles = [worker.title for worker in Flow.of(compiled("both kernels"), [1, 2.5, -3]).workers]
    assert {"head 1, softmax, keys before", "head 2, keys before"} == set(titles)
    titles = [worker.title for worker in Flow.of(compiled("products"), [1.5, -2, 0.25]).workers]
    assert any("identity (product)" in title for title in titles) and any("relu" in title for title in titles)


@cache
def wide() -> rasp.CompiledProgram:
    """Ten heads in one layer, and one after it."""
    total = sum(
        (rasp.aggregate(rasp.select(indices, indices - k, rasp.EQ), tokens) * tokens for k in range(1, 11)), rasp.lift(0.0)
    )
    return rasp.compile(rasp.aggregate(rasp.full, total), rasp.Reals(-1.0, 1.0), 12)


CASES = {
    "reverse": (lambda: compiled("reverse"), list("abc")),
    "sort unique": (lambda: compiled("sort unique"), [3, 1, 4]),
    "ten heads": (wide, [0.5, -1, 0.25, 1, 0, 0.125]),
    "constant": (lambda: compiled("constant"), ["a"]),
}


@pytest.mark.parametrize("case", list(CASES))
def test_texts_do_not_overlap(case: str) -> None:
    make, example = CASES[case]
    score = _Score(make(), example, Flow.of(make(), example))
    figure = score.figure
    renderer = figure.canvas.get_renderer()
    texts = [t for axis in figure.axes for t in axis.texts if t.get_text().strip()]
    texts += [child.title for axis in figure.axes for child in axis.child_axes if child.title.get_text()]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts]
    inside = figure.bbox
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= inside.x1 and box.y1 <= inside.y1, text
    for (a, one), (b, other) in itertools.combinations(boxes, 2):
        assert not (one.x0 < other.x1 - 1 and other.x0 < one.x1 - 1 and one.y0 < other.y1 - 1 and other.y0 < one.y1 - 1), (a, b)
    plt.close(figure)


def test_files_are_pictures(tmp_path: Path) -> None:
    program, open_before = compiled("reverse"), plt.get_fignums()
    program.draw(tmp_path / "flow.png", list("abc"))
    assert (tmp_path / "flow.png").read_bytes()[:4] == b"\x89PNG" and min(plt.imread(tmp_path / "flow.png").shape[:2]) > 300
    program.draw(tmp_path / "flow.svg")
    assert "<svg" in (tmp_path / "flow.svg").read_text()[:2000]
    draw_attention(program, list("abcd"), tmp_path / "attention.png")
    draw_attention(program.network, [0, 1, 2, 3], str(tmp_path / "same.png"))
    assert (plt.imread(tmp_path / "attention.png").shape[:2]) == plt.imread(tmp_path / "same.png").shape[:2]
    draw_attention(wide(), [0.5, -1.0], tmp_path / "wide.svg")
    for head in ("layer 1, head 10", "layer 2, head 1"):
        assert f"<!-- {head} -->" in (tmp_path / "wide.svg").read_text()
    assert plt.get_fignums() == open_before


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("flow.txt", ["a"]), r"cannot be drawn: expected a file name that ends in \.png, \.pdf, \.svg"),
        (("nowhere/flow.png", ["a"]), "cannot be written: .* is not a folder"),
        (("flow.png", ["z"]), "the token 'z' at position 0 is not in the vocabulary"),
        (("flow.png", []), "1 to 6 tokens, got 0"),
        (("flow.png", ["a"] * 41), "41 tokens are too many for a picture; give at most 40"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(arguments: tuple, message: str, tmp_path: Path) -> None:
    path, example = arguments
    for draw in (compiled("reverse").draw, lambda path, example: draw_attention(compiled("reverse"), example, path)):
        with pytest.raises(AnyformerError, match=message) as caught:
            draw(tmp_path / path, example)
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_other_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_shipped: None) -> None:
    path = tmp_path / "picture.png"
    with pytest.raises(AnyformerError, match="no attention, so there is nothing to draw"):
        draw_attention(compiled("constant"), ["a"], path)
    with pytest.raises(AnyformerError, match=r"tokens are ids, at least one; got \['a'\]"):
        draw_attention(compiled("reverse").network, ["a"], path)
    with pytest.raises(AnyformerError, match=r"ids must lie in 0\.\.3, got 9"):
        draw_attention(compiled("reverse").network, [9], path)
    with pytest.raises(AnyformerError, match="needs a compiled program or a Network, got str"):
        draw_attention("reverse", ["a"], path)  # type: ignore[arg-type]
    monkeypatch.setattr("anyformer.rasp.drawing.LARGEST", (2, LARGEST[1]))
    with pytest.raises(AnyformerError, match="4 heads and groups of units and 5 places, too many for a picture"):
        compiled("reverse").draw(path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(AnyformerError, match=r"needs matplotlib; install the extra: pip install 'anyformer\[viz\]'"):
        compiled("reverse").draw(path)


def test_a_name_is_given_to_a_copy():
    named_tokens = tokens.named("foo")
    assert (named_tokens.label, tokens.label) == ("foo", None)
    assert repr(tokens + 1) == "(tokens + 1)" and repr(named_tokens < 2) == "(foo < 2)"
