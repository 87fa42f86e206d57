"""Claim: float32 logits agree with transformers as shipped to 1e-5 of the largest logit, for every family; float64 weights, whose norms,
softmax and rotary angles transformers rounds to float32, are reported beside them.

Random weights N(0, 0.5), norms and biases included; 2 layers, 4 heads, 64 features, 64 tokens; largest error over largest logit.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from measure import claim, finish

import anyformer as af
from anyformer.targets.huggingface import own_forward

SIZES = dict(vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(max_position_embeddings=128, bos_token_id=1, eos_token_id=2)
GROUPED = SIZES | dict(num_key_value_heads=2)
GPT2 = dict(vocab_size=50, n_embd=64, n_inner=96, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2)
FAMILIES = {
    "LlamaForCausalLM": transformers.LlamaConfig(**GROUPED),
    "MistralForCausalLM": transformers.MistralConfig(**GROUPED, sliding_window=None),
    "Qwen2ForCausalLM": transformers.Qwen2Config(**GROUPED),
    "Qwen3ForCausalLM": transformers.Qwen3Config(**GROUPED, head_dim=16),
    "GPT2LMHeadModel": transformers.GPT2Config(**GPT2),
    "GPTNeoXForCausalLM": transformers.GPTNeoXConfig(**SIZES),
}
worst, exact = 0.0, 0.0
print(f"{'family':20s} {'float32':>9s} {'float64 as shipped':>20s} {'float64 throughout':>20s}")
for name, config in FAMILIES.items():
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.set_attn_implementation("eager")
    tokens = torch.randint(50, (4, 64))
    errors = []
    with torch.no_grad():
        network = af.read(model)
        shipped = model(tokens).logits
        size = float(shipped.abs().max())
        errors.append(float((network.to(torch.float32).run(tokens) - shipped).abs().max()) / size)
        model.double()
        expected = network.run(tokens)
        errors.append(float((expected - model(tokens).logits).abs().max()) / size)
        errors.append(float((expected - own_forward(model, tokens, None, None)[0]).abs().max()) / size)
    worst, exact = max(worst, errors[0]), max(exact, errors[2])
    print(f"{name:20s} {errors[0]:9.1e} {errors[1]:20.1e} {errors[2]:20.1e}")
finish(claim("largest relative float32 error", worst, 1e-5), claim("largest relative float64 error", exact, 1e-10))
