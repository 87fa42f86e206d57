"""Why a program cannot be compiled: a kind, which code asks for, and a text, which people read."""

from enum import Enum

from anyformer.errors import OutsideClass


class Refusal(Enum):
    """The kinds of reasons, and what each is called where refusals are counted."""

    EXPLODES = "a value set explodes"
    COMBINATIONS = "combinations of values too close to each other for the dtype"
    SCORES = "scores too close to each other for the dtype"
    INTEGERS = "integers that the dtype does not tell apart"
    CLASSES = "a predicate has too many classes of values"
    PREDICATE = "a predicate is undefined for some pair of values"
    EMPTY = "a part has no value on any input"
    NEAR_SCORES = "real scores whose order rounding decides"
    NEAR_VALUES = "a comparison that rounding decides"
    NEAR_JUMP = "a jump that rounding decides"
    DIVISOR = "a divisor that may be 0"
    DOMAIN = "an argument outside the domain of a function"
    TOO_LARGE = "a number too large for a float"
    MIXED = "an average of words and numbers"
    DEFAULT = "a default that is no number"
    WORDS = "words where numbers are needed"
    UNDEFINED = "a part of a real number that may have no value"
    REAL = "a real number where a set of values is needed"
    NO_RULE = "a function without a rule for real numbers"
    JUMP = "a jump that no table of ReLU units has"
    ROUNDING = "steps of ReLU units that rounding spoils"
    KNOTS = "a table of too many ReLU units"
    LOOKS_AHEAD = "a selector that looks ahead"


class CannotCompile(Exception):
    """One thing that cannot be built, and why. The compiler collects them."""

    def __init__(self, kind: Refusal, text: str):
        self.kind = kind
        self.text = text
        super().__init__(text)

    def inside(self, part: str) -> "CannotCompile":
        """The same reason, of a named part of the program."""
        return CannotCompile(self.kind, f"{part}: {self.text}")


class NotCompiled(OutsideClass):
    """A program that cannot be compiled, with every reason at once."""

    def __init__(self, what: str, refusals: list[CannotCompile]):
        self.kinds = tuple(refusal.kind for refusal in refusals)
        super().__init__(what, [refusal.text for refusal in refusals])
