"""Time as an argument: product code takes a ``Clock``, tests and the simulator bring their own."""

import time
from typing import Protocol

__all__ = ["BootClock", "Clock", "ManualClock", "MonotonicClock"]


class Clock(Protocol):
    """A source of monotonic seconds since an arbitrary origin."""

    def now_s(self) -> float:
        """Return the current time, seconds."""
        ...


class MonotonicClock:
    """The clock of the operating system."""

    def now_s(self) -> float:
        """Return ``time.monotonic()``."""
        return time.monotonic()


class BootClock:
    """A clock that also counts while the machine sleeps, for leases kept by another machine."""

    def now_s(self) -> float:
        """Return the time since the machine was started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class ManualClock:
    """A clock that moves only when ``advance`` is called, for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the time set last."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` >= 0."""
        assert seconds >= 0, seconds
        self._now_s += seconds
