"""Resolution of references in a document: ``$id``, ``$anchor``, ``$dynamicRef``, JSON pointers.

Nothing is fetched: a reference to another document is refused.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urljoin

from tandem.models.tokenizing.schemas.formulas import Place
from tandem.models.tokenizing.schemas.refused import RefusedError

__all__ = ["References"]

Path = tuple[str | int, ...]
ONE = (
    "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "items", "contains",
    "not", "if", "then", "else", "propertyNames",
)  # fmt: skip
LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
MAP = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
MAX_DEPTH = 100
MAX_SCHEMAS = 2000


class References:
    """The schemas of one document, by their names.

    Args:
        document: the root schema.

    Raises: RefusedError (schemas nest too deeply, or are too many).
    """

    def __init__(self, document: Any) -> None:
        self._document = document
        self._bases: dict[Path, str] = {}
        """Base URI of each schema that has an ``$id``, and of the root, by its path in the
        document.
        """
        self._resources: dict[str, Path] = {}
        self._anchors: dict[tuple[str, str], Path] = {}
        self._dynamic: dict[tuple[str, str], Path] = {}
        self._has_dynamic = False
        self._num_schemas = 0
        if not isinstance(document, dict):
            self._bases[()], self._resources[""] = "", ()
        self._index(document, (), "")

    @property
    def root(self) -> Place:
        """Place (path of keys from the root of the document) of the root schema."""
        return self._enter((), ())

    def get(self, place: Place) -> Any:
        """Return the schema at a place.

        Raises: RefusedError (there is none).
        """
        value = self._document
        for key in place.path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                raise RefusedError("$ref", f"there is no {_write(place.path)}") from None
        if not isinstance(value, dict | bool):
            raise RefusedError("$ref", f"{_write(place.path)} is no schema")
        return value

    def child(self, place: Place, *keys: str | int) -> Place:
        """Return the place of the schema under ``keys`` of the schema at ``place``."""
        return self._enter((*place.path, *keys), place.scope)

    def follow(self, reference: Any, place: Place) -> Place:
        """Return the place to which a ``$ref`` in the schema at ``place`` refers.

        Raises: RefusedError (it is not in this document).
        """
        return self._enter(self._find(reference, place, "$ref")[0], place.scope)

    def follow_dynamically(self, reference: Any, place: Place) -> Place:
        """Return the place to which a ``$dynamicRef`` refers, given the resources entered so far.

        Raises: RefusedError (it is not in this document).
        """
        path, uri, name = self._find(reference, place, "$dynamicRef")
        if self._dynamic.get((uri, name)) == path:
            for resource in place.scope:
                if (resource, name) in self._dynamic:
                    path = self._dynamic[resource, name]
                    break
        return self._enter(path, place.scope)

    def _index(self, schema: Any, path: Path, base: str) -> None:
        self._num_schemas += 1
        if len(path) > 2 * MAX_DEPTH or self._num_schemas > MAX_SCHEMAS:
            raise RefusedError("$defs", "schemas nest too deeply, or are too many")
        if not isinstance(schema, dict):
            return
        own = schema.get("$id")
        if isinstance(own, str):
            base = _join(base, own).partition("#")[0]
        if isinstance(own, str) or not path:
            self._bases[path] = base
            self._resources.setdefault(base, path)
        if isinstance(schema.get("$anchor"), str):
            self._anchors.setdefault((base, schema["$anchor"]), path)
        if isinstance(schema.get("$dynamicAnchor"), str):
            self._anchors.setdefault((base, schema["$dynamicAnchor"]), path)
            self._dynamic.setdefault((base, schema["$dynamicAnchor"]), path)
        self._has_dynamic |= "$dynamicRef" in schema
        for keys, child in _list_children(schema):
            self._index(child, (*path, *keys), base)

    def _find_base(self, path: Path) -> str:
        for end in range(len(path), -1, -1):
            if path[:end] in self._bases:
                return self._bases[path[:end]]
        return ""

    def _enter(self, path: Path, scope: tuple[str, ...]) -> Place:
        # Without $dynamicRef the dynamic scope does not affect the result; leaving it out gives
        # fewer distinct places.
        base = self._find_base(path)
        if self._has_dynamic and base not in scope:
            scope = (*scope, base)
        return Place(path, scope)

    def _find(self, reference: Any, place: Place, keyword: str) -> tuple[Path, str, str]:
        """Return a path, the URI of its resource, and the anchor's name if the reference
        used one.
        """
        if not isinstance(reference, str):
            raise RefusedError(keyword, "it is no text")
        uri, _, fragment = _join(self._find_base(place.path), reference).partition("#")
        if uri not in self._resources:
            raise RefusedError(keyword, f"{reference[:200]!r} is elsewhere, and nothing is fetched")
        path, fragment = self._resources[uri], unquote(fragment)
        if not fragment:
            return path, uri, ""
        if not fragment.startswith("/"):
            if (uri, fragment) not in self._anchors:
                raise RefusedError(keyword, f"there is no anchor {fragment[:200]!r}")
            return self._anchors[uri, fragment], uri, fragment
        value: Any = self.get(Place(path, ()))
        for part in fragment[1:].split("/"):
            try:
                name, value = _step(value, part)
            except (KeyError, IndexError, TypeError):
                raise RefusedError(keyword, f"there is no {reference[:200]!r}") from None
            path = (*path, name)
        return path, self._find_base(path), ""


def _step(value: Any, part: str) -> tuple[str | int, Any]:
    """Return the key that a part of a JSON pointer denotes, and the value under it."""
    if isinstance(value, list):
        if not part.isdecimal() or len(part) > 9:
            raise KeyError(part)
        return int(part), value[int(part)]
    name = part.replace("~1", "/").replace("~0", "~")
    return name, value[name]


def _list_children(schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    for key in ONE:
        if key in schema:
            yield (key,), schema[key]
    for key in LIST:
        if isinstance(schema.get(key), list):
            yield from (((key, i), child) for i, child in enumerate(schema[key]))
    for key in MAP:
        if isinstance(schema.get(key), dict):
            yield from (((key, name), child) for name, child in schema[key].items())


def _join(base: str, reference: str) -> str:
    if reference.startswith("#"):
        # urljoin does not join a fragment to URIs of unknown schemes, such as urn, so the fragment
        # is appended.
        return base + reference
    return urljoin(base, reference)


def _write(path: Path) -> str:
    return "#" + "".join(f"/{part}" for part in path)[:200]
