"""Alternatives of each schema keyword, and of its negation.

A keyword says nothing about values of other types: ``minLength`` holds for every number. So its
negation names the type. Alternatives are joined by "or": an alternative that cannot be expressed is
left out, which allows fewer values but never a wrong one; ``Work.drop`` notes the keyword.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

from tandem.models.tokenizing.schemas.constraints import (
    ALL_ITEMS,
    TYPES,
    Alternative,
    ArrayLayer,
    Count,
    Numbers,
    ObjectLayer,
    Seen,
    Sizes,
    Text,
    Value,
    list_values,
    make_fraction,
)
from tandem.models.tokenizing.schemas.formulas import (
    FALSE,
    TRUE,
    Formula,
    all_of,
    any_of,
    equal_to,
    negate,
)
from tandem.models.tokenizing.schemas.refused import RefusedError

__all__ = ["Alternatives", "Schema", "Work", "accept", "apply_unevaluated", "exclude", "reject"]

Alternatives = list[Alternative]
ANY = Alternative()
MAX_TRACKED = 4
"""Most schemas of an ``anyOf`` whose combinations are distinguished by the properties they
evaluate.
"""
SHIFTS = 8
"""Number of positions that are tried for an item that violates ``items``."""
TYPE_NAMES = TYPES | {"integer"}


class Work(Protocol):
    """The solver's functions that keywords need: alternatives (sets of constraints joined
    by "or") of the formulas of nested schemas.
    """

    def expand(self, formula: Formula, *, tracks: bool) -> Alternatives:
        """Return the alternatives of a formula (sets of constraints joined by "or"). ``tracks``:
        True if they record which items and properties they evaluate.
        """
        ...

    def join(self, groups: Iterable[Alternatives]) -> Alternatives:
        """Return the alternatives that satisfy one alternative of each group: all combinations of
        the groups (lists of alternatives joined by "or"), without those that are empty.
        """
        ...

    def excludes(self, alternatives: Alternatives, formula: Formula) -> bool:
        """Return True if it is proved that no value of the alternatives satisfies the formula."""
        ...

    def drop(self, keyword: str) -> None:
        """Note that an alternative of this keyword was left out, as it cannot be expressed."""
        ...


class Schema:
    """An object schema: its keywords, and the formulas of the schemas in it.

    Args:
        content: the schema's object in the document.
        find: returns the formula of the schema under given keys.
        follow: returns the formula to which a reference keyword refers.
    """

    def __init__(
        self,
        content: dict[str, Any],
        find: Callable[..., Formula],
        follow: Callable[[str], Formula],
    ) -> None:
        self.content = content
        self.find = find
        self.follow = follow

    def __contains__(self, keyword: str) -> bool:
        return keyword in self.content

    def get(self, keyword: str, kind: type | tuple[type, ...]) -> Any:
        """Return a keyword's value. Raises: RefusedError (it is of another type)."""
        value = self.content[keyword]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise RefusedError(keyword, "its value is of a wrong type")
        return value

    def count(self, keyword: str) -> int:
        """Return a keyword's value as a count; 2.0 is accepted as 2.

        Raises: RefusedError (it is not a whole number of 0 or more).
        """
        value = self.get(keyword, (int, float))
        if value < 0 or value != int(value):
            raise RefusedError(keyword, "it counts, and is no such number")
        return int(value)

    def list(self, keyword: str) -> list[Formula]:
        """Return the formulas of a keyword whose value is a list of schemas."""
        return [self.find(keyword, i) for i in range(len(self.get(keyword, list)))]

    def map(self, keyword: str) -> dict[str, Formula]:
        """Return the formulas of a keyword whose value maps names to schemas; empty if it is
        absent.
        """
        if keyword not in self:
            return {}
        return {name: self.find(keyword, name) for name in self.get(keyword, dict)}


def accept(schema: Schema, work: Work, *, tracks: bool) -> Alternatives:
    """Return the alternatives of a schema (sets of constraints joined by "or"), without its
    ``unevaluated*`` keywords.

    Args:
        schema: the schema.
        work: expands the schemas in it.
        tracks: True if the alternatives record which items and properties they evaluate.
    """
    groups = [_accept_plain(schema)]
    if "$ref" in schema:
        groups.append(work.expand(schema.follow("$ref"), tracks=tracks))
    if "$dynamicRef" in schema:
        groups.append(work.expand(schema.follow("$dynamicRef"), tracks=tracks))
    if "allOf" in schema:
        groups += [work.expand(part, tracks=tracks) for part in schema.list("allOf")]
    if "anyOf" in schema:
        groups.append(_accept_any(schema.list("anyOf"), work, tracks=tracks))
    if "oneOf" in schema:
        groups.append(_accept_one(schema.list("oneOf"), work, tracks=tracks))
    if "not" in schema:
        groups.append(work.expand(negate(schema.find("not")), tracks=False))
    if "if" in schema:
        groups.append(_accept_if(schema, work, tracks=tracks))
    for name, needed in _list_dependents(schema).items():
        groups.append([_absent(name), Alternative(required=tuple(needed))])
    for name, part in schema.map("dependentSchemas").items():
        present = work.join([[_object(required=(name,))], work.expand(part, tracks=tracks)])
        groups.append([_absent(name), *present])
    return work.join(groups)


def apply_unevaluated(schema: Schema, alternatives: Alternatives) -> Alternatives:
    """Return the alternatives (sets of constraints joined by "or") with ``unevaluatedProperties``
    and ``unevaluatedItems`` of the schema applied.
    """
    if "unevaluatedProperties" in schema:
        rest = schema.find("unevaluatedProperties")
        alternatives = [_close_properties(each, rest) for each in alternatives]
    if "unevaluatedItems" in schema:
        rest = schema.find("unevaluatedItems")
        alternatives = [_close_items(each, rest) for each in alternatives]
    return alternatives


def reject(schema: Schema, work: Work) -> Alternatives:
    """Return alternatives (sets of constraints joined by "or") that together allow all values that
    a schema does not allow.
    """
    found = _reject_plain(schema, work)
    parts = [schema.follow(name) for name in ("$ref", "$dynamicRef") if name in schema]
    parts += schema.list("allOf") if "allOf" in schema else []
    for part in parts:
        found += work.expand(negate(part), tracks=False)
    if "anyOf" in schema:
        none = all_of(negate(part) for part in schema.list("anyOf"))
        found += work.expand(none, tracks=False)
    if "oneOf" in schema:
        parts = schema.list("oneOf")
        found += work.expand(all_of(negate(part) for part in parts), tracks=False)
        for i, first in enumerate(parts):
            for second in parts[:i]:
                found += work.expand(all_of([first, second]), tracks=False)
    if "not" in schema:
        found += work.expand(schema.find("not"), tracks=False)
    if "if" in schema:
        condition = schema.find("if")
        for keyword, holds in (("then", condition), ("else", negate(condition))):
            if keyword in schema:
                wrong = all_of([holds, negate(schema.find(keyword))])
                found += work.expand(wrong, tracks=False)
    for name, needed in _list_dependents(schema).items():
        for other in needed:
            found += work.join([[_object(required=(name,))], [_absent(other)]])
    for name, part in schema.map("dependentSchemas").items():
        found += work.join([[_object(required=(name,))], work.expand(negate(part), tracks=False)])
    for keyword in ("unevaluatedProperties", "unevaluatedItems"):
        if keyword in schema and schema.find(keyword) != TRUE:
            work.drop(keyword)
    return found


def _accept_plain(schema: Schema) -> Alternatives:
    """Return at most one alternative (a set of constraints) for all keywords of a schema but those
    that combine schemas, such as ``anyOf``.
    """
    found = ANY
    if "type" in schema:
        types, is_integer = _read_types(schema)
        found = replace(found, types=types, numbers=Numbers(is_integer=is_integer))
    if "const" in schema:
        found = replace(found, values=_read_values("const", [schema.content["const"]]))
    if "enum" in schema:
        values = _read_values("enum", schema.get("enum", list))
        if found.values is not None:
            values = tuple(value for value in values if value in found.values)
        found = replace(found, values=values)
    if found.values is not None:
        values = tuple(v for v in found.values if _has_type(v, found))
        if not values:
            return []
        found = replace(found, values=values)
    numbers = found.numbers
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        if keyword in schema:
            numbers &= _read_number(schema, keyword)
    text = Text(
        _read_sizes(schema, "minLength", "maxLength"),
        (schema.get("pattern", str),) if "pattern" in schema else (),
        (schema.get("format", str),) if "format" in schema else (),
    )
    named, patterns = schema.map("properties"), schema.map("patternProperties")
    rest = schema.find("additionalProperties") if "additionalProperties" in schema else TRUE
    layer = ObjectLayer(tuple(named.items()), tuple(patterns.items()), rest)
    first = schema.list("prefixItems") if "prefixItems" in schema else []
    items = ArrayLayer(tuple(first), schema.find("items") if "items" in schema else TRUE)
    counts = [_read_count(schema)] if "contains" in schema else []
    seen = Seen(
        num_items=ALL_ITEMS if "items" in schema else len(first),
        items=tuple(count.item for count in counts),
        names=tuple(named),
        patterns=tuple(patterns),
        has_all_properties="additionalProperties" in schema,
    )
    return [
        replace(
            found,
            numbers=numbers,
            text=text,
            items=() if items == ArrayLayer() else (items,),
            counts=tuple(count for count in counts if count.sizes != Sizes()),
            num_items=_read_sizes(schema, "minItems", "maxItems"),
            is_unique="uniqueItems" in schema and schema.get("uniqueItems", bool),
            properties=() if layer == ObjectLayer() else (layer,),
            required=_read_names(schema, "required"),
            names=(schema.find("propertyNames"),) if "propertyNames" in schema else (),
            num_properties=_read_sizes(schema, "minProperties", "maxProperties"),
            seen=seen,
        )
    ]


def _reject_plain(schema: Schema, work: Work) -> Alternatives:
    """Return alternatives (sets of constraints joined by "or") of values that violate one of the
    keywords that do not combine schemas; ``format`` is only an annotation.
    """
    found: Alternatives = []
    if "type" in schema:
        types, is_integer = _read_types(schema)
        if TYPES - types:
            found.append(Alternative(types=TYPES - types))
        if is_integer:
            numbers = Numbers(is_fractional=True)
            found.append(Alternative(types=frozenset({"number"}), numbers=numbers))
    for keyword in ("const", "enum"):
        if keyword in schema:
            values = schema.get("enum", list) if keyword == "enum" else [schema.content["const"]]
            found += exclude(_read_values(keyword, values), work)
    for keyword, opposite in _OPPOSITES.items():
        if keyword in schema:
            value = _read_fraction(schema, keyword)
            found.append(Alternative(types=frozenset({"number"}), numbers=opposite(value)))
    if "multipleOf" in schema:
        work.drop("multipleOf")
    if "pattern" in schema:
        work.drop("pattern")
    for kind, low, high in (
        ("string", "minLength", "maxLength"),
        ("array", "minItems", "maxItems"),
        ("object", "minProperties", "maxProperties"),
    ):
        sizes = _read_sizes(schema, low, high)
        if sizes.low:
            found.append(_sized(kind, Sizes(0, sizes.low - 1)))
        if sizes.high is not None:
            found.append(_sized(kind, Sizes(sizes.high + 1)))
    return found + _reject_items(schema, work) + _reject_properties(schema, work)


def _reject_items(schema: Schema, work: Work) -> Alternatives:
    found: Alternatives = []
    first = schema.list("prefixItems") if "prefixItems" in schema else []
    places = list(enumerate(first))
    if "items" in schema and (rest := schema.find("items")) != TRUE:
        places += [(i, rest) for i in range(len(first), len(first) + SHIFTS)]
        if rest != FALSE:
            work.drop("items")
    for i, item in places:
        if item != TRUE:
            layer = ArrayLayer((*[TRUE] * i, negate(item)))
            found.append(_array(items=(layer,), num_items=Sizes(i + 1)))
    if "contains" in schema:
        count = _read_count(schema)
        low, high = count.sizes.low, count.sizes.high
        if low:
            found.append(_array(counts=(Count(count.item, Sizes(0, low - 1)),)))
        if high is not None:
            found.append(_array(counts=(Count(count.item, Sizes(high + 1)),)))
    if "uniqueItems" in schema and schema.get("uniqueItems", bool):
        work.drop("uniqueItems")
    return found


def _reject_properties(schema: Schema, work: Work) -> Alternatives:
    found: Alternatives = []
    named = schema.map("properties")
    for name, part in named.items():
        if part != TRUE:
            layer = ObjectLayer(((name, negate(part)),))
            found.append(_object(properties=(layer,), required=(name,)))
    for name in _read_names(schema, "required"):
        found += [replace(_absent(name), types=frozenset({"object"}))]
    if any(part != TRUE for part in schema.map("patternProperties").values()):
        work.drop("patternProperties")
    if "additionalProperties" in schema and schema.find("additionalProperties") != TRUE:
        work.drop("additionalProperties")
        if schema.find("additionalProperties") == FALSE and "patternProperties" not in schema:
            # If an object has more properties than the schema names, at least one is an additional
            # property, which the negated schema requires.
            found.append(_sized("object", Sizes(len(named) + 1)))
    if "propertyNames" in schema and schema.find("propertyNames") != TRUE:
        work.drop("propertyNames")
    return found


def _accept_any(parts: list[Formula], work: Work, *, tracks: bool) -> Alternatives:
    each = [work.expand(part, tracks=tracks) for part in parts]
    if not tracks:
        return [alternative for group in each for alternative in group]
    # A value that matches several parts has evaluated the properties and items of all of them, and
    # unevaluated* only gets weaker by that; so parts that are not chosen need not be negated.
    if len(parts) > MAX_TRACKED:
        work.drop("anyOf")
        return [alternative for group in each for alternative in group]
    found: Alternatives = []
    for chosen in range(1, 1 << len(parts)):
        found += work.join(group for i, group in enumerate(each) if chosen >> i & 1)
    return found


def _accept_one(parts: list[Formula], work: Work, *, tracks: bool) -> Alternatives:
    found: Alternatives = []
    for i, part in enumerate(parts):
        groups = [work.expand(part, tracks=tracks)]
        for j, other in enumerate(parts):
            if i != j and not work.excludes(groups[0], other):
                groups.append(work.expand(negate(other), tracks=False))
        found += work.join(groups)
    return found


def _accept_if(schema: Schema, work: Work, *, tracks: bool) -> Alternatives:
    condition = schema.find("if")
    if "then" not in schema and "else" not in schema:
        # Without then and else, `if` only marks properties and items as evaluated.
        return [ANY, *work.expand(condition, tracks=True)] if tracks else [ANY]
    then = schema.find("then") if "then" in schema else TRUE
    other = schema.find("else") if "else" in schema else TRUE
    return [
        *work.join([work.expand(condition, tracks=tracks), work.expand(then, tracks=tracks)]),
        *work.join(
            [work.expand(negate(condition), tracks=False), work.expand(other, tracks=tracks)]
        ),
    ]


def _close_properties(alternative: Alternative, rest: Formula) -> Alternative:
    seen = alternative.seen
    if seen.has_all_properties:
        return alternative
    layer = ObjectLayer(
        tuple((name, TRUE) for name in seen.names),
        tuple((pattern, TRUE) for pattern in seen.patterns),
        rest,
    )
    return replace(
        alternative,
        properties=(*alternative.properties, layer),
        seen=replace(seen, has_all_properties=True),
    )


def _close_items(alternative: Alternative, rest: Formula) -> Alternative:
    seen = alternative.seen
    if seen.num_items == ALL_ITEMS:
        return alternative
    # Items that a ``contains`` has evaluated need not satisfy the schema of unevaluated items.
    layer = ArrayLayer((TRUE,) * seen.num_items, any_of([rest, *seen.items]))
    return replace(
        alternative,
        items=(*alternative.items, layer),
        seen=replace(seen, num_items=ALL_ITEMS),
    )


def exclude(values: tuple[Value, ...], work: Work) -> Alternatives:
    """Return alternatives (sets of constraints joined by "or") that together allow all values
    except the given ones.
    """
    groups: list[Alternatives] = []
    scalars = tuple(v for v in values if v[0] in ("boolean", "number", "string"))
    if scalars:
        groups.append([Alternative(excluded=scalars)])
    for value in values:
        kind, content = value
        if kind == "null":
            groups.append([Alternative(types=TYPES - {"null"})])
        elif kind == "array":
            others = [Alternative(types=TYPES - {"array"})]
            if content:
                others.append(_sized("array", Sizes(0, len(content) - 1)))
            others.append(_sized("array", Sizes(len(content) + 1)))
            for i, item in enumerate(content):
                layer = ArrayLayer((*[TRUE] * i, negate(equal_to(item))))
                others.append(_array(items=(layer,), num_items=Sizes(i + 1)))
            groups.append(others)
        elif kind == "object":
            others = [Alternative(types=TYPES - {"object"})]
            others.append(_sized("object", Sizes(len(content) + 1)))
            for name, item in content:
                layer = ObjectLayer(((name, negate(equal_to(item))),))
                others.append(_object(properties=(layer,), required=(name,)))
                others.append(replace(_absent(name), types=frozenset({"object"})))
            groups.append(others)
    return work.join(groups)


def _absent(name: str) -> Alternative:
    return Alternative(properties=(ObjectLayer(((name, FALSE),)),))


def _object(**fields: Any) -> Alternative:
    return Alternative(types=frozenset({"object"}), **fields)


def _array(**fields: Any) -> Alternative:
    return Alternative(types=frozenset({"array"}), **fields)


def _sized(kind: str, sizes: Sizes) -> Alternative:
    match kind:
        case "string":
            return Alternative(types=frozenset({kind}), text=Text(sizes))
        case "array":
            return _array(num_items=sizes)
        case _:
            return _object(num_properties=sizes)


_OPPOSITES: dict[str, Callable[[Any], Numbers]] = {
    "minimum": lambda value: Numbers(high=value, is_high_open=True),
    "maximum": lambda value: Numbers(low=value, is_low_open=True),
    "exclusiveMinimum": lambda value: Numbers(high=value),
    "exclusiveMaximum": lambda value: Numbers(low=value),
}


def _read_number(schema: Schema, keyword: str) -> Numbers:
    value = _read_fraction(schema, keyword)
    match keyword:
        case "minimum":
            return Numbers(low=value)
        case "maximum":
            return Numbers(high=value)
        case "exclusiveMinimum":
            return Numbers(low=value, is_low_open=True)
        case "exclusiveMaximum":
            return Numbers(high=value, is_high_open=True)
        case _:
            if value <= 0:
                raise RefusedError(keyword, "it is not above zero")
            return Numbers(factor=value)


def _read_fraction(schema: Schema, keyword: str) -> Any:
    try:
        return make_fraction(schema.get(keyword, (int, float)))
    except (ValueError, OverflowError):
        raise RefusedError(keyword, "it is no number") from None


def _read_sizes(schema: Schema, low: str, high: str) -> Sizes:
    return Sizes(
        schema.count(low) if low in schema else 0, schema.count(high) if high in schema else None
    )


def _read_count(schema: Schema) -> Count:
    low = schema.count("minContains") if "minContains" in schema else 1
    high = schema.count("maxContains") if "maxContains" in schema else None
    return Count(schema.find("contains"), Sizes(low, high))


def _read_names(schema: Schema, keyword: str) -> tuple[str, ...]:
    if keyword not in schema:
        return ()
    names = schema.get(keyword, list)
    if not all(isinstance(name, str) for name in names):
        raise RefusedError(keyword, "it lists names")
    return tuple(dict.fromkeys(names))


def _list_dependents(schema: Schema) -> dict[str, list[str]]:
    if "dependentRequired" not in schema:
        return {}
    found = schema.get("dependentRequired", dict)
    for names in found.values():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise RefusedError("dependentRequired", "it lists names")
    return found


def _read_types(schema: Schema) -> tuple[frozenset[str], bool]:
    given = schema.get("type", (str, list))
    names = [given] if isinstance(given, str) else given
    if not names or not all(isinstance(name, str) and name in TYPE_NAMES for name in names):
        raise RefusedError("type", "it is no type of JSON")
    is_integer = "integer" in names and "number" not in names
    return frozenset("number" if name == "integer" else name for name in names), is_integer


def _read_values(keyword: str, values: list[Any]) -> tuple[Value, ...]:
    try:
        return list_values(values)
    except (ValueError, OverflowError):
        raise RefusedError(keyword, "it has a number without a value") from None


def _has_type(value: Value, alternative: Alternative) -> bool:
    kind, content = value
    return kind in alternative.types and (kind != "number" or content in alternative.numbers)
