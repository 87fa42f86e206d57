"""Claim: a stored program runs at most 1.5 times slower than transformers' eager forward, and generates the same tokens.

Llama, hidden 128, 4 layers, 8 heads, MLP 384, vocabulary 1000, 64 tokens, batch 8, float32, one thread, one run. Generation: greedy,
batched and padded prompts, compared up to the first step at which transformers' two best logits differ by less than 1e-4.
"""

import torch
from measure import claim, finish, medians
from transformers import LlamaConfig, LlamaForCausalLM

import anyformer as af

torch.manual_seed(0)
sizes = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8, vocab_size=1000)
special = dict(pad_token_id=0, bos_token_id=None, eos_token_id=None)
model = LlamaForCausalLM(LlamaConfig(**sizes, **special, max_position_embeddings=256, initializer_range=0.1)).eval()
model.set_attn_implementation("eager")
with torch.no_grad():
    machine = af.StoredProgram.for_class(model)
    program = af.compile(model, machine).detach()
    tokens = torch.randint(1000, (8, 64))
    times = medians(25, program=lambda: machine(tokens, program), transformers=lambda: model(tokens, use_cache=False).logits)
    print({name: f"{1000 * seconds:.1f} ms" for name, seconds in times.items()})
    mask = torch.ones(8, 64, dtype=torch.bool)
    for row in range(8):
        mask[row, : 7 * row] = False
    agreed = compared = 0
    for seen in (torch.ones_like(mask), mask):
        ours = af.generate(program, tokens, 32, mask=seen)
        theirs = model.generate(
            tokens,
            attention_mask=seen.long(),
            max_new_tokens=32,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(theirs.logits, 1).topk(2).values
        close = (best[..., 0] - best[..., 1] < 1e-4).long().cumsum(1) > 0
        same = ours[:, 64:] == theirs.sequences[:, 64:]
        agreed, compared = agreed + int((same & ~close).sum()), compared + int((~close).sum())
    print(
        f"{agreed} of {compared} generated tokens are the same ({2 * 8 * 32 - compared} of {2 * 8 * 32} not compared: a tie came before)"
    )
finish(
    claim("stored program / transformers' eager forward", times["program"] / times["transformers"], 1.5),
    claim("share of equal generated tokens", agreed / compared, 1.0, at_least=True),
    claim("share not compared", 1 - compared / (2 * 8 * 32), 0.05),
)
