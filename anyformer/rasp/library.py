"""The classics of RASP as functions that give expressions. "n layers" is what each compiles to (attention with the feed-forward part after
it) on finite vocabularies; the sources are Weiss, Goldberg and Yahav (2106.06981) unless said otherwise.

    count(tokens == "a")        how many positions hold an a
    sort(tokens, tokens)        the tokens in order, equal ones as they came

A condition is a sequence of Booleans. Wherever a published program counts with ``mean * (index + 1)`` or separates ties by a small number,
these count with selector widths and compare with compound selectors, so that no rounding is left to decide anything.
"""

from collections.abc import Iterable
from typing import Any

from anyformer.errors import AnyformerError, require_size
from anyformer.rasp.linear_algebra import exchanged, sort_pairs
from anyformer.rasp.operations import Value
from anyformer.rasp.sequences import (
    EQ,
    LEQ,
    LT,
    Aggregate,
    Selector,
    Sequence,
    aggregate,
    apply,
    full,
    indices,
    length,
    lift,
    maximum,
    select,
    selector_width,
    tokens,
)

before = select(indices, indices, LEQ)
"""Keys at or before the query."""


def holding(condition: Any) -> Selector:
    """The keys at which a condition holds, the same for every query."""
    return select(condition, True, lambda key, _: bool(key))


def at(position: Any) -> Selector:
    """The key at a position (a number or a sequence)."""
    return select(indices, position, EQ)


def latest(selector: Selector, values: Any, default: Value = 0) -> Sequence:
    """The value at the last of the selected keys: hard attention whose score is the position. 1 layer."""
    return Aggregate(selector, lift(values), default, "max", indices)


def shift_by(offset: int, values: Any, default: Value = 0) -> Sequence:
    """``out_q = values_(q - offset)``, the default where there is no such position. 1 layer (tracr's library)."""
    return aggregate(select(indices, indices, lambda key, query: key == query - offset), values, default)


def reverse(values: Any) -> Sequence:
    """``out_q = values_(n - 1 - q)``. 2 layers: the length, then the key."""
    return aggregate(at(length - 1 - indices), values).named("reverse")


def count(condition: Any) -> Sequence:
    """The number of positions at which a condition holds. 1 layer."""
    return selector_width(holding(condition))


def count_prevs(condition: Any) -> Sequence:
    """The number of positions at or before the own one at which a condition holds. 1 layer."""
    return selector_width(holding(condition) & before)


def first_instance(condition: Any) -> Sequence:
    """True at the first position at which a condition holds, else False. 1 layer."""
    return lift(condition) & (count_prevs(condition) == 1)


def frac_prevs(condition: Any) -> Sequence:
    """The fraction of the positions at or before the own one at which a condition holds. 1 layer."""
    return aggregate(before, condition)


def total(values: Any) -> Sequence:
    """``sum_k values_k`` everywhere, as ``length * mean``: right to rounding. 1 layer (2 on real tokens)."""
    return aggregate(full, values) * length


def running_sum(values: Any) -> Sequence:
    """``out_q = sum_(k <= q) values_k``, as ``(q + 1) * mean``: right to rounding. 1 layer."""
    return aggregate(before, values) * (indices + 1)


def histogram(values: Any = tokens) -> Sequence:
    """How often the own value occurs. 1 layer."""
    return selector_width(select(values, values, EQ)).named("hist")


def sort_unique(values: Any, keys: Any) -> Sequence:
    """``values`` in the order of their ``keys``, which must differ from each other: ``position = number of smaller keys``. 2 layers."""
    target = selector_width(select(keys, keys, LT))
    return aggregate(select(target, indices, EQ), values).named("sort_unique")


def sort(values: Any, keys: Any) -> Sequence:
    """``values`` in the order of their ``keys``, those with equal keys in the order of the input. 2 layers.

    ``position = number of keys that are smaller + number of keys that are equal and earlier``, where tracr adds a multiple of the index to
    the key and needs to be told how far apart keys are."""
    target = selector_width(select(keys, keys, LT)) + selector_width(select(keys, keys, EQ) & select(indices, indices, LT))
    return aggregate(select(target, indices, EQ), values).named("sort")


def sort_by_frequency(values: Any = tokens) -> Sequence:
    """``values``, the most frequent first, those that are equally frequent in the order of the input. 3 layers."""
    return sort(values, -histogram(values)).named("sort_freq")


def count_less_frequent(most: int, values: Any = tokens) -> Sequence:
    """The number of positions whose value occurs at most ``most`` times. 2 layers."""
    return count(histogram(values) <= most).named("count_less_freq")


def pair_balance(opening: Value, closing: Value, values: Any = tokens) -> Sequence:
    """The fraction of positions up to the own one that open, less the fraction that close: one mean of 1, -1 and 0. 1 layer, 1 head."""
    return aggregate(before, lift(values).map(lambda v: int(v == opening) - int(v == closing)))


def depth(opening: Any, closing: Any) -> Sequence:
    """The number of positions up to the own one that open (a condition), less the number that close. 1 layer."""
    return count_prevs(opening) - count_prevs(closing)


def shuffle_dyck(pairs: Iterable[str]) -> Sequence:
    """Whether, for each pair of brackets, none closes before it opens and all are closed at the end: True or False everywhere. 2 layers.

    Layer 1 has the balance of each pair (one head for all); layer 2 looks for a position where one is negative, and at the last."""
    balances = [pair_balance(opening, closing) for opening, closing in _pairs(pairs)]
    negative, closed = balances[0] < 0, balances[0] == 0
    for balance in balances[1:]:
        negative, closed = negative | (balance < 0), closed & (balance == 0)
    return (aggregate(at(length - 1), closed) & ~(count(negative) > 0)).named("shuffle_dyck")


def dyck(pairs: Iterable[str]) -> Sequence:
    """Whether the input is a word of balanced and properly nested brackets of several kinds: True or False everywhere. 3 layers.

    The depth that a bracket lies at is counted over all kinds. A closing bracket belongs to the latest opening one before it at its own
    depth, and must be of the same kind; nothing may close before it opens, and the depth must end at 0. Tokens that are no brackets
    are passed over."""
    kinds = _pairs(pairs)
    opens, closes = _any_of([o for o, _ in kinds]), _any_of([c for _, c in kinds])
    inner = depth(opens, closes)
    level = inner + apply(lambda c: int(c), closes)  # of an opening bracket and its partner alike
    partner = latest(select(level, level, EQ) & holding(opens) & before, tokens.map(_place([o for o, _ in kinds])), -1)
    mismatched = closes & (partner != tokens.map(_place([c for _, c in kinds])))
    whole = aggregate(at(length - 1), inner == 0) & (count(inner < 0) == 0)
    return (whole & (count(mismatched) == 0)).named("dyck")


def _pairs(pairs: Iterable[str]) -> list[tuple[str, str]]:
    found = [tuple(pair) for pair in pairs]
    if not found or any(len(pair) != 2 for pair in found):
        raise AnyformerError(f"brackets must be pairs of one opening and one closing token, such as '()', got {list(pairs)!r}")
    return [(opening, closing) for opening, closing in found]


def _any_of(words: list[str]) -> Sequence:
    return tokens.map(lambda token: token in words)


def _place(words: list[str]) -> Any:
    return lambda token: words.index(token) if token in words else -1


def induction(default: Value = 0, values: Any = tokens) -> Sequence:
    """What came after the latest earlier occurrence of the own value, the default where there is none. 2 layers.

    Layer 1 gives every position the value before it (and whether there is one); layer 2 looks for the latest key up to the own position
    whose value before is the own one (Olsson et al., 2209.11895)."""
    values = lift(values)
    earlier = shift_by(1, values, default)
    here = select(earlier, values, EQ) & holding(indices > 0) & before
    return latest(here, values, default).named("induction")


def detect_pattern(pattern: Iterable[Value], values: Any = tokens) -> Sequence:
    """Whether the values that end at the own position are the pattern; False where there are fewer. 1 layer."""
    pattern = list(pattern)
    if not pattern:
        raise AnyformerError("detect_pattern needs a pattern of at least one value, got none")
    found = lift(values) == pattern[-1]
    for offset, value in enumerate(reversed(pattern[:-1]), 1):
        found = shift_by(offset, lift(values) == value, False) & found
    return found


def parity(bits: Any = tokens) -> Sequence:
    """The parity (0 or 1) of the number of positions that hold something true. 1 layer: a count, then a table."""
    return (count(bits) % 2).named("parity")


def k_parity(positions: Iterable[int], bits: Any = tokens) -> Sequence:
    """k-PARITY: the parity of the bits at k stated positions (those that the input has), any k. 1 layer, 1 head."""
    places = frozenset(positions)
    for place in places:
        require_size("k_parity", "a position", place, 0)
    inside = indices.map(lambda i: i in places)
    return (selector_width(holding(inside) & holding(bits)) % 2).named("k_parity")


def masked_parity(mask: Any, bits: Any) -> Sequence:
    """k-PARITY with the k positions as input: the parity of the bits where the mask holds (both sequences). 1 layer."""
    return (selector_width(holding(mask) & holding(bits)) % 2).named("masked_parity")


def match2(modulus: int, values: Any = tokens, *, itself: bool = True) -> Sequence:
    """1 where some value added to the own one is 0 modulo p, else 0. 1 layer, 1 head. A value may be matched with itself (2x = 0 modulo p)
    unless ``itself`` is False.

    The published program compares the residue with ``p - residue``, which is never the residue of a 0, and reads the *mean* of what
    matches, which is 0 where that mean is; this one compares with ``-x modulo p`` and counts (Sanford, Hsu and Telgarsky, 2306.02896)."""
    require_size("match2", "modulus", modulus)
    values = lift(values)
    partners = select(values % modulus, -values % modulus, EQ)
    if not itself:
        partners = partners & select(indices, indices, lambda key, query: key != query)
    return (selector_width(partners) > 0).map("indicator").named("match2")


def match3(modulus: int, values: Any = tokens) -> Sequence:
    """1 where the own value and two others (any positions, also the same ones) add up to 0 modulo p, else 0. 1 layer of p heads.

    Head r asks whether residue r occurs anywhere; the feed-forward part then looks for residues r, s that occur with ``r + s + x = 0``. No one
    layer is much smaller: there is a c > 0 such that for p > n no layer of width m with H heads and b bits a number computes Match3 on n
    tokens where ``m b H <= c n / log log n`` (Sanford, Hsu and Telgarsky, 2306.02896); p > n heads of one bit are above that. n heads
    that read one position each would do as well."""
    require_size("match3", "modulus", modulus)
    own = lift(values) % modulus
    occurs = [aggregate(select(own, r, EQ), 1) for r in range(modulus)]
    found: Any = 0
    for r in range(modulus):
        for s in range(r, modulus):
            rest = -(r + s) % modulus
            found = found + apply(lambda a, b, x, rest=rest: int(a and b and x == rest), occurs[r], occurs[s], own)
    return (found > 0).map("indicator").named("match3")


def maxmin(values: Any = tokens) -> Sequence:
    """MaxMin (GroupSort of pairs; Anil, Lucas and Grosse, 1811.05381): positions 2i, 2i + 1 get the larger and the smaller of their values;
    an odd last value stays. Real values or finite ones, 1 layer, 1 head (:func:`anyformer.rasp.linear_algebra.sort_pairs`)."""
    return sort_pairs(lift(values)).named("maxmin")


def group_sort(size: int, values: Any = tokens) -> Sequence:
    """Every ``size`` positions from the first get their values in falling order; a shorter last group too. Real values or finite ones.

    Odd-even transposition: ``size`` rounds (one for pairs) in which neighbours of a group are put in order; 1 layer, 1 head each."""
    require_size("group_sort", "size", size)
    out = lift(values)
    for r in range(0 if size == 1 else 1 if size == 2 else size):
        out = _exchanged(out, size, r % 2)
    return out


def _exchanged(x: Sequence, size: int, odd: int) -> Sequence:
    """Neighbours (j, j + 1) inside a group, with j of the stated parity, put in falling order; who has no neighbour is its own partner."""

    def partner(i: int) -> int:
        there = i % size + (1 if (i % size + odd) % 2 == 0 else -1)
        return i - i % size + there if 0 <= there < size else i

    return exchanged(x, indices.map(partner))


def largest(values: Any = tokens) -> Sequence:
    """The largest value everywhere. 1 layer."""
    return maximum(full, values)
