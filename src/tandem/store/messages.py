"""Messages of master, hosts and clients, over ``tandem.rpc`` and calls of the transfer engine. No
bulk bytes.

Batches travel as columns: a field is a list with one item per object. ``epoch`` numbers the masters
of a store: a host refuses a lower one than it has seen.
"""

from enum import IntEnum, StrEnum

import msgspec

__all__ = [
    "ON_DISK",
    "Ack",
    "Change",
    "CloseWriter",
    "CommitPut",
    "CommitStatus",
    "DiskReport",
    "DiskState",
    "DiskStatus",
    "DrainHost",
    "Endpoint",
    "ExtentRecords",
    "FloorSet",
    "ForgetObjects",
    "HostExtents",
    "HostStage",
    "HostStatus",
    "InventoryDone",
    "InventoryPage",
    "JoinHost",
    "Joined",
    "KeyBytes",
    "KeyList",
    "KeyPage",
    "LeaderAnswer",
    "LeaveStore",
    "ListKeys",
    "LoadObject",
    "LocateObjects",
    "Located",
    "OpenWriter",
    "Opened",
    "Order",
    "PinObjects",
    "PrefixRemoval",
    "PullObject",
    "PutInline",
    "RemoveObjects",
    "RemovePrefix",
    "RepinExtents",
    "ReportBadReplica",
    "RetireHost",
    "SealExtents",
    "SegmentGrown",
    "SetFloor",
    "StartPut",
    "StartStatus",
    "StartedPut",
    "StoreStatus",
    "VerifyExtent",
    "WipeExtents",
]


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """The addresses at which the bytes of a host are reached."""

    host: int
    name: str
    machine: str
    address: str
    """Address of the host's transfer engine."""
    read_base: int
    """The address at which the segment begins for reading."""
    write_base: int = -1
    """The same for this client's writes; -1 where it may not write."""


class StartStatus(IntEnum):
    """The outcome for one object of a ``StartPut``."""

    GRANTED = 0
    EXISTS = 1
    DONE = 2
    """Committed already: the request came twice."""


class StartPut(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for space. Put ids make a repeated request harmless."""

    first_put_id: int
    """Unique in the life of the client; the objects have consecutive ids."""
    keys: list[str]
    sizes: list[int]
    replicas: int = 1
    preferred: list[str] = []
    machine: str = ""
    """Try hosts of this machine first; empty for no preference."""
    upsert: bool = False
    hard_pin: bool = False
    soft_pin_ms: int = 0
    wait_ms: int = 0


class PutInline(StartPut, frozen=True, kw_only=True):
    """Puts small values at once: the master has its hosts write them. Answered as a commit."""

    checksums: list[int]
    """Checksums of each object."""
    blob: bytes
    """The values, one after the other."""
    settled_below: int
    """The client asks no more for ids below this: a request that has one is a late copy."""


class HostExtents(msgspec.Struct, frozen=True, array_like=True):
    """Space on one host for objects of a batch."""

    host: int
    objects: list[int]
    """Places of these objects in the request."""
    offsets: list[int]
    """Offsets of the extents, in the segment."""


class StartedPut(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``StartPut``."""

    statuses: bytes
    """A ``StartStatus`` per object."""
    grant: int
    """Names the space given; a put id alone does not, since a request may come twice, and late."""
    places: list[HostExtents]
    endpoints: list[Endpoint]
    """Endpoints of these hosts."""


class CommitStatus(IntEnum):
    """The outcome for one object of a put."""

    CREATED = 0
    EXISTS = 1
    """Another writer was first; its value stays."""
    REPLACED = 2
    """With ``upsert`` also while hosts have not told yet whether there was one."""
    EXPIRED = 3
    """The write is not known (any more): nothing of it is visible. Put again."""


class CommitPut(msgspec.Struct, frozen=True, kw_only=True):
    """Says that the bytes of a granted request are there. Answered by a ``CommitStatus`` for each
    object that was granted, in order.
    """

    first_put_id: int
    """Id of the request."""
    grant: int
    """The grant of the space that was written."""
    checksums: list[int] = []
    """For each granted object; all empty: the put is given up."""
    tables: bytes = b""
    """The checksums of their chunks, one after the other, which hosts write."""
    failed_hosts: list[int] = []
    """Hosts to which a write did not succeed."""
    settled_below: int = 0
    """The same as in ``PutInline``."""


class LocateObjects(msgspec.Struct, frozen=True):
    """Asks where objects are, and for a lease on them."""

    keys: list[str]
    machine: str = ""
    lease: bool = True
    """Else it is no use of them, and their sizes are all that is told."""
    wait_ms: int = 0
    """Milliseconds at most that ``stage`` waits for objects that are read from disks."""


ON_DISK = -2
"""In place of a host: it is on a disk only, and being read; ``stage`` waits for that."""


class Located(msgspec.Struct, frozen=True):
    """Answer to ``LocateObjects``, in a form that costs little a key."""

    columns: bytes
    """int64, little-endian, one after the other for all keys: size, checksum, host, offset. A size
    of -1: no such object; a host of -1: all its hosts are lost, or it has no bytes."""
    endpoints: list[Endpoint]
    lease_ms: int
    versions: bytes = b""
    """The same, of the versions; without them nothing can be remembered."""
    others: dict[int, list[tuple[int, int]]] = {}
    """By index: host and offset of further replicas, best first."""
    is_recovering: bool = False
    """True if a missing object may yet come back with its host, or is just going: ask again."""


class KeyList(msgspec.Struct, frozen=True):
    """Keys to look at."""

    keys: list[str]


class KeyBytes(msgspec.Struct, frozen=True):
    """One byte per key: 1 for yes."""

    flags: bytes
    is_recovering: bool = False


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A request that must not be carried out again once its client has the answer."""

    number: int = 0
    """Number of the request, unique in the life of the client; 0: none, copies are not told
    apart."""
    settled_below: int = 0
    """The client waits no more for requests with numbers below this."""


class RemoveObjects(Change, frozen=True, kw_only=True):
    """Remove objects. Answered by a byte each: 1 if it existed."""

    keys: list[str]


class PrefixRemoval(msgspec.Struct, frozen=True):
    """The number of objects that were removed."""

    count: int


class RemovePrefix(Change, frozen=True, kw_only=True):
    """Remove all objects whose key has this prefix."""

    prefix: str


class ListKeys(msgspec.Struct, frozen=True):
    """Asks for keys with a prefix, sorted, after a given one."""

    prefix: str
    after: str = ""
    limit: int = 1000


class KeyPage(msgspec.Struct, frozen=True):
    """Answer to ``ListKeys``."""

    keys: list[str]
    sizes: list[int]
    num_replicas: list[int]
    is_last: bool


class PinObjects(Change, frozen=True, kw_only=True):
    """Replace the pins of objects; neither is unpinning."""

    keys: list[str]
    hard: bool = False
    soft_ms: int = 0


class ReportBadReplica(msgspec.Struct, frozen=True):
    """A reader found wrong bytes; the host will look for itself."""

    key: str
    version: int
    host: int


class DrainHost(msgspec.Struct, frozen=True):
    """Move everything off a host and give it nothing new."""

    name: str


class RetireHost(msgspec.Struct, frozen=True):
    """Retire a host that is away: nothing waits for it, and its objects are dead."""

    name: str


class SetFloor(msgspec.Struct, frozen=True):
    """Let what hosts have that no roster names be dead, up to now."""

    dry_run: bool = False
    """Only tell what that would be."""


class FloorSet(msgspec.Struct, frozen=True):
    """Answers ``SetFloor``."""

    version: int
    """Up to this one objects of hosts that are not named are dropped when they come."""
    is_complete: bool
    """The roster names all hosts: nothing is kept for others."""
    num_tombstones: int
    """Removals that are kept until hosts have wiped them."""
    hosts: list[str]
    """Named by the roster: they lose nothing."""


class HostStage(StrEnum):
    """The stage of a host."""

    JOINING = "joining"
    ACTIVE = "active"
    READ_ONLY = "read_only"
    """A writer of before could not be proven gone yet."""
    DRAINING = "draining"
    DRAINED = "drained"
    LOST = "lost"


class DiskState(StrEnum):
    """The state of the SSD tier of a host."""

    ACTIVE = "active"
    FULL = "full"
    """The file system has less room than the tier may use: that much is used, or nothing."""
    FAILING = "failing"
    """Writing fails; it is tried again, ever more rarely."""
    FAILED = "failed"
    """It hung; it is not used until the host starts anew, and empty then."""


class DiskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The SSD tier of a host."""

    state: DiskState = DiskState.ACTIVE
    capacity_bytes: int = 0
    used_bytes: int = 0
    """Bytes of files."""
    live_bytes: int = 0
    """Bytes of records that can be read."""
    num_objects: int = 0
    num_queued: int = 0
    """Waiting to be written."""
    counts: dict[str, int] = {}
    """Since the host started: written, loaded, skipped, evicted, corrupt, errors ..."""
    write_counts: list[int] = []
    """Latencies of rounds of writes, by bucket of the histogram."""
    write_sum_s: float = 0.0
    load_counts: list[int] = []
    load_sum_s: float = 0.0
    damaged: list[str] = []
    """Files and records that did not hold together since the host started."""


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A host as the master sees it."""

    name: str
    machine: str
    stage: HostStage
    capacity_bytes: int
    used_bytes: int
    num_objects: int
    quarantined_bytes: int
    """Bytes of unfinished writes whose writer is not yet proven gone."""
    disk: DiskStatus | None = None
    """None: it has none."""
    damaged: list[str] = []
    """Damage of its files, those of the disk included; see its log."""


class LeaderAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A master's answer to the question for the leader. Older releases have none, and lead."""

    is_leader: bool
    """True if it is the one asked."""
    address: str = ""
    """Address of the leader; empty if it is not known."""
    epoch: int = 0


class StoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The store as its master sees it."""

    epoch: int
    num_objects: int
    total_bytes: int
    num_unreadable: int
    num_under_replicated: int
    num_unfinished: int
    hosts: list[HostStatus]
    is_recovering: bool = False
    """Hosts may still bring objects: a missing object is not known to be absent."""
    damaged: list[str] = []
    """Files of the master itself that did not hold together."""
    num_tombstones: int = 0
    """Removals that are kept until hosts that were away have wiped them."""
    is_roster_complete: bool = True
    """False: the roster was lost, so tombstones are kept for hosts that it may not name."""


# Between master and hosts.


class JoinHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host comes (back)."""

    name: str
    machine: str
    segment_id: str
    """Id of the segment file: the same after a restart of the host."""
    capacity_bytes: int
    address: str
    read_base: int
    epoch_seen: int
    attempt: int
    """Rises with each join of the process: tells a new one from one that comes late or twice."""
    disk_id: str = ""
    """Id of the folder of its SSD tier; empty without one."""
    disk: DiskStatus | None = None
    final_bytes: int = 0
    """Bytes of the segment when all of it is reserved; 0: it does not say."""


class Joined(msgspec.Struct, frozen=True):
    """Answer to ``JoinHost``."""

    epoch: int
    host: int
    session: int
    """Numbers the joins of this master's life; orders of another are refused."""


class ExtentRecords(msgspec.Struct, frozen=True, kw_only=True):
    """Complete objects in a segment, as columns."""

    keys: list[str] = []
    sizes: list[int] = []
    versions: list[int] = []
    checksums: list[int] = []
    offsets: list[int] = []
    wanted: list[int] = []
    hard_pins: list[bool] = []
    soft_pin_ms: list[int] = []


class InventoryPage(msgspec.Struct, frozen=True):
    """Some of what a host holds, in order of offset."""

    session: int
    page: int
    records: ExtentRecords
    is_disk: bool = False
    """These are on the disk; offsets mean nothing."""


class InventoryDone(msgspec.Struct, frozen=True):
    """The end of an inventory; ``can_write``: no earlier writer is left."""

    session: int
    num_pages: int
    can_write: bool
    damaged: list[str] = []
    """Damage of the segment since the host started."""


class LeaveStore(msgspec.Struct, frozen=True):
    """The host ends and removes its data: it need not be waited for."""

    session: int


class DiskReport(msgspec.Struct, frozen=True, kw_only=True):
    """Changes on a host's disk. Answered by a byte for each stored object: 0 = forget."""

    session: int
    number: int
    """Rises within the session: a report may come twice, or late."""
    dropped: dict[str, int] = {}
    """Versions by key. These are gone,"""
    stored: dict[str, int] = {}
    """then these were written."""
    status: DiskStatus


class SegmentGrown(msgspec.Struct, frozen=True):
    """More of the segment is backed by memory, or all that ever will be."""

    session: int
    capacity_bytes: int
    final_bytes: int = 0
    """The same as ``JoinHost``."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The head of every order to a host: the master's epoch and session, and the order's number."""

    epoch: int
    session: int
    number: int
    """Orders are executed in this order; a late or doubled one is refused."""


class SealExtents(Order, frozen=True, kw_only=True):
    """Write the headers of complete objects: from now on they survive."""

    records: ExtentRecords
    has_values: bool = False
    blob: bytes = b""
    """If so, their values, one after the other, to be written before; else clients have."""
    tables: bytes = b""
    """Without values: their tables, one after the other, to be written before."""


class WipeExtents(Order, frozen=True, kw_only=True):
    """Forget the objects at these offsets, whether or not there are any."""

    offsets: list[int]


class RepinExtents(Order, frozen=True, kw_only=True):
    """Replace the pins in headers."""

    offsets: list[int]
    hard: bool
    soft_pin_ms: int


class OpenWriter(Order, frozen=True, kw_only=True):
    """Let a client write."""

    client: str


class Opened(msgspec.Struct, frozen=True):
    """Answer to ``OpenWriter``: where the segment begins for that client."""

    write_base: int


class CloseWriter(Order, frozen=True, kw_only=True):
    """End a client's right to write; answered yes once no byte of its can arrive any more."""

    write_base: int


class PullObject(Order, frozen=True, kw_only=True):
    """Copy an object from another host and seal it here."""

    source: Endpoint
    source_offset: int
    records: ExtentRecords
    """One, with the offset here."""
    timeout_ms: int


class ForgetObjects(Order, frozen=True, kw_only=True):
    """Forget objects on the disk, up to these versions; answered when no restart shows them."""

    keys: list[str]
    versions: list[int]


class LoadObject(Order, frozen=True, kw_only=True):
    """Read an object from the disk and seal it in memory."""

    records: ExtentRecords
    """One, with its offset in the segment."""


class VerifyExtent(Order, frozen=True, kw_only=True):
    """Compare an object with its checksum."""

    offset: int
    version: int


class Ack(msgspec.Struct, frozen=True):
    """Yes or no."""

    ok: bool = True
