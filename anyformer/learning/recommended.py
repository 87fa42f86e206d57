"""Choices that learn: what the command line takes where nothing else is said. (Attention alone: ``anyformer reproduce learnability``.)

trained rows         first rows             read-out   schedule
normed machine       0.1                    free       one cycle up to 3e-3
attention alone      0.5, self heads 1.3    shared     one cycle up to 2e-2    (random machines: in the coordinates of their reads)
other without norm   0.5                    free       one cycle up to 2e-2
around a decoder     the model's            free       one cycle up to 3e-3
whole transformer    -                      -          cosine from 5e-3
"""

from typing import Any

from anyformer.backbones.frozen import FrozenRandomRecipe, FrozenRecipe
from anyformer.learning.frozen_machine import FrozenMachine
from anyformer.learning.training import TrainingConfig

STEPS = 1500


def recommended_model(recipe: FrozenRecipe, **chosen: Any) -> FrozenMachine:
    """What is learned on the machine of ``recipe``; ``chosen`` fields that are not None stand.

    Of attention alone, U reads the leaves and nothing else, and on a machine that is wide enough E can be trained by its reads.
    """
    fields: dict[str, Any] = {"embedding_std": 0.5 if recipe.norm is None else 0.1}
    if recipe.folds and not recipe.residual:
        random = isinstance(recipe, FrozenRandomRecipe)
        if not random or recipe.programmable:
            fields |= {"readout": "shared", "coordinates": "reads" if random else "embedding", "self_heads": 1.3}
    given = {name: value for name, value in chosen.items() if value is not None}
    if given.get("readout") == "free" and fields.get("coordinates") == "reads":
        del fields["coordinates"], fields["self_heads"]
    if given.get("positions") is False:
        fields.pop("self_heads", None)
    return FrozenMachine(recipe=recipe, **fields | given)


def recommended_training(*, frozen: bool, norm: bool = True, steps: int = STEPS, **chosen: Any) -> TrainingConfig:
    """How to train for ``steps``: all of a transformer, or rows around something ``frozen``, which has a ``norm`` or none."""
    fields: dict[str, Any] = {"schedule": "cosine", "learning_rate": 5e-3, "warm_up": min(100, steps // 10)}
    if frozen:
        fields = {"schedule": "one-cycle", "learning_rate": 3e-3 if norm else 2e-2, "warm_up": steps // 10}
    fields |= {"evaluate_every": 50, "evaluation_size": 1024}
    return TrainingConfig(steps=steps, **fields | chosen)
