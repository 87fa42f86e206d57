"""Source code -> embedding -> fixed 0/1 transformer: compiled programs on the stored-program machine."""

from pathlib import Path

import pytest
import torch
from rasp_examples import EXAMPLES, compiled, inputs

import anyformer as af
from anyformer import rasp
from anyformer.conformance import close
from anyformer.rasp.compiled import edge_inputs

FINITE = [name for name, (_, vocab, _, _) in EXAMPLES.items() if not isinstance(vocab, rasp.Reals)]


@pytest.mark.parametrize("name", FINITE)
def test_the_machine_runs_the_program(name: str, tmp_path: Path) -> None:
    """Its run, its literal 0/1 layers, and the program read from disk give what the network gives; decoded, what the program means."""
    program = compiled(name)
    machine = af.StoredProgram.for_class(program.network)
    embedding = af.compile(program.network, machine)
    literal = machine.literal()
    assert all(bool(((t == 0) | (t == 1)).all()) for t in literal.state_dict().values() if t.is_floating_point())
    embedding.save(tmp_path)
    loaded = af.load(tmp_path)
    for tokens in (*inputs(name), *edge_inputs(program, 2)):
        ids = program.encode([tokens])
        out = machine(ids, embedding)
        close(out, program.run([tokens]))
        close(literal(ids, embedding), out)
        assert torch.equal(loaded.machine()(ids, loaded), out)
    for tokens in inputs(name):
        assert program.decode(machine(program.encode([tokens]), embedding)[0]) == rasp.interpret(EXAMPLES[name][0], tokens)


@pytest.mark.parametrize(
    "program", [rasp.tokens == rasp.tokens, rasp.lift(3), rasp.indices * 0], ids=["tokens == tokens", "3", "indices * 0"]
)
def test_a_program_that_is_constant_is_a_program(program: rasp.Sequence, tmp_path: Path) -> None:
    """Its network has no feature but the constant one."""
    constant = rasp.compile(program, "ab", 3)
    constant.save(tmp_path / "compiled")
    wanted = rasp.interpret(program, "ab")
    assert rasp.load(tmp_path / "compiled")("ab") == constant("ab") == wanted
    machine = af.StoredProgram.for_class(constant.network)
    af.compile(constant.network, machine).save(tmp_path / "stored")
    assert constant.decode(machine(constant.encode(["ab"]), af.load(tmp_path / "stored"))[0]) == wanted


def test_one_machine_runs_many_programs() -> None:
    """Programs that count different things are two embeddings of one machine, in one batch; a smaller program runs there too."""
    counts = {x: rasp.compile(rasp.selector_width(rasp.select(rasp.tokens, x, rasp.EQ)), "abc", 6) for x in "bc"}
    machine = af.StoredProgram.for_class(counts["b"].network)
    bank = af.ProgramBank(machine, {x: af.compile(program.network, machine) for x, program in counts.items()})
    ids = counts["b"].encode([list("bbab"), list("bbab")])
    out = bank(ids, programs=["b", "c"])
    assert [counts[x].decode(row) for x, row in zip("bc", out, strict=True)] == [[3] * 4, [0] * 4]
    shorter = rasp.compile(rasp.selector_width(rasp.select(rasp.tokens, "b", rasp.EQ)), "abc", 4)  # fewer counts, fewer units
    small = af.compile(shorter.network, machine)
    assert small.placement is not None and shorter.decode(machine(ids, small)[0]) == [3] * 4


def test_a_real_program_needs_its_numbers_in_the_stream() -> None:
    """Real tokens are no rows of an embedding: the machine gives every token row 0 where the number would be."""
    program = compiled("running sum")
    machine = af.StoredProgram.for_class(program.network)
    embedding = af.compile(program.network, machine)
    assert embedding.vocab == 1
    close(machine(torch.zeros(1, 3, dtype=torch.int64), embedding), program.run([[0, 0, 0]]))
