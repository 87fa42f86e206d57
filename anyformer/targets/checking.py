"""What makes a module something else than what its configuration says: replaced parts, hooks, options, shapes, numbers.

A reader sees weights and a configuration; the module's forward is only what its class says as long as nothing in it was
replaced. So the module is compared, part by part, with one built anew from the same configuration on the meta device.
"""

from collections.abc import Iterator

import torch
from torch import nn

SETTINGS = (bool, int, float, str, tuple, type(None))
"""Plain attributes of a part that must be as configured."""

IGNORED = frozenset({"training", "gradient_checkpointing", "name_or_path"})
"""Attributes that do not matter to an evaluation."""


def structure_problems(module: nn.Module, plain: nn.Module, harmless_hooks: tuple[str, ...] = ()) -> Iterator[str]:
    """Every difference between a module and ``plain``, its like without weights. ``harmless_hooks``: Python modules whose
    forward hooks only watch."""
    parts, configured = (dict(m.named_modules(remove_duplicate=False)) for m in (module, plain))
    for name, expected in configured.items():
        if name not in parts and name.rpartition(".")[0] in parts:
            yield f"{name}: missing, a {type(expected).__name__} was configured"
    for name, part in parts.items():
        where, expected = name or "the module itself", configured.get(name)
        if expected is None:
            yield f"{where} ({type(part).__name__}): not a part of the configured transformer"
        elif type(part) is not type(expected):
            yield f"{where}: a {type(part).__name__} stands in place of {type(expected).__name__}"
        else:
            yield from _setting_problems(where, part, expected)
        own = set() if expected is None else set(vars(expected))
        for replaced in sorted(k for k in vars(part) if k not in own and callable(getattr(type(part), k, None))):
            yield f"{where}: its {replaced} was replaced"
        hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        if any(getattr(hook, "__module__", None) not in harmless_hooks for hook in hooks):
            yield f"{where}: forward hooks may change what it computes"
    parameters, known = (
        dict(module.named_parameters(remove_duplicate=False)),
        dict(plain.named_parameters(remove_duplicate=False)),
    )
    for name, expected in known.items():
        got = parameters.get(name)
        if got is None and name.rpartition(".")[0] in parts:
            yield f"{name}: missing, a parameter of shape {tuple(expected.shape)} was configured"
        elif got is not None and got.shape != expected.shape:
            yield f"{name} has shape {tuple(got.shape)}, the configured one {tuple(expected.shape)}"
    yield from (f"{name}: a parameter that the configuration does not have" for name in parameters if name not in known)


def _setting_problems(where: str, part: nn.Module, expected: nn.Module) -> Iterator[str]:
    """Plain attributes that are not as configured."""
    for option, wanted in vars(expected).items():
        if option.startswith("_") or option in IGNORED or not isinstance(wanted, SETTINGS):
            continue
        got = getattr(part, option, None)
        if got != wanted:
            yield f"{where}: its {option} is {got}, the configured one is {wanted}"


def number_problems(module: nn.Module, advice: str = "") -> Iterator[str]:
    """dtypes other than one of float32 and float64, and numbers that are not finite."""
    dtypes = {p.dtype for p in module.parameters()}
    if not dtypes <= {torch.float32, torch.float64} or len(dtypes) > 1:
        yield f"parameters must all be float32 or all float64, got {', '.join(sorted(map(str, dtypes)))}{advice}"
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if any(t.is_meta for _, t in tensors):
        yield "its weights are on the meta device: there are no numbers to read"
        return
    for name, tensor in tensors:
        if tensor.layout != torch.strided:
            yield f"{name} is a {tensor.layout} tensor: make it dense"
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            yield f"{name} holds NaN or infinite weights"
