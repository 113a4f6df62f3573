"""An event loop that another thread may be, for a moment, while it waits for events.

A thread that serves calls is awake when one comes; the loop that guards what the call needs is
not, and waking it costs more than the call. So the thread borrows the loop: it holds the lock that
the loop lets go of in its selector, and runs what has become ready until nothing is.
"""

import asyncio
import contextlib
import math
import selectors
import threading
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["SharedLoop"]

MAX_READY = 10_000
"""Callbacks run by one borrower; what is left is the loop's own."""


class _SharingSelector(selectors.DefaultSelector):
    """Lets go of a lock while it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.lock.acquire()
        self.wakes_at_s = 0.0
        """When it goes on, whatever happens."""

    def select(self, timeout: float | None = None) -> Any:
        self.wakes_at_s = math.inf if timeout is None else time.monotonic() + timeout
        self.lock.release()
        try:
            return super().select(timeout)
        finally:
            self.lock.acquire()


class SharedLoop(asyncio.SelectorEventLoop):
    """An event loop that other threads may borrow. Run as any other, on one thread."""

    def __init__(self) -> None:
        self._sharing = _SharingSelector()
        super().__init__(self._sharing)
        self._has_early_timer = False

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """As of any loop."""
        self._has_early_timer |= when < self._sharing.wakes_at_s
        return super().call_at(when, callback, *args, context=context)

    @contextlib.contextmanager
    def borrow(self) -> Iterator[None]:
        """Be the loop on this thread, as soon as it waits for events.

        What the body makes ready, and what follows from that, has run when this ends. Not to be
        used on the loop's own thread.
        """
        with self._sharing.lock:
            self._has_early_timer = False
            asyncio._set_running_loop(self)
            try:
                yield
                self._run_ready()
            finally:
                asyncio._set_running_loop(None)
                if self._ready or self._has_early_timer:  # pyright: ignore[reportAttributeAccessIssue]
                    self.call_soon_threadsafe(_do_nothing)

    def _run_ready(self) -> None:
        ready = self._ready  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(MAX_READY):
            if not ready:
                return
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()


def _do_nothing() -> None:
    """To wake a loop with."""
