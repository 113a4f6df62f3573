"""The thread on which an instance reads the blocks of others: a ``PeerReader`` with its loop."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from tandem.core.instance_status import Statistics
from tandem.core.loop_calls import call_on_loop
from tandem.core.wire import KvPeer
from tandem.engine.disaggregation.hand_over import ReadTarget
from tandem.engine.disaggregation.reader import LoadSink, PeerReader
from tandem.engine.scheduling.plan import StepPlan

__all__ = ["ReaderService"]

JOIN_TIMEOUT_S = 5.0
T = TypeVar("T")


class ReaderService:
    """Owns the thread of hand-overs; a ``BlockTransfers`` for loads from prefill instances.

    Args:
        target: where blocks go; its parts are borrowed, and closed after ``stop``.
        sink: told how loads ended.
    """

    def __init__(self, target: ReadTarget, sink: LoadSink) -> None:
        self._target = target
        self._sink = sink
        self._reader: PeerReader | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-reader", daemon=True)

    @property
    def can_read_instances(self) -> bool:
        """True."""
        return True

    @property
    def counters(self) -> Statistics:
        """Totals since start."""
        return self._target.counters

    @property
    def num_in_transfer(self) -> int:
        """Blocks that a hand-over may write into."""
        return 0 if self._reader is None else self._reader.num_in_transfer

    def start(self) -> None:
        """Start the thread; before the first ``begin``."""
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        """End all hand-overs, leave all peers, end the thread."""
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):  # The loop has ended.
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(JOIN_TIMEOUT_S)

    async def open_peer(self, facts: KvPeer) -> None:
        """Open an instance, or again if it has restarted; see ``KvPeers.open``. Any loop."""
        await self._call(self._get_reader().open_peer(facts))

    async def close_peer(self, name: str) -> None:
        """Forget an instance; reads from it end without content. Any loop."""
        await self._call(self._get_reader().close_peer(name))

    def begin(self, plan: StepPlan) -> None:
        """Take up the loads of a plan, all from prefill instances; see ``BlockTransfers.begin``."""
        self._get_reader().begin(plan)

    def _get_reader(self) -> PeerReader:
        assert self._reader is not None, "start() comes first"
        return self._reader

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None, "start() comes first"
        return await call_on_loop(self._loop, work, "kv_peer.call")

    # The thread.

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._reader = PeerReader(self._target, self._sink)
        self._started.set()
        await self._stopping.wait()
        await self._reader.aclose()
