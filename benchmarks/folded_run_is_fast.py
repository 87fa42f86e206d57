"""Claims at (H, L, d, d_in) = (2, 4, 30, 30), 100 tokens, batch 8, float32, one thread:

the folded run is at least 60 times faster than the literal dense machine and at most 5 times slower than the target with
fused attention; the specialised module costs at most 1.2 times the target (also for a pre-norm residual gated-MLP target);
compiling takes under 50 ms.
"""

import torch
from measure import claim, finish, medians

import anyformer as af

torch.manual_seed(0)
tokens = torch.randint(30, (8, 100))
target = af.Transformer(vocab=30, heads=2, layers=4, head_dim=30, features=30)
machine = af.PathTree.for_class(target)
with torch.no_grad():
    program = af.compile(target, machine)
    fast = af.specialize(program)
    literal = machine.literal().float()
    slow = medians(5, literal=lambda: literal(tokens, program))
    quick = medians(31, target=lambda: target(tokens), folded=lambda: machine(tokens, program), specialised=lambda: fast(tokens))
    compiling = medians(11, compile=lambda: af.compile(target, machine))["compile"]
    stack = af.Transformer(vocab=30, heads=2, layers=2, head_dim=8, features=16, residual=True, norm="rms", mlp=12, gated=True)
    stack_fast = af.specialize(af.compile(stack, af.PathTree.for_class(stack)))
    stacks = medians(51, target=lambda: stack(tokens), specialised=lambda: stack_fast(tokens))

finish(
    claim("literal / folded", slow["literal"] / quick["folded"], 60, at_least=True),
    claim("folded / target", quick["folded"] / quick["target"], 5),
    claim("specialised / target, attention only", quick["specialised"] / quick["target"], 1.2),
    claim("specialised / target, pre-norm residual gated MLP", stacks["specialised"] / stacks["target"], 1.2),
    claim("seconds to compile", compiling, 0.05),
)
