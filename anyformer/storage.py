"""Folders on disk: ``config.json`` + ``model.safetensors`` + a card, written so that a killed save loses nothing.

``model.safetensors`` is self-contained: its metadata holds the configuration and a sha256 of the tensors. Replacing that one
file is the commit of a save (`os.replace` is atomic); ``config.json`` and the card are readable copies put in place right after.
A save that is killed before the commit leaves the old folder whole; after one killed between commit and copies, the ``.next``
file that it had already written stands for the copy, until the next save puts it in place.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anyformer.errors import AnyformerError

try:
    import fcntl
except ImportError:  # no file locks on this system
    fcntl = None

FORMAT = 1
REPROGRAMMING = "anyformer-reprogramming"
"""The kind of a folder that load_reprogramming reads, no program of one of our machines."""
MODEL, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}
P = ParamSpec("P")
T = TypeVar("T")
MAX_CONFIG_BYTES = 64 * 2**20


def _canonical(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=1, sort_keys=True, ensure_ascii=False)


def checksum(tensors: dict[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes of all tensors, in the order of their names."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def write_folder(folder: str | Path, kind: str, about: dict[str, Any], tensors: dict[str, Tensor], card: str) -> None:
    """Write ``kind`` (a format name) with its configuration ``about``, its tensors and a Markdown card, atomically.

    Raises :class:`AnyformerError` where the folder already holds something of another kind.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise AnyformerError(f"{folder} is a file, a folder was expected; choose another name")
    if any((folder / name).exists() for name in (MODEL, CONFIG, CARD)) and _kind_of(folder) != kind:
        raise AnyformerError(f"{folder} already holds something that is not an {kind}; choose another folder")
    tensors = apart(tensors)
    config = {"format": kind, "format_version": FORMAT, "tensors_sha256": checksum(tensors)} | about
    text = _canonical(config)
    try:
        text.encode("utf-8")
        folder.mkdir(parents=True, exist_ok=True)
    except (UnicodeEncodeError, FileExistsError, NotADirectoryError) as error:
        raise AnyformerError(f"{folder} cannot be written: {error}") from None
    with _locked(folder):
        _complete(folder)
        following = {name: folder / f".{name}.next" for name in (MODEL, CONFIG, CARD)}
        following[CONFIG].write_text(text, encoding="utf-8")
        following[CARD].write_text(card, encoding="utf-8")
        save_file(tensors, following[MODEL], metadata={"anyformer": text})
        for path in following.values():
            with open(path, "rb") as handle:
                os.fsync(handle.fileno())
        for name in (MODEL, CARD, CONFIG):  # the first replacement is the commit
            os.replace(following[name], folder / name)


def write_text(path: Path, text: str) -> None:
    """Replace a small file, atomically."""
    following = path.with_name(f".{path.name}.next")
    try:
        with open(following, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(following, path)
    except BaseException:
        following.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make renames in ``folder`` last through a power cut, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # folders cannot be opened on this system
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, and each with memory of its own (tied weights are stored twice)."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        out[name] = plain.clone() if plain.data_ptr() in seen else plain
        seen.add(plain.data_ptr())
    return out


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer a folder at a time, where the system has file locks; a killed writer's lock is gone with it."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _kind_of(folder: Path) -> str | None:
    """The format of what lies in a folder: what ``model.safetensors`` says of itself, or the configuration where that is unreadable."""
    for read in (_committed_text, lambda f: (f / CONFIG).read_text(encoding="utf-8")):
        try:
            return json.loads(read(folder)).get("format")
        except (SafetensorError, OSError, ValueError, TypeError, AttributeError, RecursionError, RuntimeError):
            continue
    return None


def holds_ours(folder: Path) -> bool:
    """Whether a folder holds (or held, before it was damaged) something that this library wrote, of whatever kind."""
    return _kind_of(folder) is not None


def _committed_text(folder: Path) -> str:
    with safe_open(folder / MODEL, framework="pt") as handle:
        return (handle.metadata() or {}).get("anyformer") or ""


def _complete(folder: Path) -> None:
    """Put the copies in place that a killed save had yet to, so that the save that follows may be killed as well."""
    following = folder / f".{CONFIG}.next"
    if not following.exists() or not (folder / MODEL).exists():
        return
    try:
        with safe_open(folder / MODEL, framework="pt") as handle:
            committed = (handle.metadata() or {}).get("anyformer") == following.read_text(encoding="utf-8")
    except (SafetensorError, OSError, ValueError):
        return
    for name in (CARD, CONFIG) if committed else ():
        if (folder / f".{name}.next").exists():
            os.replace(folder / f".{name}.next", folder / name)


@dataclass(frozen=True)
class StoredFolder:
    """An opened folder: its configuration, and the shapes and dtypes of its tensors, none of them read yet."""

    path: Path
    text: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    def expect(self, expected: dict[str, tuple[tuple[int | None, ...], torch.dtype | None]]) -> None:
        """Check names, shapes (``None``: any size) and dtypes (``None``: any floating one) before anything is read."""
        problems = [f"tensor {name} is missing" for name in sorted(expected.keys() - self.shapes.keys())]
        problems += [f"tensor {name} is not expected" for name in sorted(self.shapes.keys() - expected.keys())]
        for name in sorted(expected.keys() & self.shapes.keys()):
            shape, dtype = expected[name]
            got, kind = self.shapes[name], self.dtypes[name]
            if len(got) != len(shape) or any(w is not None and w != g for g, w in zip(got, shape, strict=True)):
                wanted = str(shape).replace("None", "any")
                problems.append(f"tensor {name} has shape {got}, expected {wanted}")
            if (kind != dtype) if dtype is not None else not kind.is_floating_point:
                problems.append(f"tensor {name} has dtype {kind}, expected {dtype or 'a floating one'}")
        if problems:
            raise AnyformerError(f"{self.path}: " + "; ".join(problems))

    def tensors(self) -> dict[str, Shaped[Tensor, "..."]]:
        """Read all tensors; checks their sha256 and that every number is finite."""
        with safe_open(self.path / MODEL, framework="pt") as handle:
            if (handle.metadata() or {}).get("anyformer") != self.text:
                raise _Disagree(f"{self.path / MODEL} was replaced while it was being read; read it again")
            tensors = {name: handle.get_tensor(name) for name in self.shapes}
        if checksum(tensors) != self.config.get("tensors_sha256"):
            raise AnyformerError(f"{self.path / MODEL}: the numbers do not match their checksum; the file is damaged")
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise AnyformerError(f"{self.path}: tensor {name} holds NaN or infinite numbers; such weights have no program")
        return tensors


def patiently(read: Callable[P, T]) -> Callable[P, T]:
    """A reader that looks again where a save committed between two of its looks."""

    @wraps(read)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(20):
            try:
                return read(*args, **kwargs)
            except _Disagree:
                time.sleep(0.01)
        return read(*args, **kwargs)

    return again


class _Disagree(AnyformerError):
    """``config.json`` and ``model.safetensors`` say different things."""


def read_folder(folder: str | Path, kind: str) -> StoredFolder:
    """Open a folder of format ``kind``. Raises :class:`AnyformerError` in one line for anything that is not one."""
    folder = Path(folder)
    if not folder.is_dir():
        raise AnyformerError(f"{folder} is not a folder; expected one with {CONFIG} and {MODEL}")
    try:
        with safe_open(folder / MODEL, framework="pt") as handle:
            text = (handle.metadata() or {}).get("anyformer")
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (a handle is no dict)
            shapes = {name: tuple(s.get_shape()) for name, s in slices.items()}
            kinds = {name: s.get_dtype() for name, s in slices.items()}
    except FileNotFoundError:
        inside = folder / "result"  # of a run
        hint = f"; give {inside}, which has one" if (inside / MODEL).exists() else ""
        raise AnyformerError(f"{folder} has no {MODEL}; expected an {kind} folder{hint}") from None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise AnyformerError(f"{folder / MODEL} is damaged or no safetensors file ({error})") from None
    if text is None or len(text) > MAX_CONFIG_BYTES:
        raise AnyformerError(f"{folder / MODEL} was not written by anyformer (no configuration inside); expected an {kind}")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        raise AnyformerError(f"{folder / MODEL}: its configuration is not JSON; the file is damaged") from None
    if not isinstance(config, dict) or config.get("format") != kind:
        found = config.get("format") if isinstance(config, dict) else None
        hint = "; load_reprogramming(folder, model) reads it" if found == REPROGRAMMING else ""
        raise AnyformerError(f"{folder} holds {found!r}, expected an {kind}{hint}")
    if config.get("format_version") != FORMAT:
        raise AnyformerError(
            f"{folder} has format version {config.get('format_version')!r}, this anyformer reads {FORMAT}; upgrade or save it anew"
        )
    _check_copy(folder, text)
    unknown = sorted({k for k in kinds.values() if k not in DTYPES})
    if unknown:
        raise AnyformerError(f"{folder / MODEL} holds dtype {', '.join(unknown)}; expected one of {', '.join(DTYPES)}")
    return StoredFolder(folder, text, config, shapes, {name: DTYPES[k] for name, k in kinds.items()})


def _check_copy(folder: Path, text: str) -> None:
    """``config.json`` must say what ``model.safetensors`` says, or be the copy that a killed save had yet to put in place."""
    following = folder / f".{CONFIG}.next"
    try:
        copy = (folder / CONFIG).read_text(encoding="utf-8") if (folder / CONFIG).exists() else None
        pending = following.read_text(encoding="utf-8") if following.exists() else None
    except OSError:  # put in place by a save just now
        raise _Disagree(f"{folder / CONFIG} is not readable text; the file is missing or damaged") from None
    except UnicodeDecodeError:
        raise AnyformerError(f"{folder / CONFIG} is not readable text; the file is damaged") from None
    if copy == text or pending == text:
        return
    if copy is None:
        raise AnyformerError(f"{folder} has no {CONFIG}; expected it beside {MODEL}")
    raise _Disagree(
        f"{folder / CONFIG} is not the configuration inside {MODEL}: one of them was changed or damaged; save the folder anew"
    )
