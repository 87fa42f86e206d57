"""Training: the loss falls, the same configuration gives the same bits, and every way to stop."""

import math
import multiprocessing
import signal
from dataclasses import astuple, dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from run_cases import BRIEF, CONFIG, Pieces
from torch import nn

from anyformer.errors import AnyformerError
from anyformer.learning import demo_targets
from anyformer.learning.demo_targets import DEMO_CLASS, DEMO_TRAINING, demo_tasks, train_demo_targets
from anyformer.learning.optimisation import Optimizer
from anyformer.learning.training import HELD_OUT, Diverged, Training, TrainingConfig, evaluate, train
from anyformer.spec import Spec
from anyformer.targets.transformer import Transformer
from anyformer.tasks import IGNORED, Dyck, Task
from anyformer.tasks.task import below


@dataclass(frozen=True, kw_only=True)
class Successor(Task):
    """Label (x + 1) mod 4 at every position but the first, which is not scored."""

    vocab: int = 4
    names: ClassVar[tuple[str, ...]] = ("a", "b", "c", "d")
    length: ClassVar[int] = 5
    words: ClassVar[int] = 5

    def _draw(self, words):
        inputs = below(words, 4)
        return inputs, np.where(np.arange(5) == 0, IGNORED, (inputs + 1) % 4)


def table(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(4, 4), nn.Dropout(dropout))


QUICK = TrainingConfig(steps=60, batch_size=8, learning_rate=0.1, warm_up=5, evaluate_every=10, evaluation_size=32)


def test_the_loss_falls_and_the_task_is_learnt():
    module, seen = table(), []
    history = train(module, Successor(), QUICK, lambda *news: seen.append(news))
    assert history.steps == (10, 20, 30, 40, 50, 60)
    assert history.losses[-1] < 0.3 * history.losses[0] and history.accuracies[-1] == 1.0
    assert not history.stopped_early and history.seconds > 0
    expected = zip(history.steps, history.losses, history.accuracies, strict=True)
    assert [news[:3] for news in seen] == list(expected)
    left = [news[3] for news in seen]
    assert all(seconds > 0 for seconds in left[:-1]) and left[-1] == 0


@pytest.mark.parametrize("schedule", ["cosine", "one-cycle"])
def test_the_same_configuration_gives_the_same_bits(schedule):
    config = TrainingConfig(steps=6, batch_size=4, warm_up=2, evaluate_every=3, evaluation_size=16, schedule=schedule)
    sizes = dict(vocab=4, heads=2, layers=1, head_dim=4, features=8, residual=True, norm="rms")
    runs = []
    for ambient in (1, 2):
        torch.manual_seed(0)
        module = Transformer(**sizes)
        torch.manual_seed(ambient)
        runs.append((train(module, Dyck(), config), module.state_dict()))
    (first, weights), (second, others) = runs
    assert first == second and all(torch.equal(weights[k], others[k]) for k in weights)


def test_dropout_follows_the_seed_and_leaves_the_callers_generator_alone():
    torch.manual_seed(7)
    expected, weights, draws = torch.rand(3), [], []
    for seed in (0, 0, 1):
        module = table(dropout=0.5)
        module[1].register_forward_hook(lambda *_: draws.append(torch.rand(())))
        torch.manual_seed(7)
        train(module, Successor(), TrainingConfig(steps=1, warm_up=0, batch_size=4, evaluation_size=4, seed=seed))
        assert torch.equal(torch.rand(3), expected)
        weights.append(module[0].weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    first = draws[:: len(draws) // 3]
    assert first[0] == first[1] != first[2]


def test_every_step_draws_anew():
    module, draws = table(dropout=0.5), []
    module[1].register_forward_hook(lambda *_: draws.append(torch.rand(()).item()) if module.training else None)
    train(module, Successor(), TrainingConfig(steps=4, warm_up=0, batch_size=4, evaluation_size=4))
    assert len(set(draws)) == 4


def test_the_loss_is_the_mean_since_the_evaluation_before():
    often, seldom = (train(table(), Successor(), replace(QUICK, steps=6, evaluate_every=every)) for every in (1, 3))
    assert seldom.losses == pytest.approx([sum(often.losses[:3]) / 3, sum(often.losses[3:]) / 3])


def test_one_step_is_the_textbook_step():
    module, task = table(), Successor()
    config = TrainingConfig(steps=3, warm_up=2, batch_size=4, learning_rate=0.1, weight_decay=0.5, clip=0.01, seed=9)
    oracle = table()
    optimizer = torch.optim.AdamW(oracle.parameters(), lr=1.0, weight_decay=0.5)
    for step, rate in enumerate((0.05, 0.1, 0.1)):
        batch = task.batch(9, step, 4)
        pairs = zip(batch.inputs[:, 1:].flatten(), batch.labels[:, 1:].flatten(), strict=True)
        losses = [-torch.log_softmax(oracle(inputs), -1)[label] for inputs, label in pairs]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        gradient = oracle[0].weight.grad
        gradient *= min(1.0, 0.01 / (gradient.norm().item() + 1e-6))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    train(module, task, config)
    torch.testing.assert_close(module[0].weight, oracle[0].weight)


def test_it_stops_after_two_good_evaluations_in_a_row():
    config = replace(QUICK, stop_at=1.0)
    seen = []
    history = train(table(), Successor(), config, lambda *news: seen.append(news))
    first = history.accuracies.index(1.0)
    assert history.stopped_early and history.steps[-1] < 60
    assert history.accuracies[-2:] == (1.0, 1.0) and len(history.steps) == first + 2
    assert seen[-1][3] == 0.0


def test_one_good_evaluation_does_not_stop_it():
    script = iter((0.99, 0.5, 0.9, 0.89, 0.9, 0.9, 1.0, 1.0))

    class Scripted(Successor):
        def accuracy(self, logits, batch):
            return next(script)

    history = train(table(), Scripted(), replace(QUICK, evaluate_every=5, stop_at=0.9))
    assert history.accuracies == (0.99, 0.5, 0.9, 0.89, 0.9, 0.9) and history.stopped_early


def test_frozen_parameters_stay_and_the_mode_is_restored():
    module = nn.Sequential(table(), nn.Linear(4, 4))
    module[0][0].weight.requires_grad_(False)
    frozen, free = module[0][0].weight.clone(), module[1].weight.clone()
    module.eval()
    train(module, Successor(), TrainingConfig(steps=2, warm_up=0, batch_size=2, evaluation_size=2))
    assert torch.equal(module[0][0].weight, frozen) and not torch.equal(module[1].weight, free)
    assert not module.training and all(p.requires_grad for p in module[1].parameters())


def test_a_loss_that_is_not_finite_stops_with_a_clear_error():
    module = table().eval()
    calls = iter((1.0, 1.0, 1.0, math.nan))
    module.register_forward_hook(lambda _module, _inputs, logits: logits * next(calls))
    with pytest.raises(AnyformerError, match=r"train: the loss is nan at step 3; try a smaller learning_rate"):
        train(module, Successor(), QUICK)
    assert not module.training and module[0].weight.isfinite().all()


def test_nothing_to_train_is_an_error():
    with pytest.raises(AnyformerError, match="no parameter of the module requires a gradient"):
        train(table().requires_grad_(False), Successor(), QUICK)


def test_evaluation_is_in_pieces_of_one_fixed_set():
    module, task = table(dropout=0.9), Successor()
    batch = task.batch(HELD_OUT, 0, 50)
    whole = task.accuracy(module.eval()(batch.inputs), batch)
    module.train()
    assert evaluate(module, task, 50) == evaluate(module, task, 50, rows=7) == whole
    assert module.training


def test_the_schedules():
    cosine = TrainingConfig(steps=1000, warm_up=100, learning_rate=2.0)
    assert [cosine.rate(s) for s in (0, 49, 99, 100)] == pytest.approx([0.02, 1.0, 2.0, 2.0])
    assert [cosine.rate(s) for s in (550, 999)] == pytest.approx([1.0, 0.0], abs=1e-5)
    cycle = TrainingConfig(steps=1000, warm_up=100, learning_rate=2.0, schedule="one-cycle")
    sgd = torch.optim.SGD([torch.zeros(1)], momentum=0.5)
    theirs = torch.optim.lr_scheduler.OneCycleLR(sgd, 2.0, total_steps=1001, pct_start=101 / 1001, final_div_factor=400)
    wanted = []
    for _ in range(1000):
        sgd.step()
        theirs.step()
        wanted.append(theirs.get_last_lr()[0])
    ours = [cycle.rate(step) for step in range(1000)]
    assert ours[:100] == pytest.approx(wanted[:100], rel=1e-12)
    assert ours[100:] == pytest.approx(wanted[99:999], rel=1e-12)  # ours stays at the highest rate for one step more
    for config in (cosine, cycle):
        rates = [config.rate(step) for step in range(1000)]
        assert max(rates) == 2.0 and all(rate > 0 for rate in rates)
        assert rates[:100] == sorted(rates[:100]) and rates[100:] == sorted(rates[100:], reverse=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, r"steps must be an integer >= 1, got 0"),
        ({"warm_up": -1}, r"warm_up must be an integer >= 0, got -1"),
        ({"warm_up": 200}, r"warm_up must be below steps, got 200 of 200"),
        ({"learning_rate": 0.0}, r"learning_rate must be a number >= 1e-12, got 0.0"),
        ({"learning_rate": math.nan}, r"learning_rate must be a number >= 1e-12, got nan"),
        ({"weight_decay": -0.1}, r"weight_decay must be a number >= 0, got -0.1"),
        ({"clip": 0.0}, r"clip must be a number >= 1e-12 or None, got 0.0"),
        ({"stop_at": 2.0}, r"stop_at is an accuracy, at most 1, got 2.0"),
        ({"stop_at": math.inf}, r"stop_at must be a number >= 1e-12 or None, got inf"),
        ({"schedule": "linear"}, r"schedule must be one of 'cosine', 'one-cycle', got 'linear'"),
        ({"seed": HELD_OUT}, r"seed 12345 is the held-out set's"),
    ],
)
def test_configuration_errors(fields, message):
    with pytest.raises(AnyformerError, match=message):
        TrainingConfig(**{"steps": 200} | fields)


def test_a_configuration_survives_json():
    assert Spec.from_json(QUICK.to_json()) == QUICK


# --- what moves, and how ------------------------------------------------------------------------------


def test_nothing_moves_but_what_requires_a_gradient():
    learner = CONFIG.model.build(CONFIG.task, 0)
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    train(learner, CONFIG.task, replace(BRIEF, steps=6, weight_decay=0.5))
    moved = {name for name, tensor in learner.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {"table.weight", "out.weight", "out.bias"}


def test_a_gradient_that_is_not_finite_stops_before_the_step():
    learner = CONFIG.model.build(CONFIG.task, 0)
    learner.out.weight.register_hook(lambda grad: grad * math.inf)
    before = learner.table.weight.detach().clone()
    with pytest.raises(Diverged, match=r"the gradient's norm is (inf|nan) at step 0"):
        train(learner, CONFIG.task, BRIEF)
    assert torch.equal(learner.table.weight, before)


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 1.0), (-0.1, 0.9)])
def test_betas(betas, as_shipped):
    with pytest.raises(AnyformerError, match=r"betas must be a tuple of two numbers in \[0, 1\)"):
        TrainingConfig(steps=200, betas=betas)


def test_betas_and_decay_reach_adamw():
    ours, oracle = (CONFIG.model.build(CONFIG.task, 0) for _ in range(2))
    config = TrainingConfig(
        steps=1, warm_up=0, batch_size=4, betas=(0.5, 0.6), weight_decay=0.3, learning_rate=0.1, evaluation_size=4
    )
    start = oracle.out.weight.detach().clone()
    train(ours, CONFIG.task, config)
    # first step of AdamW: m / (1 - b1) = g, v / (1 - b2) = g^2, whatever the betas: w (1 - rate decay) - rate sign(g)
    step = (ours.out.weight.detach() - start * (1 - 0.1 * 0.3)).abs()
    torch.testing.assert_close(step[step > 1e-3], torch.full_like(step[step > 1e-3], 0.1), rtol=1e-3, atol=1e-3)
    training = Training(oracle, CONFIG.task, config)
    training.advance()
    assert training.optimizer.parts[0].param_groups[0]["betas"] == (0.5, 0.6)


def test_muon_moves_matrices_by_orthogonal_factors():
    torch.manual_seed(0)
    named = {"matrix": nn.Parameter(torch.randn(6, 4)), "vector": nn.Parameter(torch.randn(4))}
    start = named["matrix"].detach().clone()
    for p in named.values():
        p.grad = torch.randn(p.shape)
    optimizer = Optimizer(named, "muon", betas=(0.9, 0.999), weight_decay=0.0)
    optimizer.step(0.1)
    assert set(optimizer.state()) == {"matrix/momentum_buffer", "vector/step", "vector/exp_avg", "vector/exp_avg_sq"}
    u, _, vh = torch.linalg.svd(named["matrix"].grad, full_matrices=False)
    moved = (start - named["matrix"].detach()) / (0.2 * 0.1 * math.sqrt(6))
    values = (u.mT @ moved @ vh.mT).diagonal()  # 1 for the exact orthogonal factor; five steps of the iteration come near
    assert bool(((values > 0.6) & (values < 1.3)).all())
    torch.testing.assert_close(moved, u @ values.diag() @ vh, rtol=0.05, atol=0.05)


def test_muon_decays_what_it_moves():
    ends = []
    for decay in (0.0, 0.5):
        torch.manual_seed(0)
        named = {"matrix": nn.Parameter(torch.randn(6, 4)), "vector": nn.Parameter(torch.randn(4))}
        start = {name: p.detach().clone() for name, p in named.items()}
        for p in named.values():
            p.grad = torch.randn(p.shape)
        Optimizer(named, "muon", betas=(0.9, 0.999), weight_decay=decay).step(0.1)
        ends.append({name: p.detach() for name, p in named.items()})
    for name, first in start.items():
        torch.testing.assert_close(ends[0][name] - ends[1][name], 0.1 * 0.5 * first)


def test_a_learner_may_compute_its_own_gradients():
    class Blocks(Pieces):
        """The same loss, row by row."""

        def gradients(self, inputs, labels, total=None):
            total, out = int((labels != IGNORED).sum()) if total is None else total, 0.0
            for x, y in zip(inputs, labels, strict=True):
                loss = nn.functional.cross_entropy(self(x[None])[0], y, ignore_index=IGNORED, reduction="sum") / total
                loss.backward()
                out += loss.item()
            return out

    def learner(kind: type[Pieces]) -> Pieces:
        torch.manual_seed(0)
        return kind(4, 0.0).double()

    ordinary, own = learner(Pieces), learner(Blocks)
    histories = [train(module, Dyck(), replace(BRIEF, batch_size=5)) for module in (ordinary, own)]
    assert histories[0].losses == pytest.approx(histories[1].losses, rel=1e-10)
    for one, other in zip(ordinary.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


# --- the demo's targets -----------------------------------------------------------------------------


def brief(**changes) -> dict[str, TrainingConfig]:
    config = TrainingConfig(**dict(steps=2, batch_size=2, warm_up=1, evaluate_every=1, evaluation_size=4) | changes)
    return dict.fromkeys(DEMO_TRAINING, config)


def test_the_demo_trains_what_train_trains():
    state, seen = torch.get_rng_state(), []
    training = brief() | {"dyck": brief(seed=3)["dyck"]}
    targets = train_demo_targets(lambda *news: seen.append(news), training)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(targets) == list(demo_tasks()) == ["dyck", "one-hop"]
    for name, task in demo_tasks().items():
        torch.manual_seed(training[name].seed)
        expected = Transformer(DEMO_CLASS)
        history = train(expected, task, training[name])
        assert targets[name].config == DEMO_CLASS and targets[name].token_names == task.token_names
        for key, tensor in expected.state_dict().items():
            assert torch.equal(targets[name].state_dict()[key], tensor)
        news = [n[1:5] for n in seen if n[0] == name]
        assert news == [(s, 2, *rest) for s, *rest in zip(*astuple(history)[:3], strict=True)]


def test_a_failing_worker_or_report_ends_all_of_them(monkeypatch):
    monkeypatch.setattr(demo_targets, "get_context", lambda _: multiprocessing.get_context("fork"))  # how they end is alike
    with pytest.raises(AnyformerError, match=r"training dyck: .*the loss is nan at step \d+; try a smaller"):
        train_demo_targets(training={"dyck": brief(steps=9, clip=None, learning_rate=1e30)["dyck"]})

    with pytest.raises(AnyformerError, match="a name in training must be one of 'dyck', 'one-hop', got 'other'"):
        train_demo_targets(training={"other": QUICK})

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train_demo_targets(interrupt, brief(steps=10**6))
    assert not multiprocessing.active_children() and signal.getsignal(signal.SIGINT) is before


def test_the_demo_fits_one_class():
    for name, task in demo_tasks().items():
        assert task.vocab == DEMO_CLASS.vocab and task.length <= DEMO_CLASS.max_length
        assert DEMO_TRAINING[name].stop_at is not None
