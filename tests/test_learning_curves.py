"""``anyformer reproduce learnability | bfloat16``: what the runs are, what the files say, and what happens to runs that fail."""

import json
from dataclasses import replace

import pytest

from anyformer.cli import main
from anyformer.errors import AnyformerError
from anyformer.experiments import learnability, learned
from anyformer.experiments.rounded_products import PRODUCTS, Pair, config_of
from anyformer.learning.runs import RunConfig, run_training
from anyformer.learning.sweeps import SweepResult


@pytest.fixture
def tiny(monkeypatch):
    """Runs of two steps, trained in this process; those that the list names fail."""
    failing: list[str] = []
    training_of = learned.training_of

    def short(cell, seed):
        less = dict(steps=2, batch_size=2, warm_up=1, evaluate_every=1, evaluation_size=2, stop_at=None)
        return replace(training_of(cell, seed), **less)

    def here(configs, executor, folder, report):
        wanted = [config for config in configs if config.name not in failing]
        return SweepResult(tuple(run_training(c, folder) for c in wanted), tuple((name, "out of luck") for name in failing), ())

    monkeypatch.setattr(learned, "training_of", short)
    monkeypatch.setattr(learned, "FLOOR_ROWS", 200)
    monkeypatch.setattr(learnability, "STEPS", 2)
    monkeypatch.setattr(learnability, "BATCH", 2)
    monkeypatch.setattr(learnability, "CHOICES", {name: learnability.CHOICES[name] for name in ("base", "no position rows")})
    monkeypatch.setattr(learnability, "RANDOM", {"random machine, by its reads": {}})
    monkeypatch.setattr(learned, "sweep", here)
    learned.floors.cache_clear()
    yield failing
    learned.floors.cache_clear()


def run(tmp_path, *arguments: str) -> int:
    return main(["reproduce", *arguments, "--runs", str(tmp_path / "runs"), "-o", str(tmp_path / "out")])


@pytest.mark.parametrize("profile", ["quick", "paper"])
def test_a_pair_differs_in_the_dtype_of_its_products_alone(profile):
    exact, rounded = (config_of(products, profile, 3) for products in PRODUCTS)
    assert exact != rounded and RunConfig.from_json(rounded.to_json()) == rounded
    assert replace(rounded, model=replace(rounded.model, products="float32")) == exact
    cell = learned.Cell("1-hop", "residual+norm", "random", profile)
    assert exact == learned.run_config(cell, 3), "a finished run of table 1 is read, not trained again"


def test_what_two_curves_say():
    exact = [[100, 0.3], [200, 0.8], [300, 0.91], [400, 0.97]]
    rounded = [[100, 0.9], [200, 0.5], [300, 0.89]]  # stopped earlier
    pair = Pair.of(7, dict(zip(PRODUCTS, (exact, rounded), strict=True)))
    assert pair.accuracy == {"float32": 97.0, "bfloat16": 89.0} and pair.steps_to_90 == {"float32": 300, "bfloat16": 100}
    assert pair.apart == 30.0, "at step 200, the first of the second half of 300 common steps"
    never = Pair.of(7, dict(zip(PRODUCTS, (exact[:2], rounded[:1]), strict=True)))
    assert never.steps_to_90 == {"float32": None, "bfloat16": 100} and never.apart == 60.0


def test_curves_of_rounded_products_are_written(tiny, tmp_path, capsys):
    assert run(tmp_path, "bfloat16", "--seeds", "0", "1") == 0
    said = capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "bfloat16-quick.json").read_text())
    assert written["command"] == "anyformer reproduce bfloat16 --profile quick --seeds 0 1"
    assert [pair["seed"] for pair in written["pairs"]] == [0, 1] and "| 1 |" in (
        tmp_path / "out" / "bfloat16-quick.md"
    ).read_text()
    for pair in written["pairs"]:
        assert all([step for step, _ in pair["curves"][name]] == [1, 2] for name in PRODUCTS)
    assert (tmp_path / "out" / "bfloat16-quick.png").stat().st_size > 1000 and "apart at most" in said
    tiny.append(config_of("bfloat16", "quick", 1).name)
    assert run(tmp_path, "bfloat16", "--seeds", "0", "1") == 1
    assert "failed: out of luck" in capsys.readouterr().out
    kept = json.loads((tmp_path / "out" / "bfloat16-quick.json").read_text())["pairs"]
    assert kept == written["pairs"], "a failure takes nothing away"
    assert run(tmp_path, "bfloat16", "--seeds", "2") == 1  # the one that fails is of seed 1: named all the same
    assert [p["seed"] for p in json.loads((tmp_path / "out" / "bfloat16-quick.json").read_text())["pairs"]] == [0, 1, 2]


def test_choices_that_learn_are_written(tiny, tmp_path, capsys):
    assert run(tmp_path, "learnability", "--seeds", "0") == 0
    written = json.loads((tmp_path / "out" / "learnability.json").read_text())
    assert [line["choice"] for line in written["lines"]] == ["base", "no position rows", "random machine, by its reads"]
    assert all(line["seeds"] == [0] and 0 <= line["accuracy"][0] <= 100 for line in written["lines"])
    tiny.append(learnability.config_of("base", 0).name)
    capsys.readouterr()
    assert run(tmp_path, "learnability", "--seeds", "0", "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert list(result["failures"].values()) == ["out of luck"]
    assert result["lines"] == written["lines"], "a failure takes nothing away"
    (tmp_path / "out" / "learnability.json").unlink()
    assert run(tmp_path, "learnability", "--seeds", "0") == 1
    assert "| base | 0 | not run |" in (tmp_path / "out" / "learnability.md").read_text()
    (tmp_path / "out" / "learnability.json").write_text("{}")
    assert run(tmp_path, "learnability", "--seeds", "0") == 2
    assert "not a table that this version writes" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["learnability", "bfloat16"])
def test_bad_input(name, tmp_path, capsys):
    for arguments, message in ((["--seeds", "1", "1"], "different seeds >= 0"), (["--only", "*:*:*"], "has no --only")):
        assert run(tmp_path, name, *arguments) == 2
        said = capsys.readouterr().err
        assert message in said and "Traceback" not in said and not (tmp_path / "runs").exists()
    with pytest.raises(AnyformerError, match="different seeds >= 0"):
        learnability.run(tmp_path, (), tmp_path / "runs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["universality", "--profile", "paper"], "universality has no --profile; it takes --output, --json"),
        (["simulator", "--seeds", "1"], "simulator has no --seeds; it takes --profile, --output, --json"),
        (["learnability", "--profile", "paper"], "learnability has no --profile; it takes --seeds, --engine, --runs, --output"),
        (["rasp", "--engine", "ray"], "rasp has no --engine"),
        (["rasp", "--seeds", "1", "2"], "rasp takes one seed, got [1, 2]"),
        (["universality-training", "--runs", "elsewhere"], "universality-training has no --runs"),
    ],
)
def test_an_option_without_effect_is_refused(arguments, message, capsys):
    assert main(["reproduce", *arguments]) == 2
    assert message in capsys.readouterr().err
