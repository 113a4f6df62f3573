"""Options of a put, and its result."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from tandem.core.errors import TandemError

__all__ = ["DEFAULT_OPTIONS", "PutOptions", "PutResult", "take_only"]

T = TypeVar("T")


class PutResult(Enum):
    """The outcome of a put for one object."""

    CREATED = "created"
    EXISTS = "exists"
    """The key had an object, which stays. Not with ``upsert``."""
    REPLACED = "replaced"
    """A new version took the place of an older one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PutOptions:
    """Options of a put: replicas, placement, pins."""

    replicas: int = 1
    """Number of copies, each on another host. With fewer hosts there are fewer, until a later
    repair.
    """
    preferred: Sequence[str] = ()
    """Names of hosts to try first."""
    same_machine: bool = False
    """True to try hosts of the client's machine first."""
    upsert: bool = False
    """True to replace an object of the same key. Running reads of the old version complete."""
    soft_pin_s: float = 0.0
    """Seconds for which the object is evicted only after objects without a pin."""
    hard_pin: bool = False
    """True if the object is never evicted."""
    wait_s: float | None = None
    """Seconds to wait for space; None for the configured time, which is also the limit."""


DEFAULT_OPTIONS = PutOptions()


def take_only(results: "Sequence[T | TandemError]") -> T:
    """Return the result of a batch of one. Raises the result if it is an error."""
    (result,) = results
    if isinstance(result, TandemError):
        raise result
    return result
