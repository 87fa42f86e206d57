"""Claim: the folded run's time grows about linearly with the width m (slope of log time against log m between 0.8 and 1.2).

Attention-only classes with H = 2, d = d_in = 32, L = 2 .. 7 (m = 384 .. 16,000), 64 tokens, batch 8, float32, one thread. Writes
``results/run_time_against_width.png`` where matplotlib is installed.
"""

import math
import statistics
from pathlib import Path

import torch
from measure import claim, finish, medians

import anyformer as af

torch.manual_seed(0)
tokens = torch.randint(32, (8, 64))
points = []
with torch.no_grad():
    for layers in range(2, 9):
        target = af.Transformer(vocab=32, heads=2, layers=layers, head_dim=32, features=32)
        machine = af.PathTree.for_class(target)
        program = af.compile(target, machine)
        points.append((machine.width, medians(9, run=lambda: machine(tokens, program))["run"]))  # noqa: B023
        print(f"m = {points[-1][0]:6d}: {1e3 * points[-1][1]:8.2f} ms, {1e6 * points[-1][1] / points[-1][0]:.2f} us a coordinate")

x, y = ([math.log(p[i]) for p in points] for i in (0, 1))
slope = statistics.linear_regression(x, y).slope
try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.6), layout="constrained")
    axis.loglog([p[0] for p in points], [p[1] for p in points], "o-")
    axis.set(xlabel="width m", ylabel="seconds a run", title=f"folded run, one thread: slope {slope:.2f}")
    figure.savefig(Path(__file__).parent.parent / "results" / "run_time_against_width.png", dpi=110)
except ImportError:
    print("matplotlib is not installed: no picture")
finish(claim("slope", slope, 1.2), claim("slope", slope, 0.8, at_least=True))
