"""Claims about a training step (gradients of E, positions and U; 64 x 100 tokens, float32, one thread) against the literal dense machine:

attention-only, 0/1 maps, m = 2280: at least 45 times faster, at 50 % of the matrix product that this machine reaches (the aim is 50
times and 60 %);
attention-only, random maps, m = 2280: at least 20 times; residual & norm, 0/1 maps, m = 1024: at least 6 times.
Seconds are of this process alone. Gradients are taken in blocks of 64 rows where the run folds, else of 16; peak memory is printed. The
share counts each product with a whole pattern, as the definition has it, though the first step leaves out nearly half of the causal ones
and counts tokens besides.
"""

import resource
from functools import partial
from time import process_time

import torch
import torch.nn.functional as F
from measure import claim, finish
from measure import medians as medians_of

from anyformer.backbones import FrozenMasked, FrozenRandom
from anyformer.backbones.frozen import Frozen
from anyformer.learning.learner import LearnedProgram
from anyformer.memory import keep_freed_memory
from anyformer.targets.transformer import TransformerConfig

ROWS, LENGTH, VOCAB = 64, 100, 30
medians = partial(medians_of, clock=process_time)  # a dense step takes so long that a busy machine would decide the ratio
keep_freed_memory()
torch.manual_seed(0)
tokens, labels = torch.randint(VOCAB, (2, ROWS, LENGTH))


class Dense(torch.nn.Module):
    """The same parameters on the literal machine."""

    def __init__(self, learner: LearnedProgram):
        super().__init__()
        self.literal = learner.machine.literal().float()
        self.embedding, self.position_embedding, self.readout = learner.tokens, learner.positions, learner.readout
        self.norms = None

    def step(self) -> None:
        for part, wanted in zip(tokens.split(16), labels.split(16), strict=True):
            logits = self.literal(part, self)
            (F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / labels.numel()).backward()


def learner(machine: Frozen) -> LearnedProgram:
    made = LearnedProgram(machine, VOCAB, LENGTH)
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(std=0.1)
    return made


def peak() -> float:
    """GiB held at the worst moment so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def class_of(layers: int, head_dim: int) -> TransformerConfig:
    return TransformerConfig(vocab=VOCAB, heads=2, layers=layers, head_dim=head_dim, features=VOCAB, causal=True)


def work(machine: Frozen) -> float:
    """Floating point operations of a folded step: patterns and values, once forwards and twice backwards."""
    widths, attention = machine.tree.widths, machine.recipe.attention
    columns = sum(attention.head_dim + width for width in widths[1:])
    return 3 * 2.0 * ROWS * attention.heads * LENGTH**2 * columns


square = torch.randn(2, 2048, 2048)
wide, deep = class_of(4, 30), class_of(3, 28)
fast = learner(FrozenMasked.for_class(wide))
dense = Dense(fast)
quick = medians(7, folded=lambda: fast.gradients(tokens, labels), product=lambda: square[0] @ square[1])
print(f"folded step {1e3 * quick['folded']:.0f} ms, m = {fast.machine.width}; {peak():.2f} GiB at most so far")
speed = work(fast.machine) / quick["folded"] / (2 * 2048**3 / quick["product"])
# in turns: a machine changes its pace within minutes
few = medians(3, folded=lambda: fast.gradients(tokens, labels), dense=dense.step)
print(f"dense step {few['dense']:.1f} s; {peak():.2f} GiB at most so far")
del dense, fast

random = learner(FrozenRandom.for_class(wide))
random_step = medians(3, folded=lambda: random.gradients(tokens, labels))["folded"]
random_slow = medians(1, dense=Dense(random).step)["dense"]
print(f"random: {1e3 * random_step:.0f} ms, dense {random_slow:.1f} s; {peak():.2f} GiB at most so far")
del random

normed = learner(FrozenMasked.for_class(deep, residual=True, norm="pre"))
normed_dense = Dense(normed)
normed_step = medians(3, moved=lambda: normed.gradients(tokens, labels), dense=normed_dense.step)
print(f"residual & norm: {1e3 * normed_step['moved']:.0f} ms, dense {normed_step['dense']:.1f} s, m = {normed.machine.width}")

finish(
    claim("attention only, 0/1 maps: literal / folded", few["dense"] / few["folded"], 45, at_least=True),
    claim("its share of the machine's matrix product", speed, 0.5, at_least=True),
    claim("attention only, random maps: literal / folded", random_slow / random_step, 20, at_least=True),
    claim("residual & norm, 0/1 maps: literal / moved blocks", normed_step["dense"] / normed_step["moved"], 6, at_least=True),
)
