"""The state of a host's SSD tier, shared by its parts, which make all decisions and changes."""

import asyncio
import logging
from collections.abc import Callable

from tandem.core.clock import Clock
from tandem.core.errors import InternalError, TandemError
from tandem.store.corruption_log import CorruptionLog
from tandem.store.formats.bucket import Record
from tandem.store.host.disk_index import Bucket, DiskIndex
from tandem.store.host.disk_io import DiskIo, DiskPort
from tandem.store.host.disk_queue import WriteQueue
from tandem.store.host.segment import HostSegment
from tandem.store.messages import DiskState

__all__ = ["TierState"]

logger = logging.getLogger(__name__)

COUNTS = (
    "written", "written_bytes", "loaded", "loaded_bytes", "skipped", "evicted", "corrupt", "errors",
)  # fmt: skip


class TierState:
    """The objects on one disk, and the changes that the master has yet to learn.

    Args:
        port: the disk's files; borrowed.
        segment: the host's memory; borrowed.
        capacity_bytes: limit for all bucket files together.
        clock: measures pauses and latencies.
        corruption: the log of corrupt files to extend.
    """

    def __init__(
        self,
        port: DiskPort,
        segment: HostSegment,
        capacity_bytes: int,
        clock: Clock,
        corruption: CorruptionLog,
    ) -> None:
        self.io = DiskIo(port, self.fail)
        self.segment = segment
        self.capacity_bytes = capacity_bytes
        self.clock = clock
        self.on_change: Callable[[], None] = lambda: None
        """Called when there are changes to report to the master."""
        self.corruption = corruption
        """Files and records that were found corrupt since the folder was opened."""
        self.state = DiskState.ACTIVE
        self.index = DiskIndex()
        self.queue = WriteQueue(segment, clock)
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.stored: dict[str, int] = {}
        """Version by key of the records written since the last report to the master."""
        self.dropped: dict[str, int] = {}
        """Version by key of the records removed since the last report to the master."""
        self.offsets: dict[str, int] = {}
        """Offset in memory, by key, of the objects that are also on the disk."""
        self.room_bytes = capacity_bytes
        """Bytes that the file system had room for when it last refused a bucket."""
        self.open_bucket: Bucket | None = None
        """The bucket (file) that records are appended to."""
        self.flight: dict[str, Record] = {}
        """Records of the current write round, by key: being written, or written and not yet in the
        index.
        """
        self.doubtful: dict[str, Record] = {}
        """Records of failed write rounds, by key. They may be on the disk, where the next start
        would find them.
        """
        self.round_ended = asyncio.Event()
        """Set while no write round is under way."""
        self.round_ended.set()

    @property
    def is_failed(self) -> bool:
        """True if the disk has been given up until the host restarts."""
        return self.state is DiskState.FAILED

    def set_state(self, state: DiskState, error: TandemError | None = None) -> None:
        """Change the state that is reported to the master. ``error`` is the reason."""
        if state is not self.state:
            self.state = state
            level = logging.INFO if error is None else logging.WARNING
            logger.log(level, "event=disk_state state=%s reason=%s", state.value, error)
            self.on_change()

    def note_gone(self, record: Record) -> None:
        """Report a record (an object's copy on the disk) to the master as lost, unless a newer copy
        has been written.
        """
        key = record.header.key
        if self.index.find(key) is None:
            self.stored.pop(key, None)
            self.offsets.pop(key, None)
            self.dropped[key] = record.header.version
            self.on_change()

    def forget_doubtful(self, bucket: int) -> None:
        """Forget the records of failed write rounds in a bucket (file), where no start finds them
        any more.
        """
        self.doubtful = {k: r for k, r in self.doubtful.items() if r.bucket != bucket}

    def fail(self) -> None:
        """Give the disk up. Its content is ignored from now on, also after a restart."""
        if self.is_failed:
            return
        try:
            self.io.port.condemn()
        except OSError:
            logger.exception("event=disk_not_condemned")
        for record in self.index.list_records():
            self.dropped[record.header.key] = record.header.version
        self.stored.clear()
        self.index = DiskIndex()
        self.queue.versions.clear()
        self.offsets.clear()
        self.round_ended.set()
        self.set_state(DiskState.FAILED, InternalError("store.disk", "the disk hangs"))
        self.queue.has_work.set()
