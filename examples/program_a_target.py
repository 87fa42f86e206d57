"""A target of your own, end to end: train it, compile it, run it on a fixed machine, prove it, and get it back.

python examples/program_a_target.py
"""

import torch
import torch.nn.functional as F

import anyformer as af

torch.manual_seed(0)
torch.set_num_threads(1)

# 1. a target: any Transformer of ours, trained as any other module. Here: copy the previous token.
target = af.Transformer(
    vocab=10, heads=2, layers=1, head_dim=8, features=16, residual=True, norm="rms", mlp=8, gated=True, positions="rope"
)
optimiser = torch.optim.AdamW(target.parameters(), lr=1e-2)
for _ in range(300):
    tokens = torch.randint(10, (32, 12))
    loss = F.cross_entropy(target(tokens)[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

# 2. a fixed machine for its class: every weight is 0 or 1, and nothing in it comes from this target
machine = af.PathTree.for_class(target)
print(machine)
print("coordinate 100 is", machine.coordinate(100))

# 3. the program: an input embedding
program = af.compile(target, machine)
print(af.verify(program, target).raise_if_not())

# 4. another program on the same machine is another transformer
other = af.compile(af.Transformer(target.config), machine)
tokens = torch.randint(10, (1000, 12))
for name, p in (("trained", program), ("untrained", other)):
    with torch.no_grad():
        right = (machine(tokens, p)[:, 1:].argmax(-1) == tokens[:, :-1]).float().mean()
    print(f"copies the previous token, {name} program: {100 * right:.1f} %")

# 5. and back: an ordinary module from the program alone
fast = af.specialize(program)
print(type(fast).__name__, "with", fast.config.features, "features; error", f"{fast.report.error:.0e}")
