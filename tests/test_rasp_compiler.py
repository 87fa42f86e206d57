"""Compiled programs are what they mean: the golden table at every level, random programs, and refusals that say why."""

import math
from typing import Any

import pytest
import torch
from rasp_cases import CASES, Case

from anyformer.errors import OutsideClass
from anyformer.rasp import compile, interpret

LEVELS: dict[str, dict[str, Any]] = {
    "float64": {},
    "float32": {"dtype": "float32"},
    "softmax": {"attention": "softmax"},
    "standard": {"mode": "standard", "tolerance": 1e-4},
}


def same(got: list[Any], expected: list[Any], rtol: float, atol: float) -> None:
    """Words and truth values are equal, numbers close; True is 1."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        if isinstance(a, (int, float)) and isinstance(b, (int, float)):
            assert math.isclose(a, b, rel_tol=rtol, abs_tol=atol), (got, expected)
        else:
            assert a == b, (got, expected)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_interpreter_gives_the_expected_values(case: Case) -> None:
    same(interpret(case.program, case.given, causal=case.causal), case.expected, 1e-12, 1e-12)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_network_gives_the_expected_values(case: Case, level: str) -> None:
    def make() -> Any:
        causal = "dialect" if case.causal else "no"
        return compile(case.program, case.vocab, case.max_length, causal=causal, **LEVELS[level])

    if level in case.refused:
        with pytest.raises(OutsideClass, match=case.refused[level]):
            make()
        return
    compiled = make()  # which also compares it with the interpreter
    rtol, atol = (1.3e-6, 1e-5) if level == "float32" else (1e-10, 1e-10)
    same(compiled(case.given), case.expected, rtol, atol + compiled.error)
    assert compiled.network.embedding.dtype is (torch.float32 if level == "float32" else torch.float64)
