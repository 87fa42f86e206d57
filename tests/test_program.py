"""Programs on disk: what is saved is loaded bit by bit, and anything else is refused in one line, whole or not at all."""

import hashlib
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from anyformer import program as program_module
from anyformer import storage
from anyformer.backbones import Chain, Looped, Machine, PathTree
from anyformer.classes import NetworkClass
from anyformer.compiling import compile
from anyformer.errors import AnyformerError
from anyformer.operators import Context, Softmax
from anyformer.program import Program, load
from anyformer.spec import digest
from anyformer.storage import write_folder
from anyformer.targets.transformer import Transformer, TransformerConfig

SIZES = dict(vocab=4, heads=1, layers=2, head_dim=2, features=3)
GPT = dict(norm="layer", bias=True, residual=True, mlp=1, positions="learned", max_length=6)
TOKENS = torch.tensor([[0, 3, 1], [2, 2, 0]])
NAMES = ("(", ")", "é中", "\n")


def build(machine: type[Machine] = PathTree, seed: int = 0, dtype: torch.dtype = torch.float32, **options) -> Program:
    torch.manual_seed(seed)
    target = Transformer(TransformerConfig(**SIZES | options), token_names=NAMES).to(dtype)
    for parameter in target.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return compile(target, machine.for_class(target))


def tensors_of(program: Program) -> dict[str, torch.Tensor]:
    return {name: t.detach() for name in program_module.TENSORS if (t := getattr(program, name)) is not None}


def same(a: Program, b: Program) -> bool:
    """Equal in everything that a file holds, every bit."""
    mine, other = tensors_of(a), tensors_of(b)
    return (
        (a.recipe, a.width, a.token_names, a.provenance, a.report) == (b.recipe, b.width, b.token_names, b.provenance, b.report)
        and mine.keys() == other.keys()
        and all(mine[k].dtype == other[k].dtype and torch.equal(mine[k], other[k]) for k in mine)
    )


# --- there and back -----------------------------------------------------------------------------------------------------------

ROUND_TRIPS = {
    "path tree": dict(heads=2),
    "path tree in float64": dict(dtype=torch.float64, residual=True),
    "path tree with constants and positions": GPT,
    "looped": dict(machine=Looped, residual=True, norm="rms"),
    "chain": dict(machine=Chain),
    "chain with positions": dict(machine=Chain, positions="learned", max_length=6),
}


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_saving_keeps_every_bit(case, tmp_path):
    program = build(**ROUND_TRIPS[case])
    program = replace(program, report={"passed": True, "max_abs_error": 1e-7}, provenance=program.provenance | {"note": "\u2028"})
    program.save(tmp_path / "deep" / "folder")
    again = load(tmp_path / "deep" / "folder")
    assert same(again, program) and again.fingerprint == program.fingerprint
    machine = again.machine()
    assert machine == program.machine() and machine.fingerprint == program.fingerprint
    assert torch.equal(machine(TOKENS, again), machine(TOKENS, program))
    assert not again.tokens.requires_grad and program.tokens.requires_grad


def test_a_readout_of_the_program_is_kept(tmp_path):
    program = build()
    program = replace(program, readout=torch.randn(program.width, 5))
    program.save(tmp_path)
    assert same(load(tmp_path), program)
    assert program.parameters == program.tokens.numel() + 5 * program.width


def test_a_folder_holds_a_readable_copy_and_a_card(tmp_path):
    program = build()
    program.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["format"] == "anyformer-program" and config["fingerprint"] == program.fingerprint
    assert config["token_names"] == list(NAMES) and "é中" in (tmp_path / "config.json").read_text(encoding="utf-8")
    assert f"width {program.width}" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_saving_again_replaces(tmp_path):
    for program in (build(seed=1), build(seed=2, residual=True), build(seed=3, **GPT)):
        program.save(tmp_path)
        assert same(load(tmp_path), program)
    assert len(list(tmp_path.iterdir())) == 3


PROGRAM = build(**GPT)


# --- damage -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path) -> Path:
    PROGRAM.save(tmp_path / "program")
    return tmp_path / "program"


def refused(folder: Path, message: str = "") -> None:
    with pytest.raises(AnyformerError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_truncated_files(saved):
    model = saved / "model.safetensors"
    data = model.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for length in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(data) // 2, len(data) - 4, len(data) - 1):
        model.write_bytes(data[:length])
        refused(saved, "damaged or no safetensors file")
    model.write_bytes(data + b"\0")
    refused(saved, "damaged")


def test_flipped_bits(saved):
    """Forty random bits, half of them in the header: refused, or no change in what is read; nothing else may be raised."""
    model, before = saved / "model.safetensors", load(saved)
    data = model.read_bytes()
    header, rng = 8 + int.from_bytes(data[:8], "little"), random.Random(0)
    for i in range(40):
        bit = rng.randrange(8 * (header if i % 2 else len(data)))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        model.write_bytes(flipped)
        try:
            after = load(saved)
        except AnyformerError as error:
            assert "\n" not in str(error)
        else:
            assert same(before, after), f"bit {bit}"


def test_every_bit_of_the_numbers_counts(saved):
    """A flip among the tensors is always noticed."""
    model = saved / "model.safetensors"
    data, rng = model.read_bytes(), random.Random(1)
    header = 8 + int.from_bytes(data[:8], "little")
    for _ in range(20):
        bit = rng.randrange(8 * header, 8 * len(data))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        model.write_bytes(flipped)
        refused(saved, "the numbers do not match their checksum")


def test_edited_configurations(saved):
    path = saved / "config.json"
    text = path.read_text(encoding="utf-8")
    config = json.loads(text)
    for edit in (
        text.replace('"width"', '"wider"'),
        json.dumps(config | {"width": 3}),
        json.dumps(config | {"token_names": None}),
        json.dumps(config),  # the same values in another spelling: still not the copy that was saved
        text[:-5],
        "",
        "null",
        "[" * 10**5,
    ):
        path.write_text(edit, encoding="utf-8")
        refused(saved, "is not the configuration inside model.safetensors")
    path.write_bytes(b"\xff\xfe\x00")
    refused(saved, "is not readable text")
    path.unlink()
    refused(saved, r"has no config\.json")
    path.mkdir()
    refused(saved, "is not readable text")


def test_missing_files(saved, tmp_path):
    refused(tmp_path / "nowhere", r"nowhere is not a folder; expected one with config\.json and model\.safetensors")
    refused(saved / "config.json", "is not a folder")
    (saved / "model.safetensors").unlink()
    refused(saved, r"has no model\.safetensors; expected an anyformer-program folder")
    (saved / "model.safetensors").mkdir()
    refused(saved, "damaged or no safetensors file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"has no model\.safetensors")


def test_a_lost_card_is_no_loss(saved):
    before = load(saved)
    (saved / "README.md").unlink()
    assert same(load(saved), before)


def test_foreign_files(saved):
    model = saved / "model.safetensors"
    save_file({"weight": torch.zeros(2)}, model)
    refused(saved, "was not written by anyformer")
    save_file({"weight": torch.zeros(2)}, model, metadata={"format": "pt"})
    refused(saved, "was not written by anyformer")
    for text in ("not JSON", "{", "[" * 10**5):
        save_file({"weight": torch.zeros(2)}, model, metadata={"anyformer": text})
        refused(saved, "its configuration is not JSON")
    for text in ("[]", "3", "{}", '{"format": "another"}'):
        save_file({"weight": torch.zeros(2)}, model, metadata={"anyformer": text})
        refused(saved, "holds .*, expected an anyformer-program")
    Transformer(**SIZES).save(saved.parent / "target")
    refused(saved.parent / "target", "holds 'anyformer-target', expected an anyformer-program")
    with pytest.raises(AnyformerError, match="holds 'anyformer-program', expected an anyformer-target"):
        build().save(saved.parent / "program2")
        Transformer.load(saved.parent / "program2")


# --- forgery: files that are whole, with contents that make no sense ----------------------------------------------------------


def forge(folder: Path, config: dict | None = None, tensors: dict | None = None, checksum: bool = True) -> None:
    """Rewrite a folder consistently, with some of its contents changed (None: dropped)."""
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        held = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (a handle is no dict)
        about = json.loads(handle.metadata()["anyformer"])
    held = {k: v for k, v in (held | (tensors or {})).items() if v is not None}
    about |= config or {}
    if checksum:
        about["tensors_sha256"] = sha256(held)
    text = json.dumps(about)
    save_file(held, folder / "model.safetensors", metadata={"anyformer": text})
    (folder / "config.json").write_text(text, encoding="utf-8")


def sha256(tensors: dict[str, torch.Tensor]) -> str:
    """The documented checksum, written again."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name]
        total.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        total.update(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def recipe_config(recipe) -> dict:
    return {"recipe": recipe, "fingerprint": digest(recipe)}


DEEP: list = []
for _ in range(400):
    DEEP = [DEEP]

AT, WIDTH = PROGRAM.token_at, PROGRAM.width
SMALLER = PathTree.recipe_for(build(positions=None).recipe.network_class)
FORGERIES = {
    r"format version 2, this anyformer reads 1; upgrade": dict(config={"format_version": 2}),
    r"format version None": dict(config={"format_version": None}),
    r"the recipe does not match its fingerprint": dict(config={"fingerprint": "0" * 64}),
    r"the recipe does not match its fingerprint; the file": dict(config={"recipe": SMALLER.to_json()}),
    rf"width {WIDTH + 1} is not the width {WIDTH} of its machine": dict(config={"width": WIDTH + 1}),
    r"width None is not the width": dict(config={"width": None}),
    rf"width {WIDTH} is not the width": dict(config=recipe_config(SMALLER.to_json())),
    r"unknown specification type 'Unheard'": dict(config={"recipe": {"type": "Unheard"}}),
    r"unknown specification type None": dict(config={"recipe": {"network_class": {}}}),
    r"expected a Recipe, got NoneType": dict(config={"recipe": None}),
    r"expected a Recipe, got tuple": dict(config={"recipe": []}),
    r"expected a Recipe, got Softmax": dict(config=recipe_config(Softmax().to_json())),
    r"a PathTreeRecipe is not the recipe of a machine": dict(config=recipe_config({"type": "PathTreeRecipe", "network_class": 3})),
    r"PathTreeRecipe cannot be built": dict(config=recipe_config({"type": "PathTreeRecipe"})),
    r"unknown specification type|nested too deeply": dict(config={"recipe": {"type": "PathTreeRecipe", "network_class": [DEEP, {}]}}),
    r"tensor tokens is missing": dict(tensors={"tokens": None}),
    r"tensor token_at is missing": dict(tensors={"token_at": None}),
    r"tensor constants is missing": dict(tensors={"constants": None}),
    r"tensor position_at is missing; tensor extra is not expected": dict(tensors={"position_at": None, "extra": torch.zeros(2)}),
    r"tensor token_at has shape \(2,\), expected \(\d+,\)": dict(tensors={"token_at": AT[:2].clone()}),
    r"tensor tokens has shape \(\d+,\), expected \(any, \d+\)": dict(tensors={"tokens": PROGRAM.tokens[0].detach().clone()}),
    r"tensor constants has shape \(1, \d+\), expected": dict(tensors={"constants": PROGRAM.constants.detach()[None].clone()}),
    r"tensor token_at has dtype torch.float32, expected torch.int64": dict(tensors={"token_at": AT.float()}),
    r"columns must have one dtype, got torch.float32, torch.float64": dict(tensors={"constants": PROGRAM.constants.detach().double()}),
    r"columns must have one dtype, got torch.float32, torch.int64": dict(tensors={"tokens": PROGRAM.tokens.detach().long()}),
    r"holds dtype U8; expected one of": dict(tensors={"tokens": PROGRAM.tokens.detach().byte()}),
    r"tensor readout has shape \(3, 2\), expected": dict(tensors={"readout": torch.zeros(3, 2)}),
    r"tensor tokens holds NaN or infinite": dict(tensors={"tokens": PROGRAM.tokens.detach() * torch.nan}),
    r"tensor positions holds NaN or infinite": dict(tensors={"positions": PROGRAM.positions.detach() / 0}),
    r"token_at points outside of the \d+ coordinates": dict(tensors={"token_at": AT + WIDTH}),
    r"constant_at points outside": dict(tensors={"constant_at": PROGRAM.constant_at - WIDTH}),
    r"position_at points outside": dict(tensors={"position_at": PROGRAM.position_at + WIDTH}),
    r"one coordinate is written twice": dict(tensors={"token_at": AT * 0 + AT[0]}),
    r"one coordinate is written twice$": dict(tensors={"constant_at": torch.cat((AT[:1], PROGRAM.constant_at[1:]))}),
    r"one position coordinate is written twice": dict(tensors={"position_at": PROGRAM.position_at * 0}),
    r"4 token names expected": dict(config={"token_names": ["a", "b"]}),
    r"4 token names expected$": dict(config={"token_names": "abcd"}),
    r": 4 token names expected": dict(config={"token_names": [1, 2, 3, 4]}),
    r"its provenance is not a JSON object": dict(config={"provenance": [1]}),
    r"its report is not a JSON object": dict(config={"report": "fine"}),
    r"the numbers do not match their checksum": dict(config={"tensors_sha256": "0" * 64}, checksum=False),
    r"the numbers do not match their checksum; the file": dict(config={"tensors_sha256": None}, checksum=False),
}  # fmt: skip


@pytest.mark.parametrize("message", FORGERIES)
def test_contents_that_make_no_sense(message, saved, as_shipped):
    forge(saved, **FORGERIES[message])
    refused(saved, message)


def test_the_forger_can_write_a_program(saved):
    before = load(saved)
    forge(saved)
    assert same(load(saved), before)


def write_header(path: Path, header: dict, size: int) -> None:
    """A safetensors file with this header and so many bytes of data, none of them written (a sparse file)."""
    text = json.dumps(header).encode()
    with open(path, "wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        handle.truncate(8 + len(text) + size)


def test_claims_of_huge_tensors_are_refused_before_anything_is_allocated(saved, monkeypatch):
    model, columns = saved / "model.safetensors", len(AT)
    text = (saved / "config.json").read_text(encoding="utf-8")
    monkeypatch.setattr(storage.StoredFolder, "tensors", lambda self: pytest.fail("a tensor was read"))
    rows = 2**42 // (4 * columns)
    end = 4 * rows * columns
    held = {
        "__metadata__": {"anyformer": text},
        "tokens": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, end]},
    }
    write_header(model, held, size=64)  # claimed, not there
    refused(saved, "damaged or no safetensors file")
    for shape in ([2**40, 2**40], [2**62, 4], [-1, columns]):
        write_header(model, held | {"tokens": held["tokens"] | {"shape": shape}}, size=64)
        refused(saved, "damaged or no safetensors file")
    sizes = {"token_at": [columns], "positions": [6, columns], "position_at": [columns]}
    sizes |= {"constants": [WIDTH - columns], "constant_at": [WIDTH - columns]}
    for name, shape in sizes.items():
        size = (4 if name in ("positions", "constants") else 8) * torch.Size(shape).numel()
        held[name] = {"dtype": "I64" if "_at" in name else "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    config = json.loads(text) | {"token_names": None}
    held["__metadata__"] = {"anyformer": json.dumps(config)}
    (saved / "config.json").write_text(json.dumps(config), encoding="utf-8")
    try:
        write_header(model, held, size=end)  # four terabytes that are really there, as a hole
    except OSError:
        pytest.skip("this file system holds no sparse file of four terabytes")
    refused(saved, r"the program in .* needs \d+\.\d [TP]iB of memory|unable to mmap")  # some systems map no such file


def test_a_header_longer_than_the_file_is_refused(saved):
    for length in (2**63, 2**40, 10**8):
        (saved / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
        refused(saved, "damaged or no safetensors file")


# --- killed saves -------------------------------------------------------------------------------------------------------------


class Killed(Exception):
    """Stands for the end of the process."""


class Killer:
    """Ends a save at its k-th step: before that step, or with half of it done."""

    def __init__(self, monkeypatch, step: int):
        self.left = step
        self.write_text, self.replace = Path.write_text, storage.os.replace
        monkeypatch.setattr(Path, "write_text", self.stepwise(Path.write_text, self.half_text))
        monkeypatch.setattr(storage, "save_file", self.stepwise(save_file, self.half_file))
        monkeypatch.setattr(storage.os, "replace", self.stepwise(storage.os.replace))
        monkeypatch.setattr(storage.os, "fsync", self.stepwise(storage.os.fsync))

    def stepwise(self, function, half=None):
        def step(*arguments, **options):
            self.left -= 1
            if self.left == 0 and half is not None:
                half(*arguments)
            if self.left <= 0:
                raise Killed
            return function(*arguments, **options)

        return step

    def half_text(self, path: Path, text: str, *_) -> None:
        path.write_bytes(text.encode()[: len(text) // 2])

    def half_file(self, _, path: Path) -> None:
        path.write_bytes(b"\x08" + bytes(40))


STEPS = 9  # two texts, one file of tensors, three fsyncs, three replacements


def save_killed(monkeypatch, program, folder: Path, step: int) -> bool:
    """Save, killed at a step (0: not at all); whether it was."""
    with monkeypatch.context() as patch:
        if step:
            Killer(patch, step)
        try:
            program.save(folder)
        except Killed:
            return True
    return False


def test_a_killed_save_leaves_the_old_or_the_new_program(monkeypatch, tmp_path):
    old, new, last = build(seed=1), build(seed=2, residual=True), build(seed=3)
    kept = []
    for step in range(1, STEPS + 2):
        folder = tmp_path / str(step)
        old.save(folder)
        assert save_killed(monkeypatch, new, folder, step) == (step <= STEPS)
        found = load(folder)
        assert same(found, old) or same(found, new)
        kept.append(same(found, old))
        last.save(folder)
        assert same(load(folder), last)
        assert len(list(folder.iterdir())) == 3
    assert kept == sorted(kept, reverse=True) and kept[0] and not kept[-1]  # there is one moment of commitment


def test_a_killed_first_save_leaves_nothing_or_the_program(monkeypatch, tmp_path):
    new, last = build(seed=2), build(seed=3)
    for step in range(1, STEPS + 2):
        folder = tmp_path / str(step)
        save_killed(monkeypatch, new, folder, step)
        try:
            assert same(load(folder), new)
        except AnyformerError as error:
            assert step <= STEPS - 2 and "has no model.safetensors" in str(error)
        last.save(folder)
        assert same(load(folder), last)


def test_two_killed_saves_leave_one_of_the_programs(monkeypatch, tmp_path):
    programs = [build(seed=1), build(seed=2), build(seed=3)]
    for first in range(1, STEPS + 1):
        for second in range(1, STEPS + 2):
            folder = tmp_path / f"{first}-{second}"
            programs[0].save(folder)
            save_killed(monkeypatch, programs[1], folder, first)
            between = load(folder)
            save_killed(monkeypatch, programs[2], folder, second)
            found = load(folder)
            assert same(found, between) or same(found, programs[2]), (first, second)


@pytest.mark.parametrize("kind", ["config", "target", "card", "model", "bad config", "deep config"])
def test_saving_over_something_else_is_refused_and_changes_nothing(kind, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    match kind:
        case "config":
            (folder / "config.json").write_text('{"model_type": "llama"}')
        case "target":
            Transformer(**SIZES).save(folder)
        case "card":
            (folder / "README.md").write_text("# somebody's notes")
        case "model":
            save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
        case "bad config":
            (folder / "config.json").write_bytes(b"\xff")
        case "deep config":
            (folder / "config.json").write_text("[" * 10**5)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(AnyformerError, match="already holds something that is not an anyformer-program; choose another folder"):
        build().save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_saving_beside_other_files_leaves_them_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    program = build()
    program.save(tmp_path)
    assert same(load(tmp_path), program) and (tmp_path / "notes.txt").read_text() == "mine"


def test_saving_where_a_file_is(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(AnyformerError, match="is a file, a folder was expected"):
        build().save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# --- a program by hand --------------------------------------------------------------------------------------------------------


def test_the_state_is_token_position_and_constants():
    """Columns in any order: state = E[token] + P[position], and E holds the constants."""
    recipe = PathTree.for_class(TransformerConfig(vocab=3, heads=1, layers=1, head_dim=1, features=3)).recipe
    program = Program(
        recipe,
        width=5,
        tokens=torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        token_at=torch.tensor([3, 0]),
        positions=torch.tensor([[10.0, 20.0, 30.0, 40.0, 50.0], [60.0, 70.0, 80.0, 90.0, 100.0]]),
        position_at=torch.tensor([4, 3, 2, 1, 0]),
        constants=torch.tensor([7.0]),
        constant_at=torch.tensor([4]),
    )
    assert program.embedding.tolist() == [[2, 0, 0, 1, 7], [4, 0, 0, 3, 7]]
    assert program.position_embedding.tolist() == [[50, 40, 30, 20, 10], [100, 90, 80, 70, 60]]
    tokens = torch.tensor([[0, 1], [1, 1]])
    ctx = Context.of(tokens)
    expected = program.embedding[tokens] + program.position_embedding[ctx.positions]
    assert torch.equal(program.state(tokens, ctx), expected)
    few = replace(program, positions=program.positions[:, :2], position_at=torch.tensor([4, 1]))
    assert torch.equal(few.state(tokens, ctx), few.embedding[tokens] + few.position_embedding[ctx.positions])


def test_dense_views_are_refused_above_two_gibibytes():
    recipe = PathTree.recipe_for(NetworkClass((), 2**29))
    program = Program(recipe, 2**29, torch.zeros(2, 1), torch.zeros(1, dtype=torch.long))
    with pytest.raises(AnyformerError, match=r"the dense embedding needs 4\.0 GiB, over the limit of 2 GiB"):
        _ = program.embedding


def test_token_ids():
    program = build()
    assert program.token_ids(") (  é中") == [1, 0, 2]
    plain = replace(program, token_names=None)
    assert plain.token_ids("3 0") == [3, 0]
    for wrong in ("4", "-1", "x", "²"):
        with pytest.raises(AnyformerError, match=r"unknown token .*; this program knows ids 0\.\.3"):
            plain.token_ids(wrong)
    with pytest.raises(AnyformerError, match=r"unknown token 'pad'; this program knows \( \) é中"):
        program.token_ids("( pad")
    for empty in ("", "  "):
        with pytest.raises(AnyformerError, match="no tokens given"):
            program.token_ids(empty)


def test_casting_keeps_the_places():
    program = build(**GPT).detach()
    double = program.to(torch.float64)
    assert double.dtype == torch.float64 and double.constant_at.dtype == torch.int64
    assert torch.equal(double.to(torch.float32).embedding, program.embedding)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: {"width": p.width + 1}, "width .* its machine has"),
        (lambda p: {"token_at": p.token_at * 0}, "one coordinate is written twice"),
        (lambda p: {"token_at": p.token_at[1:]}, "tokens have shape"),
        (lambda p: {"tokens": p.tokens.long()}, "one floating dtype"),
        (lambda p: {"positions": None}, "go together"),
        (lambda p: {"token_names": ("a",)}, "token names expected"),
        (lambda p: {"token_names": (1, 2, 3, 4)}, "token names expected"),
    ],
)
def test_edited_programs_are_checked(change, message, as_shipped):
    target = Transformer(vocab=4, heads=1, layers=1, head_dim=2, features=3, positions="learned", max_length=4)
    program = compile(target, PathTree.for_class(target))
    with pytest.raises(AnyformerError, match=message):
        replace(program, **change(program))


def test_tied_weights_are_stored(tmp_path):
    target = Transformer(vocab=4, heads=1, layers=1, head_dim=2, features=3)
    target.readout.weight = target.embedding.weight
    target.save(tmp_path / "t")
    tokens = torch.tensor([[0, 1, 2, 3]])
    assert torch.equal(Transformer.load(tmp_path / "t")(tokens), target(tokens))


def test_a_damaged_copy_can_be_saved_anew(tmp_path):
    target = Transformer(vocab=4, heads=1, layers=1, head_dim=2, features=3)
    program = compile(target, PathTree.for_class(target))
    program.save(tmp_path / "p")
    (tmp_path / "p" / "config.json").write_text("{")
    with pytest.raises(AnyformerError, match="save the folder anew"):
        load(tmp_path / "p")
    program.save(tmp_path / "p")
    assert torch.equal(load(tmp_path / "p").tokens, program.tokens)


def test_writers_of_one_folder_take_turns(tmp_path):
    """Threads that save two programs to one folder while a reader loads it: every load is one of them, whole."""
    target = Transformer(vocab=4, heads=1, layers=1, head_dim=2, features=3)
    machine = PathTree.for_class(target)
    programs = [compile(Transformer(target.config), machine) for _ in range(2)]
    programs[0].save(tmp_path / "p")
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(lambda p=p: [p.save(tmp_path / "p") for _ in range(20)]) for p in programs]
        loaded = [load(tmp_path / "p") for _ in range(30)]
        for job in jobs:
            job.result()
    assert all(any(torch.equal(one.tokens, p.tokens) for p in programs) for one in loaded)


def test_more_layers_than_tensors_are_refused_at_once(tmp_path):
    target = Transformer(vocab=4, heads=1, layers=1, head_dim=2, features=3)
    tensors = {k: v.detach() for k, v in target.state_dict().items()}
    about = {"transformer": target.config.to_json() | {"layers": 200_000}, "token_names": None}
    write_folder(tmp_path / "t", "anyformer-target", about, tensors, "")
    with pytest.raises(AnyformerError, match="200000 layers are configured"):
        Transformer.load(tmp_path / "t")
