"""A flag of another server's launch command."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from tandem.core.errors import ConfigError

__all__ = ["LaunchFlag", "read_count"]

PREFIX = "launch__"


class LaunchFlag(NamedTuple):
    """A flag of another server's launch command: its argument, and what it becomes here."""

    names: tuple[str, ...]
    kind: Literal["mapped", "settled", "refused"]
    target: str
    """For a mapped flag, the setting; for a settled one, the reason; for a refused one, the reason
    and what to use instead."""
    has_value: bool = True
    convert: Callable[[str, Mapping[str, str]], str] | None = None
    """For a mapped flag: returns the setting's value, given the flag's value and all given flags;
    empty: the setting is left as it is."""
    harmless: tuple[str, ...] = ()
    """Values with which a refused flag asks for nothing, so that it is accepted."""
    notes: Mapping[str, str] = MappingProxyType({})
    """For a mapped flag, notes for the user by its values that mean something else here."""

    @property
    def parameter(self) -> str:
        """Name of the parameter by which a command receives the flag."""
        return PREFIX + self.names[0].removeprefix("--").replace("-", "_")


def read_count(flag: str, value: str) -> int:
    """Return a flag's whole number.

    Raises: ConfigError (it is none).
    """
    try:
        return int(value)
    except ValueError as error:
        raise ConfigError("cli.serve", f"{flag} {value}: must be a whole number") from error
