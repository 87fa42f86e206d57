"""Products with frozen matrices in a shorter dtype than the stream's."""

from functools import lru_cache

import torch
from jaxtyping import Shaped
from torch import Tensor


def product(x: Shaped[Tensor, "*batch n m"], matrix: Shaped[Tensor, "m w"]) -> Shaped[Tensor, "*batch n w"]:
    """``x matrix`` in the matrix's dtype, as ``x`` has it. A processor without units for bfloat16 multiplies the rounded numbers in float32,
    which is what such units do (they add up in float32), without the price of emulating them."""
    if matrix.dtype == x.dtype:
        return x @ matrix
    rounded = x.to(matrix.dtype)
    if matrix.device.type == "cpu" and matrix.dtype == torch.bfloat16 and not has_bfloat16():
        return (rounded.to(x.dtype) @ matrix.to(x.dtype)).to(matrix.dtype).to(x.dtype)
    return (rounded @ matrix).to(x.dtype)


@lru_cache
def has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 by itself (as far as the system tells)."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="ignore") as table:
            flags = next((line.split() for line in table if line.startswith(("flags", "Features"))), [])
    except OSError:
        return False
    return any(flag in flags for flag in ("amx_bf16", "avx512_bf16", "bf16"))
