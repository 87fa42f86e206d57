"""What was said wrongly once: modules and architectures made to mislead, with the only verdicts that are true of them."""

import json
import logging
import time
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("flint")

from anyformer.approximation import (
    Architecture,
    Averaged,
    ColourBias,
    FeedForward,
    Group,
    Layer,
    Positions,
    assert_equivariant,
    certify,
    cyclic,
    dihedral,
    equivariant_attention,
    symmetric,
)
from anyformer.approximation.criterion import unreached
from anyformer.cli import main
from anyformer.errors import AnyformerError
from anyformer.operators import (
    ALiBi,
    Attention,
    Causal,
    Convolution,
    FeatureMap,
    FixedMatrix,
    LayerNorm,
    Neighbours,
    Polynomial,
    RMSNorm,
    Rotary,
    TableBias,
)

INF = float("inf")
logging.getLogger("torch.__trace").disabled = True  # thousands of lines that pytest would keep


class Forward(nn.Module):
    """Three linear maps q, k, v without biases, and a function of them."""

    def __init__(self, function, d=2, wide=0):
        super().__init__()
        self.q, self.k = (nn.Linear(d + wide, d + wide, bias=False) for _ in range(2))
        self.v = nn.Linear(d + wide, d, bias=False)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def above(x):
    """Booleans: keys after the query."""
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)


def scores(m, x):
    return m.q(x) @ m.k(x).mT


def attention(m, x):
    return scores(m, x).softmax(-1) @ m.v(x)


def mean(m, x):
    return m.v(x).mean(1, keepdim=True).expand_as(x)


def distances(n):
    i = torch.arange(n, dtype=torch.float64)
    return (i[:, None] - i).abs()


# --- modules: what is computed, and not what it looks like ---------------------------------------------------------------------------


def causal_through_a_view(m, x):
    s, n = scores(m, x), x.shape[1]
    s.view(-1, n, n).masked_fill_(above(x), -INF)
    return s.softmax(-1) @ m.v(x)


def zeroed_through_a_view(m, x):
    out = attention(m, x) * 1.0
    out[:, :].mul_(0.0)
    return out


def first_token_zeroed(m, x):
    out = mean(m, x).clone()
    out[:, 0].mul_(0.0)
    return out


def sum_by_views(m, x):
    out = torch.zeros(x.shape, dtype=x.dtype)
    for i in range(x.shape[1]):
        out[:, i].add_(m.v(x).sum(1))
    return out


def ring_by_views(m, x):
    out, y = torch.zeros(x.shape, dtype=x.dtype), m.v(x)
    out[:, 1:].add_(y[:, :-1])
    out[:, :1].add_(y[:, -1:])
    return out


def placed(m, x):
    out = torch.zeros_like(x)
    out[:, torch.tensor([2, 0, 1])] = m.v(x).sum(1, keepdim=True).expand_as(x)
    return out


def copied_over(m, x):
    return torch.ops.aten.copy(mean(m, x).contiguous(), torch.zeros(x.shape, dtype=x.dtype))


def padded(value, mask=None):
    def forward(m, x):
        y = F.pad(x, (0, 1), value=value)
        return (scores(m, y) + (0.0 if mask is None else mask)).softmax(-1) @ m.v(y)

    return forward


def beside_integers(m, x):
    """Attention on tokens with the feature 1, an integer."""
    y = torch.cat((x, torch.ones(1, x.shape[1], 1, dtype=torch.long)), -1)
    return scores(m, y).softmax(-1) @ m.v(y)


def rows_sum_to_one(m, x):
    b = -2e4 * torch.sigmoid(8 * m.k(x))[..., :1].mT.expand(-1, x.shape[1], -1)
    return b.softmax(-1).sum(-1, keepdim=True) * m.v(x)


def narrow_sum(dtype):
    def forward(m, x):
        y = m.v(x).to(dtype)
        total = y[:, 0]
        for i in range(1, x.shape[1]):
            total = total + y[:, i]
        return total.to(x.dtype)[:, None].expand_as(x).abs()

    return forward


def first_index(m, x):
    i = scores(m, x).max(-1, keepdim=True).indices
    return (1 - (i - torch.arange(x.shape[1])).abs().clamp(max=1)).to(x.dtype) @ m.v(x)


NO, YES, UNKNOWN = ("proved-impossible",), ("proved",), ("unknown",)
MODULES = {
    # what it is: (function, n, m, group, strengths that are true of it, a part of the reason)
    "causal, masked through a view": (causal_through_a_view, 3, 2, "symmetric", NO, "token 0 does not depend on token 1 at any depth"),
    "0, written through a view": (zeroed_through_a_view, 3, 1, "symmetric", NO, "at any depth"),
    "token 0 reads nothing": (first_token_zeroed, 3, 1, "symmetric", NO, "token 0 does not depend on token 1"),
    "sum pooling by views": (sum_by_views, 3, 1, "symmetric", YES, ""),
    "a ring by views": (ring_by_views, 3, 2, "cyclic", YES, ""),
    "sum pooling, put at places": (placed, 3, 1, "symmetric", YES, ""),
    "its input written": (lambda m, x: attention(m, x.mul_(2.0)), 3, 1, "symmetric", UNKNOWN, "it changes its input in place"),
    "Booleans of the input": (lambda m, x: mean(m, x.bool().to(x.dtype)), 3, 1, "symmetric", UNKNOWN, "chooses by its data"),
    "int8 of the input": (lambda m, x: mean(m, (x * 9).to(torch.int8).to(x.dtype)), 3, 1, "symmetric", UNKNOWN, "chooses"),
    "long of the input": (lambda m, x: mean(m, x.long().to(x.dtype)), 3, 1, "symmetric", UNKNOWN, "chooses"),
    "integers returned": (lambda m, x: mean(m, x).long(), 3, 1, "symmetric", UNKNOWN, "it returns int64"),
    "Booleans returned": (lambda m, x: mean(m, x) > 0, 3, 1, "symmetric", UNKNOWN, "it returns bool"),
    "overwritten by zeros": (copied_over, 3, 1, "symmetric", NO, "at any depth"),
    "padded with 1": (padded(1.0), 3, 1, [[0, 2, 1]], UNKNOWN, "S_3"),
    "padded with 2": (padded(2.0), 2, 1, "trivial", UNKNOWN, "S_2"),
    "padded with 1000": (padded(1000.0), 3, 1, "symmetric", YES, ""),
    "padded and masked": (padded(2.0, torch.tensor([[0.0, -INF], [0.0, 0.0]])), 2, 1, "trivial", NO, "token 0 does not depend"),
    "beside integers": (beside_integers, 3, 1, [[0, 2, 1]], UNKNOWN, "S_3"),
    "a summand that is no score": (lambda m, x: mean(m, x + (-2e4)), 3, 1, "symmetric", YES, ""),
    "all scores shifted": (lambda m, x: (scores(m, x) - 2e4).softmax(-1) @ m.v(x), 3, 1, "symmetric", YES, ""),
    "weights that underflow": (lambda m, x: (-300 * distances(4)).softmax(-1) @ m.v(x), 4, 1, "symmetric", UNKNOWN, ""),
    "float32 weights that underflow": (
        lambda m, x: (-40 * distances(4)).float().softmax(-1).to(x.dtype) @ m.v(x), 4, 1, "symmetric", UNKNOWN, ""
    ),
    "a product that underflows": (lambda m, x: mean(m, x) * (1e-200 * torch.full((1,), 1e-200, dtype=x.dtype)), 3, 1, "symmetric", UNKNOWN, ""),
    "a finite mask in exp": (
        lambda m, x: F.normalize((scores(m, x) - 1e9 * above(x)).exp(), 1, -1) @ m.v(x), 3, 1, "symmetric", UNKNOWN, "finite mask"
    ),
    "rows of far negative scores": (rows_sum_to_one, 2, 1, "symmetric", UNKNOWN, "no witness that token 0 depends on token 1"),
    "first-index hard attention": (first_index, 3, 1, "symmetric", UNKNOWN, "chooses by its data"),
    "floor by div": (lambda m, x: mean(m, torch.div(x, 1, rounding_mode="floor")), 3, 1, "symmetric", UNKNOWN, "nothing is known of div"),
    "remainder": (lambda m, x: mean(m, torch.remainder(x, 1)), 3, 1, "symmetric", UNKNOWN, "nothing is known of remainder"),
    "heaviside": (lambda m, x: mean(m, torch.heaviside(x, torch.ones(()).to(x))), 3, 1, "symmetric", UNKNOWN, "nothing is known"),
    "round, one decimal": (lambda m, x: mean(m, torch.round(x, decimals=1)), 3, 1, "symmetric", UNKNOWN, "nothing is known of round"),
    "a sum in bfloat16": (narrow_sum(torch.bfloat16), 4, 1, "auto", UNKNOWN, ""),
    "a sum in float16": (narrow_sum(torch.float16), 4, 1, "auto", UNKNOWN, ""),
    "zeros_like": (lambda m, x: attention(m, x) + torch.zeros_like(x), 3, 1, "symmetric", YES, ""),
    "new_zeros": (lambda m, x: attention(m, x) + x.new_zeros(1), 3, 1, "symmetric", YES, ""),
    "tril of scores": (lambda m, x: torch.tril(scores(m, x)) @ m.v(x), 3, 2, "symmetric", NO, "at any depth"),
    "ones in triu": (lambda m, x: (scores(m, x) + torch.ones(3, 3).triu(1)).softmax(-1) @ m.v(x), 3, 1, "symmetric", YES, ""),
    "x to the power 0": (lambda m, x: mean(m, x) * x**0, 3, 1, "symmetric", YES, ""),
    "times integers": (lambda m, x: mean(m, x * torch.arange(1, 4)[None, :, None]), 3, 1, "trivial", YES, ""),
    "plus integers": (lambda m, x: mean(m, x + torch.arange(3)[None, :, None]), 3, 1, "symmetric", YES, ""),
    "integers minus x": (lambda m, x: mean(m, torch.arange(3)[None, :, None] - x), 3, 1, "symmetric", YES, ""),
    "times Booleans": (lambda m, x: mean(m, x) * torch.tensor([True, True, False])[:, None], 3, 1, "symmetric", NO, "token 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules_made_to_mislead(name, as_shipped):
    function, n, m, group, strengths, reason = MODULES[name]
    torch.manual_seed(0)
    wide, d = int("pad" in name or "beside" in name), 3 if "far negative" in name else 2
    verdict = certify(Forward(function, d, wide), tokens=n, dim=d, layers=m, group=group)
    assert verdict.strength in strengths and reason in verdict.reason, str(verdict)


def test_state_that_is_kept_private(as_shipped):
    class Warm(Forward):
        _calls = 0

        def forward(self, x):
            self._calls += 1
            return attention(self, x) if self._calls < 6 else 0 * self.v(x)

    class Elsewhere(Forward):
        calls: ClassVar = [0]

        def forward(self, x):
            self.calls[0] += 1
            return attention(self, x) if self.calls[0] < 6 else 0 * self.v(x)

    for kind, reason in (
        (Warm, "its state changes in a call: attribute _calls"),
        (Elsewhere, "its forward changed after some calls"),
    ):
        verdict = certify(kind(None), tokens=3, dim=2, group="symmetric")
        assert verdict.strength == "unknown" and reason in verdict.reason, str(verdict)


def test_modules_that_cannot_be_asked_about(as_shipped):
    class Stops(nn.Module):
        def forward(self, x):
            raise SystemExit(3)

    for module, reason in ((nn.LazyLinear(2), "a lazy module"), (Stops(), "it cannot be run on (1, 3, 2): SystemExit")):
        assert reason in certify(module, tokens=3, dim=2).reason


def test_what_is_found_and_what_is_not_is_told_apart(as_shipped):
    """H2: a convolution's kernel, and the scale of the last norm, at 0 make g = 0."""
    ring = nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular")
    encoder = nn.TransformerEncoderLayer(2, 1, 4, batch_first=True, norm_first=False)
    for module, call, group in ((ring, lambda m, x: m(x.mT).mT, "cyclic"), (encoder, None, "symmetric")):
        verdict = certify(module, tokens=3, dim=2, group=group, call=call)
        assert verdict.holds is not False and not any(
            h.name.startswith("H2") and h.status == "failed" for h in verdict.hypotheses
        )


def test_a_batch_that_gives_no_numbers_is_valid_json(as_shipped):
    class Alone(Forward):
        def forward(self, x):
            return mean(self, x) if len(x) == 1 else x * float("nan")

    verdict = certify(Alone(None), tokens=3, dim=2, group="symmetric")
    assert verdict.holds and verdict.details["state"]["batch_coupled"] and verdict.details["state"]["batch_difference"] is None
    assert json.dumps(verdict.to_json(), allow_nan=False)


def test_averages_over_a_group_are_proved(as_shipped):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Unflatten(1, (3, 2)))
    verdict = certify(Averaged(inner, cyclic(3)), tokens=3, dim=2, group="cyclic")
    assert verdict.strength == "proved", str(verdict)


# --- declared architectures ----------------------------------------------------------------------------------------------------------


def bank(**parts):
    return Attention(1, 2, **parts)


def of(*operators, **parts):
    return Architecture.of(*operators, dim=2, **parts)


LOW = tuple(tuple(0.0 if j <= i else -1e9 for j in range(4)) for i in range(4))
ARCHITECTURES = {
    "polynomial at scale 0": (of(bank(kernel=Polynomial(), scale=0.0)), 3, "symmetric", UNKNOWN),
    "ReLU features at scale 0": (of(bank(kernel=FeatureMap("relu"), scale=0.0)), 3, "symmetric", UNKNOWN),
    "RoPE at scale 0": (of(bank(rotary=Rotary((1.0,)), scale=0.0)), 3, "trivial", UNKNOWN),
    "causal RoPE at scale 0": (of(bank(rotary=Rotary((1.0,)), mask=Causal(), scale=0.0)), 3, "causal", UNKNOWN),
    "softmax at scale 0": (of(bank(scale=0.0)), 3, "symmetric", ("proved-family",)),
    "softmax at a huge scale": (of(bank(scale=1e300)), 3, "symmetric", ("proved-family",)),
    "ReLU features behind a norm without epsilon": (of(bank(kernel=FeatureMap("relu"), qk_norm=0.0)), 3, "symmetric", UNKNOWN),
    "one token, bounded outputs": (of(bank(), output_norm=RMSNorm(2)), 1, "auto", UNKNOWN),
    "a finite mask in a table": (of(*(bank(bias=TableBias((LOW,))),) * 2), 4, "symmetric", UNKNOWN),
    "a finite mask in a table, any group": (of(*(bank(bias=TableBias((LOW,))),) * 2), 4, "auto", UNKNOWN),
    "slopes that are a mask": (of(bank(bias=ALiBi((1e4,))), bank(bias=ALiBi((1e4,)))), 4, "reflection", UNKNOWN),
    "learned numbers for fewer tokens": (of(bank(bias=ColourBias.of([[0, 1], [1, 0]]))), 3, "symmetric", UNKNOWN),
    "learned numbers for more tokens": (of(bank(bias=ColourBias.of([[0, 1, 2]] * 3))), 2, "symmetric", UNKNOWN),
    "a matrix for more tokens": (of(FixedMatrix(((0.5,) * 3,) * 3)), 2, "symmetric", UNKNOWN),
    "a graph of fewer tokens": (of(bank(mask=Neighbours(((0, 1), (0, 1))))), 3, "symmetric", UNKNOWN),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_made_to_mislead(name, as_shipped):
    architecture, n, group, strengths = ARCHITECTURES[name]
    verdict = certify(architecture, tokens=n, dim=2, group=group)
    assert verdict.strength in strengths, str(verdict)
    assert "exactly" not in str(verdict.layers) or verdict.holds


def test_the_cell_of_negative_scales_has_negative_queries(as_shipped):
    verdict = certify(of(bank(kernel=FeatureMap("relu"), scale=-1.0)), tokens=3, dim=2, group="symmetric")
    assert verdict.strength == "proved-family" and "queries in minus this interval" in verdict.details["cell"]["says"]


@pytest.mark.parametrize("kind", ["trained", "fixed"])
@pytest.mark.parametrize("group", ["trivial", "cyclic", "auto"])
def test_positions_inside_attention_agree_with_themselves(kind, group, as_shipped):
    verdict = certify(of(bank(), positions=Positions("attention", kind)), tokens=3, dim=2, group=group)
    assert (
        verdict.strength == "proved" and (verdict.layers.lower, verdict.layers.upper) == (1, 1) and not verdict.layers.impossible
    )
    assert any("generic" in note for note in verdict.notes) == (kind == "fixed")
    assert not any("sup norm" in note for note in verdict.notes)


def test_the_sup_norm_note_is_for_layers_that_keep_constants(as_shipped):
    def said(architecture, group):
        return any("sup norm" in note for note in certify(architecture, tokens=4, dim=2, group=group).notes)

    table = TableBias((tuple((0.5, 0.25, 1.5, -1.0) for _ in range(4)),))
    assert said(of(bank(bias=table)), "trivial")
    assert not said(of(bank(bias=table, sink=True)), "trivial")
    assert not said(of(bank(), positions=Positions("input", "trained")), "trivial")
    assert not said("linformer", "trivial")


@pytest.mark.parametrize(
    "parts",
    [{"feed_forward": FeedForward("square")}, {"feed_forward": FeedForward("step")}, {"feed_forward_norm": LayerNorm(2)}],
)
def test_no_number_of_layers_is_enough_where_nothing_is_known(parts, as_shipped):
    verdict = certify(of(bank(), **parts), tokens=3, dim=2, group="symmetric")
    assert verdict.strength == "unknown" and verdict.layers.upper is None and "exactly" not in str(verdict)


def test_a_layer_norm_in_front_needs_two_features(as_shipped):
    reason = certify(of(bank(), attention_norm=LayerNorm(2)), tokens=3, dim=2, group="symmetric").reason
    assert "d >= 2 behind a LayerNorm" in reason


def test_the_kernel_condition_is_said_with_its_status(as_shipped):
    for family, holds in (("softmax", True), ("polynomial", False), ("linear-relu", False)):
        verdict = certify(family, tokens=3, dim=2, group="symmetric")
        (limit,) = verdict.details["kernel_limits"]
        assert verdict.holds and limit["holds"] is holds
        assert any("kernel condition" in note and "a sufficient condition only" in note for note in verdict.notes)
    assert not certify("average-hard", tokens=3, dim=2).details["kernel_limits"]


def test_what_is_not_reached_by_powers():
    ring = torch.eye(5, dtype=torch.bool).roll(1, 1).numpy()
    assert unreached([ring] * 3, ring) == (0, 4, 4) and unreached([ring] * 4, ring) is None
    assert unreached([], ring) == (0, 1, 1) and unreached([ring & False] * 9, ring & False) == (0, 1, -1)


# --- input that cannot be used -------------------------------------------------------------------------------------------------------

IDENTITY = Architecture.of(bank(), dim=2)
REFUSED = [
    (lambda: certify("softmax", tokens=3, dim=2, group=[[1.9, 0.2, 2.7]]), "a generator must be a permutation"),
    (lambda: certify("softmax", tokens=3, dim=2, group=[["1", "0", "2"]]), "a generator must be a permutation"),
    (lambda: certify("softmax", tokens=3, dim=2, group=["102"]), "group must be a word"),
    (lambda: certify("softmax", tokens=3, dim=2, group=[[True, False, 2]]), "a generator must be a permutation"),
    (lambda: certify("softmax", tokens=3, dim=2, group=[{"0": 1, "1": 0, "2": 2}]), "group must be a word"),
    (lambda: certify("softmax", tokens=3, dim=2, group=[[1, 0, INF]]), "a generator must be a permutation"),
    (lambda: Group(2, ((1.0, 0.0),)), "a generator must be a permutation"),  # type: ignore[arg-type]
    (lambda: certify("softmax", tokens=3, dim=2, bits=0), "bits must be an integer >= 16, got 0"),
    (lambda: certify("softmax", tokens=3, dim=2, bits="a"), "bits must be an integer"),  # type: ignore[arg-type]
    (lambda: certify("softmax", tokens=3, dim=2, bits=10**6), "bits must be at most 4096, got 1000000"),
    (lambda: certify("softmax", tokens=100_000, dim=2), "tokens must be at most 256, got 100000; ask for fewer"),
    (lambda: certify("softmax", tokens=3, dim=2, layers=10**9), "layers must be at most 256"),
    (lambda: certify(IDENTITY, tokens=3, dim=77), "dim=77 was given, the architecture has 2"),
    (lambda: certify(IDENTITY, tokens=3, dim=2, layers=9), "layers=9 was given, the architecture has 1"),
    (lambda: certify("softmax", tokens=3, dim=2, call=5), "call is for modules"),  # type: ignore[arg-type]
    (lambda: certify(nn.Linear(2, 2), tokens=3, dim=2, call=5), "call must be a function"),  # type: ignore[arg-type]
    (lambda: certify("softmax", tokens=3, dim=2, feed_forward="relu"), "feed_forward must be a FeedForward"),  # type: ignore[arg-type]
    (lambda: Architecture((), 2, feed_forward="relu"), "feed_forward must be a FeedForward"),  # type: ignore[arg-type]
    (lambda: equivariant_attention("cyclic", 5, 4), "group must be a Group"),  # type: ignore[arg-type]
    (lambda: Averaged(nn.Linear(2, 2), "cyclic"), "group must be a Group"),  # type: ignore[arg-type]
    (lambda: ColourBias((((0.1, 0.2), (0.2, 0.1)),), ((0, 1),)), "colours must be 2 rows of 2"),
    (lambda: FixedMatrix(((INF, 0.5), (0.5, 0.5))), "must be a finite number"),
    (lambda: Convolution((float("nan"),)), "must be a finite number"),
    (lambda: Architecture((Layer((bank(),), maps=(((1.0,), (0.0,)),)),), 2), "a fixed map must be 2 x 2"),
    (lambda: Layer((bank(), bank()), maps=(((1.0,),),)), "2 banks need as many maps"),
    (lambda: assert_equivariant(nn.Linear(2, 2), symmetric(3), dim=2, tolerance=INF), "tolerance must be a finite number >= 0"),
    (lambda: assert_equivariant(nn.Linear(2, 2), symmetric(3), dim=2, tolerance="1"), "tolerance must be a finite number"),  # type: ignore[arg-type]
    (
        lambda: assert_equivariant(nn.Linear(2, 2), "causal", tokens=3, dim=2),
        "'causal' is a target of certify and names no group",
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_one_clear_line_for_what_cannot_be_used(number, as_shipped):
    make, message = REFUSED[number]
    with pytest.raises(AnyformerError) as caught:
        make()
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source", ["def f(:", "raise RuntimeError('no')", "raise SystemExit(3)", "def Made(): raise SystemExit(3)"]
)
def test_code_that_stops_while_it_is_imported(source, tmp_path, monkeypatch, capsys, as_shipped):
    name = f"stops_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    assert main(["certify", f"{name}:Made", "--tokens", "3", "--dim", "2"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "cannot be" in last and "Traceback" not in last


def test_large_sizes_take_moments(as_shipped):
    """What a lemma settles needs no groups; those that are computed are computed once, up to a stated size."""
    start = time.process_time()
    assert certify("softmax", tokens=256, dim=2, group="symmetric").strength == "proved-family"
    assert certify("softmax", tokens=256, dim=2, group="trivial").strength == "proved-impossible"
    assert certify("star", tokens=128, dim=2, layers=2).strength == "proved-family"
    assert certify("ring", tokens=64, dim=2, layers=32, group=dihedral(64)).strength == "proved-family"
    assert certify("bigbird", tokens=24, dim=2, layers=3).holds
    assert "more than 64 tokens" in certify("bigbird", tokens=65, dim=2, layers=9).reason
    assert certify("longformer", tokens=100, dim=2, layers=9).strength == "proved-impossible"
    assert "more than 64 tokens" in certify(Forward(attention), tokens=65, dim=2, group="symmetric").reason
    assert time.process_time() - start < 20
