"""Claim: a batch of 64 rows with 64 different programs runs at 0.9 of the speed of 64 rows of one program, run in the fastest way.

Path tree, two heads, four layers, d = d_in = 30 (m = 2280), 100 tokens, float32, one thread. The fastest way is sought over sizes of the
blocks of rows that are folded together.
"""

import torch
from measure import claim, finish, medians

import anyformer as af
from anyformer.backbones import folding

SIZES = (1, 2, 4, 8, 16, 32)
config = af.TransformerConfig(vocab=30, heads=2, layers=4, head_dim=30, features=30)
machine = af.PathTree.for_class(config)
torch.manual_seed(0)


def one_program(mebibytes: int) -> None:
    """64 rows of one program in blocks of so many bytes of state."""
    before, folding.BLOCK_BYTES = folding.BLOCK_BYTES, mebibytes * 2**20
    machine(tokens, first)
    folding.BLOCK_BYTES = before


with torch.no_grad():
    programs = {f"program {i}": af.compile(af.Transformer(config), machine).detach() for i in range(64)}
    bank, first = af.ProgramBank(machine, programs), programs["program 0"]
    tokens = torch.randint(30, (64, 100))
    out = bank(tokens, list(programs))
    alone = [machine(tokens[i : i + 1], program) for i, program in enumerate(programs.values())]
    ways = {f"one program, blocks of {m} MiB": lambda m=m: one_program(m) for m in SIZES}
    times = medians(15, bank=lambda: bank(tokens, list(programs)), **ways)
for name, seconds in times.items():
    print(f"{name}: {1000 * seconds:.0f} ms")
different = sum(not torch.equal(out[i : i + 1], row) for i, row in enumerate(alone))
finish(
    claim("64 programs / one program, in its fastest way", min(times[w] for w in ways) / times["bank"], 0.9, at_least=True),
    claim("rows that differ in any bit from running alone", different, 0),
)
