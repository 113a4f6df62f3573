"""The methods that servers may call of a ready instance, and the owner of each request.

Remembers which server sent each live request. Calls come on the control channel's event loop; the
thread that runs the engine's steps calls ``deliver``. It uses no sockets and no processes, so the
simulated world runs the same code.
"""

import asyncio
import contextlib
import inspect
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from tandem.core.adapter import AdapterInfo, AdapterSource, UnloadAdapter
from tandem.core.clock import Clock
from tandem.core.errors import TandemError, UnsupportedError
from tandem.core.instance_status import ExpertCounts, InstanceRole, InstanceStats
from tandem.core.timeline import InstanceTimeline, StoreLookup, TimelineQuery
from tandem.core.wire import (
    AddRequest,
    CancelRequest,
    ClosePeer,
    ContinueRequest,
    Empty,
    InstanceInfo,
    InstanceLoad,
    InstanceStage,
    KvPeer,
    ReleaseHold,
    RequestOutput,
    StepOutputs,
    TierKv,
)
from tandem.engine.engine import Engine
from tandem.engine.process.inventory import BlockInventory
from tandem.engine.process.methods import (
    ADD,
    CLOSE_PEER,
    CONTINUE,
    EXPERTS,
    FLUSH_CACHE,
    INFO,
    LOAD_ADAPTER,
    METHODS,
    OPEN_PEER,
    STATS,
    TIMELINES,
    UNLOAD_ADAPTER,
    InstanceMethod,
)

__all__ = ["Adapters", "InstanceApi", "PeerOpener", "ServerPeer", "StoreLookups"]

logger = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.01
"""Shortest time in seconds between two load reports while requests run, so that reports do not
delay short steps."""

Req = TypeVar("Req")
Res = TypeVar("Res")


class ServerPeer(Protocol):
    """The connection to one server process, which sends requests to this instance."""

    def push_threadsafe(self, event: msgspec.Struct) -> None:
        """Send an event; callable from any thread. Raises PeerLostError if the session is lost."""
        ...


class StoreLookups(Protocol):
    """The questions about the store that an arriving request brings; the store tier answers
    them.
    """

    async def count_stored(self, keys: Sequence[bytes]) -> int | None:
        """Return how many leading blocks of a chain (a prompt's blocks in order) the store has;
        None if it does not answer.
        """
        ...

    def pin(self, client: str, keys: Sequence[bytes], pin_s: float) -> None:
        """Ask the store to evict the blocks with these keys later than others, for ``pin_s``
        seconds; does not wait.
        """
        ...

    async def flush(self) -> int:
        """Remove all blocks with this instance's KV identity from the store; return their
        number.
        """
        ...


class PeerOpener(Protocol):
    """The reader of other instances' blocks, which connects to instances that a server names."""

    async def open_peer(self, facts: KvPeer) -> None:
        """Connect to an instance to read its blocks, also again after its restart."""
        ...

    async def close_peer(self, name: str) -> None:
        """Disconnect from an instance; its blocks are no longer read."""
        ...


class Adapters(Protocol):
    """The LoRA adapters of the model; the methods block."""

    def load(self, source: AdapterSource, *, is_confined: bool = False) -> AdapterInfo:
        """Load a LoRA adapter into the model, unless it is loaded already; return its facts. If
        ``is_confined``, it must lie in the folder that the settings allow.
        """
        ...

    def unload(self, digest: str) -> None:
        """Refuse further requests for the adapter with this digest; it is freed when its requests
        have ended.
        """
        ...


@dataclass(slots=True)
class _Arrivals:
    """The progress of one server's requests, by the numbers of those that have arrived, and the
    load last reported to it.
    """

    num_received: int = 0
    pending: set[int] = field(default_factory=set[int])
    """Numbers of the server's requests that have arrived and were neither added to the engine nor
    refused yet.
    """
    told: InstanceLoad | None = None
    """Load last reported to the server, without version number."""


class InstanceApi:
    """The handlers of servers' calls to one engine.

    Args:
        name: name of the instance.
        engine: the engine; not owned.
        clock: the engine's clock.
        tier: store tier, asked which blocks the store has; None: there is no store.
        reader: reader of other instances' blocks; None: none are read.
        adapters: LoRA adapters of the model; None: it takes none.
        info: facts about the model and instance, for servers.
        role: role of the instance.
        inventory: changes of the instance's blocks, reported to servers; None: not reported.
        read_stats: returns the statistics; None: there are none.
        read_experts: returns the counts of chosen experts; None: none are counted.
        read_load_speed: returns the rate at which KV is loaded from the store, in tokens per
            second;
            None: nothing is loaded.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        clock: Clock,
        tier: StoreLookups | None = None,
        reader: PeerOpener | None = None,
        adapters: Adapters | None = None,
        *,
        info: InstanceInfo,
        role: InstanceRole = "unified",
        inventory: BlockInventory | None = None,
        read_stats: Callable[[], InstanceStats] | None = None,
        read_experts: Callable[[], ExpertCounts] | None = None,
        read_load_speed: Callable[[], float] | None = None,
    ) -> None:
        self.engine = engine
        self.info = info
        self._role = role
        self._inventory = inventory
        self._read_stats = read_stats
        self._count_experts = read_experts
        self._read_load_speed = read_load_speed
        self._name = name
        self._clock = clock
        self._tier = tier
        self._reader = reader
        self._adapters = adapters
        self._owners: dict[str, ServerPeer] = {}
        self._counting = threading.Lock()
        """Lock held while a request is added and while the load is measured, so that a load report
        includes exactly the requests that it names. Taken before the engine's lock."""
        self._arrivals: dict[ServerPeer, _Arrivals] = {}
        self._num_loads = 0
        self._next_load_s = -math.inf
        """Time before which outputs of steps are sent without a new load report, monotonic seconds.
        """
        self._handlers: dict[str, Callable[[ServerPeer, Any], Any]] = {
            ADD.name: self.add,
            CONTINUE.name: self.continue_request,
            INFO.name: lambda _, __: self.info,
            STATS.name: self._get_stats,
            OPEN_PEER.name: self._open_peer,
            CLOSE_PEER.name: self._close_peer,
            TIMELINES.name: self._list_timelines,
            LOAD_ADAPTER.name: self._load_adapter,
            UNLOAD_ADAPTER.name: self._unload_adapter,
            EXPERTS.name: self._read_experts,
            FLUSH_CACHE.name: self._flush_cache,
        }
        assert set(self._handlers) == {method.name for method in METHODS}

    async def handle(self, method: InstanceMethod[Req, Res], peer: ServerPeer, request: Req) -> Res:
        """Answer a server's call of a method by its handler, whose docstring lists its errors."""
        answer = self._handlers[method.name](peer, request)
        if inspect.isawaitable(answer):
            answer = await answer
        return answer

    @property
    def num_owned(self) -> int:
        """Number of requests for which the sending server is remembered: live ones, and ones that
        are being added.
        """
        return len(self._owners)

    async def add(self, peer: ServerPeer, request: AddRequest) -> Empty:
        """Queue a request, after asking the store, if there is one, which of its blocks it has.

        Raises: errors of ``Engine.add``.
        """
        engine = self.engine
        # Register the owner (the server that sent the request) before the engine can produce output
        # for the request.
        owner = self._owners.setdefault(request.request_id, peer)
        arrivals = self._note_arrival(peer, request.number)
        try:
            num_stored_blocks, lookup = await self._look_up(request)
            if owner is peer and self._owners.get(request.request_id) is not peer:
                # The request was cancelled while the store was being asked for its blocks.
                return Empty()
            with self._counting:
                engine.add(request, num_stored_blocks=num_stored_blocks, lookup=lookup)
                arrivals.pending.discard(request.number)
        except TandemError:
            if owner is peer and not engine.is_live(request.request_id):
                self._owners.pop(request.request_id, None)
            raise
        finally:
            with self._counting:
                arrivals.pending.discard(request.number)
        return Empty()

    def _note_arrival(self, peer: ServerPeer, number: int) -> _Arrivals:
        with self._counting:
            if self._inventory is not None:
                self._inventory.open(peer)
            arrivals = self._arrivals.setdefault(peer, _Arrivals())
            if number:
                arrivals.num_received = max(arrivals.num_received, number)
                arrivals.pending.add(number)
        return arrivals

    def continue_request(self, peer: ServerPeer, request: ContinueRequest) -> bool:
        """Append another instance's tokens to a request; see ``ContinueRequest``.

        Returns False if the request is not live, or not of this server.

        Raises: errors of ``Engine.continue_request``.
        """
        if self._owners.get(request.request_id) is not peer:
            return False
        return self.engine.continue_request(request)

    async def _look_up(self, request: AddRequest) -> tuple[int, StoreLookup | None]:
        """Return how many leading blocks of a prompt the device or the store has, and the store's
        lookup.

        The lookup is None if the store was not asked.
        """
        if self._tier is None or not isinstance(request.kv_source, TierKv):
            return 0, None
        missing = self.engine.find_missing_blocks(request)
        if request.pin_len and request.pin_s:
            num_pinned = request.pin_len // self.info.block_size
            keys = [*missing.cached_keys, *missing.keys][:num_pinned]
            self._tier.pin(request.client, keys, request.pin_s)
        if not missing.keys:
            return missing.num_cached, None
        begin_s = self._clock.now_s()
        num_found = await self._tier.count_stored(missing.keys)
        lookup = StoreLookup(
            asked_blocks=len(missing.keys),
            found_blocks=num_found or 0,
            seconds=self._clock.now_s() - begin_s,
            is_answered=num_found is not None,
        )
        if self._inventory is not None and num_found is not None:
            self._inventory.note_in_store(missing.keys[:num_found], is_there=True)
            self._inventory.note_in_store(missing.keys[num_found:], is_there=False)
        return missing.num_cached + lookup.found_blocks, lookup

    def take_event(self, peer: ServerPeer, event: CancelRequest | ReleaseHold) -> None:
        """Cancel a request of this server, or release the blocks held for an ended prefill; unknown
        ids are ignored.
        """
        if isinstance(event, ReleaseHold):
            self.engine.release_hold(event.request_id)
        elif self._owners.get(event.request_id) is peer and not self.engine.cancel(
            event.request_id
        ):
            # The engine does not know the request: it has not been added yet, or has just ended.
            self._owners.pop(event.request_id, None)

    async def _open_peer(self, _: ServerPeer, facts: KvPeer) -> Empty:
        """Connect to another instance to read its blocks, also again after its restart.

        Raises: UnsupportedError (this instance reads no other); errors of ``KvPeers.open``.
        """
        if self._reader is None:
            raise UnsupportedError(
                "instance.open_peer",
                f"{self._name} reads the blocks of no other instance, so not of {facts.name}",
            )
        await self._reader.open_peer(facts)
        return Empty()

    async def _close_peer(self, _: ServerPeer, message: ClosePeer) -> Empty:
        """Disconnect from another instance; an unknown name is ignored."""
        if self._reader is not None:
            await self._reader.close_peer(message.name)
        return Empty()

    def _get_stats(self, _: ServerPeer, __: Empty) -> InstanceStats:
        """Return counters and gauges."""
        if self._read_stats is None:
            return InstanceStats(stage=InstanceStage.READY)
        return self._read_stats()

    def _read_experts(self, _: ServerPeer, __: Empty) -> ExpertCounts:
        """Return how often each expert was chosen."""
        if self._count_experts is None:
            return ExpertCounts(layers=[], num_tokens=0, counts=[])
        return self._count_experts()

    def _list_timelines(self, _: ServerPeer, query: TimelineQuery) -> list[InstanceTimeline]:
        """Return the timelines of requests; unknown and forgotten ones are left out."""
        found = self.engine.list_timelines(query.request_ids)
        return [
            msgspec.structs.replace(each, instance=self._name, role=self._role) for each in found
        ]

    async def _load_adapter(self, _: ServerPeer, source: AdapterSource) -> AdapterInfo:
        """Load an adapter, which must lie in the folder that the settings allow.

        Raises: UnsupportedError (the instance takes no adapters); errors of ``AdapterTable.load``.
        """
        return await asyncio.to_thread(self._require_adapters().load, source, is_confined=True)

    async def _unload_adapter(self, _: ServerPeer, message: UnloadAdapter) -> Empty:
        """Refuse further requests for an adapter; it is freed when its requests have ended.

        Raises: NotFoundError (it is not loaded); UnsupportedError (the instance takes no adapters).
        """
        await asyncio.to_thread(self._require_adapters().unload, message.digest)
        return Empty()

    def _require_adapters(self) -> Adapters:
        if self._adapters is None:
            what = f"{self._name} serves no adapters: set model.adapter or model.adapter_folder"
            raise UnsupportedError("instance.load_adapter", what)
        return self._adapters

    async def _flush_cache(self, _: ServerPeer, __: Empty) -> int:
        """Drop all cached prefixes, also in the store; return the number of the device's blocks
        freed.

        Raises: TandemError (the store cannot be reached, so its blocks are still there).
        """
        num_freed = self.engine.flush_cache()
        if self._tier is not None:
            await self._tier.flush()
        return num_freed

    def forget_peer(self, peer: ServerPeer, error: TandemError) -> None:
        """Cancel the requests of a server whose connection was lost, and forget the server."""
        # Iterate over a copy: the engine's thread removes the entries of ended requests meanwhile.
        lost = [request_id for request_id, owner in list(self._owners.items()) if owner is peer]
        logger.info("event=server_lost requests=%d reason=%s", len(lost), error)
        with self._counting:
            self._arrivals.pop(peer, None)
        if self._inventory is not None:
            self._inventory.close(peer)
        for request_id in lost:
            if not self.engine.cancel(request_id):
                self._owners.pop(request_id, None)

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Send each server the outputs of its requests, and the load. Called by the engine's
        thread.

        An idle instance calls it without outputs from time to time, to report load changes that no
        step causes, such as the end of a hold.
        """
        by_peer: dict[ServerPeer, list[RequestOutput]] = {}
        for output in outputs:
            owner = (
                self._owners.get(output.request_id)
                if output.finish_reason is None
                else self._owners.pop(output.request_id, None)
            )
            if owner is not None:
                by_peer.setdefault(owner, []).append(output)
        loads = self._measure_loads(is_busy=bool(by_peer))
        steps = self.engine.take_steps() if loads else []
        for peer in by_peer | loads:
            load, blocks = loads.get(peer), None
            if load is not None and self._inventory is not None:
                blocks = self._inventory.take(peer)
            event = StepOutputs(
                by_peer.get(peer, []), load, steps if load is not None else [], blocks
            )
            # Ignore the error of a lost server: the event loop's thread is already cancelling its
            # requests.
            with contextlib.suppress(TandemError):
                peer.push_threadsafe(event)

    def _measure_loads(self, *, is_busy: bool) -> dict[ServerPeer, InstanceLoad]:
        """Return the instance's present load, for each server to which it should be sent now.

        ``is_busy``: True if there are outputs; reports then have a minimum interval.
        """
        now_s = self._clock.now_s()
        if is_busy and now_s < self._next_load_s and self.engine.has_requests:
            return {}
        self._next_load_s = now_s + LOAD_INTERVAL_S
        loads: dict[ServerPeer, InstanceLoad] = {}
        speed = 0.0 if self._read_load_speed is None else self._read_load_speed()
        with self._counting:
            load = self.engine.measure_load()
            self._num_loads += 1
            for peer, arrivals in self._arrivals.items():
                told = msgspec.structs.replace(
                    load,
                    load_tokens_per_s=speed,
                    num_received=arrivals.num_received,
                    pending=tuple(sorted(arrivals.pending)),
                )
                if told != arrivals.told:
                    arrivals.told = told
                    loads[peer] = msgspec.structs.replace(told, version=self._num_loads)
        return loads
