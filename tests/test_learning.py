"""Learning programs: what is frozen stays, what is stated trains and nothing else; the command line from training to the program that runs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tyro

import anyformer as af
from anyformer.backbones.frozen import FrozenMasked, FrozenRandom
from anyformer.cli import main
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.learning.frozen_machine import FrozenMachine
from anyformer.learning.models import FullyTrained
from anyformer.learning.recommended import recommended_model, recommended_training
from anyformer.learning.runs import stored_config
from anyformer.learning.sizes import sizes
from anyformer.learning.training import Training, TrainingConfig, train
from anyformer.storage import apart, checksum
from anyformer.targets.reading import network_class
from anyformer.targets.transformer import TransformerConfig
from anyformer.tasks import IGNORED, Dyck, KHop
from anyformer.train_command import options_of

COPY = KHop(hops=0)  # the answer is the token itself: learned in a few dozen steps
DECAYING = TrainingConfig(steps=3, warm_up=0, batch_size=4, weight_decay=0.1, learning_rate=0.1, evaluation_size=4)
KINDS = {"sparse": FrozenMasked, "random": FrozenRandom}


def recipe(kind: str, task, layers: int = 2, **options):
    sizes = TransformerConfig(vocab=task.vocab, heads=2, layers=layers, head_dim=3, features=task.vocab)
    return KINDS[kind].recipe_for(network_class(sizes), **options)


def hash_of_machine(machine) -> str:
    """sha256 of every matrix of the dense form, the MLPs' too, and of every tensor that the fast runs hold."""
    literal = machine.literal()
    tensors = {f"bank {name}": b for name, b in literal.banks.named_buffers()}
    tensors |= {f"mlp {i} {j}": w for i, pair in enumerate(literal.mlps) for j, w in enumerate(pair)}
    held = {**dict(machine.named_buffers()), **{f"cast {key}": t for key, t in machine._cast.items()}}
    assert tensors
    return checksum(apart(tensors | held))


VARIANTS = [
    ({"residual": True, "norm": "pre"}, {}, {"tokens", "positions", "readout"}),
    ({"residual": True, "norm": "post", "mlp": 5, "seed": 3}, {"train_norms": True}, {"tokens", "positions", "readout", "norms"}),
    ({}, {"positions": False}, {"tokens", "readout"}),
    ({"residual": True}, {"readout_std": 0.3, "position_std": 0.2}, {"tokens", "positions", "readout"}),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("machine", "model", "trained"), VARIANTS, ids=[str(v[0]) for v in VARIANTS])
def test_the_machine_never_moves_and_what_is_stated_trains(kind: str, machine: dict, model: dict, trained: set):
    task = Dyck()
    learner = recommended_model(recipe(kind, task, **machine), **model).build(task, 0)
    learner(task.batch(0, 0, 1).inputs)  # what is cast for the run is there before the first hash
    assert {name for name, p in learner.named_parameters() if p.requires_grad} == trained == set(dict(learner.named_parameters()))
    assert not any(b.requires_grad for b in learner.machine.buffers()) and not list(learner.machine.parameters())
    before, start = hash_of_machine(learner.machine), {name: p.detach().clone() for name, p in learner.named_parameters()}
    training = Training(learner, task, DECAYING)
    while not training.finished:
        training.advance()
    assert hash_of_machine(learner.machine) == before
    moved = {name for name, p in learner.named_parameters() if not torch.equal(p, start[name])}
    assert moved == trained == set(training.named)
    held = {p.data_ptr() for part in training.optimizer.parts for group in part.param_groups for p in group["params"]}
    assert held == {p.data_ptr() for p in learner.parameters()}  # weight decay reaches nothing else
    program = learner.program()
    assert program.machine() == learner.machine
    assert learner.runs_on is not learner.machine or torch.equal(program.tokens, learner.tokens)


def test_the_hash_sees_one_number():
    learner = FrozenMachine(recipe=recipe("random", Dyck(), residual=True, mlp=2)).build(Dyck(), 0)
    before = hash_of_machine(learner.machine)
    learner.machine.get_buffer("mlp_0_1")[0, 0] += 1e-9
    changed = hash_of_machine(learner.machine)
    learner.machine.get_buffer("route_0_0")[0, 0] += 1e-9
    assert len({before, changed, hash_of_machine(learner.machine)}) == 3


@pytest.mark.parametrize(("kind", "options"), [("sparse", {"residual": True, "norm": "pre"}), ("random", {})])
def test_a_small_task_is_learned(kind: str, options: dict, as_shipped):
    model = recommended_model(recipe(kind, COPY, layers=1, **options))
    config = recommended_training(
        frozen=True, norm="norm" in options, steps=60, batch_size=16, evaluate_every=20, evaluation_size=32
    )
    history = train(model.build(COPY, 0), COPY, config)
    assert history.losses[-1] < history.losses[0] / 3 and history.accuracies[-1] > 0.9


def test_recommended_choices():
    masked = recommended_model(recipe("sparse", COPY))
    assert (masked.readout, masked.embedding_std, masked.coordinates) == ("shared", 0.5, "embedding") and masked.self_heads > 0
    random = recommended_model(recipe("random", COPY))
    assert (random.readout, random.coordinates) == ("shared", "reads")
    narrow = recommended_model(replace(recipe("random", COPY), width=20))
    assert (narrow.readout, narrow.coordinates, narrow.self_heads) == ("free", "embedding", 0.0)
    free = recommended_model(recipe("random", COPY), readout="free")
    assert (free.readout, free.coordinates, free.self_heads) == ("free", "embedding", 0.0)
    assert recommended_model(recipe("sparse", COPY, residual=True)).readout == "free"
    normed = recommended_model(recipe("sparse", COPY, norm="pre", residual=True), embedding_std=None, positions=False)
    assert (normed.readout, normed.embedding_std, normed.positions) == ("free", 0.1, False)
    assert recommended_model(recipe("sparse", COPY), readout="free", embedding_std=0.2) == FrozenMachine(
        recipe=recipe("sparse", COPY), readout="free", embedding_std=0.2, self_heads=1.3
    )
    rates = [
        recommended_training(frozen=frozen, norm=norm).learning_rate
        for frozen, norm in ((True, True), (True, False), (False, True))
    ]
    assert rates == [3e-3, 2e-2, 5e-3]
    assert recommended_training(frozen=True, steps=5).warm_up == 0 and recommended_training(frozen=False, steps=50).warm_up == 5
    assert recommended_training(frozen=True, steps=5, warm_up=2, schedule="cosine").schedule == "cosine"


def test_first_tables_depend_on_the_seed_alone():
    model = recommended_model(recipe("sparse", COPY))
    first, again, other = (model.build(COPY, seed) for seed in (0, 0, 1))
    for name, p in first.named_parameters():
        assert torch.equal(p, again.get_parameter(name)) and not torch.equal(p, other.get_parameter(name))
    first = replace(model, self_heads=0.0).build(COPY, 0)
    plain = replace(model, self_heads=0.0, positions=False).build(COPY, 0)
    assert torch.equal(plain.tokens, first.tokens) and torch.equal(plain.readout, first.readout)
    assert float(first.tokens.detach().std()) == pytest.approx(0.5, rel=0.05)


def test_each_table_has_numbers_of_its_own():
    made = FrozenMachine(recipe=recipe("sparse", COPY), embedding_std=1.0, readout_std=1.0).build(COPY, 0)
    firsts = [p.detach().flatten()[:50] for p in made.parameters()]
    assert len(firsts) == 3 and all(abs(float(a @ b)) < 25 for a, b in zip(firsts, firsts[1:] + firsts[:1], strict=True))


def test_products_may_be_shorter_than_what_is_trained():
    made = {
        products: FrozenMachine(recipe=recipe("random", COPY, residual=True), products=products).build(COPY, 0)
        for products in ("float32", "bfloat16")
    }
    tokens = COPY.batch(0, 0, 2).inputs
    exact, rounded = (learner(tokens).detach() for learner in made.values())
    assert not torch.equal(exact, rounded) and float((exact - rounded).abs().max()) < 0.1 * float(exact.abs().max())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embedding_std": 0.0}, "embedding_std must be a positive number, got 0.0"),
        ({"readout_std": True}, "readout_std must be a positive number, got True"),
        ({"readout": "tied"}, "readout must be one of 'free', 'shared'"),
        ({"products": "float16"}, "products must be one of"),
        ({"positions": 1}, "positions must be one of True, False"),
    ],
)
def test_bad_models(options: dict, message: str, as_shipped):
    with pytest.raises(AnyformerError, match=message):
        FrozenMachine(recipe=recipe("sparse", COPY), **options)


def test_a_task_with_another_vocabulary():
    with pytest.raises(AnyformerError, match="the machine's leaves have 30 columns, the task 4 tokens; give both one"):
        FrozenMachine(recipe=recipe("sparse", COPY)).build(Dyck(), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_count_what_is_trained_and_frozen(kind: str):
    learner = recommended_model(recipe(kind, COPY, residual=True, norm="pre")).build(COPY, 0)
    small, large = sizes(learner, COPY, 2), sizes(learner, COPY, 16)
    assert small.trained == {name: tuple(p.shape) for name, p in learner.named_parameters()}
    assert (
        small.numbers == sum(p.numel() for p in learner.parameters()) and small.frozen == learner.machine.cost().nonzero_weights
    )
    assert 16 * small.numbers < small.bytes < large.bytes == sizes(learner, COPY, 64).bytes  # blocks of 16 rows
    assert "frozen: " in str(small) and f"Frozen{'Masked' if kind == 'sparse' else 'Random'}" in str(small)
    whole = FullyTrained(config=TransformerConfig(vocab=30, heads=1, layers=1, head_dim=2, features=4)).build(COPY, 0)
    assert sizes(whole, COPY, 1).frozen == 0 and "frozen: nothing" in str(sizes(whole, COPY, 1))
    rows = [sizes(whole, COPY, n).bytes for n in (1, 2, 3)]
    assert rows[1] - rows[0] == rows[2] - rows[1] > 0


# --- the command line -----------------------------------------------------------------------------------------------------------

BRIEF = ["--steps", "4", "--batch-size", "4", "--evaluation-size", "8", "--head-dim", "3"]


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sparse", []),
        ("random", ["--norm=post", "--frozen-mlp", "4", "--train-norms"]),
        ("sparse", ["--norm", "none", "--no-residual"]),
        ("random", ["--norm", "none", "--no-residual"]),
    ],
)
def test_train_then_run_inspect_generate_and_bank(here: Path, capsys, kind: str, options: list[str]):
    code, out, err = call(capsys, "train", "dyck", "--backbone", kind, *BRIEF, *options, "--json")
    assert code == 0 and err == ""
    made = json.loads(out)
    assert made["finished"] and made["steps"] == 4 and made["frozen"] > 0 and made["memory_bytes"] > 0
    assert set(made["trained"]) == {"tokens", "positions", "readout"} | ({"norms"} if "--train-norms" in options else set())
    config = stored_config(made["folder"])
    normed = "none" not in options
    assert config.model.embedding_std == (0.1 if normed else 0.5) and config.training.learning_rate == (3e-3 if normed else 2e-2)
    assert config.training.schedule == "one-cycle" and config.training.warm_up == 0
    assert config.model.readout == ("free" if normed else "shared")

    program = made["result"]
    words = "( ( ) ) ?"
    assert len(json.loads(call(capsys, "run", program, "--tokens", words, "--json")[1])["predictions"]) == 5
    about = json.loads(call(capsys, "inspect", program, "--json")[1])
    assert about["backbone"] == KINDS[kind].name and about["provenance"] == {"made_by": "training"} and about["readout"][1] == 4
    assert about["norms"] == (4 if "--train-norms" in options else 0)
    code, out, err = call(capsys, "inspect", program)
    assert code == 0 and "learned: there is no target to verify it against" in out and "read-out" in out and not err
    assert len(json.loads(call(capsys, "generate", program, "--tokens", words, "--new-tokens", 2, "--json")[1])["ids"]) == 2

    loaded, tokens = af.load(program), Dyck().batch(0, 0, 3).inputs
    bank = af.ProgramBank(loaded.machine(), {"learned": program})
    torch.testing.assert_close(bank(tokens, programs=["learned"] * 3), af.run(loaded, tokens))
    code, _, err = call(capsys, "specialize", program, "-o", here / "back")
    if normed:
        assert code == 2 and err.count("\n") == 1 and "nothing can be specialised" in err and not (here / "back").exists()
    else:
        assert code == 0
        torch.testing.assert_close(af.Transformer.load(here / "back")(tokens), af.run(loaded, tokens), rtol=1e-3, atol=1e-4)

    code, out, err = call(capsys, "train", "dyck", "--backbone", kind, *BRIEF, *options)
    assert code == 0 and made["result"] in out and "trained:" not in out  # finished: only read
    code, out, err = call(capsys, "run", made["folder"], "--tokens", words)
    assert code == 2 and "give " in err and err.strip().endswith("result, which has one")


def test_what_is_trained_and_frozen_is_said_before_training(here: Path, capsys):
    code, out, _ = call(capsys, "train", "dyck", "--backbone", "sparse", *BRIEF)
    assert code == 0
    assert re.search(r"trained: 3,\d\d\d numbers \(tokens 4 x 52, positions 63 x 52, readout 52 x 4\)", out)
    assert re.search(r"frozen: \d+ ones of FrozenMasked\(.*pre-norm over m\)\nmemory: about [\d.]+ [KM]iB", out)
    assert out.index("trained:") < out.index("finished after")
    code, out, _ = call(capsys, "train", "dyck", *BRIEF, "--features", 4)
    assert code == 0 and "frozen: nothing" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backbone", "sparse", "--features", "8"], "--features does not apply to --backbone sparse; it is an option of none"),
        (["--backbone=sparse", "--width=8"], "--width does not apply to --backbone sparse; it is an option of random"),
        (["--width", "8"], "--width does not apply to --backbone none"),
        (["--readout", "free"], "--readout does not apply to --backbone none; it is an option of sparse, random"),
        (
            ["--embedding_std", "1"],
            "--embedding_std does not apply to --backbone none; it is an option of sparse, random, FOLDER",
        ),
        (["--backbone", "random", "--readout", "shared"], "shared"),
        (["--backbone", "sparse", "--norm", "rms"], "'rms'"),
        (["--backbone", "none", "--norm", "pre"], "'pre'"),
        (["--backbone", "sparse", "--positions", "rope"], "'rope'"),
        (["--backbone", "sparse", "--no-train-norms", "--norm", "none", "--train-norms"], "--norm none has none: leave it out"),
        (["--backbone", "sparse", "--backbone-seed", "1"], "--backbone-seed is for dense frozen matrices"),
        (["--backbone", "sparse", "--products", "bfloat16"], "--products is for dense frozen matrices"),
        (["--backbone", "random", "--products", "float16"], "'float16'"),
        (["--backbone", "random", "--width", "0"], "width must be an integer >= 1, got 0"),
        (["--backbone", "random", "--backbone-seed", "-1"], "seed must be an integer >= 0, got -1"),
        (["--backbone", "sparse", "--embedding-std", "0"], "embedding_std must be a positive number, got 0.0"),
        (["--backbone", "random", "--width", "10000000"], "needs .* of memory"),
        (["--backbone", "sparse", "--layers", "40"], "memory"),
        (["--backbone", "sprase", "--heads", "2"], "--backbone must be .*, got 'sprase'"),
        (["--backbone", ""], "--backbone must be .*, got ''"),
        (["--backbone", "random", "--norm", "none", "--no-residual", "--products", "bfloat16"], "has no effect with coordinates"),
        (["--seed", str(2**64)], "seed must be below 2\\*\\*64"),
        (["--device", "meta"], "device 'meta' cannot be used"),
        (["--backbone", "random", "--layers", "100000"], "at most 1000 layers are possible, got 100000"),
        (["--evaluation-size", "9999999999"], "^anyformer: TrainingConfig: evaluation_size must be below 2\\^32, got 9999999999"),
        (["--batch-size", "99999999999999999"], "batch_size must be below 2\\^32"),
        (["--stop-at", "2"], "stop_at is an accuracy, at most 1, got 2.0"),
        (
            ["--steps", "x"],
            r"^anyformer: Error parsing --steps: invalid literal for int\(\) with base 10: 'x' \(anyformer train dyck",
        ),
        (["--backbone", "sparse", "--norm", "foo"], "^anyformer: invalid choice 'foo' for argument '--norm'"),
        (["--threads", "99999999999"], "threads must be at most 1024"),
        (["--steps", "9" * 5000], "steps"),
        (["--backbone", "somewhere"], "--backbone must be none, sparse, random, or the folder of .*, got 'somewhere'"),
        (["--backbone", "sparse", "--steps", "x"], "steps"),
        (["--backbone", "sparse", "--steps", "5", "--warm-up", "5"], "warm_up must be below steps"),
    ],
)
def test_options_that_do_not_apply_are_refused(here: Path, capsys, words: list[str], message: str):
    code, _, err = call(capsys, "train", "dyck", *words)
    assert code == 2 and err.count("\n") == 1 and re.search(message, err), err
    assert not list(here.iterdir())


@pytest.mark.parametrize("steps", ["2000", "2_000", "+2000", " 2000 "])
def test_defaults_follow_the_steps_however_they_are_written(steps: str):
    words = ["--backbone", "sparse", "--steps", steps]
    options = tyro.cli(options_of(Dyck, words), args=words)
    assert (options.training.steps, options.training.warm_up) == (2000, recommended_training(frozen=True, steps=2000).warm_up)


@pytest.mark.parametrize(
    ("options", "said"),
    [([], "; E by its reads, E R_all\n"), (["--width", "20"], "; E itself\n")],
)
def test_how_e_is_trained_is_said(here: Path, capsys, options: list[str], said: str):
    arguments = ["train", "dyck", "--backbone", "random", *BRIEF, "--norm", "none", "--no-residual", *options, "--resume"]
    code, out, _ = call(capsys, *arguments)
    assert code == 0 and said in out and out.count("nothing to resume: ") == 1
    assert "nothing to resume" not in call(capsys, *arguments)[1]


def test_an_unknown_option_is_said_once_with_the_right_help(here: Path, capsys):
    code, _, err = call(capsys, "train", "k-hop", "--backbone", "random", "--hidden", "128")
    assert code == 2 and err.count("nrecognized options") == 1 and "anyformer train k-hop --backbone random --help" in err


def test_a_tree_that_is_too_deep(here: Path, capsys):
    code, _, err = call(
        capsys, "train", "dyck", "--backbone", "sparse", *BRIEF, "--heads", 1, "--layers", 1200, "--head-dim", 1, "--norm", "none"
    )
    assert code == 2 and err.count("\n") == 1 and "choose fewer layers" in err


@pytest.mark.parametrize(
    ("labels", "total", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), None, r"labels must have the shape \(2, 99\) of the inputs, got \(2, 2\)"),
        (torch.full((2, 99), 30), None, "token ids must lie in 0..29, got 30"),
        (torch.full((2, 99), IGNORED), None, "gradients of 0 scored positions"),
        (torch.zeros(2, 99, dtype=torch.int64), 0, "gradients of 0 scored positions"),
    ],
)
def test_labels_that_cannot_be_scored(labels, total, message, as_shipped):
    learner = recommended_model(recipe("sparse", COPY)).build(COPY, 0)
    with pytest.raises(AnyformerError, match=message):
        learner.gradients(COPY.batch(0, 0, 2).inputs, labels, total)


def test_help_shows_a_backbones_own_options_and_defaults(capsys):
    def help_of(*words: str) -> str:
        with pytest.raises(SystemExit):
            main(["train", *words, "--help"])
        return " ".join(re.sub(r"[\u2500-\u257f]", " ", capsys.readouterr().out).split())

    sparse, dense = (help_of("dyck", "--backbone", kind) for kind in KINDS)
    assert "--readout {None,free,shared}" in sparse and "--width" not in sparse and "--features" not in sparse
    assert "--width {None}|INT" in dense and "(default: one-cycle)" in dense and "(default: 0.003)" in dense
    assert "(default: 0.02)" in help_of("dyck", "--backbone", "sparse", "--norm", "none", "--steps", "70")
    assert "--features INT" in help_of("dyck") and "(default: 0.005)" in help_of("dyck")
    assert "--backbone" in help_of()


# --- compiling for these machines from the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [["frozen-masked"], ["frozen-random", "--seed", "2"], ["frozen-random", "--width", "90"]], ids=str
)
def test_compile_for_a_frozen_machine(here: Path, capsys, options: list[str]):
    torch.manual_seed(0)
    af.Transformer(vocab=4, heads=2, layers=2, head_dim=3, features=4).save(here / "target")
    code, out, _ = call(capsys, "compile", "target", "--backbone", *options, "-o", "program", "--json")
    made = json.loads(out)
    assert code == 0 and made["report"]["passed"] and made["width"] == (90 if "--width" in options else 52)
    assert call(capsys, "verify", "program", "target")[0] == 0 and call(capsys, "specialize", "program", "-o", "back")[0] == 0


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ({}, ["frozen-masked", "--width", "9"], "a frozen-masked machine takes no option width"),
        ({}, ["frozen-random", "--width", "9"], "too narrow: this class requires 52 reads"),
        ({}, ["path-tree", "--width", "9"], "takes no option width"),
        ({"residual": True}, ["frozen-masked"], "holds classes of attention alone: residual, norm and MLP are options"),
    ],
)
def test_compile_refuses_in_one_line(here: Path, capsys, target: dict, options: list[str], message: str):
    af.Transformer(vocab=4, heads=2, layers=2, head_dim=3, features=4, **target).save(here / "target")
    code, out, err = call(capsys, "compile", "target", "--backbone", *options, "-o", "program")
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err and not (here / "program").exists()


def test_specialising_a_normed_program_lists_the_reasons():
    program = FrozenMachine(recipe=recipe("sparse", Dyck(), norm="pre", residual=True)).build(Dyck(), 0).program()
    with pytest.raises(OutsideClass) as refused:
        af.specialize(program)
    assert len(refused.value.reasons) == 2
