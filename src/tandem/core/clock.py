"""Clocks: product code gets a ``Clock`` as an argument; tests and the simulator pass their own."""

import time
from typing import Protocol

__all__ = ["BootClock", "Clock", "ManualClock", "MonotonicClock"]


class Clock(Protocol):
    """A source of monotonic seconds since an arbitrary origin."""

    def now_s(self) -> float:
        """Return the current time, seconds."""
        ...


class MonotonicClock:
    """The monotonic clock of the operating system; it stops while the machine sleeps."""

    def now_s(self) -> float:
        """Return ``time.monotonic()``."""
        return time.monotonic()


class BootClock:
    """A clock that also counts while the machine sleeps, for leases (time limits) that another
    machine measures too.
    """

    def now_s(self) -> float:
        """Return the seconds since the machine was started, sleep included."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class ManualClock:
    """A clock that moves only when ``advance`` is called, for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the present time of this clock, seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward by ``seconds``, which must not be negative."""
        assert seconds >= 0, seconds
        self._now_s += seconds
