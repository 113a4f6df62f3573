"""Messages between master, hosts and clients, over ``tandem.rpc`` and the transfer engine's calls.
Values travel elsewhere, except small ones.

Batches travel as columns: a list field has one item for each object. ``epoch`` numbers the masters
of a store: a host refuses orders of a lower epoch than the highest that it has seen.
"""

from enum import IntEnum, StrEnum

import msgspec

__all__ = [
    "ON_DISK",
    "UNREADABLE",
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
    """The addresses at which clients read and write the segment of one host."""

    host: int
    name: str
    machine: str
    address: str
    """Address of the host's transfer engine."""
    read_base: int
    """The address at which the segment begins for readers."""
    write_base: int = -1
    """The address at which the segment begins for this client's writes; -1 if the client may not
    write.
    """


class StartStatus(IntEnum):
    """The outcome for one object of a ``StartPut``."""

    GRANTED = 0
    EXISTS = 1
    DONE = 2
    """The put was committed before: this request is a repeated copy."""


class StartPut(msgspec.Struct, frozen=True, kw_only=True):
    """A request for space for new objects. The put ids let the master recognise a repeated
    request.
    """

    first_put_id: int
    """Put id of the first object, unique in the client's life. The next objects have consecutive
    ids.
    """
    keys: list[str]
    sizes: list[int]
    replicas: int = 1
    preferred: list[str] = []
    machine: str = ""
    """Machine whose hosts are tried first; empty for no preference."""
    upsert: bool = False
    hard_pin: bool = False
    soft_pin_ms: int = 0
    wait_ms: int = 0


class PutInline(StartPut, frozen=True, kw_only=True):
    """A put whose small values travel in the message: the master has its hosts write them. The
    answer is that of ``CommitPut``.
    """

    checksums: list[int]
    """Checksum of each object's value."""
    blob: bytes
    """The values of all objects, concatenated."""
    settled_below: int
    """Lowest put id that the client may still use. The master refuses a request with a lower id as
    a late copy.
    """


class HostExtents(msgspec.Struct, frozen=True, array_like=True):
    """The extents (ranges of memory) that the master reserved on one host for objects of a put."""

    host: int
    objects: list[int]
    """Index of each object in the request."""
    offsets: list[int]
    """Offset of each extent in the host's segment, bytes."""


class StartedPut(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``StartPut``: where the client may write."""

    statuses: bytes
    """One ``StartStatus`` byte for each object."""
    grant: int
    """Id of this reservation of space. A put id does not suffice, because a repeated request
    reserves anew under the same put id.
    """
    places: list[HostExtents]
    endpoints: list[Endpoint]
    """Endpoints of the hosts in ``places``."""


class CommitStatus(IntEnum):
    """The outcome for one object of a put."""

    CREATED = 0
    EXISTS = 1
    """Another writer committed the key first. Its value stays."""
    REPLACED = 2
    """The put replaced an object. After a master's restart also the answer to an ``upsert`` while
    hosts have not yet reported whether the key existed.
    """
    EXPIRED = 3
    """The put was not made: its space was not reserved or has expired, or a host that had to report
    first did not. No reader can see any of it, so the client puts again.
    """


class CommitPut(msgspec.Struct, frozen=True, kw_only=True):
    """The client's report that it has written the bytes of the objects that got space by a
    ``StartPut``. The answer has one ``CommitStatus`` for each of them, in order.
    """

    first_put_id: int
    """The ``first_put_id`` of the ``StartPut``."""
    grant: int
    """The ``grant`` of the space that was written."""
    checksums: list[int] = []
    """Checksum of each granted object. An empty list gives the put up."""
    tables: bytes = b""
    """The checksum tables of the objects, concatenated. The hosts write them before the headers."""
    failed_hosts: list[int] = []
    """Hosts to which the client's writes failed."""
    settled_below: int = 0
    """Lowest put id that the client may still use, the same as in ``PutInline``."""


class LocateObjects(msgspec.Struct, frozen=True):
    """A request for the places of objects, with a lease on their bytes."""

    keys: list[str]
    machine: str = ""
    lease: bool = True
    """True to take a lease. Without one the answer serves to learn sizes only."""
    wait_ms: int = 0
    """Milliseconds that ``stage`` waits at most for objects to be read from disks."""


ON_DISK = -2
"""Stands for the host of an object that is on a disk only and is being read into memory. ``stage``
waits for such an object.
"""


UNREADABLE = -2
"""Size that ``Located`` tells of an object whose hosts are all lost, to callers that ask for sizes
alone."""


class Located(msgspec.Struct, frozen=True):
    """The answer to ``LocateObjects``, as packed columns: encoding costs little for each key."""

    columns: bytes
    """Four int64 columns, little-endian, concatenated: size, checksum, host, offset of each key.
    Size -1: there is no such object. Host -1: all its hosts are lost, or the value is empty. A
    request without a lease gets the column of sizes alone, with ``UNREADABLE`` for an object whose
    hosts are all lost.
    """
    endpoints: list[Endpoint]
    lease_ms: int
    versions: bytes = b""
    """The objects' versions as one more int64 column. A client caches no location without
    versions.
    """
    others: dict[int, list[tuple[int, int]]] = {}
    """Further replicas by index of the key: (host, offset) of each, best first."""
    is_recovering: bool = False
    """True if a missing object may still be reported by a returning host, or is being removed: the
    client asks again.
    """


class KeyList(msgspec.Struct, frozen=True):
    """A request to tell which of the objects with these keys exist."""

    keys: list[str]


class KeyBytes(msgspec.Struct, frozen=True):
    """An answer with one byte for each key: 1 for yes, 0 for no."""

    flags: bytes
    is_recovering: bool = False


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A request that changes something, and so must not be executed again after its client has the
    answer.
    """

    number: int = 0
    """Number of the request, unique in the client's life. 0 if repeated copies need not be
    recognised.
    """
    settled_below: int = 0
    """Lowest request number whose answer the client may still wait for."""


class RemoveObjects(Change, frozen=True, kw_only=True):
    """A request to remove objects. The answer has one byte for each key: 1 if the key existed."""

    keys: list[str]


class PrefixRemoval(msgspec.Struct, frozen=True):
    """The answer to ``RemovePrefix``: the number of removed objects."""

    count: int


class RemovePrefix(Change, frozen=True, kw_only=True):
    """A request to remove all objects whose keys begin with a prefix."""

    prefix: str


class ListKeys(msgspec.Struct, frozen=True):
    """A request for the keys that begin with a prefix, sorted, from the first above ``after``."""

    prefix: str
    after: str = ""
    limit: int = 1000


class KeyPage(msgspec.Struct, frozen=True):
    """The answer to ``ListKeys``: keys with their sizes and numbers of replicas."""

    keys: list[str]
    sizes: list[int]
    num_replicas: list[int]
    is_last: bool


class PinObjects(Change, frozen=True, kw_only=True):
    """A request to replace the pins of objects. No hard pin and no soft pin unpins them."""

    keys: list[str]
    hard: bool = False
    soft_ms: int = 0


class ReportBadReplica(msgspec.Struct, frozen=True):
    """A reader's report of a wrong checksum. The host verifies the replica itself."""

    key: str
    version: int
    host: int


class DrainHost(msgspec.Struct, frozen=True):
    """A request to move all objects off a host and place no new ones there."""

    name: str


class RetireHost(msgspec.Struct, frozen=True):
    """A request to retire an absent host: nothing waits for its return, and its objects are
    dead.
    """

    name: str


class SetFloor(msgspec.Struct, frozen=True):
    """A request to declare dead, up to the current version, the objects of hosts that the roster
    (the master's durable list of hosts) does not name.
    """

    dry_run: bool = False
    """True to answer with the effect without applying it."""


class FloorSet(msgspec.Struct, frozen=True):
    """The answer to ``SetFloor``: the floor (the version up to which objects of unlisted hosts are
    dead), and the hosts and removals that it concerns.
    """

    version: int
    """Objects up to this version are dropped when a host that the roster does not name joins."""
    is_complete: bool
    """True if the roster names all hosts, so that no tombstone is kept for unnamed ones."""
    num_tombstones: int
    """Number of removals that are kept until absent hosts have wiped the objects."""
    hosts: list[str]
    """Hosts that the roster names. Their objects stay."""


class HostStage(StrEnum):
    """The stage in the life of a store host."""

    JOINING = "joining"
    ACTIVE = "active"
    READ_ONLY = "read_only"
    """Reads are served and no writes granted, because a writer of an earlier session may still
    write.
    """
    DRAINING = "draining"
    DRAINED = "drained"
    LOST = "lost"


class DiskState(StrEnum):
    """The state of a host's SSD tier."""

    ACTIVE = "active"
    FULL = "full"
    """The file system has less space than the tier may use. The tier uses what there is."""
    FAILING = "failing"
    """A write failed. Writing is retried at growing intervals."""
    FAILED = "failed"
    """The disk hung. It is unused until the host restarts, and its content is dropped then."""


class DiskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a host's SSD tier."""

    state: DiskState = DiskState.ACTIVE
    capacity_bytes: int = 0
    used_bytes: int = 0
    """Bytes of the bucket files."""
    live_bytes: int = 0
    """Bytes of the records that can be read."""
    num_objects: int = 0
    num_queued: int = 0
    """Number of objects that wait to be written to the disk."""
    counts: dict[str, int] = {}
    """Event counts since the host started: written, loaded, skipped, evicted, corrupt, errors
    ...
    """
    write_counts: list[int] = []
    """Latency histogram of write rounds: one count for each bucket of the histogram."""
    write_sum_s: float = 0.0
    load_counts: list[int] = []
    load_sum_s: float = 0.0
    damaged: list[str] = []
    """Names of the tier's files and records that were found corrupt since the host started."""


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a host, as its master sees it."""

    name: str
    machine: str
    stage: HostStage
    capacity_bytes: int
    used_bytes: int
    num_objects: int
    quarantined_bytes: int
    """Bytes of unfinished writes whose writer is not yet proven gone."""
    disk: DiskStatus | None = None
    """Status of the SSD tier; None without one."""
    damaged: list[str] = []
    """Names of the host's files and records that were found corrupt, those of its disk included.
    The host's log has details.
    """


class LeaderAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A master's answer to the question who leads. Releases without this method have one master,
    which leads.
    """

    is_leader: bool
    """True if the process that was asked is the leader."""
    address: str = ""
    """Address of the leader; empty if unknown."""
    epoch: int = 0


class StoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a store, as its master sees it."""

    epoch: int
    num_objects: int
    total_bytes: int
    num_unreadable: int
    num_under_replicated: int
    num_unfinished: int
    hosts: list[HostStatus]
    is_recovering: bool = False
    """True while hosts may still report objects, so that a missing object may exist."""
    damaged: list[str] = []
    """Names of the master's own files that were found corrupt."""
    num_tombstones: int = 0
    """Number of removals that are kept until absent hosts have wiped the objects."""
    is_roster_complete: bool = True
    """False if the roster was lost: tombstones are then kept for hosts that it may not name."""


# The messages below travel between the master and hosts.


class JoinHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host's request to join, after a start or a lost session."""

    name: str
    machine: str
    segment_id: str
    """Id of the segment file, unchanged by a restart of the host."""
    capacity_bytes: int
    address: str
    read_base: int
    epoch_seen: int
    attempt: int
    """Number of this join attempt, rising in the host process, so that the master recognises late
    and repeated copies.
    """
    disk_id: str = ""
    """Id of the SSD tier's folder; empty without an SSD tier."""
    disk: DiskStatus | None = None
    final_bytes: int = 0
    """Bytes of the segment when all of it is reserved; 0 if the host does not report that."""


class Joined(msgspec.Struct, frozen=True):
    """The answer to ``JoinHost``: the session and the number that the master gives the host."""

    epoch: int
    host: int
    session: int
    """Number of this join in the master's life. The host refuses orders that name another
    session.
    """


class ExtentRecords(msgspec.Struct, frozen=True, kw_only=True):
    """Complete objects of a segment (a host's memory) or of a disk, as columns: where they lie, and
    their header fields.
    """

    keys: list[str] = []
    sizes: list[int] = []
    versions: list[int] = []
    checksums: list[int] = []
    offsets: list[int] = []
    wanted: list[int] = []
    hard_pins: list[bool] = []
    soft_pin_ms: list[int] = []


class InventoryPage(msgspec.Struct, frozen=True):
    """One page of the inventory (list of all its objects) that a joining host sends its master.
    Objects in memory are in order of their offset in the segment.
    """

    session: int
    page: int
    records: ExtentRecords
    is_disk: bool = False
    """True if these objects are on the host's disk. Their offsets are then meaningless."""


class InventoryDone(msgspec.Struct, frozen=True):
    """The end of a host's inventory (list of its objects). ``can_write`` is True if no client can
    write any more by a right from an earlier session, so that new ones may.
    """

    session: int
    num_pages: int
    can_write: bool
    damaged: list[str] = []
    """Names of the segment's parts that were found corrupt since the host started."""


class LeaveStore(msgspec.Struct, frozen=True):
    """A host's message that it ends and removes its data, so that nothing waits for its return."""

    session: int


class DiskReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report of changes on a host's disk. The answer has one byte for each stored object: 0 tells
    the host to forget the object on the disk.
    """

    session: int
    number: int
    """Number of the report, rising in a session, so that the master recognises late and repeated
    copies.
    """
    dropped: dict[str, int] = {}
    """Removed records: the version by key. The master applies these before ``stored``."""
    stored: dict[str, int] = {}
    """Written records: the version by key."""
    status: DiskStatus


class SegmentGrown(msgspec.Struct, frozen=True):
    """A host's message that more of its segment is backed by memory, or that it will grow no
    more.
    """

    session: int
    capacity_bytes: int
    final_bytes: int = 0
    """Bytes of the segment when all of it is reserved; 0 if unknown, as in ``JoinHost``."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of every order to a host: the master's epoch, the session and the order's
    number.
    """

    epoch: int
    session: int
    number: int
    """Number of the order. A host refuses an order whose number is not above the last one's: it is
    late or repeated.
    """


class SealExtents(Order, frozen=True, kw_only=True):
    """An order to write the headers of complete objects. With a header an object survives a
    restart.
    """

    records: ExtentRecords
    has_values: bool = False
    blob: bytes = b""
    """The values of the objects, concatenated; used if ``has_values``."""
    tables: bytes = b""
    """The checksum tables of the objects, concatenated, to be written before the headers if the
    order has no values.
    """


class WipeExtents(Order, frozen=True, kw_only=True):
    """An order to wipe the objects at these offsets. Offsets without an object are allowed."""

    offsets: list[int]


class RepinExtents(Order, frozen=True, kw_only=True):
    """An order to replace the pins (protection from eviction) in the headers of objects."""

    offsets: list[int]
    hard: bool
    soft_pin_ms: int


class OpenWriter(Order, frozen=True, kw_only=True):
    """An order to let a client write into the host's segment (its memory for objects)."""

    client: str


class Opened(msgspec.Struct, frozen=True):
    """The answer to ``OpenWriter``: the address at which the host's segment (memory) begins for
    that client's writes.
    """

    write_base: int


class CloseWriter(Order, frozen=True, kw_only=True):
    """An order to end a client's right to write. The answer is yes once no byte of that client can
    arrive any more.
    """

    write_base: int


class PullObject(Order, frozen=True, kw_only=True):
    """An order to copy an object from another host and to write its header here."""

    source: Endpoint
    source_offset: int
    records: ExtentRecords
    """The object to copy, as columns of one row, with the offset of its extent on this host."""
    timeout_ms: int


class ForgetObjects(Order, frozen=True, kw_only=True):
    """An order to forget the records (objects) on the host's disk of these keys, up to these
    versions. Answered when no restart would find the records.
    """

    keys: list[str]
    versions: list[int]


class LoadObject(Order, frozen=True, kw_only=True):
    """An order to read an object from the disk into the segment and to write its header."""

    records: ExtentRecords
    """The object to read, as columns of one row, with the offset of its extent in the segment."""


class VerifyExtent(Order, frozen=True, kw_only=True):
    """An order to compute the checksum of the object at an offset in the host's memory, and to
    compare it with the stored one.
    """

    offset: int
    version: int


class Ack(msgspec.Struct, frozen=True):
    """An answer of yes or no."""

    ok: bool = True
