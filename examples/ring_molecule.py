"""A ring molecule in miniature: predict, at each atom of a ring, how its two pairs of neighbours interact.

    f_s(X) = q_{s+1} q_{s+2} + q_{s-1} q_{s-2}

q are charges; the ring may be turned and mirrored, so f is D_n-equivariant. Attention with one learned bias for each orbit of pairs under D_n
against plain attention with learned positions, trained on few rings and on more.
"""

import torch
from torch import nn

from anyformer.approximation import dihedral, equivariant_attention

ATOMS, WIDE = 6, 12


class Positions(nn.Module):
    """Plain attention on tokens with a learned vector for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Parameter(0.5 * torch.randn(ATOMS, WIDE))
        self.attention = nn.MultiheadAttention(WIDE, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.where
        return self.attention(x, x, x)[0]


class Stack(nn.Module):
    """Two layers X + g(X) between feed-forward layers."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.enter, self.leave = nn.Linear(1, WIDE), nn.Linear(WIDE, 1)
        self.units = nn.ModuleList(nn.Sequential(nn.Linear(WIDE, 32), nn.GELU(), nn.Linear(32, WIDE)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        x = x + self.units[0](x)
        for layer, unit in zip(self.layers, list(self.units)[1:], strict=False):
            x = x + layer(x)
            x = x + unit(x)
        return self.leave(x + self.units[3](x))


def target(q: torch.Tensor) -> torch.Tensor:
    return q.roll(-1, 1) * q.roll(-2, 1) + q.roll(1, 1) * q.roll(2, 1)


def error(layers: list[nn.Module], rings: int, steps: int = 300) -> float:
    torch.manual_seed(1)
    train, test = torch.randn(rings, ATOMS, 1), torch.randn(2000, ATOMS, 1)
    model = Stack(layers)
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(steps):
        batch = train[torch.randint(rings, (min(rings, 128),))]
        loss = (model(batch) - target(batch)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        return float((model(test) - target(test)).square().mean() / target(test).var())


if __name__ == "__main__":
    torch.manual_seed(0)
    design = equivariant_attention(dihedral(ATOMS), ATOMS, WIDE, 2)
    print(design.certificate)
    for rings in (32, 128):
        torch.manual_seed(0)
        ours = error([equivariant_attention(dihedral(ATOMS), ATOMS, WIDE, 2) for _ in range(2)], rings)
        plain = error([Positions() for _ in range(2)], rings)
        print(
            f"{rings:4d} rings: error / variance {ours:.3f} with the D_{ATOMS} design, {plain:.3f} with plain attention and learned positions"
        )
