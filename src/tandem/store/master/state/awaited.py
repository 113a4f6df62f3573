"""Hosts that may have objects which their master does not know of, and the wait for them.

A host is *awaited* from its loss, or from this master's start, until it has sent its inventory or
is declared lost. While a host is awaited, an object that is not in the directory may still exist.
"""

import asyncio
from collections.abc import Callable, Mapping

from tandem.store.master.state.space import HostSpace
from tandem.store.messages import HostStage
from tandem.store.tasks import Tasks

__all__ = ["Awaited"]

RECOVERY_LOOK_S = 0.01
RECOVERY_LOOK_MAX_S = 0.25
"""Longest pause in seconds between two checks whether all hosts have sent their inventories."""


class Awaited:
    """The awaited hosts of one master: those that have yet to return and list their objects.

    Args:
        hosts: all known hosts by number; borrowed.
        now_ms: returns the time.
        tasks: runs the wait that all callers share.
    """

    def __init__(
        self, hosts: Mapping[int, HostSpace], now_ms: Callable[[], int], tasks: Tasks
    ) -> None:
        self.is_loaded = asyncio.Event()
        """Set once the roster has been read. No host joins before."""
        self.until_ms: dict[int, int] = {}
        """Time until which each awaited host is waited for, by host number."""
        self._hosts = hosts
        self._now_ms = now_ms
        self._tasks = tasks
        self._window_until_ms = 0
        self._learning: asyncio.Task[None] | None = None
        """The task that all callers of ``recover`` wait for; it ends when ``is_learning`` does."""

    def __contains__(self, host: int) -> bool:
        return host in self.until_ms

    def open_window(self, until_ms: int) -> None:
        """Expect until ``until_ms`` that hosts join which the roster (the list of known hosts) does
        not name.
        """
        self._window_until_ms = until_ms

    @property
    def is_window_open(self) -> bool:
        """True while hosts are expected to join that the roster (the list of known hosts) does not
        name; see ``open_window``.
        """
        if self._window_until_ms and self._now_ms() >= self._window_until_ms:
            self._window_until_ms = 0
        return self._window_until_ms > 0

    @property
    def is_learning(self) -> bool:
        """True if a host may have objects that this master does not know of. Hosts that reported
        before do not count.

        A missing key may then only mean that its host has not reported yet.
        """
        if not self.is_loaded.is_set() or self.is_window_open:
            return True
        return any(not self._hosts[number].is_all_known for number in self.until_ms)

    @property
    def is_adopting(self) -> bool:
        """True if inventories (hosts' lists of objects) are arriving that may have objects unknown
        to this master.
        """
        return self.is_learning or any(
            host.stage is HostStage.JOINING for host in self._hosts.values()
        )

    async def recover(self) -> None:
        """Wait until all hosts that may have objects have sent their inventories (lists of
        objects), or are declared lost.
        """
        while self.is_learning:
            await asyncio.shield(self._begin())

    async def wait_learnt(self, timeout_s: float) -> None:
        """Wait until all absent hosts have listed their objects or are declared lost, as
        ``recover`` does, for ``timeout_s`` at most.
        """
        if self.is_learning:
            await asyncio.wait([self._begin()], timeout=timeout_s)

    def _begin(self) -> "asyncio.Task[None]":
        # The new task may find at once that all hosts have reported, because time has passed since
        # the caller's check.
        if self._learning is None or self._learning.done():
            self._learning = self._tasks.spawn(self._look_until_learnt())
        return self._learning

    async def _look_until_learnt(self) -> None:
        # A lost member may keep this task waiting for minutes. Its checks become rarer, so that
        # waiters notice the end late by at most a tenth of the wait.
        delay_s = RECOVERY_LOOK_S
        try:
            while self.is_learning:
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 1.1, RECOVERY_LOOK_MAX_S)
        finally:
            self._learning = None
