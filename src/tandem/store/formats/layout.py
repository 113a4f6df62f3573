"""The layout of an object in a segment: the geometry of store_formats.md, as arithmetic.

An extent is ``header | key | table | value``. The header belongs to the host, everything behind the
key is written by the client. The table holds the CRC-32C of each chunk of the value, so that a
range can be checked by reading the chunks it touches; the object's checksum is that of the table.
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
"""Extents begin at multiples of this; a segment keeps one byte for each."""
CHUNK_BYTES = 64 * 1024
"""Bytes under one checksum: the least that a range costs to check."""
HEADER_BYTES = 64
ALIGNMENT = 64
VERSION_BITS = 40
"""Bits of an object's version, for counting within an epoch; the epoch stands above."""
MAX_VALUE_BYTES = 2**40


def _align(size_bytes: int) -> int:
    return (size_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def count_chunks(value_bytes: int) -> int:
    """Return how many chunks a value has; an empty one has none."""
    return (value_bytes + CHUNK_BYTES - 1) // CHUNK_BYTES


def count_chunks_each(values_bytes: Sequence[int]) -> list[int]:
    """Do as ``count_chunks``, for each; many are alike."""
    counts = {size: count_chunks(size) for size in set(values_bytes)}
    return [counts[size] for size in values_bytes]


def table_bytes(value_bytes: int) -> int:
    """Return the length of the table of checksums, padding included."""
    return _align(4 * count_chunks(value_bytes))


def table_offset(key_bytes: int) -> int:
    """Return where the table begins in an extent."""
    return HEADER_BYTES + _align(key_bytes)


def value_offset(key_bytes: int, value_bytes: int) -> int:
    """Return where the value begins in an extent."""
    return table_offset(key_bytes) + table_bytes(value_bytes)


def extent_bytes(key_bytes: int, value_bytes: int) -> int:
    """Return the length of an extent, whole granules.

    Raises: ConfigError for a negative size or one that no segment could hold.
    """
    if not 0 <= value_bytes <= MAX_VALUE_BYTES:
        raise ConfigError(
            "store.layout", f"value of {value_bytes} bytes: give 0 to 2^40", field="size"
        )
    # ``value_offset`` written out: this is asked several times for every object of an inventory.
    table = 4 * ((value_bytes + CHUNK_BYTES - 1) // CHUNK_BYTES)
    whole = HEADER_BYTES + (key_bytes + 63 & -64) + (table + 63 & -64) + value_bytes
    return whole + GRANULE_BYTES - 1 & -GRANULE_BYTES
