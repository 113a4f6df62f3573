"""A table of named objects with aliases. Names in files are looked up here, never imported by
path.
"""

import difflib
from collections.abc import Iterator
from typing import Generic, TypeVar

from tandem.core.errors import ConfigError, ConflictError

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """A map from names to values, filled when modules are imported; any thread may look up.

    Args:
        noun: kind of the values, such as "operator", for messages.
    """

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._values: dict[str, T] = {}
        self._aliases: dict[str, str] = {}

    def add(self, name: str, value: T, *, aliases: tuple[str, ...] = ()) -> None:
        """Register ``value``. Raises ConflictError if the name or an alias is taken."""
        for taken in (name, *aliases):
            if taken in self:
                raise ConflictError(
                    "core.register", f"{self._noun} {taken!r} is registered already: choose another"
                )
        self._values[name] = value
        self._aliases.update(dict.fromkeys(aliases, name))

    def resolve(self, name: str, *, where: str, field: str | None = None) -> T:
        """Return the value registered under a name or alias.

        Raises:
            ConfigError: no such name; the text lists the most similar known names.
        """
        value = self._values.get(self._aliases.get(name, name))
        if value is None:
            near = difflib.get_close_matches(name, [*self._values, *self._aliases], n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(self)}"
            raise ConfigError(where, f"unknown {self._noun} {name!r}: {hint}", field=field)
        return value

    def canonical_name(self, name: str) -> str:
        """Return the name for an alias; any other name is returned unchanged."""
        return self._aliases.get(name, name)

    def __contains__(self, name: str) -> bool:
        return name in self._values or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
