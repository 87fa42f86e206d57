"""Claim: a quarter more width than N reads makes a random backbone well conditioned: cond(R_all) at m = 1.25 N is below 200 for the
paper's attention-only sizes, and at least ten times below its value at m = N. Three seeds, both laws."""

import torch
from measure import claim, finish

import anyformer as af

torch.manual_seed(0)
worst, least = 0.0, float("inf")
for heads, layers, head_dim, features in ((4, 2, 24, 4), (2, 2, 28, 30), (2, 3, 28, 30)):
    config = af.TransformerConfig(vocab=features, heads=heads, layers=layers, head_dim=head_dim, features=features)
    for law in ("uniform", "gaussian"):
        found = {
            over: [af.Random.for_class(config, seed=s, law=law, oversample=over).condition for s in range(3)]
            for over in (1.0, 1.25)
        }
        texts = [f"m = {over} N: " + " ".join(f"{c:9.2e}" for c in values) for over, values in found.items()]
        print(f"(H, L, d, d_in) = ({heads}, {layers}, {head_dim}, {features}), {law:8s}  {'   '.join(texts)}")
        worst = max(worst, *found[1.25])
        least = min(least, min(found[1.0]) / max(found[1.25]))
finish(
    claim("largest condition number at m = 1.25 N", worst, 200),
    claim("smallest ratio of conditions, m = N / m = 1.25 N", least, 10, at_least=True),
)
