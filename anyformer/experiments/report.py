"""What every experiment does around its work: it tries its folder first, says how far it is, and leaves NAME.json and NAME.md."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeVar

from anyformer.errors import AnyformerError
from anyformer.storage import write_text

T = TypeVar("T")
Report = Callable[[int, int, str], None]
"""``report(done, of, what was done last)``."""


def require_writable(folder: Path) -> None:
    """Make the folder, and raise now rather than after minutes of work where nothing can be written into it."""
    if folder.exists() and not folder.is_dir():
        raise AnyformerError(f"{folder} is a file, a folder was expected; choose another name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise AnyformerError(f"{folder} cannot be written: {error.strerror or error}") from None


def require_seeds(seeds: Sequence[int]) -> None:
    """Raise unless there is a seed, none is negative and none is there twice."""
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise AnyformerError(f"reproduce: different seeds >= 0 expected, got {list(seeds)}")


def counted(total: int, report: Report | None) -> Callable[[str], None]:
    """``tick(what was done)``, to be called ``total`` times."""
    done = 0

    def tick(last: str) -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(done, total, last)

    return tick


def read_written(folder: Path, name: str, read: Callable[[Any], T]) -> T | None:
    """``read`` of what ``NAME.json`` holds, None where there is no such file. Raises AnyformerError for a file that is not ours."""
    path = folder / f"{name}.json"
    for taken in (path, path.with_suffix(".md")):
        if taken.is_dir():
            raise AnyformerError(f"{taken} is a folder, a file is to be written there; move it away")
    if not path.exists():
        return None
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        what = f"{type(error).__name__}: {error!s:.80}"
        raise AnyformerError(f"{path} is not a table that this version writes ({what}); move it away") from None


def require_curves(curves: Any) -> None:
    """Raise TypeError or ValueError unless these are curves: for each seed one or more pairs of a step and a number."""
    for curve in curves:
        if not [(int(step), float(value)) for step, value in curve]:
            raise ValueError("a curve without a point")


def write(folder: Path, name: str, data: Any, text: str | None = None) -> None:
    """``NAME.json`` and, of a table, ``NAME.md``: each whole or not at all."""
    write_text(folder / f"{name}.json", json.dumps(data, indent=1) + "\n")
    if text is not None:
        write_text(folder / f"{name}.md", text)


def spelled(values: Sequence[float]) -> str:
    """``99.8`` or ``99.8 ± 0.1``; "not run" of none."""
    if not values:
        return "not run"
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")
