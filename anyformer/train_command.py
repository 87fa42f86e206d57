"""``anyformer train``: options become a configuration, the configuration a run."""

import os
import sys
from typing import Any

import torch

from anyformer.console import show, train_progress
from anyformer.errors import require_size
from anyformer.learning.models import FullyTrained, Model
from anyformer.learning.runs import RunConfig, RunResult, run_training
from anyformer.learning.sinks import TrackioSink
from anyformer.options import Train
from anyformer.targets.transformer import TransformerConfig
from anyformer.tasks import Task


def run_config(options: Train[Task]) -> RunConfig:
    """The configuration that the options describe."""
    return RunConfig(task=options.task, model=_model(options), training=options.training)


def _model(options: Train[Task]) -> Model:
    config = TransformerConfig(
        vocab=options.task.vocab,
        heads=options.heads,
        layers=options.layers,
        head_dim=options.head_dim,
        features=options.features,
        residual=options.residual,
        norm=None if options.norm == "none" else options.norm,
        mlp=options.mlp,
        positions=None if options.positions == "none" else options.positions,
        max_length=options.task.length if options.positions == "learned" else None,
    )
    return FullyTrained(config=config)


def train(options: Train[Task]) -> dict[str, Any]:
    """Run the training that the options describe; returns what ``--json`` prints."""
    if int(os.environ.get("RANK", "0")) > 0:  # under torchrun the first process speaks for all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    require_size("train", "threads", options.threads)
    torch.set_num_threads(options.threads)
    config = run_config(options)
    sinks = () if options.track is None else (TrackioSink(options.track),)
    with train_progress(quiet=options.as_json, name=config.name) as report:
        result = run_training(config, options.runs, resume=options.resume, report=report, sinks=sinks, device=options.device)
    if not options.as_json:
        _show(result)
    history = result.history
    return {
        "name": config.name,
        "folder": str(result.folder),
        "result": str(result.result),
        "finished": result.finished,
        "steps": history.steps[-1],
        "loss": history.losses[-1],
        "accuracy": history.accuracies[-1],
        "stopped_early": history.stopped_early,
        "seconds": history.seconds,
    }


def _show(result: RunResult) -> None:
    history = result.history
    end = "stopped early" if history.stopped_early else "finished"
    show(
        f"{end} after {history.steps[-1]} steps, {history.seconds:.0f} s: accuracy {100 * history.accuracies[-1]:.2f} %, "
        f"loss {history.losses[-1]:.4f}\nwrote {result.result}"
    )
