"""The layout of an object in a segment, as arithmetic; the page is
docs/design/store/store_formats.md.

An extent is ``header | key | table | value``. The host writes the header, the client everything
behind the key. The table has the CRC-32C of each chunk of the value, so that reading a range checks
only the chunks in it. The object's checksum is that of the table.
"""

from collections.abc import Sequence

from tandem.core.errors import ConfigError

__all__ = [
    "CHUNK_BYTES",
    "GRANULE_BYTES",
    "HEADER_BYTES",
    "VERSION_BITS",
    "count_chunks",
    "count_chunks_each",
    "extent_bytes",
    "table_bytes",
    "table_offset",
    "value_offset",
]

GRANULE_BYTES = 512
"""Alignment of extents in bytes. A segment has one mark byte for each granule."""
CHUNK_BYTES = 64 * 1024
"""Bytes of a value under one checksum. Checking a range reads at least one chunk."""
HEADER_BYTES = 64
ALIGNMENT = 64
VERSION_BITS = 40
"""Low bits of an object's version, which count within an epoch. The epoch is in the bits above."""
MAX_VALUE_BYTES = 2**40


def _align(size_bytes: int) -> int:
    return (size_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def count_chunks(value_bytes: int) -> int:
    """Return the number of chunks of a value; 0 for an empty value."""
    return (value_bytes + CHUNK_BYTES - 1) // CHUNK_BYTES


def count_chunks_each(values_bytes: Sequence[int]) -> list[int]:
    """Return the number of chunks of each value. Equal sizes are computed once."""
    counts = {size: count_chunks(size) for size in set(values_bytes)}
    return [counts[size] for size in values_bytes]


def table_bytes(value_bytes: int) -> int:
    """Return the length of a value's checksum table in bytes, padding included."""
    return _align(4 * count_chunks(value_bytes))


def table_offset(key_bytes: int) -> int:
    """Return the offset of the checksum table from the beginning of the object's extent (its range
    in a segment).
    """
    return HEADER_BYTES + _align(key_bytes)


def value_offset(key_bytes: int, value_bytes: int) -> int:
    """Return the offset of the value from the beginning of the object's extent (its range in a
    segment).
    """
    return table_offset(key_bytes) + table_bytes(value_bytes)


def extent_bytes(key_bytes: int, value_bytes: int) -> int:
    """Return the bytes that an object takes in a segment, header and padding included: a multiple
    of the granule (the unit of allocation).

    Raises: ConfigError for a negative size or one that no segment could hold.
    """
    if not 0 <= value_bytes <= MAX_VALUE_BYTES:
        raise ConfigError(
            "store.layout", f"value of {value_bytes} bytes: give 0 to 2^40", field="size"
        )
    # ``value_offset`` is inlined here, because this function runs several times for each object of
    # an inventory.
    table = 4 * ((value_bytes + CHUNK_BYTES - 1) // CHUNK_BYTES)
    whole = HEADER_BYTES + (key_bytes + 63 & -64) + (table + 63 & -64) + value_bytes
    return whole + GRANULE_BYTES - 1 & -GRANULE_BYTES
