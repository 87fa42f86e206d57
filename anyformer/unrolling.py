"""The unrolled network: one matrix that holds every read of every path, built right to left.

    T_S = U0,        T_s = [ P_(s+1) , M_b T_(s+1) for each branch b ]        (D, width(s))

Column by column this is ``M_b1 .. M_bs`` times the columns read at path (b1..bs), so a program is ``W = E0 T_0`` (W_all of arXiv
2605.31423). It takes one product of D x D with D x width(s+1) a branch and stage, instead of one a path, and is a differentiable
function of the network's tensors.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.network import Network


def unroll(network: Network, dtype: torch.dtype = torch.float64) -> Float[Tensor, "D m"]:
    """T_0 of the network, accumulated in ``dtype``."""
    reads = network.final_readout().to(dtype)
    for stage in reversed(network.stages):
        columns = [p.to(dtype) for p in stage.probes()]
        for branch in stage.branches:
            pulled = branch.map.pull(reads)  # (count, D, w)
            columns.append(pulled.permute(1, 0, 2).flatten(1))
        reads = torch.cat(columns, dim=1)
    return reads
