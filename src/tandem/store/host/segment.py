"""A host's memory: objects in a segment, with a header beside each. ``segment_file`` has the file.

Format: docs/design/store/store_formats.md. Not thread-safe.
"""

from collections.abc import Iterator

import numpy as np

from tandem._native import seal_objects
from tandem.core.errors import ConfigError, CorruptionError
from tandem.store.formats import layout
from tandem.store.formats.checksum import check_value
from tandem.store.formats.headers import ExtentHeader, parse_object
from tandem.store.formats.records import append_record
from tandem.store.host.segment_file import SegmentFile
from tandem.store.messages import ExtentRecords

__all__ = ["HostSegment"]

MARK = 0xFF
"""Mark byte of a granule at which an object begins. It differs from 0 in all bits, so that one
flipped bit does not hide it.
"""


class HostSegment(SegmentFile):
    """A host's memory with objects in it. Made by ``open_file`` or ``make_anonymous``."""

    def seal(self, offset: int, header: ExtentHeader) -> None:
        """Write the header of the object at ``offset``, whose table and value are there. It then
        survives a restart.

        Raises: as ``seal_many``.
        """
        records = ExtentRecords()
        append_record(records, offset, header)
        self.seal_many(records)

    def seal_many(
        self, records: ExtentRecords, *, tables: bytes | None = None, values: bytes | None = None
    ) -> None:
        """Write the headers of objects, all or none, and after each header its mark (the byte that
        says that an object begins there). They then survive a restart.

        Args:
            records: offsets and header fields of the objects.
            tables: checksum tables to write first, concatenated; None if they are in the extents.
            values: values to write first, concatenated, with tables computed from them; None if
                they are in the extents.

        Raises: ConflictError if other objects lie there; ConfigError if one leaves the segment;
            CorruptionError if a checksum, or the length of a column, is wrong.
        """
        seal_objects(
            self._starts,
            self.data,
            self.usable_bytes,
            self._home,
            keys=records.keys,
            offsets=records.offsets,
            sizes=records.sizes,
            versions=records.versions,
            checksums=records.checksums,
            wanted=records.wanted,
            hard_pins=records.hard_pins,
            soft_pin_ms=records.soft_pin_ms,
            tables=tables,
            values=values,
        )

    def repin(self, offset: int, *, hard: bool, soft_pin_ms: int) -> None:
        """Replace the pins of the object at ``offset``.

        Raises: CorruptionError if there is no intact header; ConfigError if ``soft_pin_ms`` does
            not fit in one.
        """
        header = self.read_header(offset)._replace(hard_pin=hard, soft_pin_ms=soft_pin_ms)
        # Clear the mark (the byte that says that an object begins here) and write the header anew:
        # a crash in the middle of an in-place change would leave a corrupt header.
        if not 0 <= soft_pin_ms < 2**32:
            raise ConfigError("store.segment", f"a soft pin of {soft_pin_ms} ms", field="soft_s")
        self._starts[offset // layout.GRANULE_BYTES] = 0
        self.seal(offset, header)

    def wipe(self, offset: int) -> None:
        """Clear the header of the object at ``offset``, if there is one.

        Raises: ConfigError (the offset is outside of the segment).
        """
        granule, misfit = divmod(offset, layout.GRANULE_BYTES)
        if misfit or not 0 <= granule < len(self._starts):
            raise ConfigError("store.wipe", f"offset {offset} is not in the segment")
        if self._starts[granule]:
            self._starts[granule] = 0
            self.data[offset : offset + 4] = 0

    def has_object(self, offset: int) -> bool:
        """Return True if an object begins at ``offset``."""
        return bool(self._starts[offset // layout.GRANULE_BYTES])

    def read_header(self, offset: int) -> ExtentHeader:
        """Return the header of the object at ``offset``.

        Raises: CorruptionError if there is no intact one.
        """
        return self._read(offset)[0]

    def _read(self, offset: int) -> tuple[ExtentHeader, int]:
        """Return the header of the object at ``offset``, and the bytes that the whole object takes.

        An intact header is still refused if its version has a higher epoch than any master seen
        here.

        Raises: CorruptionError (no intact header, or one of too high an epoch).
        """
        usable = self.data[: self.usable_bytes]
        header = parse_object(usable, offset, self._home, offset) if offset >= 0 else None
        if header is not None and header.version >> layout.VERSION_BITS <= self._epoch:
            extent = layout.extent_bytes(len(header.key.encode()), header.size)
            if offset + extent <= self.usable_bytes:
                return header, extent
        raise CorruptionError("store.segment", f"no valid object header at offset {offset}")

    def list_offsets(self) -> list[int]:
        """Return the offsets at which objects begin now."""
        return (np.flatnonzero(self._starts) * layout.GRANULE_BYTES).tolist()

    def scan(self) -> Iterator[tuple[int, ExtentHeader]]:
        """Yield (offset, header) of all objects in order of offset.

        An object whose header is corrupt, or that overlaps the one before, is wiped and named in
        ``corruption``.
        """
        end = 0
        self._mend_marks()
        for granule in np.flatnonzero(self._starts).tolist():
            offset = granule * layout.GRANULE_BYTES
            try:
                header, length = self._read_behind(offset, end)
            except CorruptionError as error:
                self.corruption.note(f"object at {offset} of segment {self.name}", error)
                self.wipe(offset)
                continue
            end = offset + length
            yield offset, header

    def _mend_marks(self) -> None:
        """Repair the marks (a byte for each granule of memory: 0xff if an object begins there, else
        0) that have another value, by the majority of their bits. A wrongly set mark is noticed
        later, since there is no valid header.
        """
        for granule in np.flatnonzero((self._starts != 0) & (self._starts != MARK)).tolist():
            mark = int(self._starts[granule])
            self.corruption.note(f"mark {granule} of segment {self.name}", f"{mark:#x}")
            self._starts[granule] = MARK if mark.bit_count() >= 4 else 0

    def _read_behind(self, offset: int, end: int) -> tuple[ExtentHeader, int]:
        if offset < end:
            raise CorruptionError("store.segment", f"object at {offset} overlaps another")
        return self._read(offset)

    def span(self, header: ExtentHeader) -> tuple[int, int]:
        """Return the range (begin, end) of an object's checksum table and value, relative to the
        beginning of the object's extent.
        """
        key_bytes = len(header.key.encode())
        end = layout.value_offset(key_bytes, header.size) + header.size
        return layout.table_offset(key_bytes), end

    def is_intact(self, offset: int, header: ExtentHeader) -> bool:
        """Return True if the checksum table and the value of the object at ``offset`` match the
        checksums in its table and ``header``. Reads all of it.

        Raises: ConfigError (the extent is outside of the segment).
        """
        key_bytes = len(header.key.encode())
        length = layout.extent_bytes(key_bytes, header.size)
        if not 0 <= offset <= self.usable_bytes - length:
            raise ConfigError(
                "store.segment",
                f"extent of {length} bytes at {offset}: the segment has {self.usable_bytes}",
            )
        table_at = offset + layout.table_offset(key_bytes)
        value_at = offset + layout.value_offset(key_bytes, header.size)
        table = self.data[table_at : table_at + 4 * layout.count_chunks(header.size)]
        value = self.data[value_at : value_at + header.size]
        return check_value([value], table.tobytes(), header.checksum)
