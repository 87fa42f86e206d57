"""``anyformer train``: options become a configuration, the configuration a run."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tyro.conf import OmitArgPrefixes

from anyformer.backbones.frozen import FrozenMasked, FrozenRandom, attention_class
from anyformer.console import show, train_progress
from anyformer.errors import AnyformerError, require_size
from anyformer.learning.models import FullyTrained, Model
from anyformer.learning.recommended import STEPS, recommended_model, recommended_training
from anyformer.learning.reprogrammed import Reprogrammed
from anyformer.learning.runs import RunConfig, RunResult, run_training
from anyformer.learning.sinks import TrackioSink
from anyformer.learning.sizes import Sizes, sizes
from anyformer.learning.training import TrainingConfig
from anyformer.memory import keep_freed_memory
from anyformer.targets.transformer import TransformerConfig
from anyformer.tasks import Task
from anyformer.train_options import TRAINED, Dense, Folder, FrozenOptions, Full, Sparse, Train

MOST_THREADS = 1024

# --- which options there are ------------------------------------------------------------------------------------------------


def options_of(task: type, words: list[str]) -> type[Train[Any, Any]]:
    """The options of ``train`` for a task, with the backbone's own and with the defaults that go with what the words say.

    Raises AnyformerError for an option of another backbone.
    """
    backbone = _said(words, "backbone", "none")
    kind = TRAINED.get(backbone, Folder)
    if kind is Folder and not {"-h", "--help"} & set(words):
        _require_folder(backbone)
    _refuse_others(words, backbone, kind)
    defaults = recommended_training(
        frozen=kind is not Full,
        norm=_said(words, "norm", "") != "none",
        steps=_steps(_said(words, "steps", "")),
    )

    @dataclass(frozen=True)
    class Narrowed(Train[task, kind]):  # type: ignore[valid-type]
        training: OmitArgPrefixes[TrainingConfig] = field(default_factory=lambda: defaults)

    return Narrowed


def _steps(said: str) -> int:
    """How many steps the words give, as the parser will read them; the usual number where that is none."""
    try:
        steps = int(said)
    except ValueError:
        return STEPS
    return steps if 0 < steps < 2**62 else STEPS


def _require_folder(backbone: str) -> None:
    if not backbone or not Path(backbone).is_dir():
        raise AnyformerError(
            f"--backbone must be {', '.join(TRAINED)}, or the folder of a causal transformers model (with config.json), got {backbone!r}"
        )


def _said(words: list[str], name: str, otherwise: str) -> str:
    """The last value that the words give an option."""
    for at in reversed(range(len(words))):
        option, equals, value = words[at].partition("=")
        if option.replace("_", "-") == f"--{name}":
            return value if equals else words[at + 1] if at + 1 < len(words) else otherwise
    return otherwise


def _refuse_others(words: list[str], backbone: str, kind: type) -> None:
    known = {field.name for field in fields(kind)}
    named = TRAINED | {"FOLDER": Folder}
    for word in words:
        option = word.partition("=")[0]
        name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
        owners = [other for other, options in named.items() if name in {f.name for f in fields(options)}]
        if option.startswith("--") and owners and name not in known:
            raise AnyformerError(
                f"{option} does not apply to --backbone {backbone}; it is an option of {', '.join(owners)} "
                f"(anyformer train TASK --backbone {backbone} --help shows what there is)"
            )


# --- what they mean -----------------------------------------------------------------------------------------------------------


def run_config(options: Train[Task, Any]) -> RunConfig:
    """The configuration that the options describe."""
    return RunConfig(task=options.task, model=_model(options), training=options.training)


def _model(options: Train[Task, Any]) -> Model:
    given = options.machine
    if isinstance(given, Full):
        return _fully_trained(options.task, given)
    if isinstance(given, Folder):
        return _reprogrammed(options.backbone, given)
    return _frozen_machine(options.task, given)


def _fully_trained(task: Task, given: Full) -> Model:
    config = TransformerConfig(
        vocab=task.vocab,
        heads=given.heads,
        layers=given.layers,
        head_dim=given.head_dim,
        features=given.features,
        residual=given.residual,
        norm=None if given.norm == "none" else given.norm,
        mlp=given.mlp,
        positions=None if given.positions == "none" else given.positions,
        max_length=task.length if given.positions == "learned" else None,
    )
    return FullyTrained(config=config)


def _reprogrammed(backbone: str, given: Folder) -> Model:
    _require_folder(backbone)
    return Reprogrammed(
        folder=backbone,
        seed=given.backbone_seed,
        positions=given.positions == "learned",
        embedding_std=given.embedding_std,
    )


def _frozen_machine(task: Task, given: Sparse | Dense) -> Model:
    problems = list(_without_effect(given))
    if problems:
        raise AnyformerError(f"train: {'; '.join(problems)}")
    options: dict[str, Any] = {
        "residual": given.residual,
        "norm": None if given.norm == "none" else given.norm,
        "mlp": given.frozen_mlp,
        "seed": given.backbone_seed or 0,
    }
    machine = FrozenMasked
    if isinstance(given, Dense):
        machine, options["width"] = FrozenRandom, given.width
    return recommended_model(
        machine.recipe_for(attention_class(given.heads, given.layers, given.head_dim, task.vocab), **options),
        positions=given.positions == "learned",
        readout=given.readout,
        train_norms=given.train_norms,
        embedding_std=given.embedding_std,
        products=given.products,
    )


def _without_effect(given: FrozenOptions) -> Iterator[str]:
    """Options that would be ignored."""
    if given.train_norms and given.norm == "none":
        yield "--train-norms needs norms, and --norm none has none: leave it out"
    for name, value in (("--backbone-seed", given.backbone_seed), ("--products", given.products)):
        if value is not None and not isinstance(given, Dense) and not given.frozen_mlp:
            yield f"{name} is for dense frozen matrices, and a sparse machine has them in --frozen-mlp alone: leave it out"


# --- the run ------------------------------------------------------------------------------------------------------------------


def train(options: Train[Task, Any]) -> dict[str, Any]:
    """Run the training that the options describe; returns what ``--json`` prints."""
    require_size("train", "threads", options.threads)
    if options.threads > MOST_THREADS:
        raise AnyformerError(f"train: threads must be at most {MOST_THREADS}, got {options.threads}")
    torch.set_num_threads(options.threads)
    config = run_config(options)
    found: list[Sizes] = []
    sinks = () if options.track is None else (TrackioSink(options.track),)

    def started(learner: nn.Module) -> None:
        found.append(sizes(learner, config.task, config.training.batch_size))
        if not options.as_json:
            show(str(found[0]))

    keep_freed_memory()
    told: dict[str, Any] = {"sinks": sinks, "started": started, "device": options.device}
    if options.resume and not options.as_json and not (options.runs / config.name).exists():
        show(f"nothing to resume: {options.runs / config.name}, the run of these options, does not exist; it starts now")
    with train_progress(quiet=options.as_json, name=config.name) as report:
        result = run_training(config, options.runs, resume=options.resume, report=report, **told)
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
        "trained": {name: list(shape) for name, shape in found[0].trained.items()} if found else None,
        "frozen": found[0].frozen if found else None,
        "memory_bytes": found[0].bytes if found else None,
    }


def _show(result: RunResult) -> None:
    history = result.history
    end = "stopped early" if history.stopped_early else "finished"
    show(
        f"{end} after {history.steps[-1]} steps, {history.seconds:.0f} s: accuracy {100 * history.accuracies[-1]:.2f} %, "
        f"loss {history.losses[-1]:.4f}\nwrote {result.result}"
    )
