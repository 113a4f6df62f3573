"""One host as its master sees it: its session and its space.

``ledger.py`` has the use of the space, ``orders`` sends orders to the host, ``writers`` has the
clients that may write, ``drops`` the removed objects.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem._native import SegmentAllocator
from tandem.core.clock import Clock
from tandem.core.errors import CorruptionError
from tandem.store.formats import layout
from tandem.store.master.policies import HostView
from tandem.store.master.state.drops import Drops
from tandem.store.master.state.ledger import Extent, ExtentEvent, Space, SpaceLedger
from tandem.store.master.state.orders import OrderLine
from tandem.store.master.state.writers import Writers
from tandem.store.messages import DiskStatus, Endpoint, HostStage, JoinHost
from tandem.store.sessions import Caller

__all__ = ["Extent", "HostSpace"]

LOAD_HALF_LIFE_S = 1.0


class HostSpace:
    """A host, over all its sessions with this master. Used from one event loop.

    Args:
        number: the host's number in messages; never reused.
        name: the host's name.
        clock: times leases.
        epoch: returns the master's epoch, read at each order.
        on_space: called whenever space has become free.
        lease_ms: length of readers' leases.
    """

    def __init__(
        self,
        number: int,
        name: str,
        clock: Clock,
        epoch: Callable[[], int],
        on_space: Callable[[], None],
        lease_ms: int,
    ) -> None:
        self.number = number
        self.name = name
        self.machine = ""
        self.segment_id = ""
        self.address = ""
        self.read_base = 0
        self.capacity_bytes = 0
        self.final_bytes = 0
        """Bytes of the segment once it has grown, if the growth succeeds."""
        self.stage = HostStage.LOST
        self.is_leaving = False
        """True if the host is to be drained, now or after its next join."""
        self.is_known = False
        """True if this master has seen the host's whole inventory once, so that objects unknown to
        the master are stale.
        """
        self.is_retired = False
        """True if the operator has retired the host: it is no member until it joins again."""
        self.dead_below = self.disk_dead_below = -1
        """Versions up to which objects in the host's segment, and on its disk, are dead: it was
        retired, or was missing when an administrator set the roster's floor.
        """
        self.unconfirmed_from = 0
        """Lowest round of tombstones whose dead objects the host may still have; ``ALL_CONFIRMED``
        if none.
        """
        self.purging: list[asyncio.Future[Any]] = []
        """Futures that are done when the dead objects of the host's inventory are wiped."""
        self.caller: Caller | None = None
        self.line = OrderLine(name, clock, epoch, on_space)
        """The way of the master's orders to the host."""
        self.session = -1
        self.attempt = -1
        self.num_pages = 0
        self.disk: DiskStatus | None = None
        """Status of the host's SSD tier as last reported; None without one."""
        self.disk_id: str = ""
        self.disk_number = -1
        """Number of the host's last disk report in this session."""
        self.damaged: list[str] = []
        """Parts of the host's segment that were corrupt, as reported when it joined."""
        self.is_disk_known = False
        """True if this master has seen the disk's whole inventory once."""
        self.confirmed_disk: dict[int, int] = {}
        """Versions by row of the objects on the disk, from the inventory that is arriving."""
        self.confirmed: dict[int, int] = {}
        """Lengths of extents by row, from the inventory that is arriving."""
        self.ledger = SpaceLedger()
        self.writers = Writers(self.line, self.ledger, on_space)
        self.drops = Drops(self.line, self.ledger, on_space, clock=clock, lease_ms=lease_ms)
        self._clock = clock
        self._on_space = on_space
        self._load_bytes = 0.0
        self._load_at_s = 0.0

    # The properties and methods below describe the host and the use of its space.

    @property
    def is_writable(self) -> bool:
        """True if new objects may be placed on the host."""
        return self.stage is HostStage.ACTIVE and self.ledger.allocator is not None

    @property
    def is_settled(self) -> bool:
        """True if the host is connected and has sent its inventory (list of objects) in this
        session.
        """
        return self.caller is not None and self.stage is not HostStage.JOINING

    @property
    def is_all_known(self) -> bool:
        """True if this master has seen all objects in the host's memory and on its disk, so that
        others that turn up there are stale.
        """
        return self.is_known and (self.disk is None or self.is_disk_known)

    @property
    def used_bytes(self) -> int:
        """Bytes of the segment that are not free, for any use."""
        allocator = self.ledger.allocator
        return self.capacity_bytes if allocator is None else allocator.used_bytes

    def view(self) -> HostView:
        """Return the facts about this host for the policies."""
        return HostView(
            host=self.number,
            name=self.name,
            machine=self.machine,
            free_bytes=self.capacity_bytes - self.used_bytes,
            capacity_bytes=self.capacity_bytes,
            load_bytes=self._decay_load(),
            is_silent=self.line.is_silent,
        )

    def endpoint(self, write_base: int = -1) -> Endpoint:
        """Return the addresses that a client needs to reach the host's bytes."""
        return Endpoint(
            self.number, self.name, self.machine, self.address, self.read_base, write_base
        )

    def note_read(self, size_bytes: int) -> None:
        """Add bytes that a reader was sent to this host for to the load estimate."""
        self._load_bytes = self._decay_load() + size_bytes

    def _decay_load(self) -> float:
        now_s = self._clock.now_s()
        self._load_bytes *= 0.5 ** ((now_s - self._load_at_s) / LOAD_HALF_LIFE_S)
        self._load_at_s = now_s
        return self._load_bytes

    # The methods below begin and end sessions with the host.

    def begin_session(self, caller: Caller, session: int, join: JoinHost) -> None:
        """Note that the host has joined with a new session. Its inventory (list of objects)
        follows.
        """
        self.caller, self.session = caller, session
        self.line.begin(caller, session)
        self.attempt = join.attempt
        self.machine, self.segment_id = join.machine, join.segment_id
        self.address, self.read_base = join.address, join.read_base
        self.capacity_bytes = join.capacity_bytes
        self.final_bytes = max(join.final_bytes, join.capacity_bytes)
        self.stage = HostStage.JOINING
        self.num_pages = 0
        self.confirmed.clear()
        self.purging.clear()
        self.disk, self.disk_number = join.disk, -1
        self.drops.begin_session(has_disk=join.disk is not None)
        if join.disk_id != self.disk_id:
            self.disk_id, self.is_disk_known = join.disk_id, False
        self.confirmed_disk.clear()

    def end_session(self) -> None:
        """Note that the host's session has ended, also if the host has reconnected. All its running
        operations are over.
        """
        self.caller, self.session = None, -1
        self.line.end()
        self.stage = HostStage.LOST
        self.purging.clear()
        self.writers.end()
        self.drops.end_session()

    def rebuild(self, offsets: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> None:
        """Make the allocator of the host's memory anew: taken are these extents of its inventory,
        and those of the earlier session that readers may still rely on.

        Raises: CorruptionError if the extents overlap.
        """
        dropped = self.ledger.list_extents(Space.WIPING, Space.LEASED)
        if dropped:
            known = set(offsets.tolist())
            dropped = [extent for extent in dropped if extent.offset not in known]
        carried = dropped
        columns = np.array(dropped, np.uint64).reshape(-1, 2)
        allocator = SegmentAllocator(self.capacity_bytes, granule_bytes=layout.GRANULE_BYTES)
        try:
            _fill(
                allocator,
                np.concatenate([offsets, columns[:, 0]]),
                np.concatenate([lengths, columns[:, 1]]),
            )
        except CorruptionError:
            _fill(allocator, offsets, lengths)
            carried = []
        self.drops.keep({extent.offset for extent in carried})
        self.ledger.open(allocator, carried)
        self._on_space()

    def grow(self, capacity_bytes: int, final_bytes: int) -> None:
        """Note that more of the segment is usable, and its final size, 0 if that is unknown."""
        self.final_bytes = final_bytes or max(self.final_bytes, capacity_bytes)
        if capacity_bytes > self.capacity_bytes:
            self.ledger.grow(capacity_bytes)
            self.capacity_bytes = capacity_bytes
        self._on_space()  # This also wakes waiters for space that will never exist.

    # The methods below reserve and free space on the host.

    def allocate(self, length: int, *, is_load: bool = False) -> Extent | None:
        """Reserve a range; None without space. A draining host gives space only to loads from its
        own disk.
        """
        if self.stage is not HostStage.ACTIVE and not (
            is_load and self.stage is HostStage.DRAINING
        ):
            return None
        offsets = self.ledger.take([length])
        return None if offsets is None else Extent(offsets[0], length)

    def allocate_many(self, lengths: Sequence[int]) -> list[int] | None:
        """Reserve ranges for new objects, all or none. Return their offsets."""
        return self.ledger.take(lengths) if self.stage is HostStage.ACTIVE else None

    def release(self, offsets: Sequence[int]) -> None:
        """Free ranges that, as the caller ensures, have neither writers nor readers, and wake the
        puts that wait for space.
        """
        if offsets:
            self.ledger.move(ExtentEvent.GIVE_BACK, offsets)
            self._on_space()


def _fill(
    allocator: SegmentAllocator,
    offsets: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint64],
) -> None:
    order = np.argsort(offsets, kind="stable")
    allocator.rebuild(offsets[order], lengths[order])
