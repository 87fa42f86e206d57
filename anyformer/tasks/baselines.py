"""What a task is worth without understanding it: the accuracies of predictors that compose nothing.

    constant       argmax_y P(y)                     position       argmax_y P(y | i)
    own token      argmax_y P(y | i, inputs[i])      rules          whatever the task names (equal counts for Dyck)

The first three are fitted on training rows (``task.training_rows``) and scored on held-out ones, so they carry no bias from having
seen the answers; of equally good labels the smallest is taken, and a pair (i, token) never seen falls back on the constant. Each
accuracy of the task has its own fit: "letters" of k-hop is what a predictor reaches that is asked for letters alone.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64
from torch import Tensor

from anyformer.errors import AnyformerError
from anyformer.tasks.finite import FiniteTask
from anyformer.tasks.task import Batch, Task

Places = Int64[np.ndarray, " places"]


@dataclass(frozen=True)
class Baselines:
    """For each predictor the task's accuracies, in [0, 1], by name: ``baselines(task).position["accuracy"]``."""

    constant: dict[str, float]
    position: dict[str, float]
    own_token: dict[str, float]
    rules: dict[str, dict[str, float]]
    fitted_rows: int
    scored_rows: int

    def by_name(self) -> dict[str, dict[str, float]]:
        """All predictors."""
        fitted = {"constant": self.constant, "position": self.position, "position and own token": self.own_token}
        return fitted | self.rules

    def best(self, accuracy: str = "accuracy") -> float:
        """The best of all of them: what a model has to beat."""
        return max(scores[accuracy] for scores in self.by_name().values() if accuracy in scores)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def baselines(task: Task, size: int = 20_000, seed: int = 0) -> Baselines:
    """Fit on ``size`` training rows of ``seed`` and score on ``size`` held-out rows. A finite task is taken whole instead.
    Raises AnyformerError where nothing is scored."""
    if isinstance(task, FiniteTask):
        size = task.rows
    fit, held_out = task.training_rows(size, seed), task.held_out(size)
    fits, targets = task.counted(fit), task.counted(held_out)
    constant, position, own_token = {}, {}, {}
    for name, where in targets.items():
        if not (where.any() and fits[name].any()):
            continue
        known, asked = _contexts(fit, fits[name], task.vocab), _contexts(held_out, where, task.vocab)
        fallback = np.zeros_like(asked[0])
        for scores, kind in ((constant, 0), (position, 1), (own_token, 2)):
            predicted = _best(known[kind], known[-1], task.vocab, asked[kind], fallback)
            scores[name] = float((predicted == asked[-1]).mean())
            if kind == 0:
                fallback = predicted
    if not constant:
        raise AnyformerError(f"{type(task).__name__}: none of its rows has a scored position")
    rules = {name: task.scores(rule(held_out.inputs), held_out) for name, rule in task.rules().items()}
    return Baselines(constant, position, own_token, rules, len(fit.inputs), len(held_out.inputs))


def _contexts(batch: Batch, where: Tensor, vocab: int) -> tuple[Places, Places, Places, Places]:
    """At each counted place: 0, the position, position and token as one number, and the label."""
    _, position = (index.numpy() for index in where.nonzero(as_tuple=True))
    return np.zeros_like(position), position, position * vocab + batch.inputs[where].numpy(), batch.labels[where].numpy()


def _best(known: Places, labels: Places, vocab: int, asked: Int64[np.ndarray, " asked"], fallback: Int64[np.ndarray, " asked"]):
    """For each context asked for, the label most often seen there."""
    pairs, counts = np.unique(known * vocab + labels, return_counts=True)
    context = pairs // vocab
    order = np.lexsort((pairs, -counts, context))  # the best label of each context comes first
    contexts, first = np.unique(context[order], return_index=True)
    best = pairs[order][first] % vocab
    place = np.minimum(np.searchsorted(contexts, asked), len(contexts) - 1)
    return np.where(contexts[place] == asked, best[place], fallback)
