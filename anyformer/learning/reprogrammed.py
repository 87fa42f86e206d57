"""A frozen transformers model, reprogrammed: token rows, position rows and a read-out are trained around it, nothing inside of it.

    minimise over E (vocab, width), P (n_max, width), U (out, vocab):   -log softmax(decoder(E[tokens] + P[places]) U)[label]

The decoder is any causal one, trained or random, from a folder (:mod:`anyformer.targets.huggingface.backbones`): it keeps its own RoPE or
position table, runs without dropout, and is known by the sha256 of its weights and configuration, wherever its folder lies.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.errors import AnyformerError, require_choice, require_size
from anyformer.learning.models import Model, draw_tables, require_std
from anyformer.memory import require_memory
from anyformer.network import check_positions, check_tokens
from anyformer.storage import REPROGRAMMING, patiently, read_folder, write_folder
from anyformer.targets.huggingface.backbones import Decoder, load_decoder
from anyformer.targets.transformer import check_names
from anyformer.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Reprogrammed(Model):
    """E, U and, with ``positions``, P for the causal transformers model in ``folder``.

    ``sha256`` names the model: it is read from the folder where it is None, and checked whenever a learner is built, so that a run's name
    depends on the model and not on the folder's. ``seed`` (default 0) draws the weights of a folder that holds only ``config.json``.
    Rows are drawn normal with ``embedding_std`` (None: that of the model's own token rows), position rows with ``position_std`` (None: the
    same), U with ``readout_std`` (None: 1/sqrt(out)).
    """

    folder: str = field(compare=False)
    sha256: str | None = None
    seed: int | None = None
    positions: bool = True
    embedding_std: float | None = None
    position_std: float | None = None
    readout_std: float | None = None

    def __post_init__(self) -> None:
        owner = "Reprogrammed"
        object.__setattr__(self, "folder", str(self.folder))
        require_choice(owner, "positions", self.positions, (True, False))
        for name in ("embedding_std", "position_std", "readout_std"):
            require_std(owner, name, getattr(self, name))
        if self.seed is not None:
            require_size(owner, "seed", self.seed, 0)
            if self.seed >= 2**63:
                raise AnyformerError(f"{owner}: seed must be below 2^63, got {self.seed}")
        if self.sha256 is None:
            object.__setattr__(self, "sha256", load_decoder(self.folder, self.seed).sha256)

    def build(self, task: Task, seed: int) -> "Reprogramming":
        decoder = _load(self.folder, self.seed, self.sha256)
        if decoder.max_positions is not None and decoder.max_positions < task.length:
            raise AnyformerError(
                f"{self.folder} takes {decoder.max_positions} positions, the task has {task.length}: choose a shorter task or another model"
            )
        places = task.length if self.positions else None
        require_memory(16 * (decoder.width * (task.vocab + (places or 0)) + decoder.out * task.vocab), "training these rows")
        learner = Reprogramming(decoder, task.vocab, places, token_names=task.token_names)
        rows = decoder.std if self.embedding_std is None else self.embedding_std
        positions = rows if self.position_std is None else self.position_std
        readout = decoder.out**-0.5 if self.readout_std is None else self.readout_std
        draw_tables(seed, [(learner.tokens, rows), (learner.positions, positions), (learner.readout, readout)])
        return learner

    def save(self, learner: nn.Module, folder: str | Path) -> None:
        assert isinstance(learner, Reprogramming)
        learner.save(folder)


class Reprogramming(nn.Module):
    """Parameters ``tokens`` (vocab, width), ``positions`` (n_max, width) or None, and ``readout`` (out, vocab); ``backbone`` is frozen.

    Called with tokens (batch, n) it gives logits (batch, n, vocab). In training mode, too, the backbone is in evaluation mode.
    """

    def __init__(self, decoder: Decoder, vocab: int, max_positions: int | None, *, token_names: tuple[str, ...] | None = None):
        super().__init__()
        self.decoder, self.backbone = decoder, decoder.module.requires_grad_(False)
        self.token_names = None if token_names is None else check_names(token_names, vocab)
        self.tokens = nn.Parameter(torch.zeros(vocab, decoder.width))
        self.positions = None if max_positions is None else nn.Parameter(torch.zeros(max_positions, decoder.width))
        self.readout = nn.Parameter(torch.zeros(decoder.out, vocab))
        self.train()

    def train(self, mode: bool = True) -> "Reprogramming":
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, tokens: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n vocab"]:
        """Logits."""
        n, most = tokens.shape[1], self.decoder.max_positions
        check_tokens(tokens, len(self.tokens))
        if most is not None and n > most:
            raise AnyformerError(f"{n} tokens, this model takes {most} positions; give fewer tokens")
        rows = F.embedding(tokens, self.tokens)
        if self.positions is not None:
            check_positions(torch.tensor([n - 1]), len(self.positions))
            rows = rows + self.positions[:n]
        return self.backbone(inputs_embeds=rows).last_hidden_state @ self.readout

    def save(self, folder: str | Path) -> None:
        """Write the trained tables and the name of the model they are for, never its weights."""
        d = self.decoder
        backbone = {"sha256": d.sha256, "family": d.family, "width": d.width, "out": d.out, "seed": d.seed}
        tables: dict[str, Tensor] = {name: p for name, p in self.named_parameters() if p.requires_grad}
        about = {"backbone": backbone, "token_names": None if self.token_names is None else list(self.token_names)}
        card = (
            f"# Rows that reprogram a transformer\n\n{len(self.tokens)} token rows of width {d.width} and a read-out, trained around a frozen "
            f"{d.family} (sha256 {d.sha256}).\n\n```python\nfrom anyformer.learning.reprogrammed import load_reprogramming\n"
            "model = load_reprogramming('this folder', 'folder of the frozen model')\nlogits = model(tokens)\n```\n"
        )
        write_folder(folder, REPROGRAMMING, about, tables, card)


@patiently
def load_reprogramming(folder: str | Path, backbone: str | Path) -> Reprogramming:
    """Read saved tables and put them around the model in the folder ``backbone``, in evaluation mode.

    Raises :class:`AnyformerError` where that is not the model that they were trained for.
    """
    stored = read_folder(folder, REPROGRAMMING)
    about, names = stored.config.get("backbone"), stored.config.get("token_names")
    keys = {"sha256": str, "family": str, "width": int, "out": int, "seed": int | None}
    if not isinstance(about, dict) or any(not isinstance(about.get(key), kind) for key, kind in keys.items()):
        raise AnyformerError(f"{folder} does not say which model it is for; the file is damaged")
    vocab = (stored.shapes.get("tokens") or (None,))[0]
    expected: dict[str, tuple[tuple[int | None, ...], torch.dtype | None]] = {
        "tokens": ((None, about["width"]), None),
        "readout": ((about["out"], vocab), None),
    }
    if "positions" in stored.shapes:
        expected["positions"] = expected["tokens"]
    stored.expect(expected)
    decoder = _load(backbone, about["seed"], about["sha256"], f"the {about['family']} that {folder} was trained for")
    tensors = stored.tensors()
    places = tensors["positions"].shape[0] if "positions" in tensors else None
    learner = Reprogramming(decoder, len(tensors["tokens"]), places, token_names=None if names is None else tuple(names))
    with torch.no_grad():
        for name, tensor in tensors.items():
            learner.get_parameter(name).copy_(tensor)
    return learner.eval()


def _load(folder: str | Path, seed: int | None, sha256: str | None, what: str = "the model of this run") -> Decoder:
    decoder = load_decoder(folder, seed)
    if decoder.sha256 != sha256:
        raise AnyformerError(
            f"{folder} does not hold {what}: its sha256 is {decoder.sha256[:12]}..., {str(sha256)[:12]}... was expected; give the right folder"
        )
    return decoder
