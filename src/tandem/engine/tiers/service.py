"""The store tier of an instance: a thread with the store's client, which reconnects when it is
lost.

The engine and the control channel use one object from the start. While no store can be reached,
lookups find nothing, blocks are not stored, and requests are computed as without a store.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import msgspec

from tandem.core.clock import Clock
from tandem.core.errors import CapacityError, PeerLostError, TandemError
from tandem.core.instance_status import Statistics
from tandem.core.loop_calls import LoopThread
from tandem.core.wire import KvSource
from tandem.engine.groups.group import Group, GroupMemory
from tandem.engine.scheduling.plan import StepPlan
from tandem.engine.tiers.config import TierConfig
from tandem.engine.tiers.store_tier import (
    SOURCES,
    StoreTier,
)
from tandem.engine.transfers import LoadSink
from tandem.rpc import RpcConfig
from tandem.store import ClientService, StoreConfig
from tandem.transfer import PollingLoop

__all__ = ["TierService"]

logger = logging.getLogger(__name__)

RETRY_S = 2.0
"""Seconds between two attempts to reach a store."""
STOP_TIMEOUT_S = 5.0
T = TypeVar("T")


class TierService:
    """The store tier with its thread: a ``BlockTransfers``, and the lookups of arriving requests.

    Args:
        store: address and settings of the store; its deadline is replaced by the tier's.
        rpc: settings of the control channel.
        config: policy and limits of the tier.
        groups: memory of each group of the model, the full blocks first.
        block_size: tokens per block.
        identity: digest of the ``KvIdentity``.
        clock: used to measure rates.
        on_load: called with bytes and seconds of each successful read, on the tier's thread.
    """

    def __init__(
        self,
        store: StoreConfig,
        rpc: RpcConfig,
        config: TierConfig,
        groups: Mapping[Group, GroupMemory],
        *,
        block_size: int,
        identity: str,
        clock: Clock,
        on_load: Callable[[int, float], None],
    ) -> None:
        self._store = msgspec.structs.replace(store, deadline_ms=config.load_deadline_ms, name="")
        self._rpc = rpc
        self._config = config
        self._groups, self._block_size = groups, block_size
        self._identity = identity
        self._clock = clock
        self._on_load = on_load
        self.counters = Statistics()
        """Counters since the start, over all connections to stores."""
        self._tier: StoreTier | None = None
        self._sink: LoadSink | None = None
        self._stopping = asyncio.Event()
        self._thread: LoopThread | None = None
        self._serving: Future[None] | None = None
        self._tried = threading.Event()
        self._service: ClientService | None = None
        self._failure = ""
        """Reason of the last failed attempt to connect; empty if none has failed."""

    @property
    def sources(self) -> frozenset[type[KvSource]]:
        """The kinds of ``KvSource`` that this tier can load from: the store."""
        return SOURCES

    @property
    def is_connected(self) -> bool:
        """True if the store has been reached, so that blocks can be loaded and stored."""
        return self._tier is not None

    @property
    def state(self) -> str:
        """``connected``, ``connecting``, or ``unreachable`` with the reason. Readable from any
        thread.
        """
        service = self._service
        if self._tier is not None and service is not None:
            return "connected" if service.leader else "unreachable: the master is lost"
        return f"unreachable: {self._failure}" if self._failure else "connecting"

    def start(self, sink: LoadSink, *, timeout_s: float) -> None:
        """Start the thread and wait for the first attempt to reach the store, at most
        ``timeout_s``.

        If it fails, the thread tries again every ``RETRY_S``; serving does not wait for it.
        """
        self._sink = sink
        self._thread = LoopThread("kv-tier", PollingLoop)
        self._serving = self._thread.submit(self._serve())
        self._tried.wait(timeout_s)

    def stop(self) -> None:
        """End the thread; blocks still queued to be stored are lost."""
        if self._thread is None or self._serving is None:
            return
        with contextlib.suppress(RuntimeError):  # The event loop is closed.
            self._thread.loop.call_soon_threadsafe(self._stopping.set)
        wait((self._serving,), STOP_TIMEOUT_S)
        self._thread.close(STOP_TIMEOUT_S)

    def begin(self, plan: StepPlan) -> None:
        """Pass a step's plan to the store tier; do nothing while no store is connected."""
        tier = self._tier
        if tier is not None:
            tier.begin(plan)
            return
        # Without a connected store no lookup finds a block, so plans contain no loads.
        assert not plan.loads, "a load without a store"

    async def count_stored(self, keys: Sequence[bytes]) -> int | None:
        """Return how many leading blocks of a chain (a prompt's blocks in order) the store has;
        None if no store is connected.

        May be awaited on any event loop.
        """
        tier = self._tier
        if tier is None:
            return None
        return await self._call(tier.count_stored(keys))

    def pin(self, client: str, keys: Sequence[bytes], pin_s: float) -> None:
        """Ask the store to evict the blocks with these keys later than others; do nothing without a
        store. Any thread.
        """
        tier, thread = self._tier, self._thread
        if tier is None or thread is None or not keys:
            return
        with contextlib.suppress(RuntimeError):  # The event loop is closed.
            thread.loop.call_soon_threadsafe(tier.pin, client, keys, pin_s)

    async def flush(self) -> int:
        """Remove all blocks with this identity from the store; return their number. On any event
        loop.

        Raises: TandemError (the store cannot be reached, so the blocks are still there).
        """
        tier = self._tier
        if tier is None:
            raise PeerLostError("kv_tier.flush", "the store is not reached: try again later")
        return await self._call(tier.flush())

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._thread is not None, "start() comes first"
        return await self._thread.call(work, "kv_tier.call")

    # The methods below run on the tier's thread.

    async def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    await self._serve_connected()
                except (TandemError, OSError) as error:
                    failure = error.what if isinstance(error, TandemError) else str(error)
                    # Connecting is retried for as long as the instance serves, so warn once for
                    # each reason.
                    is_known = failure == self._failure
                    level = logging.DEBUG if is_known else logging.WARNING
                    text = "event=kv_store_unreachable retry_s=%.1f error=%s"
                    logger.log(level, text, RETRY_S, error)
                    self._failure = failure
                    self._tried.set()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._stopping.wait(), RETRY_S)
        finally:
            self._tried.set()

    async def _serve_connected(self) -> None:
        assert self._sink is not None
        limit = self._store.max_value_bytes
        for group, (_, block_bytes, _) in self._groups.items():
            if block_bytes > limit:
                what, advice = "block", ", or choose a smaller engine.block_size"
                if group is Group.STATE:
                    what, advice = "state", ""
                raise CapacityError(
                    "kv_tier.open",
                    f"a {what} has {block_bytes} bytes, store.max_value_bytes is {limit}: raise "
                    f"it{advice}",
                )
        async with ClientService(self._store, self._rpc) as service:
            tier = StoreTier(
                service.client,
                self._groups,
                block_size=self._block_size,
                identity=self._identity,
                config=self._config,
                clock=self._clock,
                on_load=self._on_load,
                counters=self.counters,
            )
            tier.attach(self._sink)
            try:
                await tier.probe()
                # Log the recovery at the same level as the failure, so that whoever saw the failure
                # also sees its end.
                level = logging.WARNING if self._failure else logging.INFO
                logger.log(level, "event=kv_store_connected identity=%s", self._identity[:12])
                self._service, self._failure = service, ""
                self._tier = tier
                self._tried.set()
                await self._stopping.wait()
            finally:
                await tier.aclose()
