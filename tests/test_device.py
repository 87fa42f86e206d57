"""Every machine and every operator on an accelerator, against the processor: ``pytest -m device`` where there is one.

``ANYFORMER_DEVICE=cpu pytest -m device`` runs the same tests without an accelerator: they then compare the processor with itself.
"""

import os
from dataclasses import replace

import pytest
import test_operators
import torch

import anyformer as af
from anyformer.backbones import FrozenMasked, FrozenRandom
from anyformer.conformance import LENGTH, OperatorConformance
from anyformer.learning import FrozenMachine, RunConfig, TrainingConfig, run_training
from anyformer.learning.learner import LearnedProgram
from anyformer.operators import Context
from anyformer.targets.transformer import Transformer, TransformerConfig
from anyformer.tasks import Dyck

DEVICE = os.environ.get("ANYFORMER_DEVICE", "cuda")
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no accelerator here"),
]
OPERATORS = [
    case
    for case in vars(test_operators).values()
    if isinstance(case, type) and issubclass(case, OperatorConformance) and hasattr(case, "operator")
]
SIZES = TransformerConfig(vocab=6, heads=2, layers=2, head_dim=4, features=6)
TARGETS = {
    "chain": TransformerConfig(vocab=6, heads=1, layers=2, head_dim=4, features=6),
    "composition": TransformerConfig(vocab=6, heads=2, layers=2, head_dim=4, features=6, residual=True),
}


def moved(x):
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.__name__)
def test_an_operator(case):
    made = case()
    shared, own = made.reads(torch.Generator().manual_seed(0))
    tokens = torch.zeros(own.shape[:2], dtype=torch.int64)
    values = torch.randn(*own.shape[:3], 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    here = made.operator(shared, own, Context.of(tokens)).contract(values)
    there = made.operator(moved(shared), moved(own), Context.of(moved(tokens))).contract(moved(values))
    assert there.device.type == torch.device(DEVICE).type
    torch.testing.assert_close(there.cpu(), here, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", sorted(af.MACHINES))
def test_a_machine(name):
    torch.manual_seed(0)
    target = Transformer(TARGETS.get(name, SIZES)).double()
    machine = af.MACHINES[name].for_class(target)
    program = af.compile(target, machine)
    tokens = torch.randint(6, (3, LENGTH))
    here = machine(tokens, program)
    there = machine.to(DEVICE)(moved(tokens), program.to(DEVICE))
    assert there.device.type == torch.device(DEVICE).type
    torch.testing.assert_close(there.cpu(), here, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", (FrozenMasked, FrozenRandom))
@pytest.mark.parametrize("options", ({}, {"residual": True, "norm": "pre", "mlp": 4}), ids=str)
def test_learning(kind, options):
    made = LearnedProgram(kind.for_class(SIZES, **options), 6, LENGTH).double()
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(generator=torch.Generator().manual_seed(2))
    tokens, labels = torch.randint(6, (2, 3, LENGTH), generator=torch.Generator().manual_seed(3))
    loss = made.gradients(tokens, labels)
    here = [p.grad.clone() for p in made.parameters()]
    made.zero_grad()
    made.to(DEVICE)
    assert made.gradients(moved(tokens), moved(labels)) == pytest.approx(loss, abs=1e-10)
    for p, wanted in zip(made.parameters(), here, strict=True):
        torch.testing.assert_close(p.grad.cpu(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "products", "optimizer"),
    [(FrozenMasked, "float32", "adamw"), (FrozenRandom, "float32", "muon"), (FrozenRandom, "bfloat16", "adamw")],
)
def test_a_training_is_stopped_and_resumed(kind, products, optimizer, tmp_path):
    """The run that was stopped ends as the one that was not, and as on the processor up to rounding."""
    machine = FrozenMachine(
        recipe=kind.recipe_for(af.network_class(replace(SIZES, vocab=4, features=4)), norm="pre"), products=products
    )
    steps = TrainingConfig(
        steps=6, batch_size=4, warm_up=2, evaluate_every=2, evaluation_size=8, learning_rate=1e-3, optimizer=optimizer
    )
    config = RunConfig(task=Dyck(), model=machine, training=steps)

    def stop(progress):
        if progress.step >= 3:
            raise KeyboardInterrupt

    whole = run_training(config, tmp_path / "whole", device=DEVICE)
    with pytest.raises(KeyboardInterrupt):
        run_training(config, tmp_path / "stopped", device=DEVICE, report=stop)
    resumed = run_training(config, tmp_path / "stopped", device=DEVICE)
    tables = [af.load(run.result) for run in (whole, resumed, run_training(config, tmp_path / "here"))]
    close = {"rtol": 1e-3, "atol": 1e-4} if DEVICE != "cpu" else {"rtol": 0, "atol": 0}
    for name in ("tokens", "positions", "readout"):
        ended, again, here = (getattr(program, name) for program in tables)
        torch.testing.assert_close(again, ended, **close)
        torch.testing.assert_close(ended, here, rtol=0, atol=2e-3 * (DEVICE != "cpu"))
