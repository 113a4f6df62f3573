"""Constraints of one alternative of a schema on a value, by type, and their conjunction.

An alternative is a conjunction of constraints; a schema's alternatives are joined by "or". Objects
are immutable and compare by content, so that equal alternatives are found.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import ceil, floor, lcm
from typing import Any, TypeAlias

from tandem.models.tokenizing.schemas.formulas import TRUE, Formula

__all__ = [
    "ALL_ITEMS",
    "TYPES",
    "Alternative",
    "ArrayLayer",
    "Count",
    "Numbers",
    "ObjectLayer",
    "Seen",
    "Sizes",
    "Text",
    "Value",
    "forget_seen",
    "freeze",
    "list_values",
    "make_fraction",
    "merge",
    "thaw",
]

TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
ALL_ITEMS = 1 << 40
"""Value of a number of items that means all items of an array."""

Value: TypeAlias = tuple[str, Any]
"""A hashable JSON value; equal JSON values are equal in Python: 1 and 1.0, but not 1 and true."""


def freeze(value: Any) -> Value:
    """Convert a JSON value to a hashable key (type, content), for sets and comparisons."""
    match value:
        case None:
            return ("null", None)
        case bool():
            return ("boolean", value)
        case int() | float():
            return ("number", make_fraction(value))
        case str():
            return ("string", value)
        case list():
            return ("array", tuple(freeze(item) for item in value))
        case _:
            return ("object", tuple(sorted((name, freeze(item)) for name, item in value.items())))


def make_fraction(number: float) -> Fraction:
    """Convert a number to a fraction of its decimal form: 0.1 is a tenth.

    Raises: ValueError, OverflowError: the number is NaN or infinite.
    """
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


def thaw(value: Value) -> Any:
    """Convert a hashable key of ``freeze`` back to its JSON value."""
    kind, content = value
    match kind:
        case "number":
            return int(content) if content.denominator == 1 else float(content)
        case "array":
            return [thaw(item) for item in content]
        case "object":
            return {name: thaw(item) for name, item in content}
        case _:
            return content


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bounds of a length or of a number of entries."""

    low: int = 0
    high: int | None = None

    @property
    def is_empty(self) -> bool:
        """True if no size is within the bounds, as the lower one is above the upper one."""
        return self.high is not None and self.low > self.high

    def __contains__(self, size: int) -> bool:
        return self.low <= size and (self.high is None or size <= self.high)

    def __and__(self, other: "Sizes") -> "Sizes":
        highs = [high for high in (self.high, other.high) if high is not None]
        return Sizes(max(self.low, other.low), min(highs) if highs else None)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The constraints on a number: bounds, a divisor, and whether it is an integer."""

    low: Fraction | None = None
    is_low_open: bool = False
    high: Fraction | None = None
    is_high_open: bool = False
    factor: Fraction | None = None
    """Number of which the value is a multiple; None: any number."""
    is_integer: bool = False
    is_fractional: bool = False
    """True if integers are excluded."""

    @property
    def is_empty(self) -> bool:
        """True if bounds and divisor show that no number satisfies them; False if one may."""
        if self.is_integer and self.is_fractional:
            return True
        low, high = self.low, self.high
        if low is None or high is None:
            return False
        if self.is_integer:
            first = floor(low) + 1 if self.is_low_open else ceil(low)
            return first > (ceil(high) - 1 if self.is_high_open else floor(high))
        return low > high or (low == high and (self.is_low_open or self.is_high_open))

    def __contains__(self, number: Fraction) -> bool:
        if self.low is not None and (
            number < self.low or (number == self.low and self.is_low_open)
        ):
            return False
        if self.high is not None and (
            number > self.high or (number == self.high and self.is_high_open)
        ):
            return False
        if self.factor is not None and (number / self.factor).denominator != 1:
            return False
        is_integer = number.denominator == 1
        return not ((self.is_integer and not is_integer) or (self.is_fractional and is_integer))

    def __and__(self, other: "Numbers") -> "Numbers":
        low, is_low_open = _take_bound(
            (self.low, self.is_low_open), (other.low, other.is_low_open), 1
        )
        high, is_high_open = _take_bound(
            (self.high, self.is_high_open), (other.high, other.is_high_open), -1
        )
        return Numbers(
            low,
            is_low_open,
            high,
            is_high_open,
            _join_factors(self.factor, other.factor),
            self.is_integer or other.is_integer,
            self.is_fractional or other.is_fractional,
        )


def _take_bound(
    first: tuple[Fraction | None, bool], second: tuple[Fraction | None, bool], sign: int
) -> tuple[Fraction | None, bool]:
    if first[0] is None or second[0] is None:
        return second if first[0] is None else first
    if first[0] == second[0]:
        return first[0], first[1] or second[1]
    return first if sign * first[0] > sign * second[0] else second


def _join_factors(a: Fraction | None, b: Fraction | None) -> Fraction | None:
    if a is None or b is None:
        return b if a is None else a
    scale = lcm(a.denominator, b.denominator)
    return Fraction(lcm(int(a * scale), int(b * scale)), scale)


@dataclass(frozen=True, slots=True)
class Text:
    """The constraints on a string: lengths in characters, patterns and formats."""

    sizes: Sizes = Sizes()
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()

    def __and__(self, other: "Text") -> "Text":
        return Text(
            self.sizes & other.sizes,
            _join(self.patterns, other.patterns),
            _join(self.formats, other.formats),
        )


@dataclass(frozen=True, slots=True)
class ArrayLayer:
    """The constraints of one schema on the items of an array, by position."""

    first: tuple[Formula, ...] = ()
    rest: Formula = TRUE

    def at(self, index: int) -> Formula:
        """Return the formula that the item at a position must satisfy."""
        return self.first[index] if index < len(self.first) else self.rest


@dataclass(frozen=True, slots=True)
class Count:
    """Bounds on the number of items of an array that satisfy a formula, as ``contains`` sets
    them.
    """

    item: Formula
    sizes: Sizes


@dataclass(frozen=True)
class ObjectLayer:
    """The constraints of one schema on an object's properties, by name."""

    named: tuple[tuple[str, Formula], ...] = ()
    patterns: tuple[tuple[str, Formula], ...] = ()
    rest: Formula = TRUE

    @cached_property
    def by_name(self) -> dict[str, Formula]:
        """``named``, the formulas of the properties that the schema names, as a dict for
        look-ups.
        """
        return dict(self.named)


@dataclass(frozen=True, slots=True)
class Seen:
    """Items and properties that a schema has evaluated, for ``unevaluatedItems`` and
    ``unevaluatedProperties``.
    """

    num_items: int = 0
    """Number of leading array items that a keyword has evaluated, in the sense of JSON Schema's
    ``unevaluatedItems``.
    """
    items: tuple[Formula, ...] = ()
    """Formulas (conditions on a value); an array item that satisfies one of them counts as
    evaluated, at any position.
    """
    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    has_all_properties: bool = False

    def __or__(self, other: "Seen") -> "Seen":
        return Seen(
            max(self.num_items, other.num_items),
            _join(self.items, other.items),
            _join(self.names, other.names),
            _join(self.patterns, other.patterns),
            self.has_all_properties or other.has_all_properties,
        )


NOTHING_SEEN = Seen()


@dataclass(frozen=True, slots=True)
class Alternative:
    """A set of constraints on a value that hold together; each constrains only values of its own
    type.
    """

    types: frozenset[str] = TYPES
    values: tuple[Value, ...] | None = None
    """All values that are allowed, if they are listed; None: any value."""
    excluded: tuple[Value, ...] = ()
    """Numbers, strings and booleans that are not allowed."""
    numbers: Numbers = Numbers()
    text: Text = Text()
    items: tuple[ArrayLayer, ...] = ()
    counts: tuple[Count, ...] = ()
    num_items: Sizes = Sizes()
    is_unique: bool = False
    properties: tuple[ObjectLayer, ...] = ()
    required: tuple[str, ...] = ()
    names: tuple[Formula, ...] = ()
    """Formulas (conditions) that the name of each of the object's properties must satisfy."""
    num_properties: Sizes = Sizes()
    seen: Seen = field(default=NOTHING_SEEN)


def merge(a: Alternative, b: Alternative) -> Alternative | None:
    """Return the conjunction of two alternatives (sets of constraints on a value); None if types or
    bounds show that no value satisfies both.
    """
    types = a.types & b.types
    values = a.values
    if values is None:
        values = b.values
    elif b.values is not None:
        other = set(b.values)
        values = tuple(value for value in values if value in other)
    numbers, text = a.numbers & b.numbers, a.text & b.text
    num_items, num_properties = a.num_items & b.num_items, a.num_properties & b.num_properties
    required = _join(a.required, b.required)
    impossible = {
        "number": numbers.is_empty,
        "string": text.sizes.is_empty,
        "array": num_items.is_empty,
        "object": (num_properties & Sizes(len(required))).is_empty,
    }
    types -= {name for name, is_impossible in impossible.items() if is_impossible}
    if values is not None:
        values = tuple(value for value in values if value[0] in types)
    if not types or values == ():
        return None
    return Alternative(
        types,
        values,
        _join(a.excluded, b.excluded),
        numbers,
        text,
        _join(a.items, b.items),
        _join(a.counts, b.counts),
        num_items,
        a.is_unique or b.is_unique,
        _join(a.properties, b.properties),
        required,
        _join(a.names, b.names),
        num_properties,
        a.seen | b.seen,
    )


def forget_seen(alternative: Alternative) -> Alternative:
    """Return the alternative without its record of evaluated items and properties, which only
    ``unevaluatedItems`` and ``unevaluatedProperties`` need.
    """
    if alternative.seen == NOTHING_SEEN:
        return alternative
    return replace(alternative, seen=NOTHING_SEEN)


def _join(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    if not b or a == b:
        return a
    return tuple(dict.fromkeys((*a, *b)))


def list_values(values: Iterable[Any]) -> tuple[Value, ...]:
    """Return the hashable keys (type, content) of JSON values, without duplicates."""
    return tuple(dict.fromkeys(freeze(value) for value in values))
