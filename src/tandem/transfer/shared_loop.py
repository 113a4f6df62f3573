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

MAX_READY = 256
"""Callbacks run by one borrower; what is left is the loop's own."""


class _SharingSelector(selectors.DefaultSelector):
    """Lets go of a lock while it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.lock.acquire()
        self.gate = threading.Lock()
        """Held while waiting for the lock: whoever came first is next, also beside a busy loop that
        lets go of it for a microsecond a turn."""
        self.wakes_at_s = 0.0
        """When it goes on, whatever happens."""

    def select(self, timeout: float | None = None) -> Any:
        self.wakes_at_s = math.inf if timeout is None else time.monotonic() + timeout
        self.lock.release()
        try:
            found = super().select(timeout)
        finally:
            with self.gate:
                self.lock.acquire()
        # A borrower may have closed a descriptor since, and another may have its number.
        registered = self.get_map()
        return [item for item in found if registered.get(item[0].fd) is item[0]]


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

        What the body makes ready, and what follows from that, has run when this ends, unless the
        loop is busy itself. Not to be used on the loop's own thread. A loop that stands still can
        be borrowed when it runs again.

        Raises: RuntimeError once the loop is closed.
        """
        sharing: Any = self._sharing
        with sharing.gate:
            sharing.lock.acquire()
        own: Any = self
        thread = own._thread_id
        try:
            if self.is_closed():
                raise RuntimeError("the loop is closed")
            self._has_early_timer = False
            asyncio._set_running_loop(self)
            own._thread_id = threading.get_ident()
            # With something to do the loop does not sleep: it goes on by itself.
            is_idle = not own._ready
            try:
                yield
                if is_idle:
                    self._run_ready()
            finally:
                own._thread_id = thread
                asyncio._set_running_loop(None)
                if own._ready or own._stopping or self._has_early_timer:
                    self.call_soon_threadsafe(_do_nothing)
        finally:
            sharing.lock.release()

    def close(self) -> None:
        """As of any loop; who waits to borrow it is told."""
        is_first = not self.is_closed()
        super().close()
        if is_first:
            self._sharing.lock.release()

    def _run_ready(self) -> None:
        own: Any = self
        ready = own._ready
        for _ in range(MAX_READY):
            if not ready:
                return
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()


def _do_nothing() -> None:
    """To wake a loop with."""
