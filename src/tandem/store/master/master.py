"""The master of a store. Its state is rebuilt from the hosts' reports after a restart.

Logic only: sessions are ``Caller`` objects, time is a ``Clock``, randomness is ``draw``, so that
the simulator runs this same class. All runs on one event loop. Work that must complete after its
caller has disconnected runs as a task of the master.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tandem.core.clock import Clock
from tandem.store.config import StoreConfig
from tandem.store.election import MemoryRosterStore, RosterStore, Term
from tandem.store.master.allocation import Allocation
from tandem.store.master.burials import Burials
from tandem.store.master.departures import Departures
from tandem.store.master.eviction import Eviction
from tandem.store.master.joining import Joining
from tandem.store.master.lookups import Lookups
from tandem.store.master.maintenance import Maintenance
from tandem.store.master.membership import Membership
from tandem.store.master.pins import Pins
from tandem.store.master.put_batch import PutParts
from tandem.store.master.puts import Puts
from tandem.store.master.removals import Removals
from tandem.store.master.state.ledger import Space
from tandem.store.master.state.results import Results
from tandem.store.master.state.state import StoreState
from tandem.store.master.state.versions import Versions
from tandem.store.messages import (
    Ack,
    CommitPut,
    DiskReport,
    DrainHost,
    FloorSet,
    HostStatus,
    InventoryDone,
    InventoryPage,
    Joined,
    JoinHost,
    KeyBytes,
    KeyList,
    KeyPage,
    LeaveStore,
    ListKeys,
    Located,
    LocateObjects,
    PinObjects,
    PrefixRemoval,
    PutInline,
    RemoveObjects,
    RemovePrefix,
    ReportBadReplica,
    RetireHost,
    SegmentGrown,
    SetFloor,
    StartedPut,
    StartPut,
    StoreStatus,
)
from tandem.store.metrics import StoreCounters
from tandem.store.sessions import Caller

__all__ = ["StoreMaster"]

TICK_S = 0.05


class StoreMaster:
    """A store master: creates its parts and runs their periodic work.

    Args:
        config: the limits and intervals of a store.
        clock: times leases, pins and expiry.
        epoch: above the epoch of every earlier master of this store; raised further if a host has
            seen a higher one, unless there are elections.
        draw: ``draw(n)`` is a random number in ``[0, n)``.
        term: the elected term; None for a single master, which always leads.
        roster: stores the membership durably; None to keep it in memory only.
        counters: event counts shared by all masters of this process; None for new ones.
        damaged: names of the master's own files that were found corrupt; may grow.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        clock: Clock,
        epoch: int,
        draw: Callable[[int], int],
        term: "Term | None" = None,
        roster: RosterStore | None = None,
        counters: StoreCounters | None = None,
        damaged: Sequence[str] = (),
    ) -> None:
        self.state = state = StoreState(
            config,
            clock=clock,
            versions=Versions(epoch, term),
            draw=draw,
            counters=StoreCounters() if counters is None else counters,
        )
        self._damaged = damaged
        results = Results(state.tasks)
        self.departures = departures = Departures(state)
        self.eviction = eviction = Eviction(state, departures)
        self.allocation = Allocation(state, eviction)
        burials = Burials(state, MemoryRosterStore() if roster is None else roster)
        self.burials = burials
        self.puts = Puts(PutParts(state, departures, burials), self.allocation, results)
        self.maintenance = Maintenance(state, departures, eviction)
        self.lookups = Lookups(state, self.maintenance)
        self.membership = Membership(state, departures, self.puts, burials)
        self.joining = Joining(state, departures, eviction, burials, self.membership)
        self.removals = Removals(state, departures, results, lookups=self.lookups, burials=burials)
        self.pins = Pins(state, results)
        self._running: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> int:
        """The epoch: this master's number, above that of every earlier master of the store."""
        return self.state.versions.epoch

    def methods(self) -> list[tuple[str, Callable[..., Any], type, type]]:
        """Return the methods that hosts and clients may call: (name, handler, request type,
        response type).
        """
        return [
            ("start_put", self.puts.start, StartPut, StartedPut),
            ("put_inline", self.puts.put_inline, PutInline, KeyBytes),
            ("commit_put", self.puts.commit, CommitPut, KeyBytes),
            ("locate", self.lookups.locate, LocateObjects, Located),
            ("stage", self.lookups.stage, LocateObjects, Located),
            ("exists", self.lookups.exists, KeyList, KeyBytes),
            ("remove", self.removals.remove, RemoveObjects, KeyBytes),
            ("remove_prefix", self.removals.remove_prefix, RemovePrefix, PrefixRemoval),
            ("list", self.lookups.list_keys, ListKeys, KeyPage),
            ("pin", self.pins.pin, PinObjects, KeyBytes),
            ("report_bad", self._report_bad, ReportBadReplica, Ack),
            ("drain", self.membership.drain, DrainHost, Ack),
            ("retire", self.membership.retire, RetireHost, Ack),
            ("set_floor", self.membership.set_floor, SetFloor, FloorSet),
            ("status", self._status, type(None), StoreStatus),
            ("join", self.joining.join, JoinHost, Joined),
            ("inventory", self.joining.inventory, InventoryPage, Ack),
            ("inventory_done", self.joining.inventory_done, InventoryDone, Ack),
            ("leave", self.joining.leave, LeaveStore, Ack),
            ("grown", self.joining.grown, SegmentGrown, Ack),
            ("disk_report", self.joining.disk_report, DiskReport, KeyBytes),
        ]

    def start(self) -> None:
        """Start the periodic work: expiry, eviction, repair."""
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """Stop all tasks of the master. Hosts keep their objects."""
        for host in self.state.hosts.values():
            host.end_session()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self.state.tasks.aclose()

    def on_caller_lost(self, caller: Caller) -> None:
        """Note that a session of a host, a client, or a process that is both has ended."""
        for host in self.state.hosts.values():
            if host.caller is caller:
                self.membership.lose_host(host)
        self.puts.end_client(caller.instance_id)

    async def _run(self) -> None:
        await self.membership.load()
        while True:
            await asyncio.sleep(TICK_S)
            self._step(self.state.now_ms())

    def _step(self, now_ms: int) -> None:
        """Run the periodic work that is due."""
        state = self.state
        self.membership.step(now_ms)
        self.puts.expire(now_ms)
        for host in state.hosts.values():
            host.drops.free_leased(now_ms)
        self.eviction.evict_over_watermark(now_ms)
        if self.allocation.num_waiting:
            state.space_freed.set()  # A lease or a pin may have ended, so waiting puts retry.
        self.maintenance.begin_loads(now_ms)
        self.maintenance.step(now_ms)
        if state.dropped_versions and not state.awaited.is_adopting:
            state.dropped_versions.clear()

    async def _report_bad(self, _: Caller, request: ReportBadReplica) -> Ack:
        good = await self.departures.verify_replica(request.key, request.version, request.host)
        return Ack(good)

    def status(self) -> StoreStatus:
        """Return the status of the store as this master sees it."""
        state = self.state
        return StoreStatus(
            epoch=self.epoch,
            num_objects=len(state.directory),
            total_bytes=state.directory.total_bytes,
            num_unreadable=state.directory.copies.num_unreadable,
            num_under_replicated=state.directory.count_under_replicated(),
            num_unfinished=self.puts.num_unfinished,
            hosts=[
                HostStatus(
                    name=host.name,
                    machine=host.machine,
                    stage=host.stage,
                    capacity_bytes=host.capacity_bytes,
                    used_bytes=host.used_bytes,
                    num_objects=len(state.directory.copies.rows_on_host(host.number)),
                    quarantined_bytes=host.ledger.count_bytes(Space.QUARANTINED),
                    disk=host.disk,
                    damaged=[*host.damaged, *([] if host.disk is None else host.disk.damaged)],
                )
                for host in state.hosts.values()
                if not host.is_retired
            ],
            is_recovering=state.awaited.is_learning,
            damaged=list(self._damaged),
            num_tombstones=len(self.burials.tombstones),
            is_roster_complete=self.burials.is_complete,
        )

    def _status(self, _: Caller, __: None) -> StoreStatus:
        return self.status()
