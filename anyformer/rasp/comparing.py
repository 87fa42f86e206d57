"""Random programs compared: what :mod:`anyformer.rasp.random_programs` draws, interpreted and compiled.

A program agrees where on every input the network gives the interpreter's values (numbers to 1e-10 of the largest that occurs, in float32
1e-4), or both raise. A refused program is counted with the reason; refusing is never counted as agreeing.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from anyformer.errors import AnyformerError
from anyformer.rasp.compiled import agree, edge_inputs, shown
from anyformer.rasp.compiling import compile
from anyformer.rasp.interpreter import Evaluation
from anyformer.rasp.random_programs import Case, Fragment, random_case
from anyformer.rasp.refusals import NotCompiled


@dataclass
class Report:
    """How many programs of a fragment were compared, refused (by reason), and which differ."""

    fragment: Fragment
    seed: int
    programs: int = 0
    inputs: int = 0
    undefined: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)
    examples: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def refused_share(self) -> float:
        """Refused programs over all."""
        return sum(self.refused.values()) / max(1, self.programs)


def check_random_programs(count: int, seed: int = 0, fragment: Fragment = "categorical", first: int = 0) -> Report:
    """Compile ``count`` random programs of a fragment and compare each with the interpreter on about ten inputs."""
    report = Report(fragment, seed)
    began = time.perf_counter()
    for number in range(first, first + count):
        check_case(random_case(seed, number, fragment), report, f"{fragment} {seed}/{number}")
    report.seconds = time.perf_counter() - began
    return report


def check_case(case: Case, report: Report, name: str) -> None:
    """Compare one program, and write into the report what became of it."""
    report.programs += 1
    try:
        compiled = compile(case.program, case.vocab, case.max_length, check=False, **case.options)
    except NotCompiled as refusal:
        kind = refusal.kinds[0].value
        report.refused[kind] += 1
        report.examples.setdefault(kind, f"{name}: {refusal}")
        return
    single = case.options.get("dtype") == "float32"
    for given in edge_inputs(compiled, 6):
        report.inputs += 1
        meaning = Evaluation(given, causal="causal" in case.options)
        wanted = _outcome(lambda meaning=meaning: meaning.of(case.program))
        got = _outcome(lambda given=given: compiled(given))
        if isinstance(wanted, str) and isinstance(got, str):
            report.undefined += 1
            continue
        rounding = (1e-4 if single else 1e-10) * largest(meaning)
        if isinstance(wanted, str) or isinstance(got, str) or not agree(got, wanted, compiled.error, rounding):
            texts = [x if isinstance(x, str) else shown(x) for x in (got, wanted)]
            report.mismatches.append(f"{name}: {case}: on {shown(given)} the network says {texts[0]}, the meaning is {texts[1]}")
            return


def _outcome(run: Callable[[], list[Any]]) -> list[Any] | str:
    """The values, or the error as text."""
    try:
        return run()
    except AnyformerError as error:
        return f"error: {error}"


def largest(meaning: Evaluation) -> float:
    """The largest number anywhere in an evaluation, at least 1: what rounding is relative to."""
    found = 1.0
    for values in meaning.parts():
        for value in values:
            if isinstance(value, (int, float)):
                found = max(found, abs(float(value)))
    return found
