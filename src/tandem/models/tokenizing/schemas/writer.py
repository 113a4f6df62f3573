"""Writing of alternatives as a JSON Schema with keywords that llguidance supports.

Each nested value's schema becomes a definition, so that recursive schemas can be written.
"""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from math import comb
from typing import Any

from tandem.models.tokenizing.schemas.constraints import (
    TYPES,
    Alternative,
    ArrayLayer,
    Count,
    Numbers,
    Sizes,
    Text,
    Value,
    thaw,
)
from tandem.models.tokenizing.schemas.formulas import FALSE, TRUE, Formula, all_of, negate
from tandem.models.tokenizing.schemas.patterns import exclude_texts, write_sizes
from tandem.models.tokenizing.schemas.refused import RefusedError
from tandem.models.tokenizing.schemas.solver import Solver

__all__ = ["FORMATS", "Writer"]

FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri"),
    }
)
"""Values of JSON Schema's ``format`` that a grammar enforces; by the standard, every ``format`` is
only an annotation.
"""
MAX_PLACES = 12
"""Number of leading items among which the matches of ``contains`` are placed."""
MAX_CHOICES = 64
"""Most ways to place matches of ``contains``, or to order unique items."""
MAX_DEFINITIONS = 500
MAX_VALUES = 8
"""Most values of an item for which all orders are tried for ``uniqueItems``."""


class Writer:
    """Writer of one document's schema in the keywords that llguidance supports.

    Args:
        solver: computes the document's alternatives.

    Attributes:
        narrowed: keywords for which fewer values are allowed than in the schema, in addition to
            ``Solver.dropped``.
    """

    def __init__(self, solver: Solver) -> None:
        self._solver = solver
        self._names: dict[Formula, str] = {}
        self._definitions: dict[str, Any] = {}
        self.narrowed: dict[str, None] = {}

    def write(self) -> Any:
        """Return the whole rewritten schema, with its definitions under ``$defs``."""
        root = self._write(self._solver.root)
        if isinstance(root, dict) and self._definitions:
            root = root | {"$defs": self._definitions}
        return root

    def _refer(self, formula: Formula) -> Any:
        """Return the schema to write for a nested value: true, false, or a reference to a
        definition that is written once.
        """
        if formula == TRUE:
            return True
        if self._solver.is_false(formula):
            return False
        if formula not in self._names:
            if len(self._names) >= MAX_DEFINITIONS:
                raise RefusedError("$defs", "the schema has too many parts")
            self._names[formula] = f"n{len(self._names)}"
            self._definitions[self._names[formula]] = self._write(formula)
        return {"$ref": f"#/$defs/{self._names[formula]}"}

    def _write(self, formula: Formula) -> Any:
        found: list[Any] = []
        for alternative in self._solver.settle(formula):
            for schema in self._write_alternative(alternative):
                if schema not in found:
                    found.append(schema)
        if not found:
            return False
        if {} in found:
            return {}
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _write_alternative(self, alternative: Alternative) -> Iterator[dict[str, Any]]:
        if alternative.values is not None:
            yield {"enum": [thaw(value) for value in alternative.values]}
            return
        kinds = {
            "boolean": self._write_booleans,
            "number": self._write_numbers,
            "string": self._write_strings,
            "array": self._write_arrays,
            "object": self._write_objects,
        }
        common: dict[str, Any] = {}
        types: list[str] = ["null"] if "null" in alternative.types else []
        for kind, write in kinds.items():
            if kind not in alternative.types:
                continue
            schemas = list(write(alternative))
            if len(schemas) == 1 and "enum" not in schemas[0]:
                types.append(schemas[0].pop("type", kind))
                common |= schemas[0]
            else:
                yield from ({"type": kind} | schema for schema in schemas)
        if types and (len(types) < len(TYPES) or "integer" in types):
            yield {"type": types if len(types) > 1 else types[0]} | common
        elif types:
            yield common

    def _write_booleans(self, alternative: Alternative) -> Iterator[dict[str, Any]]:
        excluded = [value[1] for value in alternative.excluded if value[0] == "boolean"]
        yield {"enum": [not excluded[0]]} if excluded else {}

    def _write_numbers(self, alternative: Alternative) -> Iterator[dict[str, Any]]:
        numbers = alternative.numbers
        if numbers.is_fractional:
            self.narrowed["type"] = None
            return
        points = sorted(value[1] for value in alternative.excluded if value[0] == "number")
        for part in _split(numbers, points):
            schema: dict[str, Any] = {"type": "integer"} if part.is_integer else {}
            for bound, is_open, keyword, open_keyword in (
                (part.low, part.is_low_open, "minimum", "exclusiveMinimum"),
                (part.high, part.is_high_open, "maximum", "exclusiveMaximum"),
            ):
                if bound is not None:
                    schema[open_keyword if is_open else keyword] = _write_number(bound)
            if part.factor is not None:
                schema["multipleOf"] = _write_number(part.factor)
            yield schema

    def _write_strings(self, alternative: Alternative) -> Iterator[dict[str, Any]]:
        yield self._write_text(alternative.text, alternative.excluded)

    def _write_text(self, text: Text, excluded: tuple[Value, ...]) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        if text.sizes.low:
            schema["minLength"] = text.sizes.low
        if text.sizes.high is not None:
            schema["maxLength"] = text.sizes.high
        patterns = _list_patterns(text, excluded)
        if patterns:
            schema["pattern"] = patterns[0]
        if len(patterns) > 1:
            schema["allOf"] = [{"pattern": pattern} for pattern in patterns[1:]]
        formats = [name for name in text.formats if name in FORMATS]
        if formats:
            schema["format"] = formats[0]
        return schema

    def _write_arrays(self, alternative: Alternative) -> Iterator[dict[str, Any]]:
        for placed in self._place(alternative):
            if placed.is_unique and placed.num_items.high != 1:
                yield from self._write_unique(placed)
                continue
            sizes = placed.num_items
            if sizes.is_empty:
                continue
            places = max((len(layer.first) for layer in placed.items), default=0)
            if sizes.high is not None:
                places = min(places, sizes.high)
            first = [self._refer(self._solver.find_item(i, placed)) for i in range(places)]
            if False in first:
                sizes &= Sizes(0, first.index(False))
                first = first[: first.index(False)]
            rest = self._refer(self._solver.find_item(places, placed))
            if sizes.is_empty or (rest is False and sizes.low > len(first)):
                continue
            schema: dict[str, Any] = {}
            if first:
                schema["prefixItems"] = first
            if rest is not True and sizes.high != len(first):
                schema["items"] = rest
            if sizes.low:
                schema["minItems"] = sizes.low
            if sizes.high is not None:
                schema["maxItems"] = sizes.high
            yield schema

    def _place(self, alternative: Alternative) -> Iterator[Alternative]:
        """Yield alternatives in which the items that ``contains`` counts have fixed positions
        instead.
        """
        if not alternative.counts:
            yield alternative
            return
        count, *others = alternative.counts
        alternative = replace(alternative, counts=tuple(others))
        for layer, sizes in self._list_places(count, alternative.num_items):
            both = alternative.num_items & sizes
            if not both.is_empty:
                items = (*alternative.items, layer)
                yield from self._place(replace(alternative, items=items, num_items=both))

    def _list_places(self, count: Count, sizes: Sizes) -> Iterator[tuple[ArrayLayer, Sizes]]:
        low, high = count.sizes.low, count.sizes.high
        if count.sizes.is_empty:
            return
        if high == 0:
            yield ArrayLayer((), negate(count.item)), Sizes()
            return
        if high is None and low == 0:
            yield ArrayLayer(), Sizes()
            return
        # With an upper bound, exactly `number` of the first items match and all others must not;
        # without one, only the lowest required number of matches is placed.
        numbers = [low] if high is None else range(low, high + 1)
        places = MAX_PLACES if sizes.high is None else min(sizes.high, MAX_PLACES)
        while places and sum(comb(places, n) for n in numbers) > MAX_CHOICES:
            places -= 1
        if places < low and (sizes.high is None or sizes.high >= low):
            raise RefusedError("contains", f"{low} items have too many places")
        if sizes.high is None or sizes.high > places:
            self.narrowed["contains"] = None
        other = TRUE if high is None else negate(count.item)
        for number in numbers:
            for chosen in combinations(range(places), number):
                end = chosen[-1] + 1 if chosen else 0
                first = tuple(count.item if i in chosen else other for i in range(end))
                yield ArrayLayer(first, other), Sizes(end)

    def _write_unique(self, alternative: Alternative) -> Iterator[dict[str, Any]]:
        """Yield a schema that enumerates the arrays of distinct items, if there are any. Raises:
        RefusedError (they are too many).
        """
        sizes = alternative.num_items
        places = max((len(layer.first) for layer in alternative.items), default=0)
        rest = self._solver.find_item(places, alternative)
        choices = [self._list_values(self._solver.find_item(i, alternative)) for i in range(places)]
        if not self._solver.is_false(rest):
            last = self._list_values(rest)
            more = len(last) if sizes.high is None else min(len(last), sizes.high)
            choices += [last] * more
        elif sizes.high is None or sizes.high > places:
            sizes &= Sizes(0, places)
        found: list[list[Any]] = []
        for row in _list_unique(choices, sizes):
            found.append([thaw(value) for value in row])
            if len(found) > MAX_CHOICES:
                raise RefusedError("uniqueItems", "the items have too many orders")
        if found:
            yield {"enum": found}

    def _list_values(self, formula: Formula) -> list[Value]:
        """Return all values of a formula. Raises: RefusedError (there are too many)."""
        found: dict[Value, None] = {}
        for alternative in self._solver.settle(formula):
            if alternative.values is not None:
                found |= dict.fromkeys(alternative.values)
                continue
            if not alternative.types <= {"null", "boolean"}:
                raise RefusedError("uniqueItems", "the items may be of too many values")
            for kind in alternative.types:
                values = [("null", None)]
                if kind == "boolean":
                    values = [("boolean", True), ("boolean", False)]
                found |= dict.fromkeys(v for v in values if v not in alternative.excluded)
        if len(found) > MAX_VALUES:
            raise RefusedError("uniqueItems", "the items may be of too many values")
        return list(found)

    def _write_objects(self, alternative: Alternative) -> Iterator[dict[str, Any]]:
        names = [name for layer in alternative.properties for name, _ in layer.named]
        patterns, rest = self._list_patterns(alternative)
        if alternative.names:
            more, pattern = self._read_names(alternative.names)
            names += more
            if pattern is not None:
                if patterns:
                    what = "beside patternProperties it may hold for the same names"
                    raise RefusedError("propertyNames", what)
                patterns, rest = ({pattern: rest} if pattern else {}), FALSE
        sizes = alternative.num_properties & Sizes(len(alternative.required))
        if sizes.is_empty:
            return
        schema: dict[str, Any] = {}
        named: dict[str, Any] = {}
        required = list(alternative.required)
        for name in dict.fromkeys([*names, *required]):
            formula = self._solver.find_property(name, alternative)
            if formula == rest and not patterns and name not in required:
                continue
            named[name] = self._refer(formula)
        if any(named.get(name) is False for name in required):
            return
        if named:
            schema["properties"] = named
        written = {pattern: self._refer(formula) for pattern, formula in patterns.items()}
        other = self._refer(rest)
        if written:
            schema["patternProperties"] = written
        if other is not True:
            schema["additionalProperties"] = other
        if required:
            schema["required"] = required
        if sizes.low > len(required):
            schema["minProperties"] = sizes.low
        if sizes.high is not None:
            schema["maxProperties"] = sizes.high
        yield schema

    def _list_patterns(self, alternative: Alternative) -> tuple[dict[str, Formula], Formula]:
        """Return the formulas of properties by pattern of their names, and that of all others."""
        layers = alternative.properties
        rest = all_of(layer.rest for layer in layers)
        found: dict[str, Formula] = {}
        for layer in layers:
            for pattern, formula in layer.patterns:
                if formula != layer.rest:
                    found[pattern] = TRUE
        for pattern in found:
            parts: list[Formula] = []
            for layer in layers:
                own = [part for other, part in layer.patterns if other == pattern]
                parts += own or [layer.rest]
            found[pattern] = all_of(parts)
        return found, rest

    def _read_names(self, formulas: tuple[Formula, ...]) -> tuple[list[str], str | None]:
        """Return the allowed names, and a pattern of all other allowed names.

        A pattern of None allows any other name, an empty pattern allows none.
        """
        strings = Alternative(types=frozenset({"string"}))
        names: list[str] = []
        patterns: list[list[str]] = []
        for alternative in self._solver.settle(all_of(formulas)):
            if "string" not in alternative.types:
                continue
            if alternative.values is not None:
                names += [v[1] for v in alternative.values if v[0] == "string"]
                continue
            text = alternative.text
            patterns.append(_list_patterns(text, alternative.excluded))
            if text.sizes != strings.text.sizes:
                patterns[-1].append(write_sizes(text.sizes))
        if [] in patterns:
            return names, None
        if len(patterns) > 1 or (patterns and len(patterns[0]) > 1):
            raise RefusedError("propertyNames", "it has several patterns")
        return names, patterns[0][0] if patterns else ""


def _list_patterns(text: Text, excluded: tuple[Value, ...]) -> list[str]:
    others = [value[1] for value in excluded if value[0] == "string"]
    return [*text.patterns, *([exclude_texts(others)] if others else [])]


def _split(numbers: Numbers, points: list[Fraction]) -> Iterator[Numbers]:
    """Yield the ranges of numbers that remain when single numbers are excluded."""
    for point in points:
        below = numbers & Numbers(high=point, is_high_open=True)
        if point in numbers:
            if not below.is_empty:
                yield below
            numbers &= Numbers(low=point, is_low_open=True)
    if not numbers.is_empty:
        yield numbers


def _write_number(number: Fraction) -> int | float:
    if number.denominator == 1:
        return int(number)
    written = float(number)
    if Fraction(repr(written)) != number:
        raise RefusedError("multipleOf", f"{number} has too many digits")
    return written


def _list_unique(choices: list[list[Value]], sizes: Sizes) -> Iterator[tuple[Value, ...]]:
    """Yield rows of distinct values, one from each list in order, with the allowed lengths."""
    rows: list[tuple[Value, ...]] = [()]
    for length in range(len(choices) + 1):
        if length in sizes:
            yield from rows
        if length == len(choices) or (sizes.high is not None and length >= sizes.high):
            return
        rows = [(*row, value) for row in rows for value in choices[length] if value not in row]
        if len(rows) > 10 * MAX_CHOICES:
            raise RefusedError("uniqueItems", "the items have too many orders")
