"""``anyformer reproduce simulator``: how exact the universal simulator of attention is, and how large, at many sizes.

    error against size      transpose, product, softmax and the whole layer, in float64 and float32 (Figure 2 of 2506.18739)
    layers, heads, width    of every version beside what the published programs measure (its Table 1, and its step-by-step U)

The error is the largest absolute difference from NumPy or torch in float64 over ``draws`` random inputs of each size.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anyformer.charts import draw_simulator
from anyformer.experiments.report import Report, require_writable, write
from anyformer.figures import pyplot
from anyformer.rasp import Reals
from anyformer.rasp import compile as compile_rasp
from anyformer.rasp.compiled import CompiledProgram
from anyformer.rasp.encoding import Layer, reference
from anyformer.rasp.linear_algebra import Matrix, product, product_of_columns_and_rows, softmax_rows, transpose
from anyformer.rasp.sequences import Sequence as Rasp
from anyformer.rasp.sequences import tokens
from anyformer.rasp.simulator import AttentionSimulator

DTYPES = ("float64", "float32")
PUBLISHED = {
    "transpose": "2 layers, heads 1 + 1",
    "product": "3 layers, heads 1 + (r + c) + r c",
    "softmax": "2 layers, heads 1 + r (no maximum subtracted)",
    "layer, paper": "16 listed layers in six programs (8 on the longest path), heads H(r + c) and H r c; never one network",
}
"""What the published programs measure (layers spent on the length included)."""


@dataclass(frozen=True)
class Point:
    """One program at one size: its largest error, and its sizes."""

    program: str
    size: int
    heads_simulated: int
    dtype: str
    error: float
    bound: float
    layers: int
    heads: list[int]
    units: int
    width: int
    tokens: int
    parameters: int
    compile_seconds: float
    run_seconds: float


def cases(
    sizes: Sequence[int], layer_sizes: Sequence[int], paper_sizes: Sequence[int], heads: Sequence[int]
) -> Iterator[tuple[str, int, int]]:
    """(program, size, heads) in the order of the table."""
    for n in sizes:
        for name in ("transpose", "product", "product, paper", "softmax"):
            yield name, n, 1
    for h in heads:
        for n in layer_sizes:
            yield "layer, compact", n, h
            yield "layer, soft", n, h
        for n in paper_sizes:
            yield "layer, paper", n, h


def measure(program: str, n: int, heads: int, dtype: str, draws: int = 5) -> Point:
    """Compile one case (n x n matrices; a layer of n tokens with d = d_v = n) and compare it on random inputs."""
    began = time.perf_counter()
    rng = np.random.default_rng(n)
    layer = Layer(n, n, n, heads)
    if program.startswith("layer"):
        simulator = AttentionSimulator.for_layer(layer, program.removeprefix("layer, "), dtype=dtype)  # type: ignore[arg-type]
        compiled = simulator.compiled
    else:
        compiled = compile_rasp(_program(program, n), Reals(-100, 100), 2 * n * n, dtype=dtype, check=False)  # type: ignore[arg-type]
        simulator = None
    compiled_at = time.perf_counter()
    worst = 0.0
    for _ in range(draws):
        if simulator is None:
            numbers = rng.normal(size=2 * n * n) * (3.0 if program == "softmax" else 1.0)
            found = np.array(compiled(numbers.tolist())[: n * n])
            worst = max(worst, float(np.abs(found - _wanted(program, numbers, n)).max()))
        else:
            # entries of size 1/sqrt(n): logits of order 1 at every size
            matrices = {k: torch.from_numpy(rng.normal(size=s) / n**0.5) for k, s in layer.matrices.items()}
            worst = max(worst, float((simulator(matrices) - reference(layer, matrices)).abs().max()))
    return _point(program, n, heads, dtype, worst, compiled, compiled_at - began, (time.perf_counter() - compiled_at) / draws)


def _point(
    program: str, n: int, heads: int, dtype: str, error: float, c: CompiledProgram, compiling: float, running: float
) -> Point:
    sizes = (c.layers, list(c.heads), sum(c.units), c.width, c.max_length, c.parameters)
    return Point(program, n, heads, dtype, error, c.error, *sizes, round(compiling, 3), round(running, 3))


def _program(program: str, n: int) -> Rasp:
    a, b = Matrix(tokens, n, n), Matrix(tokens, n, n, n * n)
    made: dict[str, Callable[[], Matrix]] = {
        "transpose": lambda: transpose(a),
        "product": lambda: product(a, b),
        "product, paper": lambda: product_of_columns_and_rows(a, b),
        "softmax": lambda: softmax_rows(a),
    }
    return made[program]().values


def _wanted(program: str, numbers: np.ndarray, n: int) -> np.ndarray:
    a, b = numbers[: n * n].reshape(n, n), numbers[n * n :].reshape(n, n)
    if program == "transpose":
        return a.T.ravel()
    if program == "softmax":
        e = np.exp(a - a.max(1, keepdims=True))
        return (e / e.sum(1, keepdims=True)).ravel()
    return (a @ b).ravel()


def run(folder: Path, full: bool, command: str, report: Report | None = None) -> dict[str, Any]:
    """Measure every case, write ``simulator.json``, ``simulator.md`` and ``simulator.png``; ``full``: layers up to n = d = d_v = 12 with 4
    heads (the paper's version up to 6 and 2), else up to 6 and 2 (4 and 1)."""
    pyplot()
    require_writable(folder)
    if full:
        plan = list(cases((2, 3, 4, 6, 8, 12), (2, 3, 4, 6, 8, 10, 12), (2, 3, 4, 6), (1, 2)))
        plan += [("layer, compact", 12, 4), ("layer, soft", 12, 4)]
    else:
        plan = list(cases((2, 3, 4), (2, 3, 4, 6), (2, 3, 4), (1,)))
    points = []
    wanted = [(case, dtype) for case in plan for dtype in DTYPES]
    for i, ((program, n, heads), dtype) in enumerate(wanted):
        points.append(measure(program, n, heads, dtype, draws=2 if n >= 10 else 5))
        if report is not None:
            report(i + 1, len(wanted), f"{program}, n = {n}, {dtype}")
    data = {"command": command, "points": [asdict(p) for p in points], "published": PUBLISHED}
    write(folder, "simulator", data, markdown(points, command))
    draw_simulator(folder / "simulator.png", points)
    return data | {"passed": all(p.error <= 1e-10 for p in points if p.dtype == "float64")}


def markdown(points: Sequence[Point], command: str) -> str:
    """The table: a row a case, errors of both dtypes beside the sizes."""
    rows = {(p.program, p.size, p.heads_simulated): p for p in points if p.dtype == "float64"}
    single = {(p.program, p.size, p.heads_simulated): p.error for p in points if p.dtype == "float32"}
    lines = [
        "# The universal simulator of attention: error and size",
        "",
        "Largest difference from NumPy or torch in float64; n x n matrices, layers with n tokens and d = d_v = n; analytic mode.",
        "",
        "| program | n | H | float64 | float32 | layers | heads | units | width | tokens | numbers |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, p in rows.items():
        error32 = f"{single[key]:.1e}" if key in single else "not run"
        heads = " + ".join(map(str, p.heads))
        sizes = f"{p.layers} | {heads} | {p.units} | {p.width} | {p.tokens} | {p.parameters:,}"
        lines.append(f"| {p.program} | {p.size} | {p.heads_simulated} | {p.error:.1e} | {error32} | {sizes} |")
    lines += ["", "What the published programs measure:", ""]
    lines += [f"- {name}: {text}" for name, text in PUBLISHED.items()]
    return "\n".join([*lines, "", f"Made by `{command}`.", ""])
