"""A causal decoder from a folder, frozen: what runs between rows that somebody else learns and a read-out that somebody else learns.

    hidden (batch, n, out) = decoder(rows (batch, n, width)),      hidden[:, :p] does not depend on rows[:, p:]

The folder holds ``config.json`` and safetensors, or ``config.json`` alone: then the weights are drawn. Nothing is downloaded, unpickled or run:
the class is the installed transformers' own for ``model_type``. The sha256 of a decoder is that of its weights and of the values of its
configuration that the run depends on; it names the decoder wherever its folder lies.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anyformer import philox
from anyformer.errors import AnyformerError
from anyformer.memory import require_memory
from anyformer.spec import digest
from anyformer.storage import apart, checksum
from anyformer.targets.huggingface.families import import_transformers
from anyformer.targets.huggingface.folders import (
    CONFIG,
    LEFTOVERS,
    PICKLED,
    make_config,
    meta_model,
    quiet,
    read_headers,
    read_json,
)

NOT_THE_RUN = {
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "task_specific_params",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Entries of ``config.json`` that say where a model comes from and how text is made with it, not what its decoder computes."""
IMPLEMENTATIONS = ("attn_implementation", "experts_implementation", "auto_map", "custom_pipelines")
"""Entries that could name code from elsewhere: left out, so that transformers' own defaults run."""
PROBE = 4


@dataclass(frozen=True, eq=False)
class Decoder:
    """A frozen causal decoder: ``module`` takes rows of ``width`` (``inputs_embeds``) and gives rows of ``out``; at most ``max_positions``
    of them, where that is limited. ``std`` is that of its own token rows. ``seed`` drew its weights; None: they were in the folder."""

    module: nn.Module
    sha256: str
    family: str
    width: int
    out: int
    max_positions: int | None
    std: float
    seed: int | None


def load_decoder(folder: str | Path, seed: int | None = None) -> Decoder:
    """The decoder in a folder, in float32, in evaluation mode, nothing of it trainable.

    Where there are no weights, ``seed`` (default 0) draws them.

    Raises :class:`AnyformerError` in one line for what is not there, not safe to read, no causal decoder, or too large.
    """
    folder = Path(folder)
    raw = _configuration(folder)
    transformers = import_transformers()
    with quiet(transformers):
        kind, config = _kind(folder, transformers, raw)
        shape = meta_model(folder, kind, config)
        require_memory(4 * sum(p.numel() for p in shape.parameters()), f"the model in {folder}")
        drawn = not any(p.suffix in (*PICKLED, ".safetensors") for p in folder.iterdir())
        if seed is not None and not drawn:
            raise AnyformerError(f"{folder} holds weights, a seed draws them where there is only {CONFIG}: leave the seed out")
        module = _draw(kind, config, seed or 0) if drawn else _read(folder, kind, config)
    module.requires_grad_(False).eval()
    own: Tensor = module.get_input_embeddings().weight  # type: ignore[operator]
    out = _check_causal(folder, module, own.shape[1])
    relevant = {name: value for name, value in raw.items() if name not in (*NOT_THE_RUN, *IMPLEMENTATIONS) and name[:1] != "_"}
    tensors = checksum(apart(module.state_dict()))
    positions = getattr(config, "max_position_embeddings", None)
    return Decoder(
        module=module,
        sha256=digest({"config": relevant, "tensors": tensors}),
        family=raw["model_type"],
        width=own.shape[1],
        out=out,
        max_positions=positions if isinstance(positions, int) else None,
        std=float(own.std()),
        seed=(seed or 0) if drawn else None,
    )


def _configuration(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise AnyformerError(f"{folder} is not a folder; expected one of a transformers model, with {CONFIG}")
    if not (folder / CONFIG).exists():
        raise AnyformerError(f"{folder} has no {CONFIG}; expected the folder of a transformers model")
    if (folder / "adapter_config.json").exists():
        raise AnyformerError(f"{folder} holds adapters (adapter_config.json): merge them into the weights first")
    raw = read_json(folder / CONFIG)
    if raw.get("quantization_config") is not None:
        raise AnyformerError(f"{folder / CONFIG}: quantised weights (quantization_config); save the model unquantised")
    return raw


def _kind(folder: Path, transformers: Any, raw: dict[str, Any]) -> tuple[Any, Any]:
    """The class of the decoder without its head, and its configuration."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = raw.get("model_type")
    if not isinstance(name, str) or name not in transformers.CONFIG_MAPPING:
        raise AnyformerError(f"{folder / CONFIG}: model_type {name!r:.40} is none of transformers {transformers.__version__}")
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise AnyformerError(f"{folder}: a {name} is no causal decoder, which is needed (Llama, GPT-2, GPT-NeoX, Qwen, ...)")
    plain = {key: value for key, value in raw.items() if key.lstrip("_") not in IMPLEMENTATIONS}
    config = make_config(folder, transformers.CONFIG_MAPPING[name], plain)
    if config.is_encoder_decoder:
        raise AnyformerError(f"{folder}: a {name} is an encoder with a decoder; a decoder alone is needed (Llama, GPT-2, ...)")
    config.use_cache = False
    try:
        return transformers.MODEL_MAPPING[type(config)], config
    except KeyError:
        raise AnyformerError(f"{folder}: transformers has no {name} without a head; choose another family") from None


def _draw(kind: Any, config: Any, seed: int) -> nn.Module:
    """Matrices of linear maps and tables are normal with the configuration's ``initializer_range``, from philox, in the order of their names;
    all else is as its class begins it (norms 1, biases 0), where that is random from torch's own generator, seeded the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = kind(config)
    std = getattr(config, "initializer_range", 0.02)
    with torch.no_grad():
        for stream, (_, part) in enumerate(sorted(module.named_modules())):
            if isinstance(part, (nn.Linear, nn.Embedding)) or type(part).__name__ == "Conv1D":
                weight = part.weight
                weight.copy_(torch.from_numpy(philox.gaussian(seed, stream, tuple(weight.shape), std)))
    return module


def _read(folder: Path, kind: Any, config: Any) -> nn.Module:
    read_headers(folder)  # refuses what is pickled, damaged or incomplete
    try:
        module, about = kind.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise AnyformerError(f"{folder}: transformers cannot read it: {' '.join(str(error).split()):.300}") from None
    parts = {name for name, _ in module.named_children()}  # what lies outside of them is a head
    spare = {name: name.removeprefix(f"{module.base_model_prefix}.") for name in sorted(about["unexpected_keys"])}
    problems = [f"tensor {name} is missing" for name in sorted(about["missing_keys"])]
    problems += [
        f"tensor {name} is not expected"
        for name, inner in spare.items()
        if inner.partition(".")[0] in parts and not any(re.search(pattern, name) for pattern in LEFTOVERS)
    ]
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise AnyformerError(f"{folder} does not hold the configured model: {'; '.join(problems[:4])}{more}")
    bad = [name for name, p in module.named_parameters() if not bool(torch.isfinite(p).all())]
    if bad:
        raise AnyformerError(
            f"{folder}: {', '.join(bad[:4])} hold NaN or infinite numbers; nothing can be learned on such weights"
        )
    return module


@torch.no_grad()
def _check_causal(folder: Path, module: nn.Module, width: int) -> int:
    """The width of the decoder's outputs. Raises where it does not run on rows alone, and where later rows change what earlier ones give."""
    rows = torch.from_numpy(philox.gaussian(0, 0, (1, PROBE, width), 1.0)).float()
    other = rows.clone()
    other[:, -1] *= -1
    try:
        first, second = (module(inputs_embeds=x).last_hidden_state for x in (rows, other))
    except Exception as error:
        raise AnyformerError(f"{folder}: it does not run on embeddings alone: {' '.join(str(error).split()):.200}") from None
    if not bool(torch.isfinite(first).all()):
        raise AnyformerError(f"{folder}: its outputs are not finite in float32; nothing can be learned on it")
    scale = 1e-4 * first.abs().max()
    if bool((first - second)[:, :-1].abs().max() > scale) or not bool((first - second)[:, -1].abs().max() > 0):
        raise AnyformerError(
            f"{folder}: later tokens change what earlier ones give: an encoder; a causal decoder is needed (Llama, GPT-2, ...)"
        )
    return first.shape[-1]
