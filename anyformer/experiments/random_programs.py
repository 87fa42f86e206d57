"""``anyformer reproduce rasp``: random RASP programs, compiled against interpreted.

Half of the programs are categorical, half real-valued (:mod:`anyformer.rasp.random_programs` states the fragments). Bars: no mismatch; at
most 5 % of the categorical and 20 % of the real-valued programs refused.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from anyformer.experiments.report import Report, require_writable, write
from anyformer.rasp.comparing import Report as Compared
from anyformer.rasp.comparing import check_random_programs

BARS = {"categorical": 0.05, "real-valued": 0.20}
"""The largest share of refused programs."""

BLOCK = 250
"""Programs of one piece of work."""


def run(folder: Path, count: int, seed: int, command: str, report: Report | None = None) -> dict[str, Any]:
    """Compare ``count`` programs on two processes; write ``rasp-programs.json`` and ``.md``; returns what ``--json`` prints."""
    require_writable(folder)
    half = count // 2
    pieces = [(fragment, first, min(BLOCK, half - first)) for fragment in BARS for first in range(0, half, BLOCK)]
    totals = {fragment: Compared(fragment, seed) for fragment in BARS}  # type: ignore[arg-type]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        work = partial(_piece, seed)
        for i, (piece, part) in enumerate(zip(pieces, pool.map(work, pieces), strict=True)):
            _add(totals[piece[0]], part)
            if report is not None:
                report(i + 1, len(pieces), f"{piece[0]}, {piece[1] + piece[2]:,} programs")
    fragments = [_told(total) for total in totals.values()]
    data = {"command": command, "fragments": fragments}
    write(folder, "rasp-programs", data, markdown(list(totals.values()), command))
    passed = all(not t.mismatches and t.refused_share <= BARS[name] for name, t in totals.items())
    return data | {"passed": passed}


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _piece(seed: int, piece: tuple[str, int, int]) -> Compared:
    fragment, first, count = piece
    return check_random_programs(count, seed, fragment, first)  # type: ignore[arg-type]


def _add(total: Compared, part: Compared) -> None:
    for name in ("programs", "inputs", "undefined", "seconds"):
        setattr(total, name, getattr(total, name) + getattr(part, name))
    total.refused.update(part.refused)
    total.mismatches += part.mismatches
    total.examples = part.examples | total.examples


def _told(total: Compared) -> dict[str, Any]:
    told = asdict(total) | {"refused_share": total.refused_share}
    return told | {"refused": dict(total.refused.most_common()), "seconds": round(total.seconds, 1)}


def markdown(totals: list[Compared], command: str) -> str:
    """The counts, and the refusals by reason with an example each."""
    lines = [
        "# Random RASP programs: compiled against interpreted",
        "",
        "A program agrees where on each of its inputs (about ten: one token, the extremes, the largest length, random ones) the network gives "
        "the interpreter's values or both raise. Numbers: 1e-10 of the largest that occurs (float32: 1e-4).",
        "",
        "| fragment | programs | inputs | no value in both | mismatches | refused | at most | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for t in totals:
        refused = f"{sum(t.refused.values())} ({t.refused_share:.1%})"
        counts = f"{t.programs:,} | {t.inputs:,} | {t.undefined:,} | {len(t.mismatches)} | {refused} | {BARS[t.fragment]:.0%}"
        lines.append(f"| {t.fragment} | {counts} | {t.seconds:.0f} |")
    lines += ["", "Refused, by reason:", "", "| fragment | programs | reason |", "|---|---|---|"]
    lines += [f"| {t.fragment} | {count} | {reason} |" for t in totals for reason, count in t.refused.most_common()]
    lines += ["", *(f"- MISMATCH {text}" for t in totals for text in t.mismatches)]
    return "\n".join([*lines, f"Made by `{command}`.", ""])
