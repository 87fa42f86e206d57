"""A trained Hugging Face Llama becomes an embedding, runs on a fixed 0/1 backbone, and becomes a Hugging Face folder again.

The model was trained by examples/llama/train.py on one-hop induction ("what followed this letter last time?").
"""

import tempfile
from pathlib import Path

import torch

import anyformer as af
from anyformer.tasks import KHop

task = KHop(vocab=23, hops=1)
folder = Path(__file__).parent / "llama" / "model"
llama = af.load_target(folder)  # a transformers model; af.read_huggingface(folder) gives the Network alone
parameters = sum(p.numel() for p in llama.parameters())

machine = af.StoredProgram.for_class(llama)
program = af.compile(llama, machine).detach()
ones = machine.cost().nonzero_weights
print(f"{parameters:,} parameters -> {machine!r}, depth {machine.cost().depth}, {ones:,} weights that are 1, all others 0")
print(af.verify(program, llama).raise_if_not())

batch = task.batch(seed=7, index=0, size=256)
with torch.no_grad():
    print(f"one-hop accuracy: Llama {100 * task.accuracy(llama(batch.inputs).logits, batch):.2f} %,", end=" ")
    print(f"program {100 * task.accuracy(machine(batch.inputs, program), batch):.2f} %")
    ours = af.generate(program, batch.inputs[:4, :20], 12)
    theirs = llama.generate(batch.inputs[:4, :20], max_new_tokens=12, do_sample=False, pad_token_id=0)
    print(f"generated as transformers does: {torch.equal(ours, theirs)}")

    random = type(llama)(llama.config).eval()  # the same machine runs any Llama of this class
    bank = af.ProgramBank(machine, {"trained": program, "random": af.compile(random, machine)})
    rows = bank(batch.inputs[:2], programs=["trained", "random"])
    print(f"two Llamas in one batch: {torch.equal(rows[:1], machine(batch.inputs[:1], program))}")

    with tempfile.TemporaryDirectory() as place:
        program.save(Path(place) / "program")
        af.write_huggingface(af.load(Path(place) / "program"), Path(place) / "llama")
        back = af.load_target(Path(place) / "llama")
        error = (back(batch.inputs).logits - llama(batch.inputs).logits).abs().max()
        print(
            f"folder -> embedding -> folder: logits agree to {error:.1e}, accuracy {100 * task.accuracy(back(batch.inputs).logits, batch):.2f} %"
        )
