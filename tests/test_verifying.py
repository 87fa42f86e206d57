"""Verification: it runs the target's own forward, catches what is wrong, and cannot be ignored."""

import copy
import gc
import warnings
from dataclasses import replace

import pytest
import torch

import anyformer as af
from anyformer.verifying import OWN_FORWARD


def make(**sizes) -> af.Transformer:
    torch.manual_seed(0)
    return af.Transformer(**(dict(vocab=6, heads=2, layers=2, head_dim=3, features=5) | sizes)).double()


def test_passes_with_figures() -> None:
    target = make(positions="learned", max_length=12)
    program = af.compile(target, af.PathTree.for_class(target))
    verdict = af.verify(program, target).raise_if_not()
    assert verdict and verdict.passed and verdict.dtype == "float64" and verdict.max_abs_error < 1e-12
    assert verdict.sequences == 33 and verdict.patterns == 33 * 2 * 2
    json = verdict.to_json()
    assert json["passed"] is True and {"max_abs_error", "max_rel_error", "dtype", "where"} <= json.keys()
    assert verdict.tie_gap is None and "passed" in str(verdict)


def test_a_single_wrong_number_is_found_and_located() -> None:
    target = make()
    program = af.compile(target, af.PathTree.for_class(target))
    tokens = program.tokens.clone()
    tokens[2, 0] += 1e-6  # one coordinate of one query
    verdict = af.verify(replace(program, tokens=tokens), target)
    assert not verdict.passed and "layer 1, head 1" in verdict.pattern_where
    with pytest.raises(af.VerificationFailed, match=r"FAILED: worst output error .* at sequence"):
        verdict.raise_if_not()


def test_patterns_count_even_where_outputs_agree() -> None:
    target = make(layers=1)
    with torch.no_grad():
        target.blocks[0].attention.W_O.weight.zero_()
    program = af.compile(target, af.PathTree.for_class(target))
    tokens = program.tokens.clone()
    tokens[:, :3] *= 2
    verdict = af.verify(replace(program, tokens=tokens), target)
    assert verdict.max_abs_error < 1e-12 and verdict.max_pattern_error > 1e-3 and not verdict.passed


def test_the_own_forward_is_run_not_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make()
    network = af.read(target)
    program = af.compile(network, af.PathTree.for_class(target))
    assert af.verify(program, network).passed
    monkeypatch.setattr(af.Network, "run", lambda *a, **k: pytest.fail("the Network was run"))
    assert af.verify(program, network).passed
    with pytest.raises(af.AnyformerError, match="no source"):
        af.verify(program, replace(network, source=None))
    with pytest.raises(af.AnyformerError, match="Linear has no registered forward"):
        af.verify(program, torch.nn.Linear(2, 2))


def test_a_failed_verdict_cannot_be_ignored_silently() -> None:
    target, other = make(), make(vocab=6)
    with torch.no_grad():
        other.readout.weight.add_(0.1)
    program = af.compile(target, af.PathTree.for_class(target))
    with pytest.warns(RuntimeWarning, match="nobody looked at a failed verdict"):
        af.verify(program, other)
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not af.verify(program, other).passed
        gc.collect()


def test_given_inputs_and_nan_are_judged() -> None:
    target = make()
    program = af.compile(target, af.PathTree.for_class(target))
    tokens = torch.tensor([[5, 4, 3, 2, 1, 0]])
    assert af.verify(program, target, tokens=tokens, sequences=1, length=2).sequences == 2 + 3 + 1
    broken = replace(program, tokens=program.tokens.clone().fill_(float("nan")))
    verdict = af.verify(broken, target)
    assert not verdict.passed and verdict.max_abs_error == float("inf") and verdict.to_json()["max_abs_error"] is None


def test_dtype_and_tolerance_are_named() -> None:
    target = make().float()
    program = af.compile(target, af.PathTree.for_class(target))
    assert program.dtype == torch.float32
    verdict = af.verify(program, target)
    assert verdict.passed and verdict.dtype == "float32" and (verdict.atol, verdict.rtol) == (1e-5, 1.3e-6)
    exact = af.compile(target, af.PathTree.for_class(target), dtype=torch.float64)
    assert af.verify(exact, target).raise_if_not().dtype == "float64"
    assert not af.verify(program, target, dtype=torch.float64).passed
    assert af.verify(program, target, dtype=torch.float64, tolerance=(1e-5, 0.0)).passed
    with pytest.raises(af.AnyformerError, match="no tolerance is known"):
        af.verify(program, target, dtype=torch.bfloat16)
    with pytest.raises(af.AnyformerError, match="sequences must be an integer >= 1"):
        af.verify(program, target, sequences=0)


def test_another_target_is_no_match() -> None:
    target = make()
    program = af.compile(target, af.PathTree.for_class(target))
    with pytest.raises(af.AnyformerError, match="another target"):
        af.verify(program, make(layers=3))


def test_tie_gaps_are_measured_where_attention_is_hard() -> None:
    target = make(attention="hard", residual=True)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_((parameter * 8).round())  # integer scores: exact ties, and gaps of at least one unit
    verdict = af.verify(af.compile(target, af.PathTree.for_class(target)), target).raise_if_not()
    assert verdict.tie_gap_sufficient and verdict.tie_gap > 1e-8
    # by brute force: relative gap between the maximum and the best score that is no tie, in the first layer
    net, tokens = af.read(target), torch.arange(6)[None]
    own = (net.embedding[tokens] @ net.stages[0].branches[1].probes).detach().reshape(6, 2, 6)
    gaps = []
    for h in range(2):
        scores = own[:, h, :3] @ own[:, h, 3:].T / 3**0.5
        for i in range(6):
            row = scores[i, : i + 1]
            rest = row[row < row.max() - 1e-9 * (1 + abs(row.max()))]
            gaps += [float((row.max() - rest.max()) / (1 + abs(row.max())))] if len(rest) else []
    machine = af.PathTree.for_class(target)
    found = machine.trace(tokens, af.compile(target, machine)).gaps[0]
    assert found == pytest.approx(min(gaps), rel=1e-9)


@pytest.mark.parametrize("options", [{"norm": "rms"}, {"norm": "layer", "bias": True, "mlp": 2}])
def test_a_float32_target_compiled_in_float64_is_exact_in_float64(options: dict) -> None:
    """What the reader multiplies (norms into maps, biases through W_O) is formed in float64, like the path products."""
    target = make(residual=True, **options).float()
    program = af.compile(target, af.PathTree.for_class(target), dtype=torch.float64)
    verdict = af.verify(program, target).raise_if_not()
    assert verdict.dtype == "float64" and verdict.max_abs_error < 1e-12
    assert af.compile(target, af.PathTree.for_class(target)).dtype == torch.float32


def test_stages_that_write_into_the_constant_feature_are_refused() -> None:
    op = af.operators
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    embedding = torch.cat((draw(5, 3), torch.ones(5, 1, dtype=torch.float64)), 1)
    residual = af.Branch(op.Identity(), None, af.IdentityMap(4))
    wild = af.Stage((residual, af.Branch(op.Gate(1, "relu"), draw(4, 1), af.DenseMap(draw(1, 4, 4)))))
    plain = af.Stage((residual, af.Branch(op.Gate(1, "relu"), draw(4, 1), af.ConstantMap(4, draw(1, 4)))))
    network = af.Network(embedding, (wild, plain), draw(4, 5), constant=True)
    with pytest.raises(af.OutsideClass, match="write into the constant"):
        af.compile(network, af.PathTree.for_class(network))


def test_every_token_row_and_position_row_is_visited() -> None:
    torch.manual_seed(0)
    target = af.Transformer(vocab=300, heads=1, layers=1, head_dim=2, features=3, positions="learned", max_length=64).double()
    program = af.compile(target, af.PathTree.for_class(target))
    verdict = af.verify(program, target).raise_if_not()
    assert (verdict.tokens_covered, verdict.positions_covered) == (300, 64)
    for row in (0, 7, 299):
        tokens = program.tokens.clone()
        tokens[row] += 1.0
        assert not af.verify(replace(program, tokens=tokens), target).passed, row
    for row in (0, 31, 32, 63):
        positions = program.positions.clone()
        positions[row] += 1.0
        assert not af.verify(replace(program, positions=positions), target).passed, row


@pytest.mark.parametrize("change", [{"tokens": 1}, {"positions": 1}, {"token_names": ("a", "b", "c", "d", "e", "g")}])
def test_programs_of_other_sizes_are_for_another_target(change: dict) -> None:
    torch.manual_seed(0)
    sizes = dict(vocab=6, heads=1, layers=1, head_dim=2, features=3, positions="learned", max_length=8)
    target = af.Transformer(**sizes, token_names=tuple("abcdef"))
    program = af.compile(target, af.PathTree.for_class(target))
    cut = {k: getattr(program, k)[:v] if isinstance(v, int) else v for k, v in change.items()}
    if "tokens" in cut:
        cut["token_names"] = None
    with pytest.raises(af.AnyformerError, match="for another target"):
        af.verify(replace(program, **cut), target)


def test_an_overflowing_target_verifies_nothing() -> None:
    target = make(residual=True, mlp=2, gated=True, activation="relu").float()
    with torch.no_grad():
        target.blocks[0].mlp.gate.weight.fill_(1e25)
        target.blocks[0].mlp.up.weight.fill_(1e25)
    program = af.compile(target, af.PathTree.for_class(target), dtype=torch.float64).to(torch.float32)
    assert not af.verify(program, target).passed


def test_float32_is_judged_against_the_targets_own_rounding_and_random_backbones_against_their_forecast() -> None:
    target = make(residual=True, norm="rms").float()
    large = copy.deepcopy(target)
    with torch.no_grad():
        large.readout.weight.mul_(300)  # large outputs: rounding alone exceeds torch's defaults
    for module, machine in ((large, af.PathTree.for_class(target)), (target, af.Random.for_class(target))):
        program = af.compile(module, machine)
        verdict = af.verify(program, module).raise_if_not()
        assert 0 < verdict.allowance < 1e-2 and verdict.dtype == "float32"
        wrong = replace(program, tokens=program.tokens * (1 + 1e-3))
        assert not af.verify(wrong, module).passed
    exact = af.verify(af.compile(target, af.PathTree.for_class(target), dtype=torch.float64), target).raise_if_not()
    assert exact.allowance == 0.0


def test_an_infinite_output_of_the_target_is_no_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """One infinite logit makes the magnitude infinite; no error may hide behind it."""
    target = make()
    program = af.compile(target, af.PathTree.for_class(target))
    own = OWN_FORWARD[af.Transformer]

    def overflowing(*arguments):
        logits, patterns = own(*arguments)
        logits[arguments[1] == 0] = float("inf")
        return logits, patterns

    monkeypatch.setitem(OWN_FORWARD, af.Transformer, overflowing)
    assert not af.verify(program, target).passed
