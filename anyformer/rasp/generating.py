"""Random programs compared: what :mod:`anyformer.rasp.random_programs` draws, interpreted and compiled.

A program agrees where on every input the network gives the interpreter's values (numbers to 1e-10 of the largest that occurs, in float32
1e-4), or both raise. A refused program is counted with the reason; refusing is never counted as agreeing.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from anyformer.errors import AnyformerError, OutsideClass
from anyformer.rasp.compiled import agree, edge_inputs, shown
from anyformer.rasp.compiling import compile
from anyformer.rasp.interpreter import Evaluation
from anyformer.rasp.random_programs import Case, Fragment, random_case


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

    def lines(self) -> list[str]:
        """The report as text."""
        head = (
            f"{self.fragment}: {self.programs:,} programs, {self.inputs:,} inputs ({self.undefined:,} on which both have no value), "
            f"{len(self.mismatches)} mismatches, {sum(self.refused.values()):,} refused ({self.refused_share:.1%}), {self.seconds:.0f} s"
        )
        return [head, *(f"  {count:5,}  {reason}" for reason, count in self.refused.most_common()), *self.mismatches]


REASONS = {
    "explodes": "a value set explodes",
    "products, at most": "a predicate has too many classes of values",
    "predicate has no value": "a predicate is undefined for some pair of values",
    "no value at all": "a part has no value on any input",
    "to tell apart": "values too close to each other for the dtype",
    "ties in this dtype": "values too close to each other for the dtype",
    "do not fit the score": "values too close to each other for the dtype",
    "nearly equal": "real scores whose order rounding decides",
    "near to each other": "a comparison that rounding decides",
    "near to a jump": "a jump that rounding decides",
    "divides by values": "a divisor that may be 0",
    "near to 0": "a divisor that may be 0",
    "it must be": "an argument outside the domain of log or sqrt",
    "too large for a float": "a number too large for a float",
    "mixes words": "an average of words and numbers",
    "is no number": "a default that is no number",
    "are no numbers": "words where numbers are needed",
    "is real-valued": "a real number where a set of values is needed",
    "is not an operation of real numbers": "a function without a rule for real numbers",
}
"""What a refusal says, and how it is counted."""


def reason_of(refusal: OutsideClass) -> str:
    """The kind of a refusal."""
    text = str(refusal)
    return next((kind for part, kind in REASONS.items() if part in text), text[-120:])


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
    except OutsideClass as refusal:
        kind = reason_of(refusal)
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
