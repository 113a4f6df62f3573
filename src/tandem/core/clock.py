"""Time as an argument: product code takes a ``Clock``, tests and the simulator bring their own."""

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "MonotonicClock"]


class Clock(Protocol):
    """Monotonic seconds since an arbitrary origin."""

    def now_s(self) -> float:
        """Return the current time, seconds."""
        ...


class MonotonicClock:
    """The clock of the operating system."""

    def now_s(self) -> float:
        """Return ``time.monotonic()``."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told; for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the time set last."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` >= 0."""
        assert seconds >= 0, seconds
        self._now_s += seconds
