"""Claim: float64 programs are exact to 1e-10 on every machine, outputs and attention patterns; float32 is reported.

Trained-size weights (PyTorch's initialisation), vocabulary 12, 2 heads, 2 layers, 24 tokens; the target's own forward is the
reference, errors are absolute, magnitudes of the outputs are printed beside them.
"""

import torch
from measure import claim, finish

import anyformer as af

CLASSES = {
    "attention only": {},
    "residual": {"residual": True},
    "residual, pre-RMSNorm": {"residual": True, "norm": "rms"},
    "residual, pre-LayerNorm, biases, RoPE": {"residual": True, "norm": "layer", "bias": True, "positions": "rope"},
    "residual, pre-RMSNorm, gated MLP": {"residual": True, "norm": "rms", "mlp": 4, "gated": True, "activation": "silu"},
    "residual, post-LayerNorm, plain MLP, ALiBi": {
        "residual": True, "norm": "layer", "norm_position": "post", "mlp": 4, "positions": "alibi"
    },
}  # fmt: skip
worst = {torch.float64: 0.0, torch.float32: 0.0}
print(f"{'class':45s} {'machine':10s} {'m':>7s}  float64 outputs, patterns   float32 outputs, patterns   magnitude")
for name, options in CLASSES.items():
    torch.manual_seed(0)
    target = af.Transformer(vocab=12, heads=2, layers=2, head_dim=4, features=8, **options).double()
    tokens = torch.randint(12, (4, 24))
    with torch.no_grad():
        size = float(target(tokens).abs().max())
    for machine_type in (af.PathTree, af.Looped, af.Random):
        if machine_type is af.Random and "mlp" in options:
            continue  # N grows with the square of the tree: see tests/test_random.py for its sizes
        machine = machine_type.for_class(target)
        errors = []
        for dtype in worst:
            module = target.to(dtype)
            verdict = af.verify(af.compile(module, machine), module, tokens=tokens, tolerance=(1.0, 0.0))
            worst[dtype] = max(worst[dtype], verdict.max_abs_error, verdict.max_pattern_error)
            errors.append(f"{verdict.max_abs_error:9.1e} {verdict.max_pattern_error:9.1e}")
        target.double()
        print(f"{name:45s} {machine.name:10s} {machine.width:7d}  {errors[0]:>25s}   {errors[1]:>25s}   {size:9.1e}")
print(f"largest float32 error: {worst[torch.float32]:.1e}")
finish(claim("largest float64 error", worst[torch.float64], 1e-10))
