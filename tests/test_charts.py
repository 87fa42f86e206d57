"""The chart of the cost of universality: its numbers are the cost code's, any machine appears, labels do not overlap, one line for bad input."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text

import anyformer as af
from anyformer.backbones.registry import MACHINES
from anyformer.charts import cost_figure, spread
from anyformer.cli import main
from anyformer.experiments.lower_bound import BOUNDED
from anyformer.figures import pyplot
from anyformer.scaling import Panel, classes, reasons, scaling

SIZES = ["--heads", "2", "--layers", "2", "--head-dim", "3", "--features", "5"]
CONFIG = af.TransformerConfig(vocab=5, heads=2, layers=2, head_dim=3, features=5)


@pytest.fixture
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyformer.scaling.RANGES", {"layers": (1,), "heads": (1,), "head_dim": (1,)})


@pytest.fixture(scope="module")
def panels() -> list[Panel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anyformer.scaling.RANGES", {"layers": (1, 8), "heads": (1, 4), "head_dim": (128,)})
        return scaling(CONFIG, length=7)


class Other(af.PathTree):
    """A machine that is registered later: wider by a half than a path tree."""

    name = "stored-program"

    @classmethod
    def cost_of(cls, recipe, length):
        return af.Cost(1, length, 3 * super().cost_of(recipe, length).state // 2, 1, 1, 10, 1)


def test_every_number_is_the_cost_codes(panels: list[Panel]) -> None:
    assert [(p.against, p.quantity) for p in panels[:6]] == [
        (a, q) for a in ("layers", "heads", "head_dim") for q in ("state", "nonzero_weights")
    ]
    assert len(panels) == 12 and len({p.kind for p in panels}) == 2
    for panel in panels:
        base = classes(CONFIG)[panel.kind]
        assert base.residual == (panel.kind != "attention only") == (base.mlp > 0)
        for i in (0, panel.x.index(getattr(CONFIG, panel.against)), len(panel.x) - 1):
            config = af.TransformerConfig(**(vars(base) | {panel.against: panel.x[i]}))
            sizes = af.cost(config, length=7)
            assert panel.lower_bound[i] == sizes["lower_bound"] * (7 if panel.quantity == "state" else 1)
            for name, one in sizes["backbones"].items():
                expected = None if one["width"] is None else one[panel.quantity]
                assert panel.series.get(name, [None] * len(panel.x))[i] == expected, (name, panel)


def test_no_attention_only_machine_is_below_the_bound(panels: list[Panel]) -> None:
    for panel in panels:
        for name in set(BOUNDED) & set(panel.series):
            values = panel.series[name]
            assert all(v is None or v >= bound for v, bound in zip(values, panel.lower_bound, strict=True))


def test_machines_that_cannot_hold_a_class_are_named(panels: list[Panel]) -> None:
    for panel in panels:
        assert ("chain" in panel.left_out) == (panel.kind != "attention only" or panel.against != "heads")
        assert set(panel.left_out) | set(panel.series) == set(MACHINES)
    lines = reasons(panels)
    assert any("chain, attention only: drawn only at heads = 1" in line for line in lines)
    assert any("chain, attention only: not drawn against layers, head dim; " in line and "2 heads" in line for line in lines)
    assert any("not drawn against layers, heads, head dim; " in line and "residual" in line for line in lines)
    assert sum("frozen-" in line and "attention alone" in line for line in lines) == 2
    assert len(lines) == 6


def test_a_machine_that_is_registered_later_appears(few_points, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MACHINES, "stored-program", Other)
    for panel in scaling(CONFIG, length=7):
        mine, tree = panel.series["stored-program"], panel.series["path-tree"]
        assert mine == ([10] * len(tree) if panel.quantity == "nonzero_weights" else [3 * v // 2 for v in tree])


def test_sizes_too_large_to_print_are_left_out_but_not_the_class_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyformer.costs.MOST_DIGITS", 12)
    long = replace(CONFIG, layers=8, mlp=1)
    monkeypatch.setattr("anyformer.scaling.classes", lambda config: {"attention only": replace(config, mlp=0)})
    panels = scaling(long)
    heads = next(p for p in panels if p.against == "heads")
    assert heads.x == [1, 2] and len(heads.lower_bound) == len(heads.series["random"]) == 2
    monkeypatch.setattr("anyformer.costs.MOST_DIGITS", 2)
    with pytest.raises(af.AnyformerError, match="more than 2 digits"):
        scaling(long)


def test_a_width_past_every_float_is_drawn() -> None:
    sizes = {"path-tree": [10, 10**400], "chain": [10, None]}
    panel = Panel("attention only", "state", "heads", [1, 2], sizes, [1, 2], {})
    figure = cost_figure([panel], 1)
    axis = next(axis for axis in figure.axes if axis.lines)
    assert list(axis.lines[0].get_ydata()) == [1, 400] and overlapping(figure) == []


def overlapping(figure) -> list[tuple[str, str]]:
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    found = []
    for axis in figure.axes:
        boxes = [(t.get_text(), Text.get_window_extent(t, renderer)) for t in axis.texts]  # without its arrow
        found += [(a, b) for i, (a, x) in enumerate(boxes) for b, y in boxes[:i] if x.overlaps(y)]
    return found


def test_labels_do_not_overlap_with_six_machines(panels: list[Panel]) -> None:
    figure = cost_figure(panels[:6], 7)
    assert overlapping(figure) == [] and sum(len(axis.texts) for axis in figure.axes) >= 12
    first = panels[0]
    crowd = {f"machine-{i}": [10 * x + i for x in first.x] for i in range(6)}
    crowded = [Panel(p.kind, p.quantity, p.against, first.x, crowd, first.lower_bound, {}) for p in panels[:2]]
    figure = cost_figure(crowded, 7)
    assert overlapping(figure) == [] and [len(axis.texts) for axis in figure.axes if axis.lines] == [7, 7]
    drawn = next(axis for axis in figure.axes if axis.lines)
    styles = {(line.get_linestyle(), line.get_marker()) for line in drawn.lines}
    assert len(styles) == 7  # a grey print tells them apart


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 0.3)), min_size=1, max_size=8))
def test_spread_keeps_order_and_distance_and_moves_nothing_that_is_free(items: list[tuple[float, float]]) -> None:
    wanted, sizes = zip(*sorted(items), strict=True)
    places = spread(wanted, sizes)
    gaps = [(b - sb / 2) - (a + sa / 2) for a, sa, b, sb in zip(places, sizes, places[1:], sizes[1:], strict=False)]
    assert all(gap > -1e-9 for gap in gaps)
    free = all(b - sb / 2 >= a + sa / 2 for a, sa, b, sb in zip(wanted, sizes, wanted[1:], sizes[1:], strict=False))
    assert not free or places == pytest.approx(list(wanted))


def test_the_command_draws_prints_the_table_and_gives_the_series(few_points, capsys, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "chart.png"
    assert main(["cost", *SIZES, "--length", "7", "--chart", str(file), "--json"]) == 0
    assert file.stat().st_size > 50_000
    chart = json.loads(capsys.readouterr().out)["chart"]
    panel = chart["panels"][0]
    assert chart["length"] == 7 and len(chart["panels"]) == 12 and panel["kind"] == "attention only"
    here = panel["x"].index(2)
    monkeypatch.setattr("anyformer.charts.draw_cost", lambda path, panels, length, title: None)
    assert main(["cost", *SIZES, "--length", "7", "--chart", str(file)]) == 0
    out = capsys.readouterr().out
    assert "path-tree" in out and f"wrote {file}" in out and "drawn only at heads = 1" in out and "lower bound" in out
    assert panel["series"]["path-tree"][here] == 7 * af.cost(CONFIG)["backbones"]["path-tree"]["width"]


@pytest.mark.parametrize(
    "name, message",
    [
        ("folder.png", "it is a folder"),
        ("missing/chart.png", "missing is not a folder"),
        ("chart.xyz", "ends in .png, .pdf, .svg"),
        ("chart", "ends in .png, .pdf, .svg"),
        ("full.png", "cannot be written: No space left"),
    ],
)
def test_unusable_files_are_one_line(few_points, capsys, monkeypatch, tmp_path: Path, name: str, message: str) -> None:
    monkeypatch.setattr("anyformer.charts.cost_figure", lambda *arguments: pyplot().figure())
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "full.png").symlink_to("/dev/full")
    assert main(["cost", *SIZES, "--chart", str(tmp_path / name), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_without_matplotlib_the_table_works_and_the_chart_says_what_to_install(
    few_points, capsys, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["cost", *SIZES]) == 0
    assert main(["cost", *SIZES, "--chart", str(tmp_path / "c.png")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "pip install 'anyformer[viz]'" in err
    assert len(scaling(CONFIG)) == 12
