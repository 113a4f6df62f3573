"""Time as an argument: product code takes a ``Clock``, tests and the simulator bring their own."""

import time
from typing import Protocol

__all__ = ["BootClock", "Clock", "ManualClock", "MonotonicClock"]


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


class BootClock:
    """Counts while the machine sleeps as well, for what ends by another machine's clock."""

    def now_s(self) -> float:
        """Return the time since the machine was started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


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
