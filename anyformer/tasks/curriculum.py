"""A curriculum: one task after another, the last of them for good.

    batch(seed, index) is that of tasks[i], i the number of ``until`` that are <= index;  measured on the last task

A training's step is the index of its batch: ``Curriculum(tasks=(KHop(hops=1), KHop(hops=2)), until=(300,))`` trains 300 steps on
one hop, then on two.
"""

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Bool, Int64
from torch import Tensor

from anyformer.errors import AnyformerError, require_size
from anyformer.tasks.task import Batch, Ids, Rule, Task, Words


@dataclass(frozen=True, kw_only=True)
class Curriculum(Task):
    """``tasks`` of one length and one vocabulary, ``until`` which batch each but the last is drawn. All that measures is the last task's."""

    tasks: tuple[Task, ...] = ()
    until: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tasks", "until"):
            if not isinstance(getattr(self, name), tuple):
                raise AnyformerError(f"Curriculum: {name} must be a tuple, got {getattr(self, name)!r:.80}")
        if not (self.tasks and all(isinstance(task, Task) for task in self.tasks)):
            raise AnyformerError(f"Curriculum: tasks must be one task or more, got {self.tasks}")
        if len(self.until) != len(self.tasks) - 1:
            raise AnyformerError(
                f"Curriculum: {len(self.tasks)} tasks need {len(self.tasks) - 1} steps in until, got {len(self.until)}"
            )
        for step in self.until:
            require_size("Curriculum", "until", step)
        if any(later <= earlier for earlier, later in zip(self.until, self.until[1:], strict=False)):
            raise AnyformerError(f"Curriculum: until must increase, got {self.until}")
        if self.vocab == 0:
            object.__setattr__(self, "vocab", self.goal.vocab)
        if {(task.length, task.vocab) for task in self.tasks} != {(self.goal.length, self.goal.vocab)}:
            raise AnyformerError("Curriculum: all tasks must have the same length and vocab (give each the largest vocab)")
        require_size("Curriculum", "vocab", self.vocab, minimum=self.goal.vocab)
        super().__post_init__()

    @property
    def goal(self) -> Task:
        """The last task."""
        return self.tasks[-1]

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.goal.names

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.goal.length

    @property
    def words(self) -> int:  # type: ignore[override]
        return self.goal.words

    def _draw(self, words: Words) -> tuple[Ids, Ids]:
        return self.goal._draw(words)

    def batch(self, seed: int, index: int, size: int) -> Batch:
        return self.tasks[bisect(self.until, index)].batch(seed, index, size)

    def held_out(self, size: int) -> Batch:
        return self.goal.held_out(size)

    def training_rows(self, size: int, seed: int = 0) -> Batch:
        return self.goal.training_rows(size, seed)

    def counted(self, batch: Batch) -> dict[str, Bool[Tensor, "batch n"]]:
        return self.goal.counted(batch)

    def scores(self, predicted: Int64[Tensor, "batch n"], batch: Batch) -> dict[str, float]:
        return self.goal.scores(predicted, batch)

    def rules(self) -> Mapping[str, Rule]:
        return self.goal.rules()
