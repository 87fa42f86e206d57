"""A bank: rows with programs of their own, bit for bit as alone; who stays, who goes."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anyformer as af
from anyformer import operators as ops
from anyformer.network import Branch, Stage

PLAIN = dict(vocab=6, heads=2, layers=2, head_dim=2, features=4)
RICH = PLAIN | dict(residual=True, norm="layer", mlp=2, bias=True, positions="learned", max_length=9)
ROPE = PLAIN | dict(residual=True, norm="rms", mlp=3, gated=True, positions="rope")
MACHINES = [
    (af.PathTree, PLAIN),
    (af.PathTree, RICH),
    (af.Looped, PLAIN),
    (af.Random, PLAIN),
    (af.Composed, RICH),
    (af.Chain, PLAIN | dict(heads=1)),
    (af.StoredProgram, RICH),
    (af.StoredProgram, ROPE),
]


def target(seed: int, sizes: dict) -> af.Transformer:
    torch.manual_seed(seed)
    module = af.Transformer(**sizes)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return module


def programs(machine: af.Machine, sizes: dict, count: int = 4) -> dict[str, af.Program]:
    return {f"p{i}": af.compile(target(i, sizes), machine).detach() for i in range(count)}


@pytest.mark.parametrize("machine_type, sizes", MACHINES, ids=lambda x: getattr(x, "__name__", ""))
@settings(max_examples=8)
@given(rows=st.lists(st.integers(0, 3), min_size=1, max_size=12), n=st.sampled_from([1, 2, 5, 8, 9]), padded=st.booleans())
def test_rows_are_bit_identical_to_running_alone(machine_type: type, sizes: dict, rows: list[int], n: int, padded: bool) -> None:
    machine = machine_type.for_class(target(0, sizes))
    bank = af.ProgramBank(machine, programs(machine, sizes))
    ids = torch.randint(6, (len(rows), n), generator=torch.Generator().manual_seed(n))
    mask = torch.ones(len(rows), n, dtype=torch.bool)
    if padded and n > 2:
        mask[::2, 0] = False
    out = bank(ids, [f"p{i}" for i in rows], mask=mask)
    for i, row in enumerate(rows):
        alone = machine(ids[i : i + 1], bank[f"p{row}"], mask=mask[i : i + 1])
        assert torch.equal(out[i : i + 1], alone)


def test_rows_of_different_programs_differ() -> None:
    machine = af.PathTree.for_class(target(0, ROPE))
    out = af.ProgramBank(machine, programs(machine, ROPE))(torch.tensor([[1, 2, 3]] * 3), ["p0", "p1", "p0"])
    assert not torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])


def test_large_states_are_folded_in_blocks_and_stay_bit_identical() -> None:
    sizes = ROPE | dict(heads=3, head_dim=6, mlp=5, activation="silu")
    machine = af.PathTree.for_class(target(0, sizes))
    bank = af.ProgramBank(machine, programs(machine, sizes, 3))
    ids = torch.randint(6, (30, 41), generator=torch.Generator().manual_seed(0))
    assert 4 * machine.width * 41 * 30 > 2 * 8 * 2**20
    names = [f"p{i % 3}" for i in range(30)]
    out = bank(ids, names)
    for i in (0, 13, 29):
        assert torch.equal(out[i : i + 1], machine(ids[i : i + 1], bank[names[i]]))


def test_programs_with_fewer_outputs_have_minus_infinity_there() -> None:
    machine = af.StoredProgram.for_class(target(0, ROPE))
    small = af.compile(target(1, ROPE | dict(vocab=4)), machine).detach()
    bank = af.ProgramBank(machine, {"small": small, "whole": programs(machine, ROPE, 1)["p0"]})
    out = bank(torch.tensor([[0, 3], [0, 5]]), ["small", "whole"])
    assert out.shape == (2, 2, 6) and bool((out[0, :, 4:] == -torch.inf).all()) and bool(torch.isfinite(out[1]).all())
    assert torch.equal(out[:1, :, :4], machine(torch.tensor([[0, 3]]), small))
    with pytest.raises(af.AnyformerError, match=r"token ids must lie in 0..3, got 5"):
        bank(torch.tensor([[0, 5]]), ["small"])


def test_add_replace_drop_and_who_goes_first(tmp_path) -> None:
    machine = af.PathTree.for_class(target(0, PLAIN))
    four = programs(machine, PLAIN)
    bank = af.ProgramBank(machine, {"p0": four["p0"], "p1": four["p1"]}, resident=2)
    ids = torch.tensor([[1, 2]])
    bank(ids, ["p0"])
    bank["p2"] = four["p2"]  # p1 is the least recently used now
    assert bank.held == ("p0", "p2") and "p1" not in bank and len(bank) == 2
    with pytest.raises(af.AnyformerError, match="program 'p1' was the least recently used and had to go: this bank keeps 2"):
        bank(ids, ["p1"])
    four["p3"].save(tmp_path / "p3")
    bank["p3"] = tmp_path / "p3"
    assert bank.held == ("p0", "p2") and list(bank) == ["p3", "p0", "p2"]
    assert torch.equal(bank(ids, ["p3"]), machine(ids, four["p3"]))
    assert bank.held == ("p2", "p3")
    bank(torch.cat((ids, ids)), ["p2", "p3"])
    bank["p2"] = four["p0"]
    assert torch.equal(bank(ids, ["p2"]), machine(ids, four["p0"]))
    bank["p1"] = four["p1"]
    assert bank.held == ("p2", "p1") and "p3" in bank  # a folder is read again when it is needed
    assert torch.equal(bank(ids, ["p3"]), machine(ids, four["p3"]))
    del bank["p3"]
    with pytest.raises(af.AnyformerError, match="there is no program 'p3' in this bank; it has 'p1'"):
        bank(ids, ["p3"])
    with pytest.raises(af.AnyformerError, match="there is no program 'p9'"):
        del bank["p9"]
    assert "1 of at most 2 resident" in repr(bank)


def test_more_programs_in_a_batch_than_stay_resident(tmp_path) -> None:
    machine = af.PathTree.for_class(target(0, PLAIN))
    bank = af.ProgramBank(machine, resident=1)
    for name, program in programs(machine, PLAIN).items():
        program.save(tmp_path / name)
        bank[name] = str(tmp_path / name)
    ids = torch.randint(6, (4, 3), generator=torch.Generator().manual_seed(0))
    out = bank(ids, ["p0", "p1", "p2", "p3"])
    assert len(bank.held) == 1 and all(torch.equal(out[i], machine(ids[i : i + 1], bank[f"p{i}"])[0]) for i in range(4))


def test_programs_change_while_the_bank_is_in_use() -> None:
    machine = af.PathTree.for_class(target(0, PLAIN))
    four = programs(machine, PLAIN)
    bank = af.ProgramBank(machine, {"p0": four["p0"], "x": four["p1"]}, resident=3)
    ids = torch.randint(6, (2, 5), generator=torch.Generator().manual_seed(0))
    allowed = [machine(ids[1:], p) for p in four.values()]
    failures: list[BaseException] = []
    stop = threading.Event()

    def change() -> None:
        i = 0
        while not stop.is_set():
            bank["x"] = four[f"p{i % 4}"]
            bank["y"] = four["p0"]
            del bank["y"]
            i += 1

    def use() -> None:
        try:
            for _ in range(100):
                out = bank(ids, ["p0", "x"])
                assert torch.equal(out[:1], machine(ids[:1], four["p0"])) and any(torch.equal(out[1:], a) for a in allowed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=f) for f in (change, use, use)]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    stop.set()
    threads[0].join()
    assert not failures


def test_bad_input(tmp_path, as_shipped) -> None:
    machine = af.PathTree.for_class(target(0, PLAIN))
    one = programs(machine, PLAIN, 1)["p0"]
    bank = af.ProgramBank(machine, {"p0": one})
    ids = torch.tensor([[1, 2]])
    other = af.PathTree.for_class(target(0, ROPE))
    for message, wrong in {
        r"one program name for each row of tokens \(1, 2\) expected, got 2 names": lambda: bank(ids, ["p0", "p0"]),
        r"one program name for each row of tokens \(1, 2\) expected, got 'p0'": lambda: bank(ids, "p0"),
        r"expected, got None": lambda: bank(ids, None),
        r"expected, got \[\[\]\]": lambda: bank(ids, [[]]),
        r"tokens are empty": lambda: bank(ids[:0], []),
        r"programs must be a mapping of names to programs, got list": lambda: af.ProgramBank(machine, [one]),
        r"there is no program 'q' in this bank; it has 'p0'": lambda: bank(ids, ["q"]),
        r"this program was made for another machine": lambda: bank.__setitem__("q", programs(other, ROPE, 1)["p0"]),
        r"a program's name must be a non-empty text, got ''": lambda: bank.__setitem__("", one),
        r"nowhere is not a folder": lambda: bank.__setitem__("q", tmp_path / "nowhere"),
        r"resident must be an integer >= 1, got 0": lambda: af.ProgramBank(machine, resident=0),
        r"token ids must lie in 0..5, got 6": lambda: bank(torch.tensor([[6]]), ["p0"]),
    }.items():
        with pytest.raises(af.AnyformerError, match=message):
            wrong()
    bank["double"] = one.to(torch.float64)
    with pytest.raises(af.AnyformerError, match="programs of one batch must have one dtype"):
        bank(torch.cat((ids, ids)), ["p0", "double"])
    (tmp_path / "empty").mkdir()
    bank["empty"] = tmp_path / "empty"
    with pytest.raises(af.AnyformerError, match=r"has no model.safetensors"):
        bank(ids, ["empty"])
    places = af.PathTree.for_class(target(0, RICH))
    with pytest.raises(af.AnyformerError, match="position 9 has no row"):
        af.ProgramBank(places, programs(places, RICH, 1))(torch.zeros(1, 10, dtype=torch.long), ["p0"])


@pytest.mark.parametrize(
    "kernel", [ops.FeatureMap(), ops.RBF(), ops.Performer(5), ops.AverageHard()], ids=lambda k: type(k).__name__
)
def test_other_kernels_are_bit_identical_too(kernel) -> None:
    generator = torch.Generator().manual_seed(1)

    def network(_: int) -> af.Network:
        heads = [torch.randn(5, 12, generator=generator), torch.randn(2, 5, 5, generator=generator)]
        stage = Stage((Branch(ops.Attention(2, 3, kernel=kernel), heads[0], af.DenseMap(heads[1])),))
        return af.Network(torch.randn(6, 5, generator=generator), (stage, stage))

    nets = [network(0), network(1)]
    machine = af.PathTree.for_class(nets[0])
    bank = af.ProgramBank(machine, {f"p{i}": af.compile(net, machine) for i, net in enumerate(nets)})
    for n in (5, 8, 9, 23):
        ids = torch.randint(6, (5, n), generator=generator)
        names = ["p0", "p1", "p0", "p0", "p1"]
        out = bank(ids, names)
        assert all(torch.equal(out[i : i + 1], machine(ids[i : i + 1], bank[name])) for i, name in enumerate(names))
