"""Greedy generation: append the likeliest token, again and again. With a cache of keys and values where the class allows it."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from anyformer.errors import AnyformerError, require_size
from anyformer.memory import require_memory
from anyformer.network import check_tokens
from anyformer.operators import Cache
from anyformer.program import Program


@torch.no_grad()
def generate(
    program: Program,
    tokens: Int[Tensor, "batch n"],
    new_tokens: int,
    *,
    mask: Bool[Tensor, "batch n"] | None = None,
    end: int | None = None,
    use_cache: bool | None = None,
) -> Int[Tensor, "batch total"]:
    """``tokens`` followed by up to ``new_tokens`` greedy ones on the program's machine.

    ``mask`` (batch, n) is True at the prompts' tokens; padding may stand on either side. A row that has given
    ``end`` goes on with ``end``; generation stops when every row has. ``use_cache``: keys and values of earlier tokens are kept (default: where
    the class allows it; every step then costs one token). Raises :class:`AnyformerError` where the program's outputs are not its tokens, a
    position table is too short, or a prompt is empty.
    """
    if not isinstance(program, Program):
        raise AnyformerError(
            f"a program is needed, got {type(program).__name__}; make one with anyformer.compile or anyformer.load"
        )
    require_size("generate", "new_tokens", new_tokens, 0)
    check_tokens(tokens, program.vocab)
    require_memory(16 * (tokens.numel() + tokens.shape[0] * new_tokens), f"a text of {tokens.shape[1] + new_tokens} tokens")
    machine = program.machine()
    outputs = machine.network_class.outputs if program.placement is None else program.placement.outputs
    if outputs != program.vocab:
        raise AnyformerError(f"the program has {outputs} outputs for {program.vocab} tokens; it predicts no tokens")
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == tokens.shape and mask.dtype == torch.bool):
        raise AnyformerError(f"mask must be a Boolean tensor of the shape of tokens {tuple(tokens.shape)}, True at real tokens")
    seen = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    if not bool(seen.any(1).all()):
        raise AnyformerError("every prompt needs at least one token that is not padding")
    if end is not None and not (isinstance(end, int) and 0 <= end < program.vocab):
        raise AnyformerError(f"end must be a token id in 0..{program.vocab - 1}, got {end!r}")
    longest = int(seen.sum(1).max()) + new_tokens
    if program.positions is not None and longest > program.positions.shape[0]:
        raise AnyformerError(f"{longest} tokens are needed, the position table holds {program.positions.shape[0]}")
    cache = Cache() if (machine.cacheable if use_cache is None else use_cache) else None
    text, text_mask = tokens.long(), seen
    step_tokens, step_mask = text, text_mask
    at = tokens.shape[1] - 1 - seen.flip(1).long().argmax(1)  # the last real token of each prompt
    done = torch.zeros(len(tokens), dtype=torch.bool)
    for _ in range(new_tokens):
        logits = machine(step_tokens, program, mask=step_mask, cache=cache)
        chosen = logits[torch.arange(len(logits)), at].argmax(-1)
        if end is not None:
            chosen = torch.where(done, end, chosen)
            done = done | (chosen == end)
        text = torch.cat((text, chosen[:, None]), 1)
        text_mask = torch.cat((text_mask, torch.ones_like(text_mask[:, :1])), 1)
        step_tokens, step_mask = (text, text_mask) if cache is None else (text[:, -1:], text_mask[:, -1:])
        at = torch.full_like(at, step_tokens.shape[1] - 1)
        if bool(done.all()):
            break
    return text
