"""The clock of a simulated cluster: callbacks in the order of their moments.

Much lighter than ``VirtualLoop``: a run of an hour has some million steps. Callbacks of one moment
run in the order in which they were asked for, so equal programs run equally.
"""

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["Events"]


class Events:
    """Callbacks to come, and the time of the one that runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_run = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_added = 0

    def call_at(self, when_s: float, callback: Callable[..., None], *args: Any) -> None:
        """Call back at a moment, or now if that has passed."""
        self._num_added += 1
        when_s = max(when_s, self.now_s)
        heapq.heappush(self._queue, (when_s, self._num_added, callback, args))

    def run(self) -> None:
        """Run callbacks until none is left."""
        queue, pop = self._queue, heapq.heappop
        while queue:
            self.now_s, _, callback, args = pop(queue)
            self.num_run += 1
            callback(*args)
