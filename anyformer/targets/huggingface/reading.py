"""From a transformers model, or its folder, to the common language: refused with every reason, or read by its family."""

from pathlib import Path
from typing import Any

from anyformer.errors import AnyformerError, OutsideClass
from anyformer.network import Network
from anyformer.targets.huggingface.families import FAMILIES, import_transformers
from anyformer.targets.huggingface.folders import load_huggingface
from anyformer.targets.huggingface.refusals import refusals


def read_huggingface(model: Any) -> Network:
    """A causal language model of transformers, or the folder of one, in the common language (float64, a function of its weights).

    Raises :class:`OutsideClass` with every reason for a model that cannot be simulated exactly, and :class:`AnyformerError` for a
    folder that cannot be read. Nothing is downloaded, unpickled, or run from the folder.
    """
    if isinstance(model, (str, Path)):
        model = load_huggingface(model)
    if not isinstance(model, import_transformers().PreTrainedModel):
        raise AnyformerError(f"a transformers model or the folder of one is needed, got {type(model).__name__}")
    reasons = refusals(model)
    if reasons:
        raise OutsideClass(f"this {type(model).__name__} cannot be simulated exactly", reasons)
    return FAMILIES[model.config.model_type].read(model)
