"""Tasks to train on and to measure with: reproducible streams of batches.

>>> TASKS["k-hop"](hops=1).batch(seed=0, index=0, size=64).inputs.shape
torch.Size([64, 99])
"""

from anyformer.tasks.dyck import Dyck
from anyformer.tasks.khop import KHop
from anyformer.tasks.task import IGNORED, Batch, Task

TASKS: dict[str, type[Task]] = {"dyck": Dyck, "k-hop": KHop}

__all__ = ["IGNORED", "TASKS", "Batch", "Dyck", "KHop", "Task"]
