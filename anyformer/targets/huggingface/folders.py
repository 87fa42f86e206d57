"""Reading a model's folder: ``config.json`` and safetensors, nothing else, checked before anything is built.

Nothing is downloaded, unpickled or run: the class comes from the installed transformers by ``model_type`` (``auto_map`` and
Python files in the folder are not looked at), and the tensors' names, shapes and dtypes are read from the files' headers and compared
with the configured model on the meta device before a single number is read.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from anyformer.errors import AnyformerError, OutsideClass
from anyformer.memory import require_memory
from anyformer.storage import DTYPES, MAX_CONFIG_BYTES
from anyformer.targets.huggingface.families import FAMILIES, Family, import_transformers
from anyformer.targets.huggingface.refusals import config_problems

MODEL, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
LEFTOVERS = (r"\.rotary_emb\.inv_freq$", r"\.masked_bias$", r"attn\.bias$", r"attention\.bias$")
"""Buffers that older versions of transformers stored: masks and frequencies, which follow from the configuration."""

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
BYTES = {"F64": 8, "F32": 4}


def load_huggingface(folder: str | Path) -> Any:
    """The model in a folder, in evaluation mode. Raises :class:`AnyformerError` in one line for anything that is not one."""
    folder = Path(folder)
    raw = _configuration(folder)
    family = FAMILIES[raw["model_type"]]
    headers = read_headers(folder)
    layers: int = raw["num_hidden_layers" if "num_hidden_layers" in family.needed else "n_layer"]
    if layers > len(headers):
        raise AnyformerError(f"{folder}: {layers} layers are configured, there are only {len(headers)} tensors")
    transformers = import_transformers()
    with quiet(transformers):
        config = make_config(folder, getattr(transformers, family.config), raw)
        problems = list(config_problems(config))
        if problems:
            raise OutsideClass(f"{folder} cannot be simulated exactly", problems)
        model = meta_model(folder, getattr(transformers, family.model), config)
    found = _matched(folder, model, headers)
    dtypes = {h.dtype for h in found.values()}
    if len(dtypes) > 1 or not dtypes <= BYTES.keys():
        raise OutsideClass(
            f"{folder} cannot be simulated exactly",
            [
                f"its tensors have dtype {', '.join(sorted(dtypes))}, all F32 or all F64 is needed: load it with transformers, "
                "then model.float().save_pretrained(a new folder)"
            ],
        )
    stated, dtype = raw.get("dtype", raw.get("torch_dtype")), dtypes.pop()
    if stated is not None and stated != str(DTYPES[dtype]).removeprefix("torch."):
        raise AnyformerError(f"{folder}: config.json says {stated!r:.40}, its tensors are {dtype}: set dtype to what they are")
    size = BYTES[dtype]
    require_memory(size * sum(numbers(h.shape) for h in found.values()), f"reading {folder}")
    tensors = _read(folder, found)
    _check_tied(folder, model, tensors)
    model.load_state_dict(tensors, strict=False, assign=True)
    with quiet(transformers):
        model.tie_weights()
    if hasattr(model.base_model, "rotary_emb"):  # its frequencies follow from the configuration
        model.base_model.rotary_emb = type(model.base_model.rotary_emb)(config)
    return model.requires_grad_(True).eval()


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """No advice and no progress bars from transformers on standard error."""
    logging = transformers.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(50)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or one line that says why not."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise AnyformerError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes; a configuration was expected")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise AnyformerError(f"{path} is not JSON ({type(error).__name__}); the file is damaged") from None
    except (OSError, ValueError) as error:
        if isinstance(error, AnyformerError):
            raise
        raise AnyformerError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise AnyformerError(f"{path} holds a {type(value).__name__}, a JSON object was expected")
    return value


def _configuration(folder: Path) -> dict[str, Any]:
    """``config.json``: its model type known, its class a causal language model, its sizes whole numbers."""
    if not folder.is_dir():
        raise AnyformerError(f"{folder} is not a folder; expected one with {CONFIG} and {MODEL}")
    if not (folder / CONFIG).exists():
        raise AnyformerError(f"{folder} has no {CONFIG}; expected an anyformer-target or a Hugging Face model's folder")
    if (folder / "adapter_config.json").exists():
        raise AnyformerError(f"{folder} holds adapters (adapter_config.json): merge them into the weights first")
    raw = read_json(folder / CONFIG)
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise AnyformerError(f"{folder / CONFIG}: model_type {kind!r} has no reader; these have: {', '.join(FAMILIES)}")
    family, problems = FAMILIES[kind], []
    made_by = raw.get("architectures")
    if made_by is not None and made_by != [family.model]:
        problems.append(f"architectures {made_by!r:.80}, expected [{family.model!r}]")
    if raw.get("quantization_config") is not None:
        problems.append("quantised weights (quantization_config)")
    problems += [f"{name} is missing" for name in family.needed if raw.get(name) is None]
    for name, value in raw.items():
        if name in _sizes(family) and value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            problems.append(f"{name} must be an integer >= 1, got {value!r:.40}")
        elif name in _sizes(family) and value is not None and value >= 2**62:
            problems.append(f"{name} overflows 64-bit integers")
    if problems:
        raise AnyformerError(f"{folder / CONFIG} is no configuration that can be read: {'; '.join(problems)}")
    return raw


def _sizes(family: Family) -> set[str]:
    return {name for name in family.needed if "eps" not in name} | {"num_key_value_heads", "head_dim", "n_inner"}


@dataclass(frozen=True)
class Header:
    """Where a tensor lies, as what, and of which shape."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]


def read_headers(folder: Path) -> dict[str, Header]:
    """All tensors of a folder from the headers of its file or shards."""
    if (folder / MODEL).exists():
        return _header(folder, MODEL)
    if not (folder / INDEX).exists():
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED)
        if pickled:
            raise AnyformerError(
                f"{folder} holds its weights as {pickled[0]}, which is never unpickled: save them as safetensors "
                "(model.save_pretrained does)"
            )
        raise AnyformerError(f"{folder} has no {MODEL}; expected a Hugging Face model's folder")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise AnyformerError(f"{folder / INDEX} has no weight_map of names to files; the file is damaged")
    found: dict[str, Header] = {}
    files = sorted(set(places.values()))
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise AnyformerError(f"{folder / INDEX} names {file!r:.80}, which is no safetensors file in the folder")
        if not (folder / file).exists():
            raise AnyformerError(f"{folder} has no {file}, which {INDEX} names")
    for file in files:
        shard = _header(folder, file)
        if shard.keys() != {name for name, where in places.items() if where == file}:
            raise AnyformerError(f"{folder / file} does not hold the tensors that {INDEX} says; the folder is damaged")
        found |= shard
    return found


def _header(folder: Path, file: str) -> dict[str, Header]:
    try:
        with safe_open(folder / file, framework="pt") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (a handle is no dict)
            return {name: Header(file, name, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except (SafetensorError, OSError, ValueError, RuntimeError, OverflowError) as error:
        raise AnyformerError(f"{folder / file} is damaged or no safetensors file ({' '.join(str(error).split())})") from None


def make_config(folder: Path, kind: Any, raw: dict[str, Any]) -> Any:
    """The configuration as transformers understands it; custom code is no part of it."""
    try:
        return kind.from_dict({k: v for k, v in raw.items() if k not in ("auto_map", "custom_pipelines")})
    except Exception as error:
        raise AnyformerError(f"{folder / CONFIG}: transformers refuses it: {' '.join(str(error).split()):.300}") from None


def meta_model(folder: Path, kind: Any, config: Any) -> Any:
    try:
        with torch.device("meta"):
            return kind(config)
    except Exception as error:
        raise AnyformerError(
            f"{folder / CONFIG}: no {kind.__name__} has these sizes: {' '.join(str(error).split()):.200}"
        ) from None


def _matched(folder: Path, model: Any, headers: dict[str, Header]) -> dict[str, Header]:
    """The model's tensors in the files, by the model's names. Raises with everything missing, unexpected or of another shape."""
    prefix, expected = model.base_model_prefix + ".", model.state_dict()
    for stored, name in FAMILIES[model.config.model_type].stored_as:
        if stored in headers and name not in headers:
            headers[name] = headers.pop(stored)
    if headers and not any(name.startswith(prefix) for name in headers):  # saved without its head, as GPT-2 was
        headers = {name if name in expected else prefix + name: h for name, h in headers.items()}
    kept = {n: h for n, h in headers.items() if n in expected or not any(re.search(p, n) for p in LEFTOVERS)}
    spare = set(_tied(model))
    problems = [f"tensor {n} is missing" for n in sorted(expected.keys() - kept.keys() - spare)]
    problems += [f"tensor {n} is not expected" for n in sorted(kept.keys() - expected.keys())]
    for name in sorted(expected.keys() & kept.keys()):
        if tuple(expected[name].shape) != kept[name].shape:
            problems.append(f"tensor {name} has shape {kept[name].shape}, expected {tuple(expected[name].shape)}")
        if kept[name].dtype not in DTYPES:
            problems.append(f"tensor {name} has dtype {kept[name].dtype}")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise AnyformerError(f"{folder} does not hold the configured model: {'; '.join(problems[:8])}{more}")
    return kept


def _tied(model: Any) -> dict[str, str]:
    """Tensors that are others under a second name."""
    return dict(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else {}


def _check_tied(folder: Path, model: Any, tensors: dict[str, Tensor]) -> None:
    for name, source in _tied(model).items():
        if name in tensors and not torch.equal(tensors[name], tensors[source]):
            raise AnyformerError(
                f"{folder}: {name} is tied to {source} (tie_word_embeddings), but holds other numbers: set tie_word_embeddings to false"
            )
        tensors[name] = tensors[source]


def _read(folder: Path, found: dict[str, Header]) -> dict[str, Tensor]:
    """The numbers; all must be finite."""
    tensors: dict[str, Tensor] = {}
    for file in sorted({h.file for h in found.values()}):
        try:
            with safe_open(folder / file, framework="pt") as handle:
                tensors |= {name: handle.get_tensor(h.name) for name, h in found.items() if h.file == file}
        except (SafetensorError, OSError, RuntimeError) as error:
            raise AnyformerError(f"{folder / file} is damaged ({' '.join(str(error).split())})") from None
    bad = [name for name, t in tensors.items() if not bool(torch.isfinite(t).all())]
    if bad:
        raise AnyformerError(f"{folder}: {', '.join(bad[:8])} hold NaN or infinite numbers; such weights have no program")
    return tensors


def numbers(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
