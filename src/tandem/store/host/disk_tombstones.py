"""Tombstones of a disk: a durable list of dead records, so that a restart does not find them
again.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence

from tandem.core.errors import TandemError
from tandem.store.formats.headers import RecordTombstone, pack_tombstones, parse_tombstones
from tandem.store.host.disk_state import TierState

__all__ = ["TombstoneList"]

logger = logging.getLogger(__name__)

COMPACT_TOMBSTONES = 100_000
TOMBSTONES = "removed"


class TombstoneList:
    """The tombstones of one disk: durable notes that a record (an object's copy there) is dead.

    Args:
        tier: the tier on that disk.
        going: buckets that the index has dropped, but whose files may still exist; borrowed.
    """

    def __init__(self, tier: TierState, going: Collection[int]) -> None:
        self.entries: list[RecordTombstone] = []
        self._tier = tier
        self._going = going
        self._lock = asyncio.Lock()
        self._num_listed = 0
        """Number of entries in the file, including those of removed buckets."""

    async def read(self) -> int:
        """Read the file of tombstones (notes of dead objects) into this list. Return the number of
        corrupt copies of entries.
        """
        self.entries, num_damaged = parse_tombstones(await self._tier.io.port.read_note(TOMBSTONES))
        return num_damaged

    async def append(self, tombstones: Sequence[RecordTombstone]) -> None:
        """Append tombstones (notes that records are dead) durably. If the disk fails, they are kept
        in memory and the error is raised.
        """
        self.entries += tombstones
        async with self._lock:
            packed = pack_tombstones(tombstones)
            await self._tier.io.bounded(self._tier.io.port.append_note(TOMBSTONES, packed))
            self._num_listed += len(tombstones)
            if self._num_listed > 2 * len(self.entries) + COMPACT_TOMBSTONES:
                await self._shorten()

    async def _shorten(self) -> None:
        """Compact the file of tombstones, which an append has made too long. The appended ones hold
        even if this fails.
        """
        try:
            await self._tier.io.bounded(self.compact())
        except TandemError as error:
            logger.warning("event=tombstones_not_compacted reason=%s", error)
            if not self._tier.is_failed:
                self._tier.counts["errors"] += 1

    async def compact(self) -> None:
        """Rewrite the file without the tombstones (notes of dead objects) whose buckets (files) no
        longer exist, and which have no effect any more.
        """
        buckets = self._tier.index.buckets
        self.entries = [e for e in self.entries if e.bucket in buckets or e.bucket in self._going]
        await self._tier.io.port.write_note(TOMBSTONES, pack_tombstones(self.entries))
        self._num_listed = len(self.entries)

    def forget_bucket(self, number: int) -> None:
        """Forget the tombstones (notes of dead records) of a bucket whose file was removed."""
        self.entries = [entry for entry in self.entries if entry.bucket != number]
