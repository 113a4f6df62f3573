"""Conversion of object headers to and from the columns of ``ExtentRecords``, and of pieces that
travel concatenated.
"""

import itertools
from collections.abc import Sequence

from tandem.core.errors import CorruptionError
from tandem.store.formats.headers import ExtentHeader
from tandem.store.messages import ExtentRecords

__all__ = ["append_record", "iterate_records", "join_pieces"]


def join_pieces(data: bytes, sizes: Sequence[int], chosen: Sequence[int]) -> bytes:
    """Return some of the pieces that ``data`` is the concatenation of, concatenated.

    Args:
        data: all pieces.
        sizes: length of each piece in bytes.
        chosen: numbers of the wanted pieces, which ascend.
    """
    if len(chosen) == len(sizes):
        return data
    view, ends = memoryview(data), list(itertools.accumulate(sizes))
    return b"".join(view[ends[i] - sizes[i] : ends[i]] for i in chosen)


def append_record(records: ExtentRecords, offset: int, header: ExtentHeader) -> None:
    """Append one object to the columns of a message."""
    records.keys.append(header.key)
    records.sizes.append(header.size)
    records.versions.append(header.version)
    records.checksums.append(header.checksum)
    records.offsets.append(offset)
    records.wanted.append(header.wanted)
    records.hard_pins.append(header.hard_pin)
    records.soft_pin_ms.append(header.soft_pin_ms)


def iterate_records(records: ExtentRecords) -> list[tuple[int, ExtentHeader]]:
    """Return the rows of the columns as (offset, header).

    Raises: CorruptionError if they differ in length.
    """
    try:
        rows = zip(
            records.offsets,
            records.keys,
            records.sizes,
            records.versions,
            records.checksums,
            records.wanted,
            records.hard_pins,
            records.soft_pin_ms,
            strict=True,
        )
        return [(offset, ExtentHeader(*fields)) for offset, *fields in rows]
    except ValueError:
        raise CorruptionError("store.records", "columns of different lengths") from None
