"""Compile a target into the input embedding of a fixed machine: the program."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.backbones.machine import Machine
from anyformer.errors import AnyformerError, OutsideClass
from anyformer.network import Network
from anyformer.program import Program
from anyformer.targets.reading import read


def compile(target: nn.Module | Network, machine: Machine, *, dtype: torch.dtype | None = None) -> Program:
    """The program that makes ``machine`` compute ``target``.

    Path trees: ``E = E0 T_0`` with the path products accumulated in float64 (:mod:`anyformer.unrolling`); random backbones: the
    minimum-norm solution of ``E R_all = E0 T_0``. A differentiable function of the target's tensors; saving detaches.
    ``dtype`` of the program defaults to the target's.

    Raises :class:`OutsideClass` with all reasons where the target cannot be read exactly or is not of the machine's class.
    """
    if not isinstance(machine, Machine):
        raise AnyformerError(f"a machine is needed, got {machine!r:.60}; make one with PathTree.for_class(target)")
    if dtype not in (None, torch.float32, torch.float64):
        raise AnyformerError(f"programs are torch.float32 or torch.float64, got {dtype!r}")
    network = read(target)
    machine.admit(network.network_class)
    bad = [f"tensor {i} of shape {tuple(t.shape)}" for i, t in enumerate(network.tensors()) if not _finite(t)]
    if bad:
        raise OutsideClass("the target holds NaN or infinite numbers", bad)
    program = machine.write(network, dtype or _dtype_of(network))
    with torch.no_grad():
        if not all(map(_finite, _columns(program))):
            advice = "" if program.dtype == torch.float64 else "; give dtype=torch.float64"
            raise OutsideClass("the program overflows", [f"path products exceed the range of {program.dtype}{advice}"])
    target_type = type(network if network.source is None else network.source).__name__
    about: dict[str, Any] = {"made_by": "compile", "target": target_type, "features": network.network_class.features}
    return replace(program, provenance=program.provenance | about)


def _dtype_of(network: Network) -> torch.dtype:
    """The dtype of the module that a network was read from, or its own."""
    parameters = network.source.parameters() if isinstance(network.source, nn.Module) else iter(())
    return next((p.dtype for p in parameters), network.embedding.dtype)


def _finite(t: Tensor) -> bool:
    """Whether every number is finite; a finite sum says so without a copy."""
    return bool(torch.isfinite(t.detach().sum())) or bool(torch.isfinite(t).all())


def _columns(program: Program) -> list[Tensor]:
    return [t for t in (program.tokens, program.positions, program.constants) if t is not None]
