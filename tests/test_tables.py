"""``anyformer reproduce``: rows, merging, floors; what the configurations are; curricula."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from anyformer.backbones import FrozenRandom
from anyformer.cli import main
from anyformer.errors import AnyformerError
from anyformer.experiments import learnability, learned, rounded_products, tables
from anyformer.experiments.learned import KINDS, PAPER, PROFILES, SIZES, VARIANTS, Cell, run_config, sizes_of, task_called
from anyformer.experiments.report import read_written
from anyformer.learning.frozen_machine import FrozenMachine
from anyformer.learning.models import FullyTrained
from anyformer.learning.runs import RunConfig
from anyformer.operators import Context
from anyformer.tasks import Addition, Curriculum, KHop

ROOT = Path(__file__).parent.parent


@pytest.fixture
def tiny(monkeypatch):
    """Quick cells of a few steps, trained in this process."""
    training_of = learned.training_of

    def short(cell: Cell, seed: int):
        less = dict(steps=2, batch_size=2, warm_up=1, evaluate_every=1, evaluation_size=2, stop_at=None)
        return replace(training_of(cell, seed), **less)

    monkeypatch.setattr(learned, "training_of", short)
    monkeypatch.setattr(tables, "SCORED_LABELS", 8)
    monkeypatch.setattr(tables, "SCORED_ROWS", 4)
    monkeypatch.setattr(learned, "FLOOR_ROWS", 200)
    learned.floors.cache_clear()

    def here(configs, executor, folder, report):
        from anyformer.learning.runs import run_training
        from anyformer.learning.sweeps import SweepResult

        runs, failures = [], []
        for config in configs:
            try:
                runs.append(run_training(config, folder))
            except AnyformerError as error:
                failures.append((config.name, str(error)))
        return SweepResult(tuple(runs), tuple(failures), ())

    monkeypatch.setattr(tables, "sweep", here)
    yield
    learned.floors.cache_clear()


def test_every_configuration_is_a_value_of_the_papers_sizes():
    names = set()
    for profile in PROFILES:
        for table in tables.TABLES:
            for cell in tables.cells(table, profile):
                config = run_config(cell, 0)
                assert RunConfig.from_json(config.to_json()) == config
                names.add(config.name)
                if isinstance(config.model, FrozenMachine):
                    assert config.model.recipe.m == sizes_of(cell.task, profile).width
                else:
                    assert isinstance(config.model, FullyTrained)
    distinct = {cell for profile in PROFILES for table in tables.TABLES for cell in tables.cells(table, profile)}
    assert len(names) == len(distinct)
    assert {task: size.width for task, size in SIZES.items()} == {
        "dyck": 1024, "1-hop": 456, "2-hop": 1024, "3-hop": 2280, "4-hop": 2280,
    }  # fmt: skip


def test_published_figures_are_where_the_tables_have_them():
    assert len(PAPER) == 30 + 15 and PAPER["3-hop", "residual+norm", "random"] == 92.6 and PAPER["1-hop", "none", "full"] == 8.4
    for cell in tables.cells("table2", "paper"):
        unknown = cell.task == "dyck" and cell.kind == "full" and cell.variant not in ("none", "residual+norm")
        assert (cell.name in PAPER) != unknown


@pytest.mark.usefixtures("tiny")
def test_a_table_is_trained_scored_written_and_not_trained_again(tmp_path):
    only = ("1-hop:none:*", "dyck:residual+norm:random")
    given = (tmp_path / "out", "table1", "quick", (0, 1), tmp_path / "runs")
    result = tables.run(*given, only=only, command="this")
    rows = {row.key[:3]: row for row in result["rows"]}
    assert len(rows) == 40 == len(result["rows"]) and not result["failures"]
    for model in tables.MODELS:
        row = rows["1-hop", "none", model]
        assert (
            row.seeds == [0, 1]
            and len(row.accuracy) == len(row.accuracy_letters) == 2
            and row.command.startswith("this --only 1-hop:none:")
        )
        assert all(0 <= a <= 100 for a in row.accuracy) and row.steps == [2, 2] and len(row.curves[0]) == 2
    compiled, full = rows["1-hop", "none", "compiled"], rows["1-hop", "none", "full"]
    assert compiled.accuracy == full.accuracy and compiled.m == rows["1-hop", "none", "sparse"].m and compiled.paper is None
    assert rows["1-hop", "none", "random"].accuracy == pytest.approx(
        rows["1-hop", "none", "sparse"].accuracy, abs=1
    )  # the same reads
    assert rows["dyck", "residual+norm", "random"].accuracy_letters == []
    assert rows["4-hop", "none", "sparse"].accuracy == [] and rows["4-hop", "none", "sparse"].paper == 39.4
    written = json.loads((tmp_path / "out" / "table1.json").read_text())
    assert written == [asdict(row) for row in result["rows"]]
    keys = {"task", "norm", "model", "H", "L", "d", "m", "seeds", "accuracy", "accuracy_letters", "paper", "profile", "command"}
    assert all(keys <= set(row) for row in written)
    text = (tmp_path / "out" / "table1.md").read_text()
    ran = next(line for line in text.splitlines() if line.startswith("| dyck | residual+norm | random | "))
    assert [cell.strip() for cell in ran.split("|")][7] == "", "letters of a task that has none"
    assert rows["2-hop", "residual+norm", "compiled"].m > rows["2-hop", "residual+norm", "full"].m, (
        "not run, and as wide as its machine"
    )
    assert "not run" in text and "±" in text and "quick" in text and (tmp_path / "out" / "table1-quick.png").stat().st_size > 1000
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/finished.json")}
    again = tables.run(*given, only=("dyck:residual+norm:random",), command="that")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/finished.json")} == before
    kept = {row.key[:3]: row for row in again["rows"]}
    assert (
        kept["1-hop", "none", "full"] == full
        and kept["dyck", "residual+norm", "random"].command == "that --only dyck:residual+norm:random"
    )


@pytest.mark.usefixtures("tiny")
def test_a_damaged_result_is_a_failure_and_the_row_stays(tmp_path):
    given = (tmp_path / "out", "table1", "quick")
    first = tables.run(*given, (0, 1), tmp_path / "runs", only=("dyck:none:full",), command="this")
    lost = run_config(Cell("dyck", "none", "full", "quick"), 0).name
    next((tmp_path / "runs" / lost / "result").glob("*.safetensors")).write_bytes(b"")
    for name in ("scores.json", "compiled-scores.json"):
        (tmp_path / "runs" / lost / name).write_text("{")  # damaged: not read
    again = tables.run(*given, (0, 1), tmp_path / "runs", only=("dyck:none:*",), command="that")
    assert list(again["failures"]) == [lost] and "damaged" in again["failures"][lost]
    for model in ("full", "compiled"):
        rows = [{row.key[:3]: row for row in result["rows"]}["dyck", "none", model] for result in (first, again)]
        assert rows[0] == rows[1] and rows[0].seeds == [0, 1]
    assert (
        next(row for row in again["rows"] if row.key[:3] == ("dyck", "none", "sparse")).command == "that --only dyck:none:sparse"
    )
    (tmp_path / "out" / "table1.json").write_text(json.dumps([asdict(row) for row in again["rows"] if row.key[1] != "none"]))
    for figures in (None, []):  # a line that is not there, then one that says "not run": the seed that stands fills it
        third = tables.run(*given, (0, 1), tmp_path / "runs", only=("dyck:none:full",), command="third")
        row = next(row for row in third["rows"] if row.key[:3] == ("dyck", "none", "full"))
        assert row.seeds == [1] and len(row.accuracy) == 1, figures
        emptied = [asdict(row) | {"seeds": [], "accuracy": [], "accuracy_letters": []} for row in third["rows"]]
        (tmp_path / "out" / "table1.json").write_text(json.dumps(emptied))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "text", ["", "[]", '{"sample": [8, 4]}', '{"sample": [8, 4], "result": "0", "accuracy": 1.0, "width": 3}']
)
def test_scores_of_another_result_are_taken_again(text, tmp_path):
    given = (tmp_path / "out", "table1", "quick", (0,), tmp_path / "runs")
    first = tables.run(*given, only=("dyck:none:full",))
    for name in ("scores.json", "compiled-scores.json"):
        (tmp_path / "runs" / run_config(Cell("dyck", "none", "full", "quick"), 0).name / name).write_text(text)
    assert tables.run(*given, only=("dyck:none:full",))["rows"] == first["rows"]


def changed(**fields):
    return lambda rows: [rows[0] | fields, *rows[1:]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows: {},
        lambda rows: [{k: v for k, v in rows[0].items() if k != "baselines"}],
        lambda rows: [rows[0], 3],
        changed(task="5-hop"),
        changed(task=[]),
        changed(norm="x"),
        changed(accuracy="abc"),
        changed(paper="x"),
        changed(steps=5),
        changed(curves=[1]),
        changed(curves=[[]]),
        changed(unknown=1),
    ],
)
def test_a_table_of_another_version_is_refused_before_anything_is_trained(damage, tmp_path):
    text = json.dumps(damage(json.loads((ROOT / "results/table1.json").read_text())))
    (tmp_path / "table1.json").write_text(text)
    with pytest.raises(AnyformerError, match=r"table1.json is not a table that this version writes .*; move it away"):
        tables.run(tmp_path, "table1", "quick", (0,), tmp_path / "runs", only=("1-hop:none:full",))
    assert (tmp_path / "table1.json").read_text() == text and not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("name", ["table1.json", "table1.md"])
def test_a_folder_in_the_place_of_a_table_is_seen_first(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(AnyformerError, match=f"{name} is a folder, a file is to be written there"):
        tables.run(tmp_path, "table1", "quick", (0,), tmp_path / "runs", only=("1-hop:none:full",))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("table1", partial(tables._rows, "table1")),
        ("table2", partial(tables._rows, "table2")),
        ("learnability", learnability._lines),
        ("bfloat16-paper", rounded_products._pairs),
    ],
)
def test_what_is_committed_is_read(name, read):
    assert read_written(ROOT / "results", name, read)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "1-hop:none"], "task:variant:model"),
        (["--only"], "got none; leave it out for all cells"),
        (["--only", "5-hop:none:full"], "none of dyck, 1-hop"),
        (["--seeds", "1", "1"], "different seeds >= 0"),
        (["--seeds", "-1"], "seed"),
        (["--profile", "tiny"], "profile"),
    ],
)
def test_bad_input_of_reproduce(arguments, message, tmp_path, capsys):
    assert main(["reproduce", "table1", "--runs", str(tmp_path / "r"), "-o", str(tmp_path / "o"), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said and not (tmp_path / "r").exists()


def test_a_damaged_table_is_not_overwritten(tmp_path):
    (tmp_path / "table1.json").write_text("[{]")
    with pytest.raises(AnyformerError, match="not a table that this version writes"):
        tables.run(tmp_path, "table1", "quick", (0,), tmp_path / "runs", only=("1-hop:none:full",))
    assert (tmp_path / "table1.json").read_text() == "[{]"


def test_floors_are_those_of_the_reference():
    floors = learned.floors("1-hop")
    assert floors["position"] == pytest.approx(27.7, abs=0.6) and floors["position and own token"] == pytest.approx(35.5, abs=0.8)


def test_a_curriculum_changes_its_task_at_a_step_and_is_measured_on_the_last():
    first, last = KHop(hops=1), KHop(hops=2)
    task = Curriculum(tasks=(first, last), until=(3,))
    for index, wanted in ((0, first), (2, first), (3, last), (99, last)):
        assert torch.equal(task.batch(5, index, 4).labels, wanted.batch(5, index, 4).labels)
    assert torch.equal(task.held_out(4).labels, last.held_out(4).labels) and Curriculum.from_json(task.to_json()) == task
    sums = Curriculum(tasks=(Addition(digits=2),))
    batch = sums.held_out(3)
    assert sums.scores(batch.labels, batch) == Addition(digits=2).scores(batch.labels, batch)
    assert set(sums.scores(batch.labels, batch)) == {"accuracy", "answers"}
    for wrong in (dict(tasks=(first, last)), dict(tasks=()), dict(tasks=(first, last, first), until=(5, 5))):
        with pytest.raises(AnyformerError, match="Curriculum"):
            Curriculum(**wrong)
    with pytest.raises(AnyformerError, match="same length and vocab"):
        Curriculum(tasks=(first, KHop(hops=1, vocab=40)), until=(3,))


def test_heads_that_attend_to_themselves_do_so_at_the_start():
    cell = Cell("1-hop", "none", "sparse", "paper")
    model = run_config(cell, 0).model
    assert isinstance(model, FrozenMachine)
    tokens = task_called("1-hop").batch(0, 0, 2).inputs

    def shares(self_heads: float) -> list[list[float]]:
        made = replace(model, self_heads=self_heads).build(task_called("1-hop"), 0)
        trace = made.machine.trace(tokens, made.program())
        return [[float(p.diagonal(dim1=-2, dim2=-1)[:, h, 50:].mean()) for h in range(2)] for p in trace.patterns]

    for (free, own), (_, plain) in zip(shares(3.0), shares(0.0), strict=True):
        assert own > 0.4 > 0.2 > max(free, plain)


def test_reads_are_the_same_program_on_the_random_machine():
    cell = Cell("2-hop", "none", "random", "quick")
    model, task = run_config(cell, 3).model, task_called("2-hop")
    assert isinstance(model, FrozenMachine) and model.coordinates == "reads"
    made = model.build(task, 3).double()
    tokens = task.batch(0, 0, 2).inputs
    program = made.program()
    assert isinstance(made.machine, FrozenRandom) and program.width == made.machine.width == made.runs_on.width
    logits = made.machine.logits(
        made.machine.tables(program.tokens, program.positions, program.readout, None), tokens, Context.of(tokens)
    )
    torch.testing.assert_close(logits, made(tokens), rtol=1e-6, atol=1e-6)  # m = N: R_all is ill-conditioned
    for wrong in (replace(model, readout="free"), replace(model, recipe=replace(model.recipe, width=300))):
        with pytest.raises(AnyformerError, match="reads"):
            wrong.build(task, 0)
    assert set(KINDS) == {"sparse", "random", "full"} and len(VARIANTS) == 5


def test_the_readme_says_what_the_table_says():
    rows = {
        tuple(row[k] for k in ("task", "norm", "model", "profile")): row
        for row in json.loads((ROOT / "results/table1.json").read_text())
    }
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, task, m, kind, model in (
        ("Dyck-1", "dyck", 1024, "0/1", "sparse"),
        ("1-hop", "1-hop", 456, "0/1", "sparse"),
        ("1-hop", "1-hop", 456, "random", "random"),
        ("2-hop", "2-hop", 1024, "0/1", "sparse"),
        ("3-hop", "3-hop", 2280, "0/1", "sparse"),
        ("4-hop", "4-hop", 2280, "0/1", "sparse"),
        ("Dyck-1", "dyck", 1024, "random", "random"),
        ("2-hop", "2-hop", 1024, "random", "random"),
        ("3-hop", "3-hop", 2280, "random", "random"),
        ("4-hop", "4-hop", 2280, "random", "random"),
    ):
        cells = [f"{name}, m = {m}", kind]
        for variant in ("none", "residual+norm"):
            row = rows[task, variant, model, "paper"]
            cells += [tables.spelled(row["accuracy"]), f"{row['paper']:.1f}"]
            assert row["m"] == m
        assert f"| {' | '.join(cells)} |" in text
