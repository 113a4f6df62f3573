"""An event loop that polls for the calls of peers before it sleeps.

Waking a thread costs more than a small call. So the event loop that serves calls polls like the
engine's own threads: for some microseconds after a call it reads the engine's sockets itself, since
the next call often comes that soon; then it sleeps. It polls within its selector, so handlers run
as callbacks and tasks of asyncio on the loop's thread.
"""

import asyncio
import selectors
import time
from typing import TYPE_CHECKING

from tandem._native import poll_sources

if TYPE_CHECKING:
    from tandem._native import CallSource

__all__ = ["PollingLoop"]

FOREVER_S = 1.0
"""Longest wait of one poll in seconds; a poll ends as soon as something arrives."""


class _PollingSelector(selectors.EpollSelector):
    """A selector that polls before it sleeps, if calls have come since its last sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[CallSource] = []
        self.is_warm = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self.is_warm or (timeout is not None and timeout <= 0):
            return super().select(timeout)
        self.is_warm = False
        if timeout is None:
            is_readable = poll_sources(self.sources, self.fileno(), FOREVER_S)
        else:
            begin_s = time.monotonic()
            is_readable = poll_sources(self.sources, self.fileno(), timeout)
            timeout = max(0.0, timeout - (time.monotonic() - begin_s))
        return super().select(0 if is_readable else timeout)


class PollingLoop(asyncio.SelectorEventLoop):
    """An event loop for a process that serves calls; see ``TransferEngine.serve_calls``."""

    def __init__(self) -> None:
        self._polling = _PollingSelector()
        super().__init__(self._polling)

    def add_source(self, source: "CallSource") -> None:
        """Poll for the calls of an engine, from the next ``expect_calls`` on."""
        self._polling.sources.append(source)

    def remove_source(self, source: "CallSource") -> None:
        """Stop polling for the calls of an engine. No effect if the loop does not poll for it."""
        self._polling.sources = [each for each in self._polling.sources if each is not source]

    def expect_calls(self) -> None:
        """Poll before the next sleep, because a call has come or will come soon."""
        self._polling.is_warm = bool(self._polling.sources)
