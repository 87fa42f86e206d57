"""How the benchmarks measure: one thread, alternating rounds in one process, medians, and ratios of them."""

import statistics
import sys
import time
from collections.abc import Callable

import torch

torch.set_num_threads(1)


def medians(rounds: int, clock: Callable[[], float] = time.perf_counter, **jobs: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each job; the jobs take turns, so that a busy moment of the machine hits all of them. With the clock
    ``time.process_time`` the turns of other programs do not count."""
    for job in jobs.values():
        job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            start = clock()
            job()
            times[name].append(clock() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def claim(text: str, value: float, bound: float, at_least: bool = False) -> bool:
    """Print one claim with its figure; returns whether it holds."""
    holds = value >= bound if at_least else value <= bound
    print(f"{'holds' if holds else 'FAILS'}: {text}: {value:.3g} ({'>=' if at_least else '<='} {bound:g})")
    return holds


def finish(*claims: bool) -> None:
    """Exit code 1 where a claim fails."""
    sys.exit(0 if all(claims) else 1)
