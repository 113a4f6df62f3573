"""The thread on which an instance reads other instances' blocks."""

import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from tandem.core.instance_status import Statistics
from tandem.core.loop_calls import LoopThread
from tandem.core.wire import KvPeer, KvSource
from tandem.engine.disaggregation.hand_over import ReadTarget
from tandem.engine.disaggregation.reader import SOURCES, STOP_TIMEOUT_S, PeerReader
from tandem.engine.scheduling.plan import StepPlan
from tandem.engine.transfers import LoadSink

__all__ = ["ReaderService"]

T = TypeVar("T")


class ReaderService:
    """A ``PeerReader`` with a thread and event loop of its own.

    Args:
        target: memory that blocks are written to; not owned, and to be closed after ``stop``.
        sink: told how loads ended.
    """

    def __init__(self, target: ReadTarget, sink: LoadSink) -> None:
        self._target = target
        self._thread = LoopThread("kv-reader")
        self._reader = PeerReader(target, sink, self._thread.loop)

    @property
    def sources(self) -> frozenset[type[KvSource]]:
        """The kinds of ``KvSource`` that this service loads from: prefill instances."""
        return SOURCES

    @property
    def counters(self) -> Statistics:
        """Counters since start of the blocks read from other instances."""
        return self._target.counters

    @property
    def num_in_transfer(self) -> int:
        """Number of blocks that a hand-over (a read from a prefill instance) may still write
        into.
        """
        return self._reader.num_in_transfer

    def stop(self) -> None:
        """End all hand-overs (reads from prefill instances), close the connections to other
        instances and end the thread.
        """
        # Ignore the timeout: a hand-over that does not end is cancelled together with the loop.
        with contextlib.suppress(TimeoutError, RuntimeError):
            self._thread.run(self._reader.aclose(), STOP_TIMEOUT_S)
        self._thread.close(STOP_TIMEOUT_S)

    async def open_peer(self, facts: KvPeer) -> None:
        """Open an instance for reading, or reopen it after it was restarted or lost; callable from
        any event loop.
        """
        await self._call(self._reader.open_peer(facts))

    async def close_peer(self, name: str) -> None:
        """Forget an instance; reads from it fail. Callable from any event loop."""
        await self._call(self._reader.close_peer(name))

    def begin(self, plan: StepPlan) -> None:
        """Start the loads of a step's plan, all from prefill instances."""
        self._reader.begin(plan)

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._thread.call(work, "kv_peer.call")
