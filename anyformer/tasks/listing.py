"""All tasks with their sizes and baselines, as plain data: what ``anyformer tasks`` prints."""

from dataclasses import replace
from typing import Any

from anyformer.tasks.addition import Addition
from anyformer.tasks.baselines import baselines
from anyformer.tasks.dyck import Dyck
from anyformer.tasks.khop import KHop
from anyformer.tasks.memorisation import Memorisation
from anyformer.tasks.modular import ModularAddition
from anyformer.tasks.needle import Needle
from anyformer.tasks.task import Task
from anyformer.tasks.text import Text


def listing(rows: int = 20_000, file: str | None = None) -> list[dict[str, Any]]:
    """Every task as it comes, k-hop also for fixed k; with ``file``, language modelling on it."""
    tasks: dict[str, Task] = {"dyck": Dyck(), "k-hop": KHop()}
    tasks |= {f"k-hop, hops={k}": KHop(hops=k) for k in range(1, 5)}
    tasks |= {"needle": Needle(), "addition": Addition(), "modular-addition": ModularAddition(), "memorisation": Memorisation()}
    if file is not None:
        tasks["text"] = Text(file=file)
    return [
        {
            "name": name,
            "vocab": task.vocab,
            "used": replace(task, vocab=0).vocab,
            "length": task.length,
            "task": task.to_json(),
            "row": task.show(task.batch(0, 0, 1)).splitlines(),
            "baselines": baselines(task, rows).to_json(),
        }
        for name, task in tasks.items()
    ]
