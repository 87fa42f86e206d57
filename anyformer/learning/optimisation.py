"""How trained parameters move: AdamW, or Muon for matrices with AdamW for the rest.

    AdamW   w <- (1 - rate decay) w - rate m / (sqrt(v) + eps),   m, v: running means of g and g^2 (``betas``)
    Muon    W <- (1 - rate decay) W - 0.2 rate sqrt(max(rows, columns)) O,   O: the orthogonal factor of the momentum

Muon's factor 0.2 sqrt(max(...)) makes the size of its steps that of AdamW, so one rate and one decay serve both.
Only the parameters that are given move, and only they decay.
"""

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from anyformer.errors import AnyformerError

OPTIMIZERS = ("adamw", "muon")
MUON_STEPS = 5


class Optimizer:
    """One or two of torch's optimizers over named parameters; its state is a dictionary of tensors by name."""

    def __init__(self, named: dict[str, nn.Parameter], kind: str, betas: tuple[float, float], weight_decay: float):
        self.named = named
        matrices = [p for p in named.values() if p.ndim == 2 and kind == "muon"]
        others = [p for p in named.values() if p.ndim != 2 or kind != "muon"]
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            if not hasattr(torch.optim, "Muon"):
                raise AnyformerError(f"optimizer 'muon' needs torch >= 2.9, this is {torch.__version__}; choose 'adamw'")
            muon = torch.optim.Muon(
                matrices, weight_decay=weight_decay, momentum=0.95, ns_steps=MUON_STEPS, adjust_lr_fn="match_rms_adamw"
            )
            self.parts.append(muon)
        if others:
            self.parts.append(torch.optim.AdamW(others, betas=betas, weight_decay=weight_decay, foreach=True))

    def step(self, rate: float) -> None:
        """One step down the gradients that the parameters hold."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()

    def state(self) -> dict[str, Shaped[Tensor, "..."]]:
        """Every tensor of the optimizer's memory, by parameter and kind (``w/exp_avg``): the tensors themselves."""
        memory = {p: kept for part in self.parts for p, kept in part.state.items()}
        return {f"{name}/{kind}": tensor for name, p in self.named.items() for kind, tensor in memory.get(p, {}).items()}

    def restore(self, tensors: dict[str, Shaped[Tensor, "..."]]) -> None:
        """Take over a memory that :meth:`state` gave; raises AnyformerError where it is of other parameters."""
        owner = {p: part for part in self.parts for group in part.param_groups for p in group["params"]}
        for part in self.parts:
            part.state.clear()
        for key, tensor in tensors.items():
            name, _, kind = key.rpartition("/")
            if name not in self.named:
                raise AnyformerError(f"the optimizer's memory is of other parameters: {name!r} is not trained here")
            p = self.named[name]
            if kind != "step" and tensor.shape != p.shape:
                raise AnyformerError(f"the optimizer's memory of {name} has shape {tuple(tensor.shape)}, not {tuple(p.shape)}")
            owner[p].state[p][kind] = tensor.clone() if kind == "step" else tensor.to(p.device, copy=True)
