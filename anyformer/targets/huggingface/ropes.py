"""RoPE both ways: a tuple of frequencies as the parameters of a configuration that gives the same float32 numbers.

    default        f_i = theta^(-2i/d)
    proportional   all zero (no position is seen at all), with partial_rotary_factor = 0
    linear         all divided by one factor
    llama3         the slow ones divided by one factor, with transformers' usual bounds
    longrope       f_i = 1 / factor_i with one list of factors for all lengths: any frequencies, to the last bit of float32

transformers computes its frequencies in float32: those of the first four kinds are found again bit for bit; those of a module that
forms them in float64 are met to float32's rounding.
"""

import math
from typing import Any

import torch
from torch import Tensor

from anyformer.errors import OutsideClass
from anyformer.operators import Attention

ROUNDING = 1e-6
LONGEST = 131_072
NONE = "no Llama-like model computes this network"


def rope_options(op: Attention, source: Any = None) -> tuple[dict[str, Any], float]:
    """``rope_parameters`` and ``max_position_embeddings`` of a configuration for an attention's rotary, and the number by which that
    configuration multiplies what it turns.

    ``source``: the model that the attention was read from, whose own parameters are taken where they give these frequencies.
    """
    config = getattr(source, "config", None)
    length = getattr(config, "max_position_embeddings", None) or LONGEST
    wanted = () if op.rotary is None else op.rotary.frequencies
    if wanted and 2 * len(wanted) != op.head_dim:
        raise OutsideClass(NONE, [f"RoPE on {2 * len(wanted)} of {op.head_dim} coordinates of a head"])
    if op.head_dim % 2:
        raise OutsideClass(NONE, [f"heads of odd width {op.head_dim}"])
    parameters, scaling = _of_source(source, wanted)
    if parameters is None:
        parameters = _fixed(wanted, op.head_dim, length)
    return {"rope_parameters": parameters, "max_position_embeddings": length}, scaling


def _of_source(source: Any, wanted: tuple[float, ...]) -> tuple[dict[str, Any] | None, float]:
    """The source's own parameters, if a rotary made anew from them has these frequencies, and its scaling."""
    rotary = getattr(getattr(source, "base_model", None), "rotary_emb", None)
    if rotary is None:
        return None, 1.0
    fresh = type(rotary)(source.config)
    if tuple(fresh.inv_freq.double().tolist()) != wanted:
        return None, 1.0
    return dict(source.config.rope_parameters), fresh.attention_scaling


def _default(theta: float, head_dim: int) -> Tensor:
    """transformers' own formula, in float32."""
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim))


def _llama3(plain: Tensor, factor: float, original: int) -> Tensor:
    """transformers' llama3 formula for its usual bounds 1 and 4, in float32."""
    wavelength = 2 * math.pi / plain
    low, high = original / 1.0, original / 4.0
    slow = torch.where(wavelength > low, plain / factor, plain)
    share = (original / wavelength - 1.0) / (4.0 - 1.0)
    between = ~(wavelength < high) * ~(wavelength > low)
    return torch.where(between, (1 - share) * slow / factor + share * slow, slow)


def _short(number: float) -> list[float]:
    """A number and its roundings to few digits, the shortest first."""
    return [float(f"{number:.{digits}g}") for digits in range(1, 13)] if 0 < number < math.inf else []


def _fixed(wanted: tuple[float, ...], head_dim: int, length: int) -> dict[str, Any]:
    """Parameters that give the frequencies: exactly where transformers' formulas do, else to float32's rounding."""
    if not any(wanted):
        return {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.0}
    if not all(f > 0 for f in wanted):
        raise OutsideClass(NONE, ["RoPE with some frequencies that are not positive"])
    target = torch.tensor(wanted, dtype=torch.float32)
    single = target.double().tolist() == list(wanted)

    def theta(frequency: float, index: int) -> float:
        return frequency ** (-head_dim / (2 * index)) if index else 10000.0

    last = len(wanted) - 1
    thetas = [10000.0, 500000.0, 1000000.0, *_short(theta(wanted[-1], last))]
    for t in thetas:
        plain = _default(t, head_dim)
        if torch.equal(plain, target) or (not single and bool(((plain - target).abs() <= ROUNDING * target).all())):
            return {"rope_type": "default", "rope_theta": t}
    for factor in _short(1 / wanted[0]):
        for t in [10000.0, 500000.0, 1000000.0, *_short(theta(wanted[-1] * factor, last))]:
            if torch.equal(_default(t, head_dim) / factor, target):
                return {"rope_type": "linear", "rope_theta": t, "factor": factor}
    for t in [10000.0, 500000.0, 1000000.0, *_short(theta(wanted[min(1, last)], min(1, last)))]:
        plain = _default(t, head_dim)
        for factor in _short(float(plain[-1] / target[-1])):
            for original in (2**k for k in range(8, 18)):
                if torch.equal(_llama3(plain, factor, original), target):
                    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": original}
                    return {"rope_type": "llama3", "rope_theta": t, "factor": factor} | bounds
    factors = [_factor(f) for f in wanted]
    lists = {"short_factor": factors, "long_factor": factors, "factor": 1.0, "attention_factor": 1.0}
    return {"rope_type": "longrope", "rope_theta": 1.0, "original_max_position_embeddings": length} | lists


def _factor(frequency: float) -> float:
    """A float32 number whose float32 reciprocal is the frequency, or the nearest there is."""
    near = torch.tensor(1.0 / frequency, dtype=torch.float32)
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    candidates = [near, torch.nextafter(near, up), torch.nextafter(near, down)]
    wanted = torch.tensor(frequency, dtype=torch.float32)
    return float(min(candidates, key=lambda c: float((1.0 / c - wanted).abs())))
