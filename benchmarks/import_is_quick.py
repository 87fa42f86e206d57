"""Claim: ``import anyformer`` adds less than 1 second to ``import torch`` (median of 5 fresh processes each)."""

import statistics
import subprocess
import sys

from measure import claim, finish

CODE = "import time; s = time.perf_counter(); import {}; print(time.perf_counter() - s)"


def seconds(module: str) -> float:
    return float(subprocess.run([sys.executable, "-c", CODE.format(module)], capture_output=True, text=True, check=True).stdout)


rounds = [(seconds("torch"), seconds("anyformer")) for _ in range(5)]
finish(claim("seconds added", statistics.median(b for _, b in rounds) - statistics.median(a for a, _ in rounds), 1))
