"""Computation of formulas' alternatives, without those that no value satisfies.

All work is bounded: a schema with too many alternatives is refused. If a keyword was left out of a
negated schema (``drop``), that formula allows too few values, so it is never used as proof that a
value violates it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tandem.models.tokenizing.schemas.constraints import (
    Alternative,
    Sizes,
    Value,
    forget_seen,
    merge,
)
from tandem.models.tokenizing.schemas.formulas import (
    FALSE,
    TRUE,
    Formula,
    Place,
    all_of,
    at,
)
from tandem.models.tokenizing.schemas.keywords import (
    Alternatives,
    Schema,
    accept,
    apply_unevaluated,
    exclude,
    reject,
)
from tandem.models.tokenizing.schemas.references import References
from tandem.models.tokenizing.schemas.refused import RefusedError

__all__ = ["Solver"]

MAX_ALTERNATIVES = 128
MAX_STEPS = 50_000
"""Largest number of alternatives that are merged, settled and tested while one schema is rewritten:
about a second of work.
"""
ANY = Alternative()
KEYWORDS = frozenset(
    """type const enum minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength
    maxLength pattern format properties patternProperties additionalProperties required
    minProperties maxProperties propertyNames dependentRequired dependentSchemas prefixItems items
    minItems maxItems uniqueItems contains $ref $dynamicRef allOf anyOf oneOf not if
    unevaluatedItems unevaluatedProperties""".split()  # noqa: SIM905 - a list is less readable
)
"""Keywords that restrict values or evaluate parts by themselves."""


class Solver:
    """Computation of the alternatives of formulas over one document.

    Args:
        document: the root schema.
        matches: returns True if a pattern is found in a text, in bounded time; raises ValueError
            for an invalid pattern.

    Attributes:
        dropped: keywords of which an alternative was left out, so that fewer values are allowed.
    """

    def __init__(self, document: Any, matches: Callable[[str, str], bool]) -> None:
        self.references = References(document)
        self._matches = matches
        self._known: dict[tuple[Formula, bool], Alternatives] = {}
        self._settled: dict[Formula, Alternatives] = {}
        self._narrowed: dict[tuple[Formula, bool], str] = {}
        """Formulas for which some alternatives were left out, so that fewer values are allowed,
        with the keyword responsible.
        """
        self._working: list[tuple[Formula, bool]] = []
        self._settling: set[Formula] = set()
        self._steps_left = MAX_STEPS
        self._verdicts: dict[tuple[Value, Formula], bool] = {}
        self._found: dict[tuple[str, str], bool] = {}
        self.dropped: dict[str, None] = {}

    @property
    def root(self) -> Formula:
        """Formula of the whole document: what a value must satisfy to match its root schema."""
        return self._at(self.references.root)

    def drop(self, keyword: str) -> None:
        """Note that an alternative of this keyword was left out of all formulas being expanded, as
        it cannot be expressed; they allow fewer values.
        """
        for key in self._working:
            self._narrowed.setdefault(key, keyword)

    def join(self, groups: Iterable[Alternatives]) -> Alternatives:
        """Return the alternatives that satisfy one alternative of each group: all combinations of
        the groups (lists of alternatives joined by "or"), without those that are empty.
        """
        found: Alternatives = [ANY]
        for group in groups:
            self._spend(len(found) * len(group))
            merged = (merge(a, b) for a in found for b in group)
            found = _limit(list(dict.fromkeys(each for each in merged if each is not None)))
        return found

    def expand(self, formula: Formula, *, tracks: bool) -> Alternatives:
        """Return a formula's alternatives, the sets of constraints of which a value satisfies one;
        cached.

        ``tracks``: True if they record which items and properties they evaluate.

        Raises: RefusedError (a keyword cannot be expressed, or a schema refers to itself at one
            place).
        """
        key = (formula, tracks)
        if key not in self._known:
            if key in self._working or len(self._working) > 100:
                raise RefusedError("$ref", "a schema refers to itself at one place")
            with self._work_on(key):
                found = self._expand(formula, tracks=tracks)
                if not tracks:
                    found = [forget_seen(each) for each in found]
                self._known[key] = _limit(list(dict.fromkeys(found)))
        elif key in self._narrowed:
            self.drop(self._narrowed[key])
        return self._known[key]

    def excludes(self, alternatives: Alternatives, formula: Formula) -> bool:
        """Return True if it is proved that no value of the alternatives satisfies the formula."""
        others = self.expand(formula, tracks=False)
        if (formula, False) in self._narrowed:
            # The formula's alternatives are incomplete: a dropped one might overlap with the given
            # ones, so exclusion is not proved.
            return False
        return not any(self._settle(each) for each in self.join([alternatives, others]))

    def settle(self, formula: Formula) -> Alternatives:
        """Return the alternatives of a formula, without those that provably no value satisfies.

        Raises: RefusedError (there is none, and an alternative was left out).
        """
        if formula in self._settled:
            return self._settled[formula]
        if formula in self._settling:
            # The schema contains itself: the inner occurrence counts as satisfiable and the
            # outermost level decides.
            return [ANY]
        self._settling.add(formula)
        try:
            alternatives = self.expand(formula, tracks=False)
            found = [each for a in alternatives for each in self._settle(a)]
        finally:
            self._settling.discard(formula)
        keyword = self._narrowed.get((formula, False))
        if keyword is not None:
            if not found:
                raise RefusedError(keyword, "its negation has no grammar")
            self.dropped[keyword] = None
        self._settled[formula] = list(dict.fromkeys(found))
        return self._settled[formula]

    def is_false(self, formula: Formula) -> bool:
        """Return True if it is proved that no value satisfies a formula."""
        return formula == FALSE or (formula != TRUE and not self.settle(formula))

    def satisfies(self, value: Value, formula: Formula) -> bool:
        """Return True if a value satisfies a formula.

        Raises: RefusedError (this cannot be decided).
        """
        key = (value, formula)
        if key not in self._verdicts:
            self._spend(1)
            self._verdicts[key] = self._satisfies(value, formula)
        return self._verdicts[key]

    def fits(self, value: Value, alternative: Alternative) -> bool:
        """Return True if a value satisfies all constraints. Raises: RefusedError (undecidable)."""
        kind, content = value
        if kind not in alternative.types or value in alternative.excluded:
            return False
        if alternative.values is not None and value not in alternative.values:
            return False
        match kind:
            case "number":
                return content in alternative.numbers
            case "string":
                text = alternative.text
                return len(content) in text.sizes and all(
                    self.matches(pattern, content) for pattern in text.patterns
                )
            case "array":
                return self._fits_array(content, alternative)
            case "object":
                return self._fits_object(dict(content), alternative)
            case _:
                return True

    def matches(self, pattern: str, text: str) -> bool:
        """Return True if a pattern is found in a text. Raises: RefusedError (an invalid
        pattern).
        """
        key = (pattern, text)
        if key not in self._found:
            self._spend(10)
            try:
                self._found[key] = self._matches(pattern, text)
            except ValueError as error:
                raise RefusedError("pattern", str(error)) from error
        return self._found[key]

    def find_property(self, name: str, alternative: Alternative) -> Formula:
        """Return the formula that the value of a property with this name must satisfy; false if the
        name is not allowed.
        """
        self._spend(1)
        parts: list[Formula] = []
        for layer in alternative.properties:
            own = [layer.by_name[name]] if name in layer.by_name else []
            own += [part for pattern, part in layer.patterns if self.matches(pattern, name)]
            parts += own or [layer.rest]
        for names in alternative.names:
            if not self.satisfies(("string", name), names):
                return FALSE
        return all_of(parts)

    def find_item(self, index: int, alternative: Alternative) -> Formula:
        """Return the formula that the item at a position of an array must satisfy, by all
        constraints of an alternative.
        """
        return all_of(layer.at(index) for layer in alternative.items)

    def _spend(self, num_steps: int) -> None:
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise RefusedError("anyOf", "the schema has too many alternatives")

    def _at(self, place: Place) -> Formula:
        schema = self.references.get(place)
        if isinstance(schema, bool):
            return TRUE if schema else FALSE
        return at(place) if any(key in KEYWORDS for key in schema) else TRUE

    def _satisfies(self, value: Value, formula: Formula) -> bool:
        kind, content = formula
        match kind:
            case "all":
                return all(self.satisfies(value, part) for part in content)
            case "any":
                return any(self.satisfies(value, part) for part in content)
            case "not":
                return not self.satisfies(value, content)
            case "equals":
                return value == content
            case _:
                alternatives = self.expand(formula, tracks=False)
                if (formula, False) in self._narrowed:
                    raise RefusedError(self._narrowed[formula, False], "its negation is not known")
                return any(self.fits(value, each) for each in alternatives)

    @contextmanager
    def _work_on(self, key: tuple[Formula, bool]) -> Iterator[None]:
        self._working.append(key)
        try:
            yield
        finally:
            self._working.pop()

    def _expand(self, formula: Formula, *, tracks: bool) -> Alternatives:
        kind, content = formula
        match kind:
            case "all":
                return self.join([self.expand(part, tracks=tracks) for part in content])
            case "any":
                return [each for part in content for each in self.expand(part, tracks=tracks)]
            case "equals":
                return [Alternative(types=frozenset({content[0]}), values=(content,))]
            case "at":
                schema = self._open(content)
                closes = "unevaluatedProperties" in schema or "unevaluatedItems" in schema
                found = accept(schema, self, tracks=tracks or closes)
                return apply_unevaluated(schema, found) if closes else found
            case _:
                if content[0] == "equals":
                    return exclude((content[1],), self)
                return reject(self._open(content[1]), self)

    def _open(self, place: Place) -> Schema:
        content = self.references.get(place)

        def find(*keys: str | int) -> Formula:
            return self._at(self.references.child(place, *keys))

        def follow(keyword: str) -> Formula:
            if keyword == "$ref":
                return self._at(self.references.follow(content[keyword], place))
            return self._at(self.references.follow_dynamically(content[keyword], place))

        return Schema(content, find, follow)

    def _settle(self, alternative: Alternative) -> Alternatives:
        """Return the alternative without types of which no value satisfies it; an empty list if no
        type remains.
        """
        self._spend(1 + len(alternative.required))
        if alternative.values is not None:
            plain = replace(alternative, values=None)
            values = tuple(v for v in alternative.values if self.fits(v, plain))
            if not values:
                return []
            return [Alternative(types=frozenset(v[0] for v in values), values=values)]
        types = set(alternative.types)
        excluded = {v[1] for v in alternative.excluded if v[0] == "boolean"}
        if excluded == {True, False}:
            types.discard("boolean")
        if alternative.numbers.is_empty:
            types.discard("number")
        if "array" in types:
            alternative = replace(alternative, num_items=self._bound_items(alternative))
            if alternative.num_items.is_empty:
                types.discard("array")
        if "object" in types and any(
            self.is_false(self.find_property(name, alternative)) for name in alternative.required
        ):
            types.discard("object")
        return [replace(alternative, types=frozenset(types))] if types else []

    def _bound_items(self, alternative: Alternative) -> Sizes:
        """Return an array's lengths, limited to the first position at which no item is possible."""
        sizes = alternative.num_items
        places = max((len(layer.first) for layer in alternative.items), default=0)
        for index in range(places + 1):
            if index not in Sizes(0, sizes.high):
                break
            if self.is_false(self.find_item(index, alternative)):
                return sizes & Sizes(0, index)
        return sizes

    def _fits_array(self, items: tuple[Value, ...], alternative: Alternative) -> bool:
        if len(items) not in alternative.num_items:
            return False
        if alternative.is_unique and len(set(items)) < len(items):
            return False
        for count in alternative.counts:
            if sum(self.satisfies(item, count.item) for item in items) not in count.sizes:
                return False
        return all(
            self.satisfies(item, self.find_item(i, alternative)) for i, item in enumerate(items)
        )

    def _fits_object(self, properties: dict[str, Value], alternative: Alternative) -> bool:
        if len(properties) not in alternative.num_properties:
            return False
        if not all(name in properties for name in alternative.required):
            return False
        return all(
            self.satisfies(value, self.find_property(name, alternative))
            for name, value in properties.items()
        )


def _limit(alternatives: Alternatives) -> Alternatives:
    if len(alternatives) > MAX_ALTERNATIVES:
        raise RefusedError("anyOf", "the schema has too many alternatives")
    return alternatives
