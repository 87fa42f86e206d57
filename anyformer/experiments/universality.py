"""``anyformer reproduce universality``: the application table of arXiv 2506.23551 (claims from public summaries) beside our verdicts.

Rows of the paper first, then designs with a given symmetry, further families, and modules of other packages as they are shipped (those that are
installed). Each row is certified for the group and the number of layers that are claimed. The figure shows graph families: the mask, its
group, and the layers that it needs against n; and how long a proof in balls with pair markings takes.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anyformer.approximation import certify, family
from anyformer.approximation.certifying import prove_in_balls
from anyformer.approximation.criterion import Stack, layer_bounds
from anyformer.approximation.groups import dihedral
from anyformer.approximation.patterns import Pattern, pattern_of
from anyformer.approximation.question import Question
from anyformer.approximation.zoo import ZOO
from anyformer.charts import draw_universality
from anyformer.errors import AnyformerError
from anyformer.experiments.report import Report, counted, require_writable, write
from anyformer.figures import pyplot

TOKENS, DIM = 6, 3

PAPER = (
    ("softmax", "S_n, 1 layer", 1, "symmetric"),
    ("performer", "S_n almost surely, 1 layer", 1, "symmetric"),
    ("rbf", "S_n, 1 layer", 1, "symmetric"),
    ("rbf-unnormalised", "S_n, 1 layer (which of the two is unknown)", 1, "symmetric"),
    ("skyformer", "S_n, 1 layer", 1, "symmetric"),
    ("linformer", "no symmetry, 1 layer", 1, "trivial"),
    ("longformer", "reflection, 'connectivity hops'", 5, "reflection"),
    ("bigbird", "of the pattern, 'connectivity hops'", 3, "auto"),
)
"""(family, what the paper claims, layers, group)."""

DESIGNS = (("cyclic", "C_n designs announced", 1, "cyclic"), ("dihedral", "D_n designs announced", 2, "dihedral"))
FURTHER = (
    ("mean-pooling", "", 1, "symmetric"),
    ("linear", "", 1, "symmetric"),
    ("linear-relu", "not analytic: outside its Theorem 2", 1, "symmetric"),
    ("linear-elu", "", 1, "symmetric"),
    ("polynomial", "outside its kernel condition", 1, "symmetric"),
    ("average-hard", "", 1, "symmetric"),
    ("alibi", "", 2, "reflection"),
    ("rope", "", 1, "trivial"),
    ("causal-softmax", "not treated", 2, "causal"),
    ("causal-softmax", "not treated", 2, "symmetric"),
    ("causal-rope", "", 1, "causal"),
    ("ring", "", 3, "dihedral"),
    ("directed-ring", "", 5, "cyclic"),
    ("star", "", 2, "auto"),
    ("fnet", "", 2, "auto"),
)
GRAPHS = ("longformer", "ring", "directed-ring", "star", "bigbird")
PROVED = (
    "torch MultiheadAttention",
    "performer-pytorch",
    "linformer",
    "nystrom-attention (residual off)",
    "linear-attention-transformer",
    "x-transformers",
    "BigBird (full mode)",
)
"""Packages whose group must be proved: S_n, and none for linformer."""
SIZES = tuple(range(3, 13))
DRAWN = 8
"""Tokens of the masks that are drawn."""
PROOF_SIZES = (8, 16, 32, 64)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    kind: str
    name: str
    claimed: str
    layers_asked: int
    strength: str
    holds: bool | None
    group: str
    layers: str
    theorem: str
    reason: str
    seconds: float


def rows(report: Report | None = None) -> list[Row]:
    """Certify every row."""
    tick = counted(len(PAPER) + len(DESIGNS) + len(FURTHER) + len(ZOO), report)
    out = []
    for kind, listed in (("paper", PAPER), ("design", DESIGNS), ("further", FURTHER)):
        for name, claimed, layers, group in listed:
            out.append(certified(kind, name, claimed, layers, group))
            tick(name)
    for name, exhibit in ZOO.items():
        tick(name)
        try:
            module = exhibit.make()
        except AnyformerError:
            continue
        size = {"tokens": exhibit.tokens, "dim": exhibit.dim, "layers": exhibit.layers, "group": exhibit.group}
        out.append(_row("package", name, "", exhibit.layers, lambda module=module, size=size: certify(module, **size)))
    return out


def certified(kind: str, name: str, claimed: str, layers: int, group: str) -> Row:
    """The row of one family, certified now."""
    dim = 4 if name == "fnet" else DIM
    return _row(kind, name, claimed, layers, lambda: certify(name, tokens=TOKENS, dim=dim, layers=layers, group=group))


def _row(kind: str, name: str, claimed: str, layers: int, run: Callable[[], Any]) -> Row:
    start = time.perf_counter()
    verdict = run()
    seconds = round(time.perf_counter() - start, 2)
    said = (verdict.strength, verdict.holds, verdict.group_name, str(verdict.layers), verdict.theorem, verdict.reason)
    return Row(kind, name, claimed, layers, *said, seconds)


def graph_families() -> dict[str, list[dict[str, Any]]]:
    """For each graph family and n: its exact group and the least number of layers for that group."""
    out: dict[str, list[dict[str, Any]]] = {}
    for name in GRAPHS:
        out[name] = []
        for n in SIZES:
            pattern = _pattern(name, n)
            group = Stack((pattern,), n).symmetries(certain=False)
            bounds = layer_bounds(pattern, group)
            out[name].append({"n": n, "group": group.name, "order": group.order, "lower": bounds.lower, "upper": bounds.upper})
    return out


def _pattern(name: str, n: int) -> Pattern:
    """The pattern of a family of :data:`GRAPHS`."""
    pattern = pattern_of(family(name, n, 2, 1).layers[0].operators[0], n)
    assert isinstance(pattern, Pattern)
    return pattern


def proof_times(sizes: tuple[int, ...] = PROOF_SIZES) -> list[dict[str, Any]]:
    """Seconds of the separation certificate in balls with pair markings: the D_n design, d = 4, m = 2."""
    out = []
    for n in sizes:
        question = Question(family("dihedral", n, 4, 2), n, dihedral(n), 64)
        start = time.perf_counter()
        certificate = prove_in_balls(question)
        seconds = time.perf_counter() - start
        if isinstance(certificate, str):
            raise AnyformerError(f"no certificate at n = {n}: {certificate}")
        done = certificate.remaining.issubset(dihedral(n)) and certificate.independent is None
        out.append(
            {"n": n, "seconds": round(seconds, 3), "proved": done, "evaluations": certificate.evaluations, "gap": certificate.gap}
        )
    return out


def run(folder: Path, command: str, report: Report | None = None) -> dict[str, Any]:
    """Certify, draw, and write ``universality.json``, ``.md`` and ``.png`` into the folder."""
    pyplot()
    require_writable(folder)
    table = rows(report)
    graphs = graph_families()
    times = proof_times()
    result = {"command": command, "tokens": TOKENS, "rows": [asdict(r) for r in table], "graphs": graphs, "proofs": times}
    write(folder, "universality", result, markdown(table, command))
    supports = {name: _pattern(name, DRAWN).support for name in GRAPHS}
    draw_universality(folder / "universality.png", graphs, supports, times)
    return result | {"passed": all(laws(result).values())}


def laws(result: dict[str, Any]) -> dict[str, bool]:
    """What must be true of the table wherever it is made, each true or false; packages that are not installed are not judged."""
    listed = result["rows"]
    packages = {row["name"]: row for row in listed if row["kind"] == "package"}
    return {
        "every row of the paper holds": all(row["holds"] for row in listed if row["kind"] in ("paper", "design")),
        "a causal mask is not S_n": all(
            row["strength"] == "proved-impossible"
            for row in listed
            if row["name"] == "causal-softmax" and row["claimed"] == "not treated" and row["group"].startswith("S_")
        ),
        "packages are proved": all(packages[name]["strength"] == "proved" for name in PROVED if name in packages),
        "at most three packages are unknown": sum(row["strength"] == "unknown" for row in packages.values()) <= 3,
        "the proofs in balls are proofs": all(proof["proved"] for proof in result["proofs"]),
    }


def markdown(table: list[Row], command: str) -> str:
    """The rows as a table."""
    out = [
        "# Which attention is universal: claims and verdicts",
        "",
        f"`{command}`; n = {TOKENS}, d = {DIM} for families (fnet: d = 4); packages at the sizes of docs/certify.md.",
        "Claims are those of the paper as public summaries give them.",
        "",
        "| | architecture | the paper claims | m asked | verdict | G | layers needed | by | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in table:
        verdict = f"{r.strength}{'' if r.holds is None else ': yes' if r.holds else ': no'}"
        by = r.theorem if r.holds is not None else r.reason.replace("|", "/")[:120]
        out.append(
            f"| {r.kind} | {r.name} | {r.claimed or '-'} | {r.layers_asked} | {verdict} | {r.group} | {r.layers} | {by} | {r.seconds} |"
        )
    return "\n".join(out) + "\n"
