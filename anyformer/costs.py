"""What universality costs: the width of every registered machine for a class, beside the lower bound.

Any universal attention-only model of the target's depth that matches attention needs ``m >= H^(L/2)``, even with d_in = 1 (arXiv
2605.31423, Theorem 4.1). All sizes are integers of any magnitude: a width of 1e48 is an answer.
"""

from dataclasses import asdict
from math import isqrt, log10
from typing import Any

from anyformer.backbones.registry import MACHINES
from anyformer.classes import NetworkClass
from anyformer.errors import AnyformerError, OutsideClass, require_size
from anyformer.targets.reading import network_class

MOST_DIGITS = 4000
"""Widths with more digits are refused: Python prints integers of up to 4300."""


def lower_bound(heads: int, layers: int) -> int:
    """The smallest integer >= H^(L/2), exactly."""
    power = heads**layers
    root = isqrt(power)
    return root if root * root == power else root + 1


def cost(target: Any, length: int = 1) -> dict[str, Any]:
    """Sizes of every machine for the class of ``target`` (a module, Network, NetworkClass or TransformerConfig).

    Returns ``{"backbones": {name: sizes}, "lower_bound": H^(L/2)}``. ``sizes`` are the fields of :class:`Cost`, or ``{"width": None,
    "reason": ..}`` where the machine cannot hold the class. Random backbones: ``width`` is N, the least, and ``recommended`` is
    ceil(1.25 N). Nothing is allocated.
    """
    require_size("cost", "length", length)
    known: NetworkClass = network_class(target)
    digits = sum(log10(stage.count) for stage in known.stages)
    if digits > MOST_DIGITS:
        raise AnyformerError(
            f"a width of this class has more than {MOST_DIGITS} digits (about {digits:.0f}); choose fewer layers or heads"
        )
    backbones: dict[str, Any] = {}
    for name, machine in MACHINES.items():
        try:
            recipe, beside = machine.least(known)
            backbones[name] = asdict(machine.cost_of(recipe, length)) | beside
        except OutsideClass as error:
            backbones[name] = {"width": None, "reason": str(error)}
    if any(isinstance(v, int) and v.bit_length() > 3.3 * MOST_DIGITS for sizes in backbones.values() for v in sizes.values()):
        raise AnyformerError(
            f"a size of this class has more than {MOST_DIGITS} digits; choose fewer layers or heads, or a shorter length"
        )
    return {"backbones": backbones, "lower_bound": lower_bound(max(known.heads, 1), known.layers)}
