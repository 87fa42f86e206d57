"""Greedy generation: append the likeliest token, again and again. With a cache of keys and values where the class allows it."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from anyformer.errors import AnyformerError, require_size
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

    ``mask`` (batch, n) is True at the prompts' tokens; padding may stand on either side, but not between tokens. A row that has given
    ``end`` goes on with ``end``; generation stops when every row has. ``use_cache``: keys and values of earlier tokens are kept (default: where
    the class allows it; every step then costs one token). Raises :class:`AnyformerError` where the program's outputs are not its tokens, a
    position table is too short, or a prompt is empty.
    """
    require_size("generate", "new_tokens", new_tokens, 0)
    machine = program.machine()
    seen = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    if not bool(seen.any(1).all()):
        raise AnyformerError("every prompt needs at least one token that is not padding")
    if end is not None and not 0 <= end < program.vocab:
        raise AnyformerError(f"end must be a token id in 0..{program.vocab - 1}, got {end}")
    longest = int(seen.sum(1).max()) + new_tokens
    if program.positions is not None and longest > program.positions.shape[0]:
        raise AnyformerError(f"{longest} tokens are needed, the position table holds {program.positions.shape[0]}")
    cache = Cache() if (machine.cacheable if use_cache is None else use_cache) else None
    out, kept = tokens.long(), seen
    last = tokens.shape[1] - 1 - seen.flip(1).long().argmax(1)
    new, new_seen = out, seen
    for step in range(new_tokens):
        logits = machine(new, program, mask=new_seen, cache=cache)
        if logits.shape[-1] != program.vocab:
            raise AnyformerError(f"the program has {logits.shape[-1]} outputs for {program.vocab} tokens; it predicts no tokens")
        at = last if step == 0 else torch.full_like(last, logits.shape[1] - 1)
        chosen = logits[torch.arange(len(logits)), at].argmax(-1)
        if end is not None and step > 0:
            chosen = torch.where(out[:, tokens.shape[1] :].eq(end).any(1), end, chosen)
        out = torch.cat((out, chosen[:, None]), 1)
        kept = torch.cat((kept, torch.ones_like(chosen[:, None], dtype=torch.bool)), 1)
        new, new_seen = (chosen[:, None], kept[:, -1:]) if cache is not None else (out, kept)
        if end is not None and bool(out[:, tokens.shape[1] :].eq(end).any(1).all()):
            break
    return out
