"""Run a program by itself: its machine is built from its recipe."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.errors import AnyformerError
from anyformer.program import Program


def run(
    program: Program,
    tokens: Int[Tensor, "batch n"] | str,
    *,
    mask: Bool[Tensor, "batch n"] | None = None,
    positions: Int[Tensor, "batch n"] | None = None,
) -> Float[Tensor, "batch n out"]:
    """Logits of ``program`` on its machine. ``tokens`` may be text: token names (or ids) separated by white space.

    The machine is built from the recipe and kept for the next call; see :meth:`Machine.forward` for ``mask`` and ``positions``.
    """
    if not isinstance(program, Program):
        raise AnyformerError(
            f"a program is needed, got {type(program).__name__}; make one with anyformer.compile or anyformer.load"
        )
    if isinstance(tokens, str):
        tokens = torch.tensor([program.token_ids(tokens)])
    return program.machine()(tokens, program, mask=mask, positions=positions)
