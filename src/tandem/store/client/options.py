"""Options by which objects are kept, and the result of a put."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from tandem.core.errors import TandemError

__all__ = ["DEFAULT_OPTIONS", "PutOptions", "PutResult", "take_only"]

T = TypeVar("T")


class PutResult(Enum):
    """The result of a put."""

    CREATED = "created"
    EXISTS = "exists"
    """There was an object under the key; it stays as it is. Not with ``upsert``."""
    REPLACED = "replaced"
    """A new version took the place of an old one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PutOptions:
    """Options by which objects are kept."""

    replicas: int = 1
    """Copies, each on another host; fewer if there are not so many, and then repaired later."""
    preferred: Sequence[str] = ()
    """Names of hosts to try first."""
    same_machine: bool = False
    """Try hosts of our machine first."""
    upsert: bool = False
    """Replace an object of the same key; readers of the old version are not disturbed."""
    soft_pin_s: float = 0.0
    """Evicted only after what is not pinned, for so long."""
    hard_pin: bool = False
    """Never evicted."""
    wait_s: float | None = None
    """Seconds to wait for space; None = as configured, which is also the most."""


DEFAULT_OPTIONS = PutOptions()


def take_only(results: "Sequence[T | TandemError]") -> T:
    """Return the result of a batch of one. Raises: the error that it is."""
    (result,) = results
    if isinstance(result, TandemError):
        raise result
    return result
