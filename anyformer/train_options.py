"""What ``anyformer train`` takes: the options of the command, and of each kind of model that it trains."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar

from tyro.conf import OmitArgPrefixes

from anyformer.learning.training import TrainingConfig
from anyformer.options import AsJson

T = TypeVar("T")
B = TypeVar("B")


@dataclass(frozen=True)
class AnyTask:
    """Stands where a task's own options go, as long as no task is named."""


@dataclass(frozen=True)
class Full:
    """The transformer (--backbone none)."""

    heads: int = 2
    """H, attention heads a layer."""
    layers: int = 2
    """L."""
    head_dim: int = 28
    """d, width of a head's queries and keys."""
    features: int = 32
    """D, width of the stream."""
    mlp: int = 0
    """Hidden units of the MLP (0: none)."""
    residual: bool = True
    """With residual connections."""
    norm: Literal["none", "rms", "layer"] = "rms"
    """Normalisation before each part: RMSNorm, LayerNorm or none."""
    positions: Literal["none", "learned", "rope", "alibi"] = "learned"
    """How positions are told apart."""


@dataclass(frozen=True)
class FrozenOptions:
    """A machine of the paper's experiments, and what of its program is trained."""

    heads: int = 2
    """H, attention heads a layer."""
    layers: int = 2
    """L."""
    head_dim: int = 28
    """d, width of a head's queries and keys."""
    residual: bool = True
    """With residual connections."""
    norm: Literal["none", "pre", "post"] = "pre"
    """LayerNorm over all m coordinates: before each part, after it, or none."""
    frozen_mlp: int = 0
    """Hidden units of a random MLP in each layer, frozen (0: none)."""
    backbone_seed: int | None = None
    """Draws what is random of the machine (default 0)."""
    positions: Literal["learned", "none"] = "learned"
    """Whether the program has position rows."""
    train_norms: bool = False
    """Also train gains and biases of the LayerNorms."""
    embedding_std: float | None = None
    """Of the first token and position rows (default 0.1 with a norm, 0.5 without)."""
    products: Literal["float32", "bfloat16"] | None = None
    """dtype of products with dense frozen matrices (default float32)."""


@dataclass(frozen=True)
class Sparse(FrozenOptions):
    """The machine of 0 and 1 (--backbone sparse), and what of its program is trained."""

    readout: Literal["free", "shared"] | None = None
    """U over all m coordinates, or one matrix that all leaves share (default for attention alone)."""


@dataclass(frozen=True)
class Dense(FrozenOptions):
    """The random machine (--backbone random), and what of its program is trained."""

    width: int | None = None
    """m, the width of the stream (default: the number of required reads)."""
    readout: Literal["free"] | None = None
    """U over all m coordinates."""


@dataclass(frozen=True)
class Folder:
    """The causal transformers model in a folder (--backbone FOLDER), and what is trained around it."""

    backbone_seed: int | None = None
    """Draws the weights of a folder that holds config.json alone (default 0)."""
    positions: Literal["learned", "none"] = "learned"
    """Whether position rows are trained; the model keeps its own positions in any case."""
    embedding_std: float | None = None
    """Of the first token and position rows (default: that of the model's own token rows)."""


TRAINED: dict[str, type] = {"none": Full, "sparse": Sparse, "random": Dense}
"""--backbone -> its options; anything else is a :class:`Folder`."""


@dataclass(frozen=True)
class Train(Generic[T, B]):
    """Train on a task, in a folder runs/HASH that resumes after anything: a transformer, or the program of a frozen machine.

    TASK comes first: dyck, k-hop, needle, addition, modular-addition, memorisation or text. Each task and backbone has its own options:
    anyformer train TASK --backbone BACKBONE --help shows them.

    Example: anyformer train k-hop --hops 1 --backbone sparse --steps 300
    """

    task: OmitArgPrefixes[T]
    machine: OmitArgPrefixes[B]
    training: OmitArgPrefixes[TrainingConfig] = field(default_factory=lambda: TrainingConfig(steps=1500))
    backbone: str = "none"
    """none: every weight of a transformer is trained. Only the embedding and the read-out: sparse (a machine of 0 and 1), random (a machine of
    random numbers), or the folder of a causal transformers model (config.json, and safetensors unless its weights are to be random)."""
    runs: Path = Path("runs")
    """Folder of the run folders."""
    resume: bool = False
    """Go on where an unfinished run with these options stopped."""
    device: str = "cpu"
    """Where to train (cpu, cuda)."""
    threads: int = 1
    """Threads of torch; with 1 a resumed run has the bits of one that was never stopped, and small models are fastest."""
    track: str | None = None
    """Send the figures to this project of trackio as well (extra track)."""
    as_json: AsJson = False
