"""The limits: bounds and their proof in numbers, fits below N, LayerNorm, witnesses, the command, and the quoted figures."""

import copy
import itertools
import json
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import anyformer as af
from anyformer.backbones.random_backbone import build_reads
from anyformer.cli import main
from anyformer.experiments import below_width, layer_norm, lower_bound, random_weights
from anyformer.experiments.least_squares import minimise
from anyformer.experiments.limits import laws
from anyformer.operators import Attention

ROOT = Path(__file__).parent.parent
SIZES = [(2, 1), (2, 2), (3, 2), (2, 4), (5, 3), (12, 9), (10, 101)]


# --- the lower bound ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads, layers", SIZES)
def test_the_bounds_are_the_smallest_integers_and_imply_the_papers(heads: int, layers: int) -> None:
    m = lower_bound.symmetric_bound(heads, layers)
    needed = Fraction(heads * (heads * (heads + 1)) ** (layers - 1), 2 ** (layers - 1))
    assert m * (m + 1) >= 2 * needed > (m - 1) * m
    two = lower_bound.two_feature_bound(heads, layers)
    assert two**2 >= heads ** (2 * layers - 1) > (two - 1) ** 2
    for head_dim, features in ((1, 1), (2, 1), (1, 2), (2, 2)):
        bound = lower_bound.our_bound(heads, layers, head_dim, features)
        assert bound == (max(m, two) if head_dim == features == 2 else m) and bound >= af.lower_bound(heads, layers)
        # a machine that exists: a random backbone that is solved for attention's reads alone
        assert bound <= 2 * heads * head_dim * (heads**layers - 1) // (heads - 1)


@pytest.mark.parametrize("heads, layers", [(2, 1), (2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("features", [1, 2])
def test_targets_span_as_many_dimensions_as_the_proof_counts(heads: int, layers: int, features: int) -> None:
    """Sampled right sides c_h v_p u_p' (one feature: u = v), written out path by path."""
    paths = list(itertools.product(range(heads), repeat=layers - 1))
    count = heads * (heads * (heads + 1) // 2) ** (layers - 1) if features == 1 else heads ** (2 * layers - 1)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(2 * count):
        c, v, u = (0.5 + torch.rand(n, heads, dtype=torch.float64, generator=generator) for n in (1, layers, layers))
        u = v if features == 1 else u
        left, right = ([float(torch.tensor([w[l, h] for l, h in enumerate(p)]).prod()) for p in paths] for w in (v, u))
        rows.append([float(c[0, h]) * a * b for h in range(heads) for a in left for b in right])
    assert int(torch.linalg.matrix_rank(torch.tensor(rows, dtype=torch.float64), rtol=1e-9)) == count


@pytest.mark.parametrize("heads, layers", [(2, 1), (4, 1), (2, 2), (3, 2)])
def test_the_lemmas_vectors_are_independent(heads: int, layers: int) -> None:
    vectors = lower_bound.path_vectors(heads, layers, 8 * heads**layers + 4, seed=1)
    assert vectors.shape[1] == 2 * heads**layers + 1
    assert int(torch.linalg.matrix_rank(vectors)) == vectors.shape[1]
    found = lower_bound.independence(heads, layers)
    assert found["rank"] == found["vectors"] == vectors.shape[1]


def test_scores_agree_coefficient_by_coefficient() -> None:
    """e_1 R_p S_h R_p'^T e_2^T = c_h v_p u_p' for a program of a random machine, with the dense machine's own matrices."""
    generator = torch.Generator().manual_seed(3)
    v, u, c = (0.5 + torch.rand(2, dtype=torch.float64, generator=generator) for _ in range(3))
    first = torch.tensor([[1.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    second = torch.zeros(2, 4, dtype=torch.float64)
    second[0, ::2], second[1, 1::2] = c, 1.0
    maps = torch.diag_embed(torch.stack((v, u), dim=1))
    stages = tuple(af.Stage((af.Branch(Attention(2, 1, scale=1.0), probes, af.DenseMap(maps)),)) for probes in (first, second))
    network = af.Network(torch.eye(2, dtype=torch.float64), stages)
    machine = af.Random.for_class(network)
    E, dense = af.compile(network, machine).embedding, machine.literal()
    for h, p, q in itertools.product(range(2), repeat=3):
        own = dense.order[1].banks[0].own[:, h, 0]
        left, right = (E[a] @ dense.order[0].banks[0].R_V[path] for a, path in ((0, p), (1, q)))
        score = (left @ own[:, :1]) @ (right @ own[:, 1:])
        torch.testing.assert_close(score, c[h] * v[p] * u[q], rtol=1e-9, atol=1e-9)


# --- below N --------------------------------------------------------------------------------------------------------------------


def test_the_narrow_machine_is_the_random_machine_where_that_exists() -> None:
    network = below_width.make_target(2, 2, 2, 4, seed=0)
    tokens = torch.arange(12).reshape(2, 6)
    known = network.network_class
    assert (below_width.attention_reads(known), below_width.required_reads(known)) == (24, 40)
    machine = af.Random.for_class(network, width=44, law="gaussian", seed=7)
    unit = replace(network, embedding=torch.eye(4, dtype=torch.float64))
    E = af.compile(unit, machine).embedding  # rows: what the program says of each feature
    narrow = below_width.NarrowMachine(known, 44, 7)
    mine = narrow.patterns(E, network.embedding[tokens])
    theirs = torch.stack(machine.trace(tokens, af.compile(network, machine)).patterns, dim=1)
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    wanted: list[torch.Tensor] = []
    network.run(tokens, patterns=wanted)
    torch.testing.assert_close(mine, torch.stack(wanted, dim=1), rtol=1e-9, atol=1e-9)
    assert float((wanted[1] - 1 / 6).abs().max()) > 0.3  # patterns are far from uniform: an error is an error


def test_attention_is_exact_from_its_reads_on_and_not_before() -> None:
    below, at = (below_width._one((2, 2, 2, 4), m, seed=1, starts=1, steps=0) for m in (23, 24))
    assert below["attention_only"] > 1e-2 > 1e-9 > at["attention_only"] and at["compiled"] > 1e-2
    assert below_width._one((2, 2, 2, 4), 40, seed=1, starts=1, steps=0)["compiled"] < 1e-9


def test_the_optimiser_reaches_the_count_and_not_one_below() -> None:
    """One coordinate fewer than attention's reads: an exact embedding that no linear system gives."""
    assert below_width.counted_width(2, 2, 2, 4) == 20 and below_width.counted_width(2, 2, 1, 3) == 11
    below, at = (below_width._one((2, 2, 1, 3), m, seed=1, starts=1, steps=60) for m in (10, 11))
    assert at["optimised"] < 1e-9 < 1e-2 < min(below["optimised"], at["attention_only"])
    row = below_width.counts(1, 1, 0, ((2, 2, 1, 3),))[0]
    assert (row["counted_width"], row["attention_reads"]) == (11, 12) and row["one_above"] < 1e-9 < row["at_count"]


def test_the_optimiser_solves_and_is_the_least_squares_solution_where_there_is_none() -> None:
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((9, 4), (9, 3)))
    E, rms = minimise(lambda e: A @ e - B, torch.zeros(4, 3, dtype=torch.float64), 60)
    torch.testing.assert_close(E, torch.linalg.lstsq(A, B).solution, rtol=1e-7, atol=1e-7)
    assert rms == pytest.approx(float((A @ E - B).square().mean().sqrt()))
    wanted = torch.tanh(A @ torch.randn(4, 3, dtype=torch.float64, generator=generator))
    _, rms = minimise(lambda e: torch.tanh(A @ e) - wanted, torch.zeros(4, 3, dtype=torch.float64), 100)
    assert rms < 1e-13


# --- LayerNorm ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constant", [False, True])
def test_a_standard_layer_norm_stays_above_its_floor_and_ours_is_exact(constant: bool) -> None:
    found = layer_norm.fit(16, seed=2, constant=constant, starts=1, steps=25)
    assert found["floor"] > 0.3 and found["error"] > 0.1  # with a constant feature the floor holds in the limit only
    if constant:
        assert found["at_zero"] < found["error"] / 2
    else:
        assert found["error"] >= found["floor"] * (1 - 1e-9)
        assert found["at_zero"] == pytest.approx(found["floor"], rel=1e-12)
    assert 0 <= layer_norm.norm_operator(2) < 1e-12


def test_the_inputs_are_zero_and_mirror_images() -> None:
    x = layer_norm.inputs(0)
    half = (len(x) - 1) // 2
    assert not x[0].any() and torch.equal(x[1 : 1 + half], -x[1 + half :])
    assert float(x.abs().max()) > 500


# --- random weights -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        dict(vocab=3, heads=2, layers=2, head_dim=2, features=3),
        dict(vocab=3, heads=2, layers=2, head_dim=1, features=2, residual=True),
        dict(vocab=3, heads=1, layers=1, head_dim=2, features=3, residual=True, mlp=2, gated=True),
    ],
)
def test_reads_of_the_dense_matrices_are_the_machines(sizes: dict) -> None:
    machine = af.Random.for_class(af.TransformerConfig(**sizes), seed=4)
    assert torch.equal(random_weights.read_matrix(machine.literal()), build_reads(machine.recipe)[0])


def test_determinants_are_exact() -> None:
    assert random_weights.integer_determinant([[0, 2, 1], [3, 0, 5], [1, 1, 0]]) == 13
    assert random_weights.integer_determinant([[1, 2], [2, 4]]) == 0
    assert random_weights.integer_determinant([[0, 1], [1, 0]]) == -1
    generator = torch.Generator().manual_seed(1)
    for n in (1, 2, 5, 8):
        matrix = torch.randint(-9, 10, (n, n), generator=generator)
        exact = random_weights.integer_determinant(matrix.tolist())
        assert exact == round(float(torch.linalg.det(matrix.double()))) and isinstance(exact, int)


@pytest.mark.parametrize("residual, reads", [(False, 44), (True, 106)])
def test_the_zero_one_machine_is_a_witness(residual: bool, reads: int) -> None:
    found = random_weights.witness(residual)
    assert found["reads"] == reads and abs(found["determinant"]) == 1
    assert found["slogdet"] == [float(found["determinant"]), 0.0]


def test_ordinary_units_are_too_few() -> None:
    found = random_weights.random_mlp(seed=3)
    few, enough = found["ordinary"], found["enough"]
    assert few["units"] == 4 and few["rank"] < few["reads"] // 2 and few["residual"] > 1e-2
    assert enough["units"] == 4 * 8 and enough["rank"] == enough["reads"] and enough["residual"] < 1e-10


# --- the command ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp("limits") / "out"
    return main(["limits", "--quick", "-o", str(folder)]), folder


def test_the_command_writes_what_it_says(quick: tuple[int, Path]) -> None:
    code, folder = quick
    result = json.loads((folder / "limits.json").read_text())
    assert code == 0 and result["passed"] is True and result["quick"] is True
    assert all((folder / f"{name}.png").stat().st_size > 10_000 for name in ("below_width", "conditioning", "layer_norm"))
    assert list(result) == ["quick", "lower_bound", "below_width", "layer_norm", "random_weights", "passed"]
    assert {name for row in result["lower_bound"]["standing"] for name in row["machines"]} == set(af.MACHINES)


def test_every_law_can_fail(quick: tuple[int, Path]) -> None:
    result = json.loads((quick[1] / "limits.json").read_text())
    assert all(laws(result).values())
    spoil = {
        "the lemma's": lambda r: r["lower_bound"]["independence"][0].update(rank=1),
        "no attention-only": lambda r: r["lower_bound"]["standing"][0]["machines"]["looped"].update(width=1),
        "nothing is exact": lambda r: r["below_width"]["curve"][0].update(width=2, optimised={"min": 0.0}),
        "attention is": lambda r: r["below_width"]["curve"][-1]["attention_only"].update(max=1.0),
        "programs are": lambda r: r["below_width"]["curve"][-1]["compiled"].update(max=1.0),
        "a standard": lambda r: r["layer_norm"]["fits"][0].update(error=0.0),
        "a norm over": lambda r: r["layer_norm"]["verified"]["pre"].update(passed=False),
        "the 0/1": lambda r: r["random_weights"]["witness"]["residual"].update(determinant=0),
        "r ordinary": lambda r: r["random_weights"]["random_mlp"]["enough"].update(rank=1),
    }
    for start, change in spoil.items():
        broken = copy.deepcopy(result)
        change(broken)
        assert [name for name, holds in laws(broken).items() if not holds] == [n for n in laws(result) if n.startswith(start)]


def test_unusable_output_is_one_line_before_any_work(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for folder, message in (("file", "is a file, a folder was expected"), ("file/below", "cannot be written")):
        assert main(["limits", "-o", str(tmp_path / folder)]) == 2
        out, err = capsys.readouterr()
        assert err.count("\n") == 1 and message in err and "laws" not in out
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["limits", "--quick", "-o", str(tmp_path / "new"), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "pip install 'anyformer[viz]'" in err and not (tmp_path / "new").exists()


# --- the quoted figures ---------------------------------------------------------------------------------------------------------


def rows(result: dict[str, Any]) -> dict[str, str]:
    """Table name -> its rows, as docs/limits.md prints them."""
    bound, below, norm, weights = (result[k] for k in ("lower_bound", "below_width", "layer_norm", "random_weights"))

    def table(lines: list[list[str]]) -> str:
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def sizes(row: dict[str, Any]) -> str:
        return ", ".join(str(row[k]) for k in ("heads", "layers", "head_dim", "features"))

    standing = []
    for row in bound["standing"]:
        tree = row["machines"]["path-tree"]
        assert all(row["machines"][name] == tree for name in ("looped", "random"))
        standing.append(
            [sizes(row), f"{row['bound']:,}", f"{row['our_bound']:,}", f"{tree['width']:,} ({tree['over_bound']:,.3g} x)"]
        )
    fits = []
    for width in sorted({row["width"] for row in norm["fits"]}):
        here = [row for row in norm["fits"] if row["width"] == width]
        names = ("floor", "error", "error_at_zero", "error_with_constant", "error_at_zero_with_constant")
        fits.append([str(width), *(f"{sum(row[k] for row in here) / len(here):.3f}" for k in names)])
    conditions = [weights["condition"][name] for name in ("least", "recommended")]
    mlps = [weights["random_mlp"][name] for name in ("ordinary", "enough")]
    errors = [
        (row["width"], row["optimised"]["min"], *(row[k]["median"] for k in ("optimised", "attention_only", "compiled")))
        for row in below["curve"]
    ]
    return {
        "independence": table(
            [
                [str(row[k]) for k in ("heads", "paths_through", "vectors", "rank")] + [f"{row['smallest_over_largest']:.1e}"]
                for row in bound["independence"]
            ]
        ),
        "standing": table(standing),
        "below": table([[str(width), *(f"{e:.1e}" for e in found)] for width, *found in errors]),
        "counts": table(
            [
                [sizes(row), str(row["attention_reads"]), str(row["counted_width"])]
                + [f"{row[k]:.1e}" for k in ("one_below", "at_count", "one_above")]
                for row in below["counts"]
            ]
        ),
        "layer_norm": table(fits),
        "condition": table([[str(c["width"]), *(f"{c[k]:.2f}" for k in ("smallest", "median", "largest"))] for c in conditions]),
        "mlp": table([[str(r["units"]), str(r["reads"]), str(r["rank"]), f"{r['residual']:.1e}"] for r in mlps]),
    }


def test_the_page_quotes_the_committed_results() -> None:
    """Every table is what results/limits.json says, in full; so is every figure in the text; every law holds there."""
    result = json.loads((ROOT / "results" / "limits.json").read_text())
    page = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    assert result["quick"] is False and result["passed"] is True and all(laws(result).values())
    quoted = rows(result)
    for name, text in quoted.items():
        assert f"|---|\n{text}\n" in page, name
    assert page.count("|---|\n") == len(quoted)
    below, norm, weights = (result[k] for k in ("below_width", "layer_norm", "random_weights"))
    for text in (
        f"m >= N = {below['required_reads']} (here",
        f"N without the output columns, {below['attention_reads']}, and for",
        f"Between our bound, {below['our_bound']}, and {below['attention_reads']} nothing is proven",
        f"{below['starts']} starts (the first: least squares) for each of {below['seeds']} seeds",
        f"reaches exact attention at m = {below['narrowest_exact']}, narrower",
        f"`d_in * {below['attention_reads']} - H L d^2` numbers",
        f"m >= {below['attention_reads']} - H L d^2 / d_in = {below['counted_width']}",
        f"largest error {norm['norm_operator_error']:.1e} on the same inputs",
        f"pre-LayerNorm to {norm['verified']['pre']['max_abs_error']:.1e}",
        f"post-LayerNorm to {norm['verified']['post']['max_abs_error']:.1e}",
        f"{weights['witness']['attention_only']['determinant']:+d} for attention only",
        f"{weights['witness']['residual']['determinant']:+d} with a residual",
        f"of {weights['condition']['seeds']} backbones, N = {weights['condition']['required_reads']}",
    ):
        assert text in " ".join(page.split()), text
