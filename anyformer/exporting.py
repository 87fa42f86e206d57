"""Export: what a program, a module or a Network computes, as a model that other libraries load."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from anyformer.errors import AnyformerError
from anyformer.network import Network
from anyformer.program import Program
from anyformer.specialising import specialize
from anyformer.targets.reading import read


def write_huggingface(source: Program | nn.Module | Network, folder: str | Path, *, dtype: torch.dtype | None = None) -> Any:
    """Write a Network, a module that can be read, or a program (specialised first) as a Hugging Face model's folder; returns the model.

    Networks of a Llama-like class become Llama, Mistral or Qwen3. ``dtype`` defaults to the module's or program's. The folder is new,
    empty, or holds a model that is replaced; it is written beside itself and put in place whole. Raises :class:`OutsideClass` with every
    part that no Llama-like model has.
    """
    from anyformer.targets.huggingface.writing import check_free, save, to_huggingface

    if dtype not in (None, torch.float32, torch.float64):
        raise AnyformerError(f"models are written in torch.float32 or torch.float64, got {dtype!r}")
    check_free(Path(folder))
    network = read(specialize(source) if isinstance(source, Program) else source)
    own = network.source.parameters() if isinstance(network.source, nn.Module) else iter(())
    dtype = dtype or next((p.dtype for p in own), network.embedding.dtype)
    model = to_huggingface(network).to(dtype)
    save(model, Path(folder))
    return model
