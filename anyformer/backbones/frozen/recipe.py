"""Recipes of the machines on which programs are learned: a class of attention-only transformers, and what the experiments add to it.

    layer    X <- [X +] sum_h A_h Y R_V[l,h],   A_h = softmax((Y R_Q[l,h]) (Y R_K[l,h])^T / sqrt(d)),     Y = X, or LayerNorm(X) over all m
    MLP      X <- [X +] act(Y W_1) W_2          W_1 (m, r), W_2 (r, m) random and frozen
    logits = Y U                                U (m, d_in), the program's

Nothing here depends on a target. (Fixed Universal Transformers, arXiv 2605.31423, experiments; what it leaves open is a field.)
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from anyformer.backbones.random_backbone import RandomRecipe, required_reads
from anyformer.backbones.tree import Tree
from anyformer.classes import BranchClass, NetworkClass, StageClass
from anyformer.errors import AnyformerError, OutsideClass, require_choice, require_size
from anyformer.operators import Attention, Causal
from anyformer.operators.functions import FUNCTIONS
from anyformer.recipe import Recipe

NORMS = (None, "pre", "post")


@dataclass(frozen=True, kw_only=True)
class FrozenRecipe(Recipe, ABC):
    """What both kinds of machine have. ``network_class`` holds L stages of attention alone; its outputs are d_in.

    ``norm`` is a LayerNorm over all m coordinates: "pre" (of what attention and MLP read, and once more before U), "post" (of the stream
    after each of them) or None. Its gain and bias are 1 and 0 unless a program brings its own. ``mlp`` is r (0: no MLP). ``seed`` draws
    whatever is random, with the law of PyTorch's linear layers: uniform within 1/sqrt(fan-in).
    """

    network_class: NetworkClass
    residual: bool = False
    norm: str | None = None
    norm_eps: float = 1e-5
    mlp: int = 0
    activation: str = "gelu"
    seed: int = 0

    def __post_init__(self) -> None:
        owner = type(self).__name__
        require_choice(owner, "norm", self.norm, NORMS)
        require_choice(owner, "residual", self.residual, (True, False))
        require_choice(owner, "activation", self.activation, tuple(FUNCTIONS))
        require_size(owner, "mlp", self.mlp, 0)
        require_size(owner, "seed", self.seed, 0)
        if self.seed >= 2**64:
            raise AnyformerError(f"{owner}: seed must be below 2^64, got {self.seed}")
        if not (isinstance(self.norm_eps, float) and self.norm_eps > 0):
            raise AnyformerError(f"{owner}: norm_eps must be a positive number, got {self.norm_eps!r}")
        if not isinstance(self.network_class, NetworkClass) or not all(map(_attends_alone, self.network_class.stages)):
            reason = "residual, norm and MLP are options of the machine itself; path-tree machines take such targets"
            raise OutsideClass("a frozen machine holds classes of attention alone", [reason])
        first = self.network_class.stages[0].attention if self.network_class.stages else None
        if first is None or any(stage.attention != first for stage in self.network_class.stages):
            raise OutsideClass(
                "a frozen machine holds classes of attention alone", ["all layers, at least one, have the same attention"]
            )

    @property
    def attention(self) -> Attention:
        """The attention of every layer."""
        attention = self.network_class.stages[0].attention
        assert attention is not None
        return attention

    @property
    def layers(self) -> int:
        """L."""
        return len(self.network_class.stages)

    @property
    @abstractmethod
    def m(self) -> int:
        """The width of the stream."""

    @property
    def norms(self) -> int:
        """How many LayerNorms a run has."""
        each = self.layers * (2 if self.mlp else 1)
        return {None: 0, "pre": each + 1, "post": each}[self.norm]

    @property
    @abstractmethod
    def folds(self) -> bool:
        """Whether a run needs the reads of a tree alone, never the stream of width m."""


@dataclass(frozen=True, kw_only=True)
class FrozenMaskedRecipe(FrozenRecipe):
    """The 0/1 maps of Theorem 3.1 in the masked layout: R_V is a diagonal of 0 and 1, reads sum over prefixes; m is the path tree's width."""

    @property
    def m(self) -> int:
        return Tree.of(self.network_class).width

    @property
    def folds(self) -> bool:
        return self.norm is None and not self.mlp


@dataclass(frozen=True, kw_only=True)
class FrozenRandomRecipe(FrozenRecipe):
    """Dense random R_Q, R_K (m, d) and R_V (m, m): those of a :class:`~anyformer.backbones.random_backbone.Random` machine."""

    width: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_size("FrozenRandomRecipe", "width", self.width)

    @property
    def m(self) -> int:
        return self.width

    @property
    def folds(self) -> bool:
        return self.norm is None and not self.mlp and not self.residual

    def maps(self) -> RandomRecipe:
        """The recipe of the random machine with the same R_Q, R_K, R_V."""
        return RandomRecipe(self.network_class, self.width, "uniform", self.seed)

    @property
    def programmable(self) -> bool:
        """Whether the width lets every target of the class be compiled."""
        return self.folds and self.width >= required_reads(self.network_class)


MOST_LAYERS = 1000
"""Beyond it a width of H^L is a number that takes minutes to write down."""


def attention_class(heads: int, layers: int, head_dim: int, features: int) -> NetworkClass:
    """The class that a frozen machine holds: L layers of H causal heads of width d, nothing else, d_in = ``features`` outputs."""
    require_size("attention_class", "layers", layers)
    if layers > MOST_LAYERS:
        raise AnyformerError(f"attention_class: at most {MOST_LAYERS} layers are possible, got {layers}; choose fewer layers")
    stage = StageClass((BranchClass(Attention(heads, head_dim, mask=Causal())),))
    return NetworkClass((stage,) * layers, features)


def _attends_alone(stage: StageClass) -> bool:
    """Whether a stage is one bank of plain attention with general maps."""
    banks = stage.branches
    return len(banks) == 1 and isinstance(banks[0].operator, Attention) and banks[0].map == "general" and not stage.shared
