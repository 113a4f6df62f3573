"""The decode side: executes the loads whose source is a prefill instance.

Threads: hand-overs run on one event loop of their own; ``begin`` is called by the engine's thread,
``open_peer`` and ``close_peer`` are awaited on any loop.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from tandem.core.errors import PeerLostError, TandemError
from tandem.core.wire import KvPeer, PrefillKv
from tandem.engine.disaggregation.counters import PeerReadCounters
from tandem.engine.disaggregation.hand_over import HandOver, ReadTarget
from tandem.engine.disaggregation.peers import KvPeers, OpenPeer
from tandem.engine.plan import BlockLoad, StepPlan
from tandem.engine.request import Request

__all__ = ["LoadSink", "PeerReader"]

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
T = TypeVar("T")


class LoadSink(Protocol):
    """Who is told how loads ended: the engine."""

    def load_done(self, request: Request, block_ids: Sequence[int]) -> None:
        """Blocks have their content, verified."""
        ...

    def load_failed(self, request: Request, block_ids: Sequence[int]) -> None:
        """Blocks have not; nothing writes into them any more."""
        ...


class PeerReader:
    """Owns the thread of hand-overs; a ``BlockTransfers`` for loads from prefill instances.

    Args:
        target: where blocks go; its parts are borrowed, and closed after ``stop``.
        sink: told how loads ended.
    """

    def __init__(self, target: ReadTarget, sink: LoadSink) -> None:
        self._target = target
        self._sink = sink
        self._loop: asyncio.AbstractEventLoop | None = None
        self._peers: KvPeers | None = None
        self._stopping: asyncio.Event | None = None
        self._tasks: dict[int, tuple[Request, asyncio.Task[None]]] = {}
        """By the id of each block that a hand-over may write into."""
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-reader", daemon=True)

    @property
    def can_read_instances(self) -> bool:
        """True: that is what it does."""
        return True

    @property
    def counters(self) -> PeerReadCounters:
        """Totals since start."""
        return self._target.counters

    @property
    def num_in_transfer(self) -> int:
        """Blocks that a hand-over may write into."""
        return len(self._tasks)

    def start(self) -> None:
        """Start the thread; before the first ``begin``."""
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        """End all hand-overs, leave all peers, end the thread."""
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):  # The loop has ended.
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(STOP_TIMEOUT_S)

    async def open_peer(self, facts: KvPeer) -> None:
        """Open an instance, or again if it has restarted; see ``KvPeers.open``. Any loop."""
        assert self._peers is not None, "start() comes first"
        await self._call(self._peers.open(facts))

    async def close_peer(self, name: str) -> None:
        """Forget an instance; reads from it end without content. Any loop."""
        assert self._peers is not None, "start() comes first"
        await self._call(self._peers.close(name))

    def begin(self, plan: StepPlan) -> None:
        """Take up the loads of a plan, all from prefill instances; see ``BlockTransfers.begin``."""
        if not plan.loads and not plan.dropped:
            return
        assert self._loop is not None, "start() comes first"
        try:
            self._loop.call_soon_threadsafe(self._take, plan.dropped, plan.loads)
        except RuntimeError:  # The loop has ended with the instance.
            self._fail(plan.loads, "offline")

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None, "start() comes first"
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise PeerLostError("kv_peer.call", "the instance is stopping") from error
        return await asyncio.wrap_future(future)

    # The thread.

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._peers = KvPeers(self._target.transfer, self._target.own)
        self._started.set()
        await self._stopping.wait()
        tasks = {task for _, task in self._tasks.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
        await self._peers.close_all()

    def _take(self, dropped: Sequence[BlockLoad], loads: Sequence[BlockLoad]) -> None:
        assert self._stopping is not None
        for load in dropped:
            request, task = self._tasks.get(load.block_id, (None, None))
            if task is not None and request is load.request:
                task.cancel()
        by_request: dict[Request, list[BlockLoad]] = {}
        for load in loads:
            by_request.setdefault(load.request, []).append(load)
        for request, its_loads in by_request.items():
            if self._stopping.is_set():
                self._fail(its_loads, "offline")
                continue
            task = asyncio.get_running_loop().create_task(self._load(request, its_loads))
            for load in its_loads:
                self._tasks[load.block_id] = (request, task)

    async def _load(self, request: Request, loads: Sequence[BlockLoad]) -> None:
        """Read the blocks of one request and report the end of each."""
        missing = {load.block_id: load for load in loads}

        def take(done: list[BlockLoad]) -> None:
            for load in done:
                del missing[load.block_id]
                del self._tasks[load.block_id]
            self._sink.load_done(request, [load.block_id for load in done])

        reason = "internal"
        peer: OpenPeer | None = None
        try:
            assert isinstance(request.kv_source, PrefillKv), request.kv_source
            assert self._peers is not None
            peer = await self._peers.find(request.kv_source.instance)
            await HandOver(self._target, peer, request, loads, take).run()
        except asyncio.CancelledError:
            reason = "dropped"
        except TandemError as error:
            reason = error.code
            if isinstance(error, PeerLostError) and peer is not None:
                peer.is_lost = True
            logger.info("event=kv_hand_over_failed request=%s error=%s", request.request_id, error)
        except Exception:  # The edge of a task: its blocks must come back, whatever went wrong.
            logger.exception("hand-over of request %s", request.request_id)
        finally:
            for block_id in missing:
                del self._tasks[block_id]
            self._fail(list(missing.values()), reason)

    def _fail(self, loads: Sequence[BlockLoad], reason: str) -> None:
        failures = self._target.counters.failures
        for load in loads:
            failures[reason] = failures.get(reason, 0) + 1
            self._sink.load_failed(load.request, [load.block_id])
