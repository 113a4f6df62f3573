"""The clock of a simulated cluster: calls callbacks in order of their times.

Much cheaper than ``VirtualLoop``, since an hour of simulated time has some million steps. Callbacks
with equal times run in the order of their registration, so runs are reproducible.
"""

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Events"]


class Events:
    """Pending callbacks, and the time of the one that is running."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_run = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        """Callbacks of later times, a heap."""
        self._due: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        """Callbacks of the current time that were registered at that time. Half of all callbacks
        are such, and a heap would take longer for them.
        """
        self._num_added = 0

    def call_at(self, when_s: float, callback: Callable[..., None], *args: Any) -> None:
        """Call ``callback`` at time ``when_s``, or at the current time if that has passed."""
        if when_s <= self.now_s:
            self._due.append((callback, args))
            return
        self._num_added += 1
        heapq.heappush(self._queue, (when_s, self._num_added, callback, args))

    def run(self) -> None:
        """Run callbacks until none is pending."""
        queue, due, pop = self._queue, self._due, heapq.heappop
        while queue or due:
            # Callbacks of the heap with the current time were registered before those that are due.
            if due and (not queue or queue[0][0] > self.now_s):
                callback, args = due.popleft()
            else:
                self.now_s, _, callback, args = pop(queue)
            self.num_run += 1
            callback(*args)
