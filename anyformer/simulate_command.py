"""``anyformer simulate``: a random attention layer on the simulator of its class, beside torch's own attention."""

import time
from typing import Any

import torch

from anyformer.console import show
from anyformer.errors import AnyformerError
from anyformer.options import Simulate
from anyformer.rasp.encoding import Layer, reference
from anyformer.rasp.simulator import AttentionSimulator, require_simulable


def simulate(options: Simulate) -> tuple[dict[str, Any], int]:
    """Run the command."""
    if not 0 < options.scale < 100:
        raise AnyformerError(f"simulate: --scale must be above 0 and below 100, got {options.scale:g}")
    if not -(2**63) <= options.seed < 2**64:
        raise AnyformerError(f"simulate: --seed must be an integer of at most 64 bits, got {options.seed}")
    layer = Layer(options.n, options.d, options.dv, options.heads, causal=options.causal, scaled=options.scaled)
    require_simulable(layer, options.version)
    g = torch.Generator().manual_seed(options.seed)
    matrices = {k: options.scale * torch.randn(*s, generator=g, dtype=torch.float64) for k, s in layer.matrices.items()}
    largest = max(float(m.abs().max()) for m in matrices.values())
    x, folded = matrices["X"], [matrices[f"A{h}"] for h in range(layer.heads)]
    score = max(float((layer.scale * x @ a @ x.T).abs().max()) for a in folded)
    began = time.perf_counter()
    modes: dict[str, Any] = {
        "mode": options.mode,
        "dtype": options.dtype,
        "bound": max(100.0, 2 * largest),
        "logits": max(2000.0, 2 * score),
    }
    if options.mode == "standard":
        narrow = {"bound": 8.0 * options.scale, "logits": 50.0 * options.d**2 * options.scale**3}
        modes |= {
            "tolerance": options.tolerance,
            "bound": max(narrow["bound"], largest),
            "logits": max(narrow["logits"], 1.1 * score),
        }
    simulator = AttentionSimulator.for_layer(layer, options.version, **modes)
    compiled, seconds = simulator.compiled, time.perf_counter() - began
    found, wanted = simulator(matrices), reference(layer, matrices)
    error = float((found - wanted).abs().max())
    rounding = (1e-10 if options.dtype == "float64" else 1e-4) * max(1.0, score / 1000)  # of scores, which exp makes relative
    result = {
        "max_abs_error": error,
        "error_bound": compiled.error,
        "layers": compiled.layers,
        "heads": list(compiled.heads),
        "width": compiled.width,
        "tokens": layer.tokens,
        "parameters": compiled.parameters,
        "mode": options.mode,
        "version": options.version,
        "dtype": options.dtype,
        "compile_seconds": seconds,
    }
    if not options.as_json:
        rows = "\n".join(
            "  " + "  ".join(f"{x:9.5f}" for x in ours) + "     " + "  ".join(f"{x:9.5f}" for x in theirs)
            for ours, theirs in zip(found.tolist(), wanted.tolist(), strict=True)
        )
        claim = f"bound {compiled.error:.3g}" if compiled.error else "exact to rounding"
        show(
            f"a random layer with n = {layer.n}, d = {layer.d}, d_v = {layer.d_v}, {layer.heads} heads, described by {layer.tokens} tokens\n"
            f"{options.version} simulator: {compiled.layers} layers, heads {list(compiled.heads)}, width {compiled.width}, "
            f"{compiled.parameters:,} numbers, {options.mode} mode, {options.dtype}\n"
            f"simulated (left) and torch's scaled_dot_product_attention in float64 (right):\n{rows}\n"
            f"largest difference {error:.3g} ({claim})"
        )
    return result, 0 if error <= compiled.error + rounding * (1 + float(wanted.abs().max())) else 1
