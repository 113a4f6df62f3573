"""Search of a schema for the JSON types that the properties of an object may have.

Unlike ``rewrite_schema`` this never refuses a schema and takes bounded time whatever the schema is:
what is not understood says nothing. It serves to read what a model has written, not to restrict it.
"""

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

__all__ = ["find_kinds", "list_names", "name_kind"]

_MAX_SCHEMAS = 1000
"""Most schemas that one search visits."""
_MAX_DEPTH = 64


def find_kinds(document: Any, name: str) -> frozenset[str] | None:
    """Return the JSON types that a property may have; None if the schema does not tell.

    The types are "null", "boolean", "integer", "number", "string", "array" and "object"; where any
    number may stand, "integer" is among them.

    Args:
        document: JSON Schema of the object.
        name: name of the property.
    """
    return _Search(document).find(document, name)


def list_names(document: Any) -> list[str]:
    """Return the names of the properties that an object's schema mentions, each once."""
    search = _Search(document)
    found: dict[str, None] = {}
    pending = [document]
    while pending:
        schema = pending.pop()
        if not isinstance(schema, Mapping) or not search.may_visit():
            continue
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            found |= dict.fromkeys(properties)
        pending += [
            part for keyword in ("oneOf", "anyOf", "allOf") for part in _list(schema, keyword)
        ]
        pending += search.follow(schema)
    return list(found)


def name_kind(value: Any) -> str:
    """Return the JSON type of a Python value, "integer" for one without a fraction."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


class _Search:
    """One search of a document, which visits a bounded number of schemas."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._left = _MAX_SCHEMAS

    def may_visit(self) -> bool:
        """Count a visit; return False if there were too many."""
        self._left -= 1
        return self._left >= 0

    def follow(self, schema: Mapping[str, Any]) -> list[Any]:
        """Return the schema to which a ``$ref`` refers, if there is one in this document."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return []
        found = self._document
        for part in unquote(reference[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isascii() and key.isdigit() and len(key) < 9:
                found = found[int(key)] if int(key) < len(found) else None
            else:
                return []
        return [found]

    def find(self, schema: Any, name: str | None, depth: int = 0) -> frozenset[str] | None:
        """Return the types that a schema allows, or that it allows for the property ``name``; None
        if it does not tell.
        """
        if schema is False:
            return frozenset()
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or not self.may_visit():
            return None
        own = _own_kinds(schema) if name is None else self._find_property(schema, name, depth)
        found = [own]
        parts = [*self.follow(schema), *_list(schema, "allOf")]
        found += [self.find(part, name, depth + 1) for part in parts]
        for keyword in ("anyOf", "oneOf"):
            each = [self.find(part, name, depth + 1) for part in _list(schema, keyword)]
            if name is not None:
                # An alternative that does not mention the property says nothing about its type.
                each = [kinds for kinds in each if kinds is not None]
            told = [kinds for kinds in each if kinds is not None]
            found.append(frozenset().union(*told) if each and len(told) == len(each) else None)
        return _intersect(found)

    def _find_property(
        self, schema: Mapping[str, Any], name: str, depth: int
    ) -> frozenset[str] | None:
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return self.find(properties[name], None, depth + 1)
        if "patternProperties" in schema:
            return None
        rest = schema.get("additionalProperties")
        return self.find(rest, None, depth + 1) if isinstance(rest, Mapping) else None


def _own_kinds(schema: Mapping[str, Any]) -> frozenset[str] | None:
    given = schema.get("type")
    kinds = [given] if isinstance(given, str) else _list(schema, "type")
    found = frozenset(kind for kind in kinds if isinstance(kind, str))
    if "number" in found:
        found |= {"integer"}
    values = [schema["const"]] if "const" in schema else _list(schema, "enum")
    listed = frozenset(map(name_kind, values))
    return _intersect([found or None, listed or None])


def _intersect(found: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    told = [kinds for kinds in found if kinds is not None]
    return frozenset.intersection(*told) if told else None


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []
