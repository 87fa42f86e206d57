"""Levenberg-Marquardt: minimise ``|r(E)|^2`` over a matrix E, to machine precision where the minimum is 0.

E <- E - (J^T J + damping * diag(J^T J))^(-1) J^T r        J: the Jacobian of r, by forward-mode differentiation
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

EXACT = 1e-28
"""Mean squared residual below which nothing is left to gain in float64."""
PATIENCE, GAIN = 25, 0.2
"""Stop where that many steps together reduced the squared residual by less than this part."""


def minimise(
    residual: Callable[[Tensor], Float[Tensor, "*residuals"]], start: Float[Tensor, "rows m"], steps: int
) -> tuple[Float[Tensor, "rows m"], float]:
    """The best E found from ``start`` in at most ``steps`` steps, and its root mean squared residual."""
    E, damping = start, 1e-2
    r = residual(E).flatten()
    history = [float(r.square().mean())]
    for _ in range(steps):
        J: Tensor = torch.func.jacfwd(lambda e: residual(e).flatten())(E)  # type: ignore[assignment]
        J = J.flatten(1)
        normal, gradient = J.T @ J, J.T @ r
        for _ in range(10):
            damped = normal + torch.diag(damping * normal.diagonal() + 1e-14 * normal.diagonal().max() + 1e-300)
            trial = E - torch.linalg.solve(damped, gradient).reshape(E.shape)
            r_trial = residual(trial).flatten()
            if float(r_trial.square().mean()) < history[-1]:
                break
            damping *= 4
        else:
            break
        E, r, damping = trial, r_trial, max(damping / 5, 1e-14)
        history.append(float(r.square().mean()))
        stalled = len(history) > PATIENCE and history[-1] > (1 - GAIN) * history[-1 - PATIENCE]
        if stalled or history[-1] < EXACT:
            break
    return E, history[-1] ** 0.5
