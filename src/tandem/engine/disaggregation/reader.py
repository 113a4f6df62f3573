"""The decode side of disaggregation: it carries out loads whose source is a prefill instance.

Threads: everything runs on one event loop, except ``begin``, which the engine's thread calls.
"""

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import PeerLostError, TandemError
from tandem.core.instance_status import Statistics
from tandem.core.wire import KvPeer, KvSource, PrefillKv
from tandem.engine.disaggregation.hand_over import HandOver, ReadTarget
from tandem.engine.disaggregation.peers import KvPeers, OpenPeer
from tandem.engine.groups.group import GroupBlock
from tandem.engine.scheduling.plan import BlockLoad, StepPlan
from tandem.engine.scheduling.request import Request
from tandem.engine.transfers import LoadSink

__all__ = ["SOURCES", "PeerReader"]

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
SOURCES: frozenset[type[KvSource]] = frozenset({PrefillKv})
"""The kinds of ``KvSource`` that this reader loads from."""


@dataclass(slots=True, eq=False)
class _Reading:
    """A hand-over (the reading of one request's KV from a prefill instance) in progress."""

    request: Request
    missing: dict[GroupBlock, BlockLoad]
    """Loads that have not arrived, by block id."""
    reason: str = "dropped"
    """Reason that is reported for the blocks which will not arrive."""


class PeerReader:
    """The reader of other instances' blocks; a ``BlockTransfers`` for loads from prefill instances.

    Args:
        target: memory that blocks are written to; not owned, and to be closed after ``aclose``.
        sink: told how loads ended.
        loop: event loop that everything runs on; None: the caller's.
    """

    def __init__(
        self,
        target: ReadTarget,
        sink: LoadSink,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._target = target
        self._sink = sink
        self._loop = asyncio.get_running_loop() if loop is None else loop
        self._peers = KvPeers(target.port, target.own)
        self._tasks: dict[GroupBlock, tuple[Request, asyncio.Task[None]]] = {}
        """By id of a KV block: the request, and the task of the hand-over (reading KV from a
        prefill instance) that may write into the block.
        """
        self._is_closing = False

    @property
    def sources(self) -> frozenset[type[KvSource]]:
        """The kinds of ``KvSource`` that this reader loads from: prefill instances."""
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
        return len(self._tasks)

    async def open_peer(self, facts: KvPeer) -> None:
        """Open an instance for reading, or reopen it after it was restarted or lost."""
        await self._peers.open(facts)

    async def close_peer(self, name: str) -> None:
        """Forget an instance; later reads from it fail, and those in progress too."""
        await self._peers.close(name)

    async def aclose(self) -> None:
        """Cancel all hand-overs and close all peers; later loads fail."""
        self._is_closing = True
        tasks = {task for _, task in self._tasks.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
        await self._peers.close_all()

    def begin(self, plan: StepPlan) -> None:
        """Start the loads of a step's plan; all must be from prefill instances. Called by the
        engine's thread.
        """
        if not plan.loads and not plan.dropped:
            return
        try:
            self._loop.call_soon_threadsafe(self._take, plan.dropped, plan.loads)
        except RuntimeError:  # The event loop was closed when the instance ended.
            self._fail(plan.loads, "offline")

    def _take(self, dropped: Sequence[BlockLoad], loads: Sequence[BlockLoad]) -> None:
        for load in dropped:
            request, task = self._tasks.get(load.block, (None, None))
            if task is not None and request is load.request:
                task.cancel()
        by_request: dict[Request, list[BlockLoad]] = {}
        for load in loads:
            by_request.setdefault(load.request, []).append(load)
        for request, its_loads in by_request.items():
            if self._is_closing:
                self._fail(its_loads, "offline")
                continue
            reading = _Reading(request, {load.block: load for load in its_loads})
            task = self._loop.create_task(self._load(reading))
            # A done callback also runs if the task is cancelled before its first line.
            task.add_done_callback(functools.partial(self._end, reading))
            for load in its_loads:
                self._tasks[load.block] = (request, task)

    async def _load(self, reading: _Reading) -> None:
        """Read the blocks of one request; blocks that arrive are reported at once."""
        request, missing = reading.request, reading.missing

        def take(done: list[BlockLoad]) -> None:
            for load in done:
                del missing[load.block]
                del self._tasks[load.block]
            self._sink.load_done(request, [load.block for load in done])

        peer: OpenPeer | None = None
        try:
            assert isinstance(request.kv_source, PrefillKv), request.kv_source
            peer = await self._peers.find(request.kv_source.instance)
            await HandOver(self._target, peer, request, list(missing.values()), take).run()
        except TandemError as error:
            reading.reason = error.code
            if isinstance(error, PeerLostError) and peer is not None:
                peer.is_lost = True
            logger.info("event=kv_hand_over_failed request=%s error=%s", request.request_id, error)
        except Exception:  # Boundary of a task: its blocks must be returned after any error.
            reading.reason = "internal"
            logger.exception("hand-over of request %s", request.request_id)

    def _end(self, reading: _Reading, _: "asyncio.Task[None]") -> None:
        """Report the blocks that an ended hand-over (a read from a prefill instance) has not read
        as failed.
        """
        for block in reading.missing:
            del self._tasks[block]
        self._fail(list(reading.missing.values()), reading.reason)

    def _fail(self, loads: Sequence[BlockLoad], reason: str) -> None:
        failures = self._target.counters.peer_read_failures
        for load in loads:
            failures[reason] = failures.get(reason, 0) + 1
            self._sink.load_failed(load.request, [load.block], reason)
