"""A table of named things with aliases: names in a file resolve here, never by an import path."""

import difflib
from collections.abc import Iterator
from typing import Generic, TypeVar

from tandem.core.errors import ConfigError, ConflictError

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to values, filled once at import; later lookups only read, from any thread.

    Args:
        noun: what is registered, for messages ("operator").
    """

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._values: dict[str, T] = {}
        self._aliases: dict[str, str] = {}

    def add(self, name: str, value: T, *, aliases: tuple[str, ...] = ()) -> None:
        """Register ``value``; a name or alias already taken raises ``ConflictError``."""
        for taken in (name, *aliases):
            if taken in self:
                raise ConflictError(
                    "core.register", f"{self._noun} {taken!r} is registered already: choose another"
                )
        self._values[name] = value
        self._aliases.update(dict.fromkeys(aliases, name))

    def resolve(self, name: str, *, where: str, field: str | None = None) -> T:
        """Return what ``name``, or the alias ``name``, stands for.

        Raises:
            ConfigError: unknown; the text names the nearest known names.
        """
        value = self._values.get(self._aliases.get(name, name))
        if value is None:
            near = difflib.get_close_matches(name, [*self._values, *self._aliases], n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(self)}"
            raise ConfigError(where, f"unknown {self._noun} {name!r}: {hint}", field=field)
        return value

    def canonical_name(self, name: str) -> str:
        """Return the name behind an alias; other names come back as they are."""
        return self._aliases.get(name, name)

    def __contains__(self, name: str) -> bool:
        return name in self._values or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
