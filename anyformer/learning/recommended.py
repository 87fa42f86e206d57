"""Choices that learn, in one place: what the command line and the experiments take where nothing else is said (measured in docs/learning.md).

trained rows         first rows   read-out   schedule
normed machine       0.1          free       one cycle up to 3e-3
no norm              0.5          shared     one cycle up to 3e-2       (small rows make attention flat: no gradient to speak of)
around a decoder     the model's  free       one cycle up to 3e-3
whole transformer    -            -          cosine from 5e-3
"""

from typing import Any

from anyformer.backbones.frozen import FrozenMaskedRecipe, FrozenRecipe
from anyformer.learning.frozen_machine import FrozenMachine
from anyformer.learning.training import TrainingConfig

STEPS = 1500


def recommended_model(recipe: FrozenRecipe, **chosen: Any) -> FrozenMachine:
    """What is learned on the machine of ``recipe``; ``chosen`` fields that are not None stand.

    A shared read-out is for attention alone on a masked machine: where leaves are all that U should read, and where they are apart.
    """
    attention_alone = recipe.folds and not recipe.residual
    fields: dict[str, Any] = {
        "embedding_std": 0.5 if recipe.norm is None else 0.1,
        "readout": "shared" if attention_alone and isinstance(recipe, FrozenMaskedRecipe) else "free",
    }
    return FrozenMachine(recipe=recipe, **fields | {name: value for name, value in chosen.items() if value is not None})


def recommended_training(*, frozen: bool, norm: bool = True, steps: int = STEPS, **chosen: Any) -> TrainingConfig:
    """How to train for ``steps``: all of a transformer, or rows around something ``frozen``, which has a ``norm`` or none."""
    fields: dict[str, Any] = {"schedule": "cosine", "learning_rate": 5e-3, "warm_up": min(100, steps // 10)}
    if frozen:
        fields = {"schedule": "one-cycle", "learning_rate": 3e-3 if norm else 3e-2, "warm_up": steps // 10}
    fields |= {"evaluate_every": 50, "evaluation_size": 1024}
    return TrainingConfig(steps=steps, **fields | chosen)
