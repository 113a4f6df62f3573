"""Hosts that may have what their master has never heard of, and the wait for them.

A host is *awaited* from when it went away, or from when this master began, until it has told what
it has or is declared lost; while one is, that this master never told of an object means nothing.
"""

import asyncio
from collections.abc import Callable, Mapping

from tandem.store.master.state.space import HostSpace
from tandem.store.messages import HostStage
from tandem.store.tasks import Tasks

__all__ = ["Awaited"]

RECOVERY_LOOK_S = 0.01
RECOVERY_LOOK_MAX_S = 0.25
"""Pause between two checks whether all hosts have sent their inventory."""


class Awaited:
    """The awaited hosts of one master.

    Args:
        hosts: all that it knows, by number; borrowed.
        now_ms: tells the time.
        tasks: runs the wait that all callers share.
    """

    def __init__(
        self, hosts: Mapping[int, HostSpace], now_ms: Callable[[], int], tasks: Tasks
    ) -> None:
        self.is_loaded = asyncio.Event()
        """Set once the roster has been read; no host joins before."""
        self.until_ms: dict[int, int] = {}
        """By number: until when a host is waited for."""
        self._hosts = hosts
        self._now_ms = now_ms
        self._tasks = tasks
        self._window_until_ms = 0
        self._learning: asyncio.Task[None] | None = None
        """Done when ``is_learning`` ends."""

    def __contains__(self, host: int) -> bool:
        return host in self.until_ms

    def open_window(self, until_ms: int) -> None:
        """No roster was found: until then unknown hosts may come."""
        self._window_until_ms = until_ms

    @property
    def is_window_open(self) -> bool:
        """True if hosts may come that no roster knows of."""
        if self._window_until_ms and self._now_ms() >= self._window_until_ms:
            self._window_until_ms = 0
        return self._window_until_ms > 0

    @property
    def is_learning(self) -> bool:
        """True if a host may have what this master has never heard of: not one that comes back.

        A miss may only mean that its host has not told yet.
        """
        if not self.is_loaded.is_set() or self.is_window_open:
            return True
        return any(not self._hosts[number].is_all_known for number in self.until_ms)

    @property
    def is_adopting(self) -> bool:
        """True if objects are coming in that this master may not have heard of."""
        return self.is_learning or any(
            host.stage is HostStage.JOINING for host in self._hosts.values()
        )

    async def recover(self) -> None:
        """Wait until all members have sent their inventory, or are declared lost."""
        while self.is_learning:
            await asyncio.shield(self._begin())

    async def wait_learnt(self, timeout_s: float) -> None:
        """Do as ``recover``, but no longer than so."""
        if self.is_learning:
            await asyncio.wait([self._begin()], timeout=timeout_s)

    def _begin(self) -> "asyncio.Task[None]":
        # It may be over before it has begun: time passes between two looks.
        if self._learning is None or self._learning.done():
            self._learning = self._tasks.spawn(self._look_until_learnt())
        return self._learning

    async def _look_until_learnt(self) -> None:
        # A lost member may keep this waiting for minutes: look ever more rarely, so that whoever
        # waits learns of the end at most a tenth later than it came.
        delay_s = RECOVERY_LOOK_S
        try:
            while self.is_learning:
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 1.1, RECOVERY_LOOK_MAX_S)
        finally:
            self._learning = None
