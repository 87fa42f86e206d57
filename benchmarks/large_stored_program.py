"""Claim: a Llama of about 10 million parameters compiles, saves, loads and runs as a stored program, exactly, in memory of its own size.

Every step is a fresh process; its memory is the rise of ru_maxrss above what the process had with its imports done. The allowance is 2 times the
parameters and 3 times what transformers' forward adds to its loaded model (batch 8, 128 tokens, float32, no gradients).
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measure import claim, finish

import anyformer as af

SIZES = dict(
    hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, vocab_size=7200
)
TOKENS = torch.arange(8 * 128).view(8, 128) * 7919 % SIZES["vocab_size"]


def peak() -> int:
    """Bytes: the largest resident size of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def make(folder: Path) -> dict:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.1))
    model.save_pretrained(folder / "llama")
    return {"parameters": sum(p.numel() for p in model.parameters())}


def transformers_forward(folder: Path) -> dict:
    model = af.load_target(folder / "llama")
    model.set_attn_implementation("eager")
    loaded = peak()
    logits = model(TOKENS, use_cache=False).logits
    used = peak() - loaded
    torch.save(logits, folder / "logits.pt")
    return {"bytes": used}


def compile_and_save(folder: Path) -> dict:
    import transformers.models.llama.modeling_llama  # noqa: F401 (an import, not the compilation)

    before = peak()
    model = af.load_target(folder / "llama")
    machine = af.StoredProgram.for_class(model)
    af.compile(model, machine).save(folder / "program")
    return {"bytes": peak() - before, "width": machine.width, "scratch": machine.scratch / machine.width}


def load_and_run(folder: Path) -> dict:
    before = peak()
    program = af.load(folder / "program")
    logits = af.run(program, TOKENS)
    used = peak() - before
    expected = torch.load(folder / "logits.pt")
    return {"bytes": used, "error": float((logits - expected).abs().max()), "largest": float(expected.abs().max())}


def verify_in_float64(folder: Path) -> dict:
    model = af.load_target(folder / "llama")
    program = af.compile(model, af.StoredProgram.for_class(model), dtype=torch.float64)
    verdict = af.verify(program, model, sequences=2, length=64)
    return {"error": verdict.max_abs_error, "pattern_error": verdict.max_pattern_error, "passed": verdict.passed}


STEPS = {f.__name__: f for f in (make, transformers_forward, compile_and_save, load_and_run, verify_in_float64)}

if len(sys.argv) > 1:
    with torch.no_grad():
        print(json.dumps(STEPS[sys.argv[1]](Path(sys.argv[2]))))
    sys.exit()

with tempfile.TemporaryDirectory() as folder:
    results = {}
    for name in STEPS:
        done = subprocess.run([sys.executable, __file__, name, folder], check=True, capture_output=True, text=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, results[name])

parameters, forward = 4 * results["make"]["parameters"], results["transformers_forward"]["bytes"]
allowance = (2 * parameters + 3 * forward) / 2**20
print(
    f"{parameters / 2**20:.0f} MiB of parameters, transformers' forward adds {forward / 2**20:.0f} MiB: allowance {allowance:.0f} MiB"
)
run, compiled, exact = results["load_and_run"], results["compile_and_save"], results["verify_in_float64"]
finish(
    claim("width / parameters", compiled["width"] / results["make"]["parameters"], 1.0),
    claim("scratch / width", compiled["scratch"], 0.05),
    claim("MiB added by reading the folder, compiling and saving", compiled["bytes"] / 2**20, allowance),
    claim("MiB added by loading the program and running it", run["bytes"] / 2**20, allowance),
    claim("largest float32 error / largest logit", run["error"] / run["largest"], 1e-5),
    claim(
        "largest error of a float64 program, every token seen, outputs and patterns",
        max(exact["error"], exact["pattern_error"]),
        1e-10,
    ),
)
