"""Data-parallel training: R processes, each with its rows of every batch, all with the same numbers after each step.

    gradient = sum_r gradient_r,   gradient_r: of rank r's rows, over the scored positions of the whole batch

so R processes take the steps of one, up to the rounding of the sums. Rank 0 reads, measures and writes for all.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anyformer.errors import AnyformerError


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process reads, measures and writes."""
        return self.rank == 0

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's rows: the ranks' shares are in order and differ by one row at most."""
        return whole.tensor_split(self.size)[self.rank]

    def add(self, parameters: list[nn.Parameter], number: float) -> float:
        """Replace every gradient by its sum over the ranks, in one message; the sum of ``number`` comes back."""
        if self.size == 1:
            return number
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        whole = torch.cat([g.flatten() for g in grads])
        summed = torch.tensor([number], dtype=torch.float64, device=whole.device)
        dist.all_reduce(whole)
        dist.all_reduce(summed)
        for p, piece in zip(parameters, whole.split([p.numel() for p in parameters]), strict=True):
            p.grad = piece.view_as(p)
        return float(summed)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether any rank says yes."""
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)], device=device)
        dist.all_reduce(flags)
        return bool(flags)

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What ``make()`` gives on rank 0, on every rank; what it raises there is raised everywhere."""
        if self.size == 1:
            return make()
        box: list[Any] = [None, None]
        if self.first:
            try:
                box[0] = make()
            except Exception as error:
                box[1] = error
        dist.broadcast_object_list(box)
        if box[1] is not None:
            raise box[1]
        return box[0]


ALONE = Ranks()


def by_torchrun() -> tuple[int, int]:
    """Rank and number of processes as torchrun's environment variables say them; (0, 1) where it did not start this process."""
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if not (rank.isdigit() and size.isdigit()) or int(size) < 2:
        return 0, 1
    return int(rank), int(size)


_JOINED = itertools.count()


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """The ranks of ``torchrun`` (its environment variables say so), or one process alone."""
    if by_torchrun()[1] < 2:
        yield ALONE
        return
    if not dist.is_available():
        raise AnyformerError("WORLD_SIZE is set but this torch has no torch.distributed; run one process")
    if dist.is_initialized():  # by whoever calls
        yield Ranks(dist.get_rank(), dist.get_world_size())
        return
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, count = next(rendezvous("env://"))
    apart = PrefixStore(f"anyformer-{next(_JOINED)}", store)  # keys of an earlier group would mislead this one
    kind = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(kind, store=apart, rank=rank, world_size=count)
    try:
        yield Ranks(rank, count)
        dist.barrier()  # one that ends while another still listens to it can bring that one down
    finally:
        dist.destroy_process_group()
