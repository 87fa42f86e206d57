"""Verdicts on declared architectures: the reference cases, brute force over all permutations, soundness, and what reports say."""

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flint")

from anyformer.approximation import (
    Architecture,
    ColourBias,
    FeedForward,
    GatedFeedForward,
    Group,
    Layer,
    LayerBounds,
    NotCertified,
    Positions,
    Verdict,
    certify,
    cyclic,
    dihedral,
    family,
    feed_forward_condition,
    grid_translations,
    product,
    reflection,
    symmetric,
    trivial,
    wreath,
)
from anyformer.approximation.colourings import Coloured, automorphisms, mapping
from anyformer.approximation.criterion import Stack, layer_bounds
from anyformer.approximation.families import FAMILIES, circulant
from anyformer.approximation.feedforward import LIPSCHITZ
from anyformer.approximation.groups import compose, group_of, inverse
from anyformer.approximation.patterns import OUTSIDE, Pattern, pattern_of
from anyformer.errors import AnyformerError
from anyformer.operators import (
    FUNCTIONS,
    RBF,
    ALiBi,
    Attention,
    AverageHard,
    Causal,
    FeatureMap,
    FixedMatrix,
    Identity,
    LayerNorm,
    Linformer,
    Neighbours,
    Polynomial,
    RelativeBias,
    RMSNorm,
    Rotary,
    TableBias,
    Window,
)


def attention(**parts):
    return Attention(1, 2, **parts)


def undirected(n, edges):
    rows = [{i} for i in range(n)]
    for i, j in edges:
        rows[i].add(j)
        rows[j].add(i)
    return Neighbours(tuple(tuple(sorted(row)) for row in rows))


ORDER_TWO = undirected(6, [(0, 1), (0, 4), (1, 2), (1, 5), (2, 3), (3, 4), (3, 5), (4, 5)])


def row_constant(n):
    """A bias a_i of the query alone."""
    return TableBias((tuple((float(i),) * n for i in range(n)),))


def orbit_bias(group):
    """One colour for each orbit of ordered pairs, by listing the group."""
    n = group.degree
    pairs = {(i, j): min((g[i], g[j]) for g in group.elements) for i in range(n) for j in range(n)}
    order = {pair: k for k, pair in enumerate(sorted(set(pairs.values())))}
    return ColourBias.of([[order[pairs[i, j]] for j in range(n)] for i in range(n)])


# --- the reference cases --------------------------------------------------------------------------------------------------------------

YES, FAMILY, NO = "proved", "proved-family", "proved-impossible"
CASES = [
    # what, n, d, m, target, strength, layers that the target needs (lower, upper, impossible) or None
    ("softmax", 5, 2, 1, "symmetric", FAMILY, (1, 1, False)),
    ("softmax", 7, 1, 1, "symmetric", FAMILY, (1, 1, False)),
    ("softmax", 5, 2, 1, "trivial", NO, (0, None, True)),
    ("mean-pooling", 4, 2, 1, "symmetric", FAMILY, (1, 1, False)),
    ("identity", 3, 2, 0, "symmetric", NO, (0, None, True)),
    ("linear", 4, 3, 1, "symmetric", FAMILY, (1, 1, False)),
    ("linear-relu", 4, 3, 1, "symmetric", FAMILY, (1, 1, False)),
    ("average-hard", 4, 2, 1, "symmetric", FAMILY, (1, 1, False)),
    ("performer", 4, 2, 1, "symmetric", FAMILY, (1, 1, False)),
    ("rbf", 4, 2, 1, "symmetric", FAMILY, (1, 1, False)),
    ("linformer", 4, 2, 1, "trivial", FAMILY, None),
    ("linformer", 4, 2, 1, "cyclic", FAMILY, None),
    ("cyclic", 5, 2, 1, "cyclic", FAMILY, (1, 1, False)),
    ("cyclic", 5, 2, 1, "reflection", NO, (0, None, True)),
    ("dihedral", 4, 2, 1, "dihedral", FAMILY, (1, 1, False)),
    ("dihedral", 5, 2, 1, "dihedral", NO, (2, 2, False)),
    ("dihedral", 5, 2, 2, "dihedral", FAMILY, (2, 2, False)),
    (attention(bias=ALiBi((0.1,))), 3, 2, 1, "reflection", FAMILY, (1, 1, False)),
    (attention(bias=ALiBi((0.1,))), 4, 2, 1, "reflection", NO, (2, 2, False)),
    (attention(bias=ALiBi((0.1,))), 5, 2, 1, "reflection", NO, (2, 2, False)),
    (attention(bias=ALiBi((0.1,))), 5, 2, 2, "reflection", FAMILY, (2, 2, False)),
    (attention(bias=RelativeBias(((0.75, 0.5, 0.25, 0.0, -0.25, -0.5, -0.75),))), 4, 2, 1, "trivial", YES, (1, 1, False)),
    (attention(bias=TableBias((tuple((0.5, 0.25, 1.5, -1.0) for _ in range(4)),))), 4, 2, 1, "trivial", YES, (1, 1, False)),
    (attention(bias=row_constant(5)), 5, 2, 1, "symmetric", YES, (1, 1, False)),
    (attention(bias=row_constant(5)), 5, 2, 1, "trivial", NO, (0, None, True)),
    (attention(kernel=RBF(normalised=False), bias=row_constant(5)), 5, 2, 1, "trivial", NO, (2, 2, False)),
    (attention(kernel=RBF(normalised=False), bias=row_constant(5)), 5, 2, 2, "trivial", YES, (2, 2, False)),
    ("longformer", 5, 2, 3, "symmetric", NO, (4, 4, False)),
    ("longformer", 5, 2, 3, "reflection", NO, (4, 4, False)),
    ("longformer", 5, 2, 4, "reflection", YES, (4, 4, False)),
    ("longformer", 4, 2, 2, "reflection", NO, (3, 3, False)),
    ("longformer", 4, 2, 3, "reflection", YES, (3, 3, False)),
    (attention(mask=Window(3, 3)), 5, 2, 2, "reflection", NO, (0, None, True)),
    ("ring", 5, 2, 1, "dihedral", NO, (2, 2, False)),
    ("ring", 5, 2, 2, "dihedral", FAMILY, (2, 2, False)),
    ("directed-ring", 5, 2, 3, "cyclic", NO, (4, 4, False)),
    ("directed-ring", 5, 2, 4, "cyclic", FAMILY, (4, 4, False)),
    ("star", 5, 2, 1, "auto", NO, (2, 2, False)),
    ("star", 5, 2, 2, "auto", FAMILY, (2, 2, False)),
    (attention(mask=ORDER_TWO), 6, 2, 2, [(2, 1, 0, 4, 3, 5)], NO, (3, 3, False)),
    (attention(mask=ORDER_TWO), 6, 2, 2, "symmetric", YES, (2, 2, False)),
    (attention(mask=ORDER_TWO), 6, 2, 3, [(2, 1, 0, 4, 3, 5)], YES, (3, 3, False)),
    ("causal-softmax", 4, 2, 2, "symmetric", NO, (0, None, True)),
    ("causal-softmax", 3, 2, 1, "causal", NO, None),
    ("causal-softmax", 4, 2, 1, "causal", NO, None),
    ("causal-softmax", 2, 2, 1, "causal", FAMILY, None),
    ("causal-softmax", 4, 2, 2, "causal", FAMILY, None),
    ("causal-alibi", 4, 2, 1, "causal", FAMILY, None),
    ("causal-rope", 4, 2, 1, "causal", FAMILY, None),
    ("causal-rope", 4, 2, 3, "trivial", NO, (0, None, True)),
    ("rope", 4, 2, 1, "trivial", FAMILY, None),
    (attention(mask=undirected(4, [(0, 1), (2, 3)])), 4, 2, 3, "symmetric", NO, (0, None, True)),
    ("fnet", 4, 3, 1, "auto", NO, None),
    ("fnet", 4, 3, 2, "auto", YES, None),
    (attention(bias=orbit_bias(product(cyclic(2), cyclic(3)))), 5, 2, 1, "auto", YES, (1, 1, False)),
    (attention(bias=orbit_bias(grid_translations(2, 3))), 6, 2, 1, grid_translations(2, 3), YES, (1, 1, False)),
    (attention(bias=orbit_bias(wreath(2, 3))), 6, 2, 1, wreath(2, 3), NO, (2, 2, False)),
    (attention(bias=orbit_bias(wreath(2, 3))), 6, 2, 2, wreath(2, 3), YES, (2, 2, False)),
    (attention(bias=orbit_bias(wreath(3, 2))), 6, 2, 1, wreath(3, 2), YES, (1, 1, False)),
    (
        attention(bias=orbit_bias(Group(5, ((1, 2, 0, 3, 4), (1, 2, 3, 4, 0))))),
        5,
        2,
        3,
        [(1, 2, 0, 3, 4), (1, 2, 3, 4, 0)],
        NO,
        (0, None, True),
    ),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c[0] if isinstance(c[0], str) else type(c[0]).__name__}-{c[1]}-{c[3]}-{c[4]}"[:60]
)
def test_reference_cases(case):
    what, n, d, m, target, strength, layers = case
    verdict = certify(what, tokens=n, dim=d, layers=m, group=target)
    assert verdict.strength == strength, str(verdict)
    if layers is not None:
        assert verdict.layers == LayerBounds(*layers)


def test_exact_colours_decide_not_floats():
    """With slopes 0.1 the floats b[3] - b[2] and b[1] - b[0] differ; the rationals that the floats are do as well: 0.1 * 3 is formed exactly."""
    for slope in (0.1, 0.3, 1 / 3):
        assert certify(attention(bias=ALiBi((slope,))), tokens=4, dim=2, layers=2, group="reflection").holds
        table = tuple(tuple(-slope * abs(i - j) for j in range(5)) for i in range(5))
        assert certify(attention(bias=TableBias((table,))), tokens=5, dim=2, layers=2, group="reflection").holds


def test_smallest_group_where_none_is_named():
    verdict = certify(attention(bias=ALiBi((0.1,))), tokens=4, dim=2, layers=1)
    assert (
        verdict.holds
        and verdict.claim.group is not None
        and verdict.claim.group.order == 8
        and verdict.symmetry == reflection(4)
        and verdict.exact
    )
    for what, dim, order in ((attention(mask=Window(3, 3)), 2, 12), ("fnet", 2, 8), ("fnet", 3, 2)):
        group = certify(what, tokens=5, dim=dim, layers=2).claim.group
        assert group is not None and group.order == order


def test_masks_of_several_kinds_in_their_order():
    path, full = Layer((attention(mask=Window(1, 1)),)), Layer((attention(),))
    good = certify(Architecture((path, full), 2), tokens=4, dim=2, group="reflection")
    bad = certify(Architecture((full, path), 2), tokens=4, dim=2, group="reflection")
    assert good.strength == YES and bad.strength == NO and "N2" in bad.theorem


def test_norms():
    layer, rms = Layer((attention(),)), RMSNorm(2)
    everywhere = Architecture((layer,), 2, attention_norm=LayerNorm(2), feed_forward_norm=LayerNorm(2))
    for target in ("symmetric", "trivial"):
        verdict = certify(everywhere, tokens=3, dim=2, group=target)
        assert verdict.strength == NO and "N4" in verdict.theorem
    both = certify(Architecture((layer,), 2, attention_norm=rms, feed_forward_norm=rms), tokens=3, dim=2, group="symmetric")
    attention_only = certify(Architecture((layer,), 2, attention_norm=LayerNorm(2)), tokens=3, dim=2, group="symmetric")
    assert both.holds and attention_only.holds
    blocked = certify(Architecture((layer,), 2, feed_forward_norm=LayerNorm(2)), tokens=3, dim=2, group="symmetric")
    assert blocked.strength == "unknown" and "LayerNorm in front of the feed-forward part" in blocked.reason
    last = certify(Architecture((layer,), 2, output_norm=LayerNorm(2)), tokens=3, dim=2, group="symmetric")
    assert last.strength == NO and "N5" in last.theorem


def test_positions():
    layer = (Layer((attention(),)),)
    fixed = certify(Architecture(layer, 2, positions=Positions("input", "fixed")), tokens=4, dim=2, group="trivial")
    assert fixed.strength == NO and "N7" in fixed.theorem
    trained = certify(Architecture(layer, 2, positions=Positions()), tokens=4, dim=2, group="trivial")
    assert trained.strength == FAMILY
    inside = certify(Architecture(layer, 2, positions=Positions("attention")), tokens=4, dim=2, group="trivial")
    assert inside.strength == YES and "Corollary 1" in inside.theorem


def test_without_a_residual_path_the_mean_is_never_a_yes():
    mean = Architecture(family("mean-pooling", 4, 2, 1).layers, 2, skip="none")
    assert certify(mean, tokens=4, dim=2, group="symmetric").holds is None


def test_one_token_needs_no_attention():
    verdict = certify("softmax", tokens=1, dim=3)
    assert verdict.holds and verdict.layers == LayerBounds(0, 0)
    assert certify("softmax", tokens=1, dim=3, feed_forward=FeedForward("square")).holds is None


def test_relative_bias_without_a_mask_that_grows_along_the_row():
    """lambda (j - i): all rows equal softmax(lambda j), which only the identity keeps: m = 1 is enough."""
    rows = tuple(tuple(0.25 * (j - i) for j in range(5)) for i in range(5))
    assert certify(attention(bias=TableBias((rows,))), tokens=5, dim=2, group="trivial").strength == YES


# --- brute force ----------------------------------------------------------------------------------------------------------------------


def dense(logits, parameters, x):
    """A stack written out: x + sum_h softmax(q k^T + B_h) x W_h, between residual tanh layers."""
    for table, (wq, wk, wv, *hidden) in zip(logits, parameters, strict=True):
        x = feed_forward(x, *hidden)
        total = 0
        for h, bias in enumerate(table):
            scores = x @ wq[h] @ (x @ wk[h]).T + bias
            weights = np.exp(scores - scores.max(1, keepdims=True))
            total = total + weights / weights.sum(1, keepdims=True) @ x @ wv[h]
        x = x + total
    return feed_forward(x, *parameters[-1][3:])


def feed_forward(x, w1, b1, w2):
    return x + np.tanh(x @ w1 + b1) @ w2


def draw_parameters(rng, heads, d=2, hidden=8):
    def numbers(*shape):
        return 0.4 * rng.standard_normal(shape)

    return (*(numbers(heads, d, d) for _ in range(3)), 2 * numbers(d, hidden), numbers(hidden), numbers(hidden, d))


def brute_force(logits, n, seed=0):
    """(dependences (n, n), {s: set of sigma with F_sigma(s) o sigma = F_s}) by evaluating every permutation at random points."""
    rng = np.random.default_rng(seed)
    depends, bad = np.zeros((n, n), dtype=bool), {s: set(itertools.permutations(range(n))) for s in range(n)}
    for _ in range(3):
        parameters = [draw_parameters(rng, len(table)) for table in logits]
        x = rng.standard_normal((n, 2))
        out = dense(logits, parameters, x)
        for u in range(n):
            moved = x.copy()
            moved[u] += rng.standard_normal(2)
            depends[:, u] |= np.abs(dense(logits, parameters, moved) - out).max(1) > 1e-9
        for sigma in itertools.permutations(range(n)):
            y = np.empty_like(x)
            y[list(sigma)] = x
            image = dense(logits, parameters, y)
            for s in range(n):
                if np.abs(image[sigma[s]] - out[s]).max() > 1e-9:
                    bad[s].discard(sigma)
    return depends, bad


def all_bad(stack):
    """Every bad permutation of every slot, from the cosets that the criterion finds up to symmetry."""
    n, known = stack.tokens, stack.symmetries(certain=False)
    out = {s: set() for s in range(n)}
    for coset in stack.bad(certain=True):
        inner = Group(n, coset.generators).elements
        for g, h in itertools.product(known.elements, repeat=2):
            out[g[coset.source]] |= {compose(h, compose(coset.tau, compose(a, inverse(g)))) for a in inner}
    return out


@st.composite
def structures(draw):
    """Logits of 1 to 3 layers, 1 or 2 heads, few values so that coincidences are frequent; no empty row."""
    n = draw(st.integers(2, 4))
    values = st.sampled_from([-math.inf, 0.0, 0.5])
    table = st.lists(st.lists(values, min_size=n, max_size=n), min_size=n, max_size=n)
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    tables = np.array(draw(st.lists(table, min_size=layers * heads, max_size=layers * heads)))
    tables = tables.reshape(layers, heads, n, n)
    for index in np.ndindex(layers, heads, n):
        if np.isinf(tables[index]).all():
            tables[(*index, index[-1])] = 0.0
    return tables


def pattern_of_logits(table):
    """Rows up to a shift, as exact numbers: written here again, by hand."""
    top = table.max(-1, keepdims=True)
    shifted = np.where(np.isinf(table), np.inf, table - top)
    ids = {value: k for k, value in enumerate(sorted(set(shifted.ravel().tolist()) - {math.inf}))}
    colours = np.array([OUTSIDE if math.isinf(x) else ids[x] for x in shifted.ravel()]).reshape(table.shape)
    return Pattern(colours, colours, True)


@given(structures())
@settings(max_examples=25)
def test_theorem_4_agrees_with_brute_force(tables):
    n = tables.shape[-1]
    stack = Stack(tuple(pattern_of_logits(t) for t in tables), n)
    depends, bad = brute_force(tables, n)
    assert np.array_equal(stack.all_levels >= 0, depends | np.eye(n, dtype=bool))
    if stack.unreachable is None:
        assert all_bad(stack) == bad
        everything = {sigma for of_slot in bad.values() for sigma in of_slot}
        for group in (symmetric(n), trivial(n), reflection(n), cyclic(n)):
            holds = all(sigma in group for sigma in everything)
            assert (stack.violation(group, certain=True) is None) == holds == (stack.violation(group, certain=False) is None)
        assert stack.generated().issubset(symmetric(n)) and all(sigma in stack.generated() for sigma in everything)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=12)
def test_random_digraphs_of_five_tokens_agree_with_brute_force(seed):
    """The whole verdict: masks through our operators, m layers, against 120 permutations and 5 slots."""
    rng = np.random.default_rng(seed)
    allowed = rng.random((5, 5)) < 0.45
    allowed |= ~allowed.any(1)[:, None] & np.eye(5, dtype=bool)
    mask = Neighbours(tuple(tuple(np.flatnonzero(row).tolist()) for row in allowed))
    m = int(rng.integers(1, 4))
    logits = np.where(allowed, 0.0, -math.inf)[None]
    depends, bad = brute_force([logits] * m, 5, seed)
    complete = (depends | np.eye(5, dtype=bool)).all()
    everything = {sigma for of_slot in bad.values() for sigma in of_slot}
    for group in (symmetric(5), reflection(5), trivial(5)):
        expected = bool(complete and all(sigma in group for sigma in everything))
        verdict = certify(attention(mask=mask), tokens=5, dim=2, layers=m, group=group)
        assert verdict.holds is expected, str(verdict)


@pytest.mark.parametrize(
    ("what", "n", "m", "group", "count"),
    [
        ("dihedral", 5, 1, dihedral(5), 50),
        (attention(bias=ALiBi((0.1,))), 4, 1, reflection(4), 4),
        (attention(bias=ALiBi((0.1,))), 5, 1, reflection(5), 6),
        (attention(kernel=RBF(normalised=False), bias=row_constant(5)), 5, 1, trivial(5), 75),
        (attention(mask=ORDER_TWO), 6, 2, Group(6, ((2, 1, 0, 4, 3, 5),)), 4),
        (attention(bias=orbit_bias(wreath(2, 3))), 6, 1, wreath(2, 3), 288),
    ],
)
def test_counted_violators(what, n, m, group, count):
    """How many permutations outside the group some slot cannot see (counts of the reference, found there by exact enumeration)."""
    op = family(what, n, 2, 1).layers[0].operators[0] if isinstance(what, str) else what
    pattern = pattern_of(op, n)
    assert isinstance(pattern, Pattern)
    bad = set().union(*all_bad(Stack((pattern,) * m, n)).values())
    assert sum(sigma not in group for sigma in bad) == count


@pytest.mark.parametrize("n", range(3, 9))
@pytest.mark.parametrize("w", (1, 2, 3))
def test_windows_need_the_steps_that_their_mask_needs(n, w):
    """Computed for all n: ceil((n - 1) / w) layers are enough; the symmetry is the reflection iff n >= 2 w + 1."""
    if w > n - 2:
        return
    pattern = pattern_of(attention(mask=Window(w, w)), n)
    assert isinstance(pattern, Pattern)
    group = Stack((pattern,), n).symmetries(certain=False)
    steps = -(-(n - 1) // w)
    assert layer_bounds(pattern, group) == LayerBounds(steps, steps)
    assert group.order == (2 if n >= 2 * w + 1 else 2 * math.factorial(2 * w + 2 - n))


def test_maps_between_coloured_structures_agree_with_enumeration():
    rng = np.random.default_rng(0)
    for _ in range(60):
        n = int(rng.integers(2, 6))
        a = Coloured(rng.integers(0, 2, n), rng.integers(0, 2, (n, n)))
        b = Coloured(a.vertices, rng.integers(0, 2, (n, n)))
        own = [s for s in itertools.permutations(range(n)) if a.keeps(a, s)]
        assert set(Group(n, automorphisms(a)).elements) == set(own)
        between = [s for s in itertools.permutations(range(n)) if a.keeps(b, s)]
        found = mapping(a, b)
        assert (found in between) if between else found is None


# --- soundness ------------------------------------------------------------------------------------------------------------------------

SHIFT = FixedMatrix(tuple(tuple(float(j == (i + 1) % 4) for j in range(4)) for i in range(4)))
WRONG = [
    ("token-local mixing", Architecture.of(attention(mask=Window(0, 0)), dim=2), ("symmetric", "trivial")),
    ("no mixing", Architecture((), 2), ("symmetric", "trivial")),
    ("one-way", Architecture.of(*(attention(mask=Window(3, 0)),) * 3, dim=2), ("symmetric", "trivial", "reflection")),
    ("ignores a token", Architecture.of(*(attention(mask=Neighbours(((0, 1, 2),) * 4)),) * 3, dim=2), ("symmetric",)),
    ("moved outputs", Architecture.of(SHIFT, dim=2, skip="none"), ("symmetric", "trivial", "cyclic")),
    ("a mean without residual", Architecture((Layer((FixedMatrix(((0.25,) * 4,) * 4),)),), 2, skip="none"), ("symmetric",)),
    ("polynomial feed-forward", Architecture.of(attention(), dim=2, feed_forward=FeedForward("square")), ("symmetric",)),
    ("identity operator", Architecture.of(Identity(), dim=2), ("symmetric", "trivial")),
]


@pytest.mark.parametrize(("name", "architecture", "targets"), WRONG, ids=[w[0] for w in WRONG])
def test_wrong_on_purpose_is_never_a_yes(name, architecture, targets):
    for target in targets:
        assert certify(architecture, tokens=4, dim=2, group=target).holds is not True


@pytest.mark.parametrize("name", [f for f in FAMILIES if f != "identity"])
def test_known_good_is_never_a_no(name):
    """Every family, deep enough, for the full symmetric group (causal ones for causal maps)."""
    target = "causal" if name.startswith("causal") else "symmetric"
    verdict = certify(name, tokens=4, dim=3, layers=4, group=target)
    assert verdict.holds is True, str(verdict)


def test_kinked_kernels_with_masks_are_not_guessed():
    verdict = certify(attention(kernel=FeatureMap("relu"), mask=Window(1, 1)), tokens=3, dim=2, layers=3, group="symmetric")
    assert (verdict.strength == "unknown" and "not analytic" in verdict.reason) or "0 at 0" in verdict.reason
    assert certify(attention(kernel=FeatureMap("relu"), mask=Window(1, 1)), tokens=4, dim=2, layers=1).strength == NO
    masked = certify(attention(kernel=Polynomial(), mask=Window(1, 1)), tokens=3, dim=2, layers=2, group="symmetric")
    assert masked.strength == YES and "Corollary 1" in masked.theorem


def test_an_operator_that_nobody_knows_is_unknown():
    class Mine(Attention):
        pass

    verdict = certify(Mine(1, 2), tokens=3, dim=2, group="symmetric")
    assert verdict.strength == "unknown" and "Mine" in verdict.reason


# --- the feed-forward condition -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "elu_plus_one", "exp"])
def test_feed_forward_layers_that_meet_the_condition(activation):
    assert feed_forward_condition(FeedForward(activation)).holds
    assert feed_forward_condition(GatedFeedForward(activation)).holds
    assert feed_forward_condition(FeedForward(activation), RMSNorm(3, 1e-6)).holds


@pytest.mark.parametrize(
    ("feed_forward", "norm", "blocker"),
    [
        (FeedForward("square"), None, "square is a polynomial"),
        (FeedForward("identity"), None, "identity is a polynomial"),
        (FeedForward("log"), None, "log is not defined at x <= 0"),
        (FeedForward("step"), None, "step is not continuous"),
        (FeedForward(frozen=("hidden bias",)), None, "the hidden bias is missing or frozen"),
        (GatedFeedForward(frozen=("hidden bias",)), None, "the hidden bias is missing or frozen"),
        (FeedForward(frozen=("input map",)), None, "the input map is frozen"),
        (FeedForward(frozen=("output map",)), None, "the output map is frozen"),
        (FeedForward(), LayerNorm(3), "mean-subtracting LayerNorm"),
        (FeedForward(), RMSNorm(3, 0.0), "eps = 0"),
    ],
)
def test_feed_forward_layers_that_are_explained(feed_forward, norm, blocker):
    condition = feed_forward_condition(feed_forward, norm)
    assert condition.holds is None and blocker in condition.blocker


def test_lipschitz_bounds_are_bounds():

    x = torch.linspace(-8, 8, 200_001, dtype=torch.float64)
    for name, bound in LIPSCHITZ.items():
        slopes = FUNCTIONS[name](x).diff() / x.diff()
        assert 0.9 * bound <= slopes.abs().max() <= bound * (1 + 1e-6), name


# --- groups ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "name", "order"),
    [
        (symmetric(4), "S_4", 24),
        (trivial(3), "trivial", 1),
        (cyclic(5), "C_5", 5),
        (dihedral(5), "D_5", 10),
        (reflection(4), "reflection", 2),
        (wreath(2, 3), "S_2 wr S_3", 48),
        (grid_translations(2, 3), "C_6", 6),
        (product(cyclic(3), symmetric(2)), "C_3 on {0, 1, 2} x S_2 on {3, 4}", 6),
        (Group(4, ((1, 2, 0, 3), (0, 2, 3, 1))), "A_4", 12),
        (dihedral(64), "D_64", 128),
    ],
)
def test_groups_have_names(group, name, order):
    assert (group.name, group.order) == (name, order)
    if order < 1000:
        assert len(group.elements) == order and all(g in group for g in group.elements)


@pytest.mark.parametrize(
    ("given_group", "message"),
    [
        ("klein", "group must be one of symmetric"),
        (symmetric(3), "the group acts on 3 points, there are 4 tokens"),
        ([(0, 1, 2)], r"a generator must be a permutation of 0\.\.3"),
        ([(0, 1, 1, 2)], r"a generator must be a permutation of 0\.\.3"),
        (7, "group must be a word"),
    ],
)
def test_groups_that_do_not_act(given_group, message, as_shipped):
    with pytest.raises(AnyformerError, match=message):
        certify("softmax", tokens=4, dim=2, group=given_group)
    assert group_of([[1, 0, 2]], 3).order == 2


# --- reports and bad input ------------------------------------------------------------------------------------------------------------


def test_the_report_and_its_json():
    verdict = certify("softmax", tokens=5, dim=2, layers=1, group="symmetric")
    report = str(verdict)
    for part in (
        "PROVED-FAMILY for n=5, every d, m=1",
        "S_5",
        "L^p (p < inf, not sup)",
        "H2 identity reachable: checked",
        "not independently reviewed",
    ):
        assert part in report
    data = json.loads(json.dumps(verdict.to_json()))
    assert data["holds"] is True and data["group"] == "S_5" and data["norm"] == "Lp"
    assert (data["layers"]["lower"], data["layers"]["upper"]) == (1, 1)
    assert data["details"]["witness"]["gap"] > 0 and data["details"]["witness"]["model_minus_float64"] < 1e-12


def test_what_holds_instead_is_said():
    verdict = certify("causal-softmax", tokens=4, dim=2, layers=2, group="symmetric")
    assert verdict.covered is not None and "causal" in verdict.covered


def test_raise_if_not():
    good = certify("softmax", tokens=3, dim=1)
    assert good.raise_if_not() is good and good.raise_if_not("certified") is good
    with pytest.raises(NotCertified, match="expected a verdict that is proved") as caught:
        certify("causal-softmax", tokens=3, dim=1).raise_if_not()
    assert caught.value.verdict.holds is False
    with pytest.raises(AnyformerError, match="wanted must be one of"):
        good.raise_if_not("sure")


def test_verdicts_that_contradict_themselves_cannot_be_made():
    claim = certify("softmax", tokens=2, dim=1).claim
    for strength, holds in (
        ("unknown", True),
        ("proved", False),
        ("evidence", False),
        ("proved-impossible", None),
        ("certified-at-samples", None),
    ):
        with pytest.raises(AnyformerError, match="Verdict"):
            Verdict("x", claim, strength, holds, "", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(subject="softmx", tokens=3, dim=2), "there is no family 'softmx'; known: softmax"),
        (dict(subject="softmax", tokens=0, dim=2), "tokens must be an integer >= 1, got 0"),
        (dict(subject="softmax", tokens=3, dim=0), "dim must be an integer >= 1, got 0"),
        (dict(subject="softmax", tokens=3, dim=2, layers=-1), "layers must be an integer >= 0"),
        (dict(subject=3, tokens=3, dim=2), "expected a family, an operator, an Architecture or a module, got int"),
    ],
)
def test_bad_input(arguments, message, as_shipped):
    with pytest.raises(AnyformerError, match=message) as caught:
        certify(**arguments)
    assert "\n" not in str(caught.value)


def test_unfitting_parts(as_shipped):
    with pytest.raises(AnyformerError, match="attention_norm is for 3 features, the tokens have 2"):
        Architecture((), 2, attention_norm=RMSNorm(3))
    with pytest.raises(AnyformerError, match="Layer: at least one operator"):
        Layer(())
    with pytest.raises(AnyformerError, match="frozen may name"):
        FeedForward(frozen=("everything",))
    verdict = certify(Linformer(1, 2, ((1.0, 2.0),), ((1.0, 2.0),)), tokens=3, dim=2)
    assert verdict.holds is None and "made for 2 tokens" in verdict.reason


def test_fractions_of_turns_are_exact():
    """cos at a quarter turn is 0 and at symmetric turns equal: no float says otherwise."""
    pattern = pattern_of(family("fnet", 8, 2, 1).layers[0].operators[0], 8)
    assert isinstance(pattern, Pattern) and pattern.maybe[0, 1, 2] == OUTSIDE
    for i, j in np.ndindex(8, 8):
        assert pattern.maybe[0, i, j] == pattern.maybe[0, i, -j % 8]
    assert Fraction(1, 4) != 0 and circulant(4, True).colours[0] == (0, 1, 2, 1)


def test_rotary_needs_what_the_lemma_asks():
    slow = certify(attention(rotary=Rotary((0.5,))), tokens=4, dim=2, group="trivial")
    assert slow.strength == YES and "Corollary 1" in slow.theorem
    flat = certify(Attention(1, 2, rotary=Rotary((1.0,))), tokens=4, dim=1, group="trivial")
    assert flat.strength != FAMILY


def test_average_hard_with_a_bias_is_not_settled():
    verdict = certify(attention(kernel=AverageHard(), bias=ALiBi((0.5,))), tokens=4, dim=2, group="symmetric")
    assert verdict.holds is None


def test_causal_masks_are_causal_maps_only_where_they_are():
    assert certify("softmax", tokens=3, dim=2, layers=2, group="causal").holds is None
    assert certify(attention(mask=Causal(), kernel=FeatureMap("elu_plus_one")), tokens=3, dim=2, layers=2, group="causal").holds
