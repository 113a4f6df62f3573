"""Checksums of values: a CRC-32C per chunk (the table), and one of the table for the object."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem._native import checksum_chunks, crc32c
from tandem.store.formats.layout import CHUNK_BYTES

__all__ = ["check_value", "checksum_table", "make_table"]


def make_table(parts: "Sequence[npt.NDArray[np.uint8]]") -> bytes:
    """Return the checksum table of a value, given as consecutive parts: a CRC-32C of 4 bytes for
    each chunk.
    """
    if len(parts) == 1:
        return checksum_chunks(parts[0], CHUNK_BYTES) if parts[0].size else b""
    table = bytearray()
    crc, filled = 0, 0
    for part in parts:
        at = 0
        while at < part.size:
            if filled == 0 and part.size - at >= CHUNK_BYTES:
                whole = (part.size - at) // CHUNK_BYTES * CHUNK_BYTES
                table += checksum_chunks(part[at : at + whole], CHUNK_BYTES)
                at += whole
                continue
            length = min(CHUNK_BYTES - filled, part.size - at)
            crc = crc32c(part[at : at + length], crc)
            filled += length
            at += length
            if filled == CHUNK_BYTES:
                table += crc.to_bytes(4, "little")
                crc, filled = 0, 0
    if filled:
        table += crc.to_bytes(4, "little")
    return bytes(table)


def checksum_table(table: bytes | bytearray) -> int:
    """Return the checksum of an object from its table: the table's CRC-32C, or 0 for an empty
    value.
    """
    return crc32c(np.frombuffer(table, dtype=np.uint8)) if table else 0


def check_value(parts: Sequence[Any], table: bytes, checksum: int) -> bool:
    """Return True if the value matches its table and the table matches the object's checksum."""
    return checksum_table(table) == checksum and make_table(parts) == table
