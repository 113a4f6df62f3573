"""The master of a store. Its state is soft; each host can report its part again.

The logic alone: sessions come as ``Caller``, time as a ``Clock``, chance as ``draw``, so that the
simulator runs this very class. Everything runs on one event loop; what must not be left half done
when a caller goes away runs as a task of the master's own.
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
from tandem.store.master.lookups import Lookups
from tandem.store.master.maintenance import Maintenance
from tandem.store.master.membership import Membership
from tandem.store.master.pins import Pins
from tandem.store.master.put_batch import PutParts
from tandem.store.master.puts import Puts
from tandem.store.master.removals import Removals
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
    """Wires the parts of a master, and runs its periodic work.

    Args:
        config: the limits and intervals of a store.
        clock: of leases, pins and expiry.
        epoch: above that of every earlier master of this store; raised further if a host has
            seen a higher one, unless there are elections.
        draw: ``draw(n)`` is a random number in ``[0, n)``.
        term: the elected one; None for a single master, which always leads.
        roster: keeps the membership beyond the life of this master; None: nothing does.
        counters: of all masters of this process; None: of this one alone.
        damaged: names files of the master itself that did not hold together; it may grow.
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
        store = MemoryRosterStore() if roster is None else roster
        self.burials = burials = Burials(state, store)
        self.puts = Puts(PutParts(state, departures, burials), self.allocation, results)
        self.maintenance = Maintenance(state, departures, eviction)
        self.lookups = Lookups(state, departures, self.maintenance)
        self.membership = Membership(
            state,
            departures,
            eviction,
            self.puts,
            burials,
            store=store,
        )
        self.removals = Removals(state, departures, results, lookups=self.lookups, burials=burials)
        self.pins = Pins(state, results)
        self._running: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> int:
        """Epoch of its term."""
        return self.state.versions.epoch

    def methods(self) -> list[tuple[str, Callable[..., Any], type, type]]:
        """Return what hosts and clients may call: name, handler, request and response type."""
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
            ("join", self.membership.join, JoinHost, Joined),
            ("inventory", self.membership.inventory, InventoryPage, Ack),
            ("inventory_done", self.membership.inventory_done, InventoryDone, Ack),
            ("leave", self.membership.leave, LeaveStore, Ack),
            ("grown", self.membership.grown, SegmentGrown, Ack),
            ("disk_report", self.membership.disk_report, DiskReport, KeyBytes),
        ]

    def start(self) -> None:
        """Begin the work behind: expiry, eviction, repair."""
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """End all of the master's tasks; hosts keep what they hold."""
        for host in self.state.hosts.values():
            host.end_session()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self.state.tasks.aclose()

    def on_caller_lost(self, caller: Caller) -> None:
        """Note that a session has ended: of a host, of a client, or of a process that is both."""
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
            state.space_freed.set()  # A lease or a pin may have ended: they try again.
        self.maintenance.begin_loads(now_ms)
        self.maintenance.step(now_ms)
        if state.dropped_versions and not state.awaited.is_adopting:
            state.dropped_versions.clear()

    async def _report_bad(self, _: Caller, request: ReportBadReplica) -> Ack:
        good = await self.departures.verify_replica(request.key, request.version, request.host)
        return Ack(good)

    def status(self) -> StoreStatus:
        """Return what the store looks like from here."""
        state = self.state
        return StoreStatus(
            epoch=self.epoch,
            num_objects=len(state.directory),
            total_bytes=state.directory.total_bytes,
            num_unreadable=state.directory.num_unreadable,
            num_under_replicated=state.directory.count_under_replicated(),
            num_unfinished=self.puts.num_unfinished,
            hosts=[
                HostStatus(
                    name=host.name,
                    machine=host.machine,
                    stage=host.stage,
                    capacity_bytes=host.capacity_bytes,
                    used_bytes=host.used_bytes,
                    num_objects=len(state.directory.rows_on_host(host.number)),
                    quarantined_bytes=host.quarantined_bytes,
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
