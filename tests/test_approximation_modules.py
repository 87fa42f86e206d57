"""Verdicts on PyTorch modules: traced, in balls, at samples; wrong ones never get a yes; what blocks is said."""

import json
import logging
import math

import pytest
import torch
from torch import nn

pytest.importorskip("flint")

from anyformer.approximation import FeedForward, assert_equivariant, assert_universal, certify, cyclic, symmetric
from anyformer.approximation.balls import balls, precision
from anyformer.approximation.graph_balls import evaluate
from anyformer.approximation.subjects import Subject, examine
from anyformer.approximation.tracing import Traced, trace
from anyformer.approximation.zoo import ZOO, call_of, plain
from anyformer.cli import main
from anyformer.errors import AnyformerError

INF = float("inf")
logging.getLogger("torch.__trace").disabled = True  # thousands of lines that pytest would keep


class Softmax(nn.Module):
    """Single-head attention; ``mask`` (n, n) is added to the scores."""

    def __init__(self, d, mask=None, scale=1.0):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d, d) for _ in range(3))
        self.register_buffer("mask", mask)
        self.scale = scale

    def weights(self, x):
        scores = self.scale * self.q(x) @ self.k(x).mT
        return (scores if self.mask is None else scores + self.mask).softmax(-1)

    def forward(self, x):
        return self.weights(x) @ self.v(x)


class TokenLocal(Softmax):
    def forward(self, x):
        return torch.tanh(self.q(x)) * self.v(x)


class FirstIndexHard(Softmax):
    """torch.argmax: first-index ties."""

    def forward(self, x):
        best = (self.q(x) @ self.k(x).mT).argmax(-1)
        return torch.gather(self.v(x), 1, best[..., None].expand_as(x))


class IgnoresToken(Softmax):
    """Token 2 is never a key."""

    def __init__(self, d):
        super().__init__(d, torch.tensor([0.0, 0.0, -INF, 0.0]))


class Saturated(Softmax):
    """A hard gate far outside its range: no gradient anywhere near."""

    def forward(self, x):
        return torch.relu(self.v(x.mean(1, keepdim=True)) - 1e6).expand_as(x)


class Dropped(Softmax):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, training=True)


class Counting(Softmax):
    """Its state changes in a call."""

    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


class BatchCoupled(Softmax):
    def forward(self, x):
        return super().forward(x) / (1 + x.abs().max())


class ZeroInit(Softmax):
    def __init__(self, d):
        super().__init__(d)
        self.out = nn.Linear(d, d)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        return self.out(super().forward(x))


class Narrow(Softmax):
    """Softmax in float32 whatever the input."""

    def weights(self, x):
        return (self.q(x) @ self.k(x).mT).float().softmax(-1).to(x.dtype)


class Branching(Softmax):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else -super().forward(x)


class NotANumber(Softmax):
    def forward(self, x):
        return super().forward(x) * math.nan


class Shorter(Softmax):
    def forward(self, x):
        return super().forward(x)[:, :-1]


class Pair(Softmax):
    def forward(self, x):
        return super().forward(x), None


class FixedMean(nn.Module):
    """No parameters at all."""

    def forward(self, x):
        return x.mean(1, keepdim=True).expand_as(x)


class Circulant(Softmax):
    """A learned number for each (j - i) mod n."""

    def __init__(self, d, n):
        super().__init__(d)
        self.bias = nn.Parameter(torch.zeros(n))
        self.register_buffer("at", (torch.arange(n)[None] - torch.arange(n)[:, None]) % n)

    def weights(self, x):
        return (self.q(x) @ self.k(x).mT + self.bias[self.at]).softmax(-1)


def causal(n, low):
    return torch.full((n, n), low, dtype=torch.float64).triu(1)


def test_torch_attention_is_proved_from_its_own_graph():
    verdict = certify(nn.MultiheadAttention(4, 2, batch_first=True), tokens=4, dim=4, group="symmetric")
    assert verdict.strength == "proved" and "Corollary 1" in verdict.theorem and "12/12 dependences" in verdict.reason
    other = certify(nn.MultiheadAttention(4, 2), tokens=3, dim=4)
    assert other.strength == "proved" and other.group_name == "S_3"
    assert json.dumps(verdict.to_json()) and verdict.to_json()["details"]["state"]["batch"] == 1


@pytest.mark.parametrize("low", [-INF, -1e9, -1e4])
def test_causal_masks_finite_or_not_are_a_structural_no(low):
    verdict = certify(Softmax(2, causal(4, low)), tokens=4, dim=2, layers=3, group="symmetric")
    assert verdict.strength == "proved-impossible" and "token 0 does not depend on token 1 at any depth" in verdict.reason


def test_a_window_needs_enough_layers():
    mask = torch.full((4, 4), -INF, dtype=torch.float64)
    for i in range(4):
        mask[i, max(0, i - 1) : i + 2] = 0
    short = certify(Softmax(2, mask), tokens=4, dim=2, layers=2, group="symmetric")
    assert short.strength == "proved-impossible" and "in 2 layers" in short.reason and not short.layers.impossible
    assert certify(Softmax(2, mask), tokens=4, dim=2, layers=3, group="symmetric").strength == "proved"


def test_linformer_like_and_circulant_modules():
    verdict = certify(Circulant(2, 4), tokens=4, dim=2, group="auto")
    assert verdict.strength == "proved" and verdict.claim.group == cyclic(4), str(verdict)
    assert_equivariant(Circulant(2, 5), cyclic(5), dim=2)
    with pytest.raises(AssertionError, match=r"Circulant is not equivariant under S_4: worst element \(.*\), error .* at token"):
        assert_equivariant(Circulant(2, 4), symmetric(4), dim=2)


@pytest.mark.parametrize("kind", [IgnoresToken, Saturated, Branching])
def test_wrong_on_purpose_never_gets_a_yes(kind):
    torch.manual_seed(0)
    assert certify(kind(2), tokens=4, dim=2, layers=2, group="symmetric").holds is not True


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (FirstIndexHard(2), r"it chooses by its data \(argmax, gather\)"),
        (Dropped(2), "its forward is stochastic"),
        (Counting(2), "its state changes in a call: attribute calls"),
        (NotANumber(2), "NaN or infinite"),
        (Shorter(2), r"it changes the shape: \(1, 4, 2\) became \(1, 3, 2\)"),
        (Pair(2), "it returns a tuple, a tensor"),
        (Softmax(3), r"it cannot be run on \(1, 4, 2\)"),
        (TokenLocal(2), "token 0 does not depend on token 1 at any depth"),
    ],
)
def test_what_blocks_is_said(module, reason):
    torch.manual_seed(0)
    verdict = certify(module, tokens=4, dim=2, layers=2, group="symmetric")
    assert verdict.holds is not True
    with pytest.raises(AnyformerError, match=reason):
        verdict.raise_if_not()


def test_good_modules_with_quirks_are_handled():
    torch.manual_seed(0)
    coupled = certify(BatchCoupled(2), tokens=3, dim=2, group="symmetric")
    assert coupled.holds and any("batch mates" in note for note in coupled.notes) and coupled.details["state"]["batch_coupled"]
    zero = certify(ZeroInit(2), tokens=3, dim=2, group="symmetric")
    assert zero.strength == "proved" and zero.details["state"]["zero_at_initialisation"]
    narrow = certify(Narrow(2), tokens=3, dim=2, group="symmetric")
    assert narrow.strength == "proved" and narrow.details["state"]["narrow_dtypes"] == ["float32"]
    assert_equivariant(Narrow(2), symmetric(4), dim=2)


def test_data_dependent_control_flow_is_not_traced():
    torch.manual_seed(0)
    traced = trace(Branching(2).double(), plain, 3, 2)
    assert isinstance(traced, str) and "cannot be traced" in traced


def test_without_parameters_theorem_3_asks_more():
    """The mean beside a residual path is S_n-universal with a free W; without W the identity is not reachable, and Theorem 3 decides."""
    verdict = certify(FixedMean(), tokens=3, dim=2, group="symmetric")
    assert verdict.holds and "Theorem 3" in verdict.theorem and any("no trained parameters" in note for note in verdict.notes)


def test_one_token_and_the_feed_forward_condition():
    assert certify(Softmax(2), tokens=1, dim=2).strength == "proved-family"
    assert certify(Softmax(2), tokens=3, dim=2, feed_forward=FeedForward("square")).strength == "unknown"


def test_the_graph_in_balls_is_the_module():
    """Both at the same random points: the tie of the proof to the code."""
    for module in (
        Softmax(3),
        Softmax(3, causal(4, -1e9)),
        nn.MultiheadAttention(3, 1, batch_first=True),
        Circulant(3, 4),
        nn.TransformerEncoderLayer(3, 1, 5, batch_first=True),
    ):
        torch.manual_seed(1)
        subject = examine(module, call_of(module), 4, 3, "x")
        assert isinstance(subject, Subject)
        traced = trace(subject.module, subject.call, 4, 3)
        assert isinstance(traced, Traced)
        parameters, x = subject.draw(5), torch.randn(2, 4, 3, dtype=torch.float64)
        expected = subject.run(parameters, x)
        with precision(128):
            got = evaluate(traced, parameters, balls(x), traced.vary(parameters, {}).forbidden)
        for ball, number in zip(got.ravel(), expected.ravel().tolist(), strict=True):
            assert float(ball.rad()) < 1e-25 and abs(float(ball.mid()) - number) < 1e-12


def test_helpers():
    verdict = assert_universal(Softmax(2), tokens=3, dim=2, group="symmetric", wanted="proved")
    assert verdict.holds
    with pytest.raises(AssertionError, match="expected a verdict that is certified"):
        assert_universal(TokenLocal(2), tokens=3, dim=2, group="symmetric")
    with pytest.raises(AssertionError, match="its forward is stochastic"):
        assert_equivariant(Dropped(2), symmetric(3), dim=2)
    for arguments, message in (
        ({"group": "symmetric"}, "tokens is needed"),
        ({"group": "trivial", "tokens": 3}, "the trivial group has nothing to test"),
        ({"group": symmetric(3), "trials": 0}, "trials must be an integer >= 1"),
    ):
        with pytest.raises(AnyformerError, match=message):
            assert_equivariant(Softmax(2), dim=2, **arguments)


# --- the command line -----------------------------------------------------------------------------------------------------------------


def test_command_line(tmp_path, monkeypatch, capsys):
    assert main(["certify", "softmax", "--tokens", "5", "--dim", "2", "--layers", "1", "--group", "symmetric"]) == 0
    assert "PROVED-FAMILY for n=5" in capsys.readouterr().out
    assert main(["certify", "causal-softmax", "--tokens", "4", "--dim", "2", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["strength"] == "proved-impossible" and data["holds"] is False
    (tmp_path / "mine_to_certify.py").write_text(
        "import torch\n\nclass Mean(torch.nn.Module):\n    def __init__(self, dim):\n        super().__init__()\n"
        "        self.v = torch.nn.Linear(dim, dim)\n    def forward(self, x):\n        return self.v(x).mean(1, keepdim=True).expand_as(x)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["certify", "mine_to_certify:Mean", "--kwargs", '{"dim": 2}', "--tokens", "3", "--dim", "2"]
    assert main([*words, "--json", "--group", "[[1,0,2],[1,2,0]]"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["group"] == "S_3" and "runs its code" in out.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["softmx"], "there is no family 'softmx'"),
        (["softmax", "--kwargs", '{"dim": 2}'], "--kwargs are for module:Class"),
        (["torch.nn:Nothing"], "cannot be imported"),
        (["torch.nn:Linear", "--kwargs", "[1]"], "--kwargs must be one JSON object"),
        (["torch.nn:Linear", "--kwargs", "{"], "--kwargs must be JSON"),
        (["torch.nn:Linear"], "cannot be built from"),
        (["math:pi"], "cannot be built from"),
        (["softmax", "--group", "[[0,1]]"], r"a generator must be a permutation of 0\.\.2"),
        (["softmax", "--activation", "swish"], "no scalar function 'swish'"),
    ],
)
def test_bad_command_lines(words, message, capsys, as_shipped):
    assert main(["certify", *words, "--tokens", "3", "--dim", "2"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert message.replace("\\", "") in said[-1] and "Traceback" not in "".join(said)


# --- other packages -------------------------------------------------------------------------------------------------------------------

EXPECTED = {
    "torch MultiheadAttention": ("proved", "S_4"),
    "performer-pytorch": ("proved", "S_4"),
    "linformer": ("proved", "trivial"),
    "nystrom-attention (residual off)": ("proved", "S_4"),
    "linear-attention-transformer": ("proved", "S_4"),
    "x-transformers": ("proved", "S_4"),
    "BigBird (full mode)": ("proved", "S_4"),
    "YOSO (expectation)": ("certified-at-samples", "S_4"),
    "FNet": ("certified-at-samples", "S_2 on {1, 3}"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_zoo(name):
    exhibit = ZOO[name]
    try:
        module = exhibit.make()
    except AnyformerError as missing:
        pytest.skip(str(missing))
    verdict = certify(module, tokens=exhibit.tokens, dim=exhibit.dim, layers=exhibit.layers, group=exhibit.group)
    assert (verdict.strength, verdict.group_name) == EXPECTED[name], str(verdict)
