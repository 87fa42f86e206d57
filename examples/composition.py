"""Known composition makes a path tree narrow: where head h of a layer feeds only head h of the next one, the width is linear in the
depth instead of H^L.

    python examples/composition.py
"""

import torch

import anyformer as af

HEADS, HEAD_DIM, FEATURES, VOCAB = 4, 4, 16, 10


def parallel_chains(layers: int) -> af.Transformer:
    """A transformer whose head h reads and writes the h-th block of features and nothing else."""
    target = af.Transformer(vocab=VOCAB, heads=HEADS, layers=layers, head_dim=HEAD_DIM, features=FEATURES).double()
    block = torch.arange(FEATURES)[None] // HEAD_DIM
    with torch.no_grad():
        for layer in target.blocks:
            for linear in (layer.attention.W_Q, layer.attention.W_K, layer.attention.W_V, layer.attention.W_O):
                linear.weight *= 2 * (block == block.T)
    return target


# 1. the structure is declared once for the class, or read off a target: products of its maps that are exactly zero
torch.manual_seed(0)
target = parallel_chains(4)
structure = af.Composition.of(target)
assert structure == af.Composition.chains(target)

# 2. the width, from the class and the structure alone
print("layers  path tree  composition")
for layers in (1, 2, 4, 8, 16, 32):
    config = af.TransformerConfig(vocab=VOCAB, heads=HEADS, layers=layers, head_dim=HEAD_DIM, features=FEATURES)
    full = af.PathTree.width_of(af.PathTree.recipe_for(af.network_class(config)))
    known = af.Composed.recipe_for(af.network_class(config), af.Composition.chains(config))
    print(f"{layers:6}  {full:9.3g}  {af.Composed.cost_of(known, 1).width:11}")

# 3. the machine: compiled, verified and run as any other
machine = af.Composed.for_class(target, composition=structure)
program = af.compile(target, machine)
print(machine, af.verify(program, target).raise_if_not().passed)

# 4. a target that breaks the declaration is refused, product by product
try:
    af.compile(af.Transformer(target.config), machine)
except af.OutsideClass as refusal:
    print(refusal.reasons[0])

# 5. nearly zero: with a tolerance the structure is found again, the program is an approximation, and says so
with torch.no_grad():
    for parameter in target.blocks.parameters():
        parameter += 1e-5 * torch.randn_like(parameter)
rough = af.Composed.for_class(target, composition=af.Composition.of(target, tolerance=1e-3))
approximation = af.compile(target, rough)
verdict = af.verify(approximation, target)
print(rough, verdict.passed)
print(f"largest neglected product {approximation.provenance['largest_neglected_product']:.0e}, error {verdict.max_rel_error:.0e}")
