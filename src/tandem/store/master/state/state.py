"""The state of a master, shared by its parts, which make all decisions and changes."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tandem._native import fill_rows, locate_rows
from tandem.core.clock import Clock
from tandem.store.config import StoreConfig
from tandem.store.formats import layout
from tandem.store.formats.headers import ExtentHeader
from tandem.store.formats.records import append_record
from tandem.store.master.policies import Strategy, order_hosts
from tandem.store.master.state.awaited import Awaited
from tandem.store.master.state.index import NO_ROW, Directory, Passes, Replica
from tandem.store.master.state.orders import ORDER_TIMEOUT_S
from tandem.store.master.state.space import Extent, HostSpace
from tandem.store.master.state.versions import Versions
from tandem.store.master.state.wipes import Wipes
from tandem.store.messages import ExtentRecords
from tandem.store.metrics import StoreCounters
from tandem.store.tasks import Tasks

__all__ = ["CopyUnderWay", "StoreState"]


@dataclass(slots=True)
class CopyUnderWay:
    """A running copy of an object into an extent on the target host."""

    target: HostSpace
    session: int
    extent: Extent
    is_load: bool = False
    """True if the copy is read from the target's own disk."""
    is_abandoned: bool = False
    """True if the object was removed meanwhile, so that the extent is being wiped."""


class StoreState:
    """Objects, hosts, time and versions of one master.

    Args:
        config: the limits and intervals of a store.
        clock: times leases, pins and expiry.
        versions: numbers the master's objects and grants.
        draw: ``draw(n)`` is a random number in ``[0, n)``.
        counters: counts of events.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        clock: Clock,
        versions: Versions,
        draw: Callable[[int], int],
        counters: StoreCounters,
    ) -> None:
        self.config = config
        self.clock = clock
        self.versions = versions
        self.counters = counters
        self.directory = Directory(Passes(fill_rows, locate_rows))
        self.hosts: dict[int, HostSpace] = {}
        """All hosts by number, in the order in which they first joined."""
        self.sessions: dict[int, HostSpace] = {}
        """Connected hosts by the number of their session."""
        self.tasks = Tasks()
        self.awaited = Awaited(self.hosts, self.now_ms, self.tasks)
        self.copies: dict[str, CopyUnderWay] = {}
        """Copies of objects that hosts are making now, by key."""
        self.committing: dict[str, asyncio.Future[None]] = {}
        """A future for each key that is being committed, done when the commit has ended."""
        self.space_freed = asyncio.Event()
        self.dropped_versions: dict[str, int] = {}
        """Versions of objects that were removed while inventories are arriving, by key: the
        inventories must not bring them back.
        """
        self.wipes = Wipes()
        self.unlisted: set[str] = set()
        """Keys of which an absent host may have a copy that the directory does not list."""
        self._draw = draw

    def now_ms(self) -> int:
        """Return the current time, milliseconds."""
        return int(self.clock.now_s() * 1e3)

    # The methods below choose among the hosts.

    def writable_hosts(self) -> list[HostSpace]:
        """Return the hosts that take new objects."""
        return [host for host in self.hosts.values() if host.is_writable]

    def answering_hosts(self) -> list[HostSpace]:
        """Return the hosts that take new objects and answer in time; if none answers, all that take
        new objects.
        """
        hosts = self.writable_hosts()
        answering = [host for host in hosts if not host.line.is_silent]
        return answering or hosts

    def choose_hosts(self, *, preferred: Sequence[str] = (), machine: str = "") -> list[int]:
        """Return the hosts that take new objects and answer, in the order in which to try them."""
        hosts = self.answering_hosts()
        if len(hosts) == 1:
            return [hosts[0].number]
        return order_hosts(
            [host.view() for host in hosts],
            strategy=Strategy(self.config.strategy),
            draw=self._draw,
            preferred=preferred,
            machine=machine,
        )

    def answer_timeout_s(self, host: HostSpace, num_objects: int = 0) -> float:
        """Return how long a put waits for a host's answer: a short time if another host could take
        its place.
        """
        has_others = any(other is not host for other in self.answering_hosts())
        return host.line.answer_timeout_s(num_objects) if has_others else ORDER_TIMEOUT_S

    # The methods below describe objects in the directory.

    def extent_of(self, row: int, offset: int) -> Extent:
        """Return the range of a host's memory that the replica at ``offset`` of the object in
        ``row`` takes.
        """
        key_bytes = len(self.directory.key[row].encode())
        return Extent(offset, layout.extent_bytes(key_bytes, self.directory.size[row]))

    def record_of(self, row: int, offset: int) -> ExtentRecords:
        """Return the header that the copy of ``row`` at ``offset`` has on its host, as a message
        with one row.
        """
        soft_ms = self.directory.soft_pinned_until_ms(row) - self.now_ms()
        header = ExtentHeader(
            self.directory.key[row],
            self.directory.size[row],
            self.directory.version[row],
            self.directory.checksum[row],
            self.directory.wanted[row],
            self.directory.is_hard_pinned(row),
            max(0, soft_ms),
        )
        records = ExtentRecords()
        append_record(records, offset, header)
        return records

    def readable_copies(self, row: int) -> list[Replica]:
        """Return the replicas of the object in ``row`` in memory of connected hosts."""
        replicas = self.directory.copies.replicas(row)
        return [replica for replica in replicas if self.hosts[replica.host].caller is not None]

    def hosts_with_disk_copy(self, row: int) -> list[HostSpace]:
        """Return the connected hosts that have the object in ``row`` on disk."""
        hosts = [self.hosts[number] for number in self.directory.copies.disks(row)]
        return [host for host in hosts if host.caller is not None]

    def is_version(self, row: int, key: str, version: int) -> bool:
        """Return True if a row of the directory still stands for this version of the key, and was
        not reused since.
        """
        return self.directory.find(key) == row and self.directory.version[row] == version

    def find_copy(self, row: int, host: int) -> int:
        """Return the offset of the copy of the object in ``row`` in a host's memory; -1 without
        one.
        """
        return next((r.offset for r in self.directory.copies.replicas(row) if r.host == host), -1)

    def note_unlisted(self, key: str) -> None:
        """Note that an absent host may have a copy of the key that the directory does not list, so
        that its removal needs a tombstone.
        """
        self.unlisted.add(key)

    def may_have_older(self, keys: Collection[str]) -> bool:
        """Return True if older copies of one of the keys are being wiped, or an absent host may
        have some.
        """
        if self.wipes.has_replaced:
            return True
        return bool(self.unlisted) and not self.unlisted.isdisjoint(keys)

    @property
    def can_be_unsure(self) -> bool:
        """True if ``is_unsure`` could be True for some keys; nearly always False."""
        return self.directory.copies.num_unreadable > 0 or self.awaited.is_learning

    def is_unsure(self, keys: Sequence[str]) -> bool:
        """Return True if one of these keys may have an object on an awaited host (one that has yet
        to return and list its objects). The caller ensures that none of them has a readable object.
        """
        if self.awaited.is_learning:
            return True
        directory = self.directory
        if not directory.copies.num_unreadable:
            return False
        rows = [row for key in keys if (row := directory.find(key)) != NO_ROW]
        return any(
            any(replica.host in self.awaited for replica in directory.copies.replicas(row))
            or any(host in self.awaited for host in directory.copies.disks(row))
            for row in rows
        )
