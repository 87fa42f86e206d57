"""Tasks to train on and to measure with: reproducible streams of batches, and what they are worth without understanding.

>>> TASKS["k-hop"](hops=1).batch(seed=0, index=0, size=64).inputs.shape
torch.Size([64, 99])
"""

from anyformer.tasks.addition import Addition
from anyformer.tasks.baselines import Baselines, baselines
from anyformer.tasks.curriculum import Curriculum
from anyformer.tasks.dyck import Dyck
from anyformer.tasks.finite import FiniteTask
from anyformer.tasks.khop import KHop
from anyformer.tasks.memorisation import Memorisation
from anyformer.tasks.modular import ModularAddition
from anyformer.tasks.needle import Needle
from anyformer.tasks.task import HELD_OUT, IGNORED, Batch, Ids, Task, Words, below
from anyformer.tasks.text import Text

TASKS: dict[str, type[Task]] = {
    "dyck": Dyck,
    "k-hop": KHop,
    "needle": Needle,
    "addition": Addition,
    "modular-addition": ModularAddition,
    "memorisation": Memorisation,
    "text": Text,
}

__all__ = [
    "HELD_OUT",
    "IGNORED",
    "TASKS",
    "Addition",
    "Baselines",
    "Batch",
    "Curriculum",
    "Dyck",
    "FiniteTask",
    "Ids",
    "KHop",
    "Memorisation",
    "ModularAddition",
    "Needle",
    "Task",
    "Text",
    "Words",
    "baselines",
    "below",
]
