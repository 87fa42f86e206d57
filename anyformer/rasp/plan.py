"""What must be computed when. A plan is a list of heads and units that write named coordinates of the stream at stated times.

    time 0: the embedding      2l - 1: attention of layer l      2l: its feed-forward part

Everything is a :class:`Form`, a linear form of coordinates and the constant feature: sums and multiples cost nothing, they become
probe columns. A head or unit runs as early as its forms allow, so the plan has as few layers as the program has dependent steps.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

FAULT = 1e-6
"""How large the fault output may be on an input on which the program is defined."""

Intervals = tuple[tuple[int | None, int | None], ...]
"""Sets of integers as intervals (low, high), None: unbounded."""


@dataclass(frozen=True)
class Form:
    """``sum of coefficient * coordinate + constant``; terms in the order of coordinates."""

    terms: tuple[tuple[int, float], ...] = ()
    constant: float = 0.0

    def __add__(self, other: "Form") -> "Form":
        terms = dict(self.terms)
        for coordinate, coefficient in other.terms:
            terms[coordinate] = terms.get(coordinate, 0.0) + coefficient
        return _form(terms, self.constant + other.constant)

    def __rmul__(self, factor: float) -> "Form":
        return _form({c: factor * w for c, w in self.terms}, factor * self.constant)

    def __sub__(self, other: "Form") -> "Form":
        return self + (-1.0) * other


def _form(terms: dict[int, float], constant: float) -> Form:
    return Form(tuple((c, w) for c, w in sorted(terms.items()) if w != 0), constant + 0.0)


def number(value: float | int) -> Form:
    """A constant."""
    return Form((), float(value))


@dataclass(frozen=True)
class Coordinate:
    """One number of the stream: its name, and the time at which it is written."""

    name: str
    time: int


@dataclass(frozen=True)
class Score:
    """``score(query, key) = sum of a(query) b(key)`` over the ``pairs``: 1/2 where the key is selected, at most -1/2 where not. ``offsets``: the
    allowed distances key - query, or None for all."""

    pairs: tuple[tuple[Form, Form], ...]
    offsets: Intervals | None = None

    def plus(self, query: Form, key: Form, factor: float = 1.0) -> "Score":
        """``factor`` times this score, plus one more product."""
        return Score((*((factor * q, k) for q, k in self.pairs), (query, key)), self.offsets)

    def forms(self) -> Iterable[Form]:
        """All forms it reads."""
        return (form for pair in self.pairs for form in pair)

    def merged(self) -> "Score":
        """The same score with equal keys, then equal queries, in one product."""
        by_key: dict[Form, Form] = {}
        for query, key in self.pairs:
            by_key[key] = by_key[key] + query if key in by_key else query
        by_query: dict[Form, Form] = {}
        for key, query in by_key.items():
            by_query[query] = by_query[query] + key if query in by_query else key
        none = Form()
        return Score(tuple((q, k) for q, k in by_query.items() if none not in (q, k)), self.offsets)


@dataclass
class Head:
    """One attention head at a time: its score, the kernel, and the values that it averages into coordinates."""

    time: int
    score: Score
    kernel: Literal["hard", "soft"]
    writes: dict[int, Form] = field(default_factory=dict)
    name: str = ""


@dataclass
class Unit:
    """One hidden unit: ``function(gate) * value`` (value None: 1), times a coefficient into each coordinate."""

    time: int
    function: str
    gate: Form
    value: Form | None
    writes: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """``coefficient * function(gate) * value``: what one unit adds to a coordinate."""

    function: str
    gate: Form
    value: Form | None = None
    coefficient: float = 1.0

    def __rmul__(self, factor: float) -> "Part":
        return replace(self, coefficient=factor * self.coefficient)


@dataclass
class Plan:
    """Coordinates, and what writes them."""

    coordinates: list[Coordinate] = field(default_factory=list)
    token_columns: dict[int, np.ndarray] = field(default_factory=dict)
    index_columns: dict[int, np.ndarray] = field(default_factory=dict)
    token_input: int | None = None
    heads: list[Head] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    slips: dict[int, float] = field(default_factory=dict)
    """How far a coordinate may be off beyond rounding, where it may: sums of steps of ReLU units, and what is averaged from them."""
    sizes: dict[int, float] = field(default_factory=dict)
    """How large a coordinate may be, where that is known: functions of finite sets, and averages of them."""
    _heads: dict[tuple, Head] = field(default_factory=dict)
    _units: dict[tuple, Unit] = field(default_factory=dict)

    def coordinate(self, name: str, time: int) -> int:
        """A new coordinate."""
        self.coordinates.append(Coordinate(name, time))
        return len(self.coordinates) - 1

    def form(self, coordinate: int) -> Form:
        """The coordinate itself."""
        return Form(((coordinate, 1.0),))

    def time(self, *forms: Form | None) -> int:
        """When all these forms can be read."""
        return max((self.coordinates[c].time for form in forms if form is not None for c, _ in form.terms), default=0)

    def slip(self, form: Form) -> float:
        """How far the form may be off beyond rounding."""
        return sum((abs(w) * self.slips.get(c, 0.0) for c, w in form.terms), 0.0)

    def size(self, form: Form) -> float:
        """How large the form may be; infinite where that is not known."""
        return abs(form.constant) + sum(abs(w) * self.sizes.get(c, math.inf) for c, w in form.terms)

    def embedded(self, name: str, values: np.ndarray, table: Literal["tokens", "indices"]) -> Form:
        """A function of the token or of the position, written by the embedding."""
        place = self.coordinate(name, 0)
        self.sizes[place] = float(np.abs(values).max(initial=0.0))
        (self.token_columns if table == "tokens" else self.index_columns)[place] = values
        return self.form(place)

    def attend(self, name: str, score: Score, kernel: Literal["hard", "soft"], value: Form, head_name: str) -> Form:
        """A coordinate with the average of ``value``; heads with one score at one time are one head."""
        time = _next(self.time(value, *score.forms()), attention=True)
        key = (time, score, kernel)
        if key not in self._heads:
            self._heads[key] = Head(time, score, kernel, name=head_name)
            self.heads.append(self._heads[key])
        head = self._heads[key]
        for place, written in head.writes.items():
            if written == value:
                return self.form(place)
        place = self.coordinate(name, time)
        self._note(place, self.slip(value), self.size(value))
        head.writes[place] = value
        return self.form(place)

    def _note(self, place: int, slip: float, size: float) -> None:
        if slip:
            self.slips[place] = slip
        if size < math.inf:
            self.sizes[place] = size

    def compute(self, name: str, parts: List[Part], slip: float = 0.0, size: float = math.inf) -> Form:
        """A coordinate with the sum of the parts, which may be off by ``slip`` and as large as ``size``; equal units at one time are one."""
        time = _next(max(self.time(part.gate, part.value) for part in parts), attention=False)
        place = self.coordinate(name, time)
        self._note(place, slip, size)
        for part in parts:
            key = (time, part.function, part.gate, part.value)
            if key not in self._units:
                self._units[key] = Unit(*key)
                self.units.append(self._units[key])
            writes = self._units[key].writes
            writes[place] = writes.get(place, 0.0) + part.coefficient
        return self.form(place)


def _next(time: int, *, attention: bool) -> int:
    """The next attention (odd) or feed-forward (even) time after ``time``."""
    return time + 1 if (time % 2 == 0) == attention else time + 2
