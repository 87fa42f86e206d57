"""One function for every kind of folder that holds a target: ours, or a Hugging Face model's."""

from pathlib import Path

from torch import nn

from anyformer.storage import holds_ours
from anyformer.targets.transformer import Transformer


def load_target(folder: str | Path) -> nn.Module:
    """The target in a folder written by ``Transformer.save`` or by transformers' ``save_pretrained``.

    Raises :class:`AnyformerError` in one line for anything else. Nothing is downloaded, unpickled, or run from the folder.
    """
    folder = Path(folder)
    if not folder.is_dir() or not any(folder.iterdir()) or holds_ours(folder):
        return Transformer.load(folder)
    from anyformer.targets.huggingface.folders import load_huggingface

    return load_huggingface(folder)
