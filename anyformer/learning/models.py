"""What is trained, as a value: a model and a task make a learner, a module from input ids to logits.

    learner = model.build(task, seed)      only its parameters with ``requires_grad`` are trained
    model.save(learner, folder)            the result, in the format of its kind

A learner may define ``gradients(inputs, labels, total=None) -> float``: the sum of the cross-entropies over scored
positions / ``total`` (None: the number of scored positions), with its gradients added to the parameters' ``grad``.
First tables are normal, from philox: the same bits on every machine.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from anyformer import philox
from anyformer.errors import AnyformerError
from anyformer.memory import require_memory
from anyformer.spec import Spec
from anyformer.targets.transformer import Transformer, TransformerConfig
from anyformer.tasks import Task

FIRST_STREAM = 2**63
"""Philox streams from here on draw first tables: tokens, positions, read-out."""


@dataclass(frozen=True, kw_only=True)
class Model(Spec, ABC):
    """Base of every kind of model that can be trained."""

    @abstractmethod
    def build(self, task: Task, seed: int) -> nn.Module:
        """A fresh learner of ``task``; ``seed`` alone decides its numbers. The caller's random state is left alone.

        Raises AnyformerError where the model cannot learn this task (sizes that do not fit, no memory).
        """

    @abstractmethod
    def save(self, learner: nn.Module, folder: str | Path) -> None:
        """Write the trained ``learner``, atomically."""


@dataclass(frozen=True, kw_only=True)
class FullyTrained(Model):
    """A transformer of which every weight is trained."""

    config: TransformerConfig

    def build(self, task: Task, seed: int) -> Transformer:
        c = self.config
        if c.vocab != task.vocab:
            raise AnyformerError(
                f"FullyTrained: the task has {task.vocab} tokens, the transformer {c.vocab}; give both one vocab"
            )
        if c.max_length is not None and c.max_length < task.length:
            raise AnyformerError(f"FullyTrained: max_length must be at least the task's length {task.length}, got {c.max_length}")
        require_memory(16 * _parameters(c), "training this transformer")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Transformer(c, token_names=task.token_names)

    def save(self, learner: nn.Module, folder: str | Path) -> None:
        assert isinstance(learner, Transformer)
        learner.save(folder)


def require_std(owner: str, name: str, value: object) -> None:
    """Raise unless ``value`` is None or a standard deviation that philox draws with."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-250 <= value < math.inf):
        raise AnyformerError(f"{owner}: {name} must be a positive number, got {value!r}")


@torch.no_grad()
def draw_tables(seed: int, tables: Sequence[tuple[nn.Parameter | None, float]]) -> None:
    """Fill each table with normal numbers of its standard deviation; one that is None leaves the others' numbers as they are."""
    for stream, (table, std) in enumerate(tables):
        if table is not None:
            table.copy_(torch.from_numpy(philox.gaussian(seed, FIRST_STREAM + stream, tuple(table.shape), std)))


def _parameters(c: TransformerConfig) -> int:
    """About how many (without norms and biases), in integers of any size: building it to count may not be possible."""
    kv, e = c.kv_heads or c.heads, c.value_dim or c.head_dim
    attention = c.head_dim * (c.heads + kv) + e * (kv + c.heads)
    return c.features * (c.layers * (attention + (2 + c.gated) * c.mlp + 1) + 2 * c.vocab + (c.max_length or 0))
