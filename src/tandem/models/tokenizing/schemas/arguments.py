"""Analysis of a tool's arguments for calls that write them one by one, each as text or as JSON.

A grammar of such arguments must know which strings an argument may be, since strings are written
without quotes; all else is written as JSON.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tandem.models.tokenizing.schemas.kinds import find_kinds
from tandem.models.tokenizing.schemas.refused import RefusedError
from tandem.models.tokenizing.schemas.rewrite import rewrite_schema

__all__ = ["Argument", "Arguments", "list_arguments"]

_PLAIN = {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
    *("title", "description", "$schema", "$comment", "default", "examples", "strict"),
}
"""Keywords of a schema whose properties can be read one by one."""
_TEXT = ("minLength", "maxLength", "pattern", "format", "allOf")
"""Keywords of strings in a rewritten schema."""
_OTHERS = ["null", "boolean", "number", "array", "object"]
_FAR = re.compile(r'"\$(?:ref|dynamicRef)": "(?!#/\$defs/|#/definitions/)')
"""Pattern of a reference to something else than a definition."""

Matches = Callable[[str, str], bool]


class Argument(msgspec.Struct):
    """Values that one argument may have."""

    strings: list[dict[str, Any]]
    """Constraints on strings, one of which must hold: ``enum``, or some of ``minLength``,
    ``maxLength``, ``pattern``, ``format``, and ``allOf`` with further patterns."""
    other: Any
    """JSON Schema of all values but strings; False: there are none."""
    kinds: list[str] | None
    """Types as whoever reads the call finds them; see ``find_kinds``."""


class Arguments(msgspec.Struct):
    """One way in which the arguments of a call may be chosen."""

    named: dict[str, Argument]
    required: list[str]
    """Names among ``named``."""
    forbidden: list[str]
    """Names of which there is no argument."""
    patterns: list[tuple[str, Argument]]
    """Further arguments, by a pattern that is found in their names."""
    rest: Argument | None
    """All other arguments; None: there are none."""


def list_arguments(schema: Mapping[str, Any], matches: Matches) -> list[Arguments]:
    """Return the ways to choose arguments that a tool's schema allows.

    Arguments that the schema does not mention are allowed where it says so or mentions none.

    Args:
        schema: JSON Schema of the arguments, an object.
        matches: as of ``rewrite_schema``.

    Raises:
        RefusedError: a keyword cannot be expressed, or no object is allowed.
    """
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise RefusedError("type", "the arguments of a tool are an object")
    whole: Any = {**schema, "type": "object"}
    ways = [whole]
    properties = schema.get("properties", {})
    if (
        not schema.keys() <= _PLAIN
        or _FAR.search(json.dumps(schema))
        or not isinstance(properties, Mapping)
        or not {*_list(schema, "required")} <= properties.keys()
    ):
        whole = rewrite_schema(whole, matches).schema
        ways = whole.get("anyOf", [whole]) if isinstance(whole, dict) else []
    shared = {name: whole[name] for name in ("$defs", "definitions") if whole and name in whole}
    found = [
        _read_way(way, lambda value, name: _read(value, schema, name, shared, matches))
        for each in ways
        for way in _open_values(each)
        if _can_be(way)
    ]
    if not found:
        raise RefusedError("properties", "no arguments satisfy the schema")
    return found


def _open_values(way: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a schema with listed objects as ones with listed properties."""
    if "enum" not in way:
        return [way]
    return [
        {
            "properties": {name: {"const": part} for name, part in value.items()},
            "required": list(value),
            "additionalProperties": False,
        }
        for value in way["enum"]
    ]


def _can_be(way: Mapping[str, Any]) -> bool:
    """Return True if no argument is both required and forbidden."""
    properties = way.get("properties", {})
    return all(properties.get(name) is not False for name in _list(way, "required"))


def _read_way(way: Mapping[str, Any], read: Callable[[Any, str], Argument]) -> Arguments:
    properties = way.get("properties", {})
    patterns = way.get("patternProperties", {})
    rest = way.get("additionalProperties", not properties and not patterns)
    required = _list(way, "required")
    if "minProperties" in way:
        raise RefusedError("minProperties", "more arguments than the required ones are not counted")
    named = {name: read(value, name) for name, value in properties.items() if value is not False}
    is_open = bool(patterns) or rest is not False
    if "maxProperties" in way and (is_open or len(named) > way["maxProperties"]):
        raise RefusedError("maxProperties", "arguments are not counted")
    return Arguments(
        named,
        [name for name in required if name in named],
        [name for name in properties if name not in named],
        [(pattern, read(value, "")) for pattern, value in patterns.items() if value is not False],
        None if rest is False else read(rest, ""),
    )


def _read(
    value: Any, document: Any, name: str, shared: Mapping[str, Any], matches: Matches
) -> Argument:
    """Return what an argument may be.

    Args:
        value: its schema.
        document: schema of all arguments, by which the call is read.
        name: name of the argument; empty for one that the schema does not name.
        shared: definitions to which ``value`` refers.
        matches: as of ``rewrite_schema``.
    """
    kinds = find_kinds(document, name)
    own = find_kinds({"properties": {"x": value}, **shared}, "x")
    if own is not None and "string" not in own:
        return Argument([], {**shared, **value} if own else False, _sort(kinds))
    whole = value if isinstance(value, bool) else {**shared, **value}
    written = rewrite_schema(whole, matches).schema
    strings: list[dict[str, Any]] = []
    others: list[Any] = []
    ways: list[Any] = [written]
    if isinstance(written, dict) and "anyOf" in written:
        ways = written["anyOf"]
    for way in ways:
        if way is False:
            continue
        way = {} if way is True else {k: v for k, v in way.items() if k != "$defs"}
        if "enum" in way:
            texts = [each for each in way["enum"] if isinstance(each, str)]
            left = [each for each in way["enum"] if not isinstance(each, str)]
            strings += [{"enum": texts}] if texts else []
            others += [{"enum": left}] if left else []
            continue
        types = way.get("type", ["string", *_OTHERS])
        types = [types] if isinstance(types, str) else types
        if "string" in types:
            strings.append({key: way[key] for key in _TEXT if key in way})
        types = [kind for kind in types if kind != "string"]
        if types:
            others.append({k: v for k, v in way.items() if k not in _TEXT} | {"type": types})
    if kinds is not None:
        # Text that is read as something else is not written, and the reverse.
        strings = strings if "string" in kinds else []
        others = others if kinds - {"string"} else []
    other: Any = False
    if others:
        other = others[0] if len(others) == 1 else {"anyOf": others}
        other = {**other, "$defs": written["$defs"]} if "$defs" in written else other
    if not strings and other is False:
        raise RefusedError("properties", f"no value satisfies the schema of {name[:100]!r}")
    return Argument(strings, other, _sort(kinds))


def _sort(kinds: frozenset[str] | None) -> list[str] | None:
    return None if kinds is None else sorted(kinds)


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []
