"""Checks of a store client's arguments before anything is sent. A wrong argument raises a
``ConfigError`` that names it.
"""

import math
import operator
from collections.abc import Iterable, Sequence

from tandem.core.errors import ConfigError

__all__ = [
    "MAX_REPLICAS",
    "MAX_SOFT_PIN_MS",
    "check_keys",
    "check_ranges",
    "check_replicas",
    "to_ms",
]

MAX_REPLICAS = 255
MAX_SOFT_PIN_MS = 2**32 - 1
"""The longest soft pin in milliseconds that fits in an object's header."""


def check_keys(keys: Iterable[str], *, field: str = "key") -> None:
    """Check that keys are strings that UTF-8 can encode; a lone surrogate is not.

    Raises: ConfigError (one is not).
    """
    try:
        if all(map(str.isascii, keys)):
            return
    except TypeError:
        raise ConfigError("store.key", f"keys are strings, not {keys!r:.80}", field=field) from None
    for key in keys:
        try:
            key.encode()
        except UnicodeEncodeError:
            raise ConfigError("store.key", f"{key!r} is not valid text", field=field) from None


def check_ranges(ranges: Sequence[tuple[int, int]]) -> None:
    """Check that each range is a pair of integers >= 0. Raises: ConfigError (one is not)."""
    try:
        is_good = all(
            operator.index(offset) >= 0 and operator.index(length) >= 0 for offset, length in ranges
        )
    except (TypeError, ValueError):
        is_good = False
    if not is_good:
        raise ConfigError("store.get", "a range (offset, length) of numbers >= 0 for each key")


def check_replicas(replicas: object) -> None:
    """Check that a replica count fits in an object's header.

    Raises: ConfigError (it does not, or is not an integer).
    """
    if not isinstance(replicas, int) or not 1 <= replicas <= MAX_REPLICAS:
        raise ConfigError(
            "store.put", f"{replicas} replicas: give 1 to {MAX_REPLICAS}", field="replicas"
        )


def to_ms(seconds: float, field: str, *, most_ms: int) -> int:
    """Return a time in whole milliseconds, ``most_ms`` at most.

    Raises: ConfigError if it is negative, NaN, infinite or not a number.
    """
    try:
        is_good = math.isfinite(seconds) and seconds >= 0
    except (TypeError, OverflowError):
        is_good = False
    if not is_good:
        raise ConfigError(
            "store.time", f"{field}={seconds!r:.40}: give a finite number >= 0", field=field
        )
    return int(min(seconds * 1e3, most_ms))
