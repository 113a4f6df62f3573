"""The memory of an instance's KV blocks, reserved from the system as blocks are first used.

Address space for all blocks exists from the start, so the cache, its views and the transfer
engine's registrations never move. Physical memory is reserved in extents, from block 0 on, before
the scheduler allocates a block in it; so a step never touches memory that other processes could
have taken. An idle instance has one extent.

Threads: only the engine's thread calls ``reserve_blocks``.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tandem import _native
from tandem.core.errors import CapacityError
from tandem.kernels.device import Reservation

__all__ = ["KvExtents", "KvMemory"]

logger = logging.getLogger(__name__)

EXTENT_BYTES = 32 << 20
"""Bytes of KV memory that are reserved from the system at a time. The first step that uses such a
piece waits until it is zeroed.
"""

KEEP_FREE_BYTES = 256 << 20
"""Bytes of the machine's memory that KV leaves free: with less, the kernel would kill processes
rather than refuse memory.
"""

MIB = 1 << 20


class KvMemory(Reservation, Protocol):
    """A range of address space in host memory for KV blocks, of which only the first part has
    physical memory (is reserved).
    """

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes of the range; those beyond ``reserved_bytes`` must not be accessed."""
        ...


class KvExtents:
    """The ``BlockMemory`` of a block pool in host memory.

    Args:
        memory: range for all blocks, one after the other.
        num_blocks: number of blocks of the pool.
        block_bytes: bytes of one block.
        extent_bytes: bytes reserved at a time, at least one block.
        read_free_bytes: returns the bytes free in the machine and its control groups; None:
            unknown.
    """

    def __init__(
        self,
        memory: Reservation,
        *,
        num_blocks: int,
        block_bytes: int,
        extent_bytes: int = EXTENT_BYTES,
        read_free_bytes: Callable[[], int | None] = _native.read_free_memory,
    ) -> None:
        self._memory = memory
        self._block_bytes = block_bytes
        self._size_bytes = num_blocks * block_bytes
        self._extent_bytes = max(extent_bytes, block_bytes)
        self._read_free_bytes = read_free_bytes
        self._is_short = False

    def reserve_blocks(self, num_blocks: int) -> int:
        """Reserve memory for the blocks below ``num_blocks``, or as many as possible; return how
        many have it.

        Logs the beginning and the end of a shortage.
        """
        wanted = min(num_blocks * self._block_bytes, self._size_bytes)
        try:
            while (begin := self._memory.reserved_bytes) < wanted:
                self._reserve(begin, min(begin + self._extent_bytes, self._size_bytes))
        except CapacityError as error:
            self._note_shortage(is_short=True, reason=error.what)
        else:
            self._note_shortage(is_short=False)
        return min(self._memory.reserved_bytes, self._size_bytes) // self._block_bytes

    def _reserve(self, begin: int, end: int) -> None:
        # Check free memory first: reserving more than is free would get a process killed, not fail.
        free_bytes = self._read_free_bytes()
        if free_bytes is not None and free_bytes - (end - begin) < KEEP_FREE_BYTES:
            raise CapacityError(
                "engine.reserve_kv",
                f"{free_bytes / MIB:.0f} MiB are free, {(end - begin) / MIB:.0f} MiB more for KV "
                f"would leave less than {KEEP_FREE_BYTES / MIB:.0f} MiB",
            )
        self._memory.reserve(end)

    def _note_shortage(self, *, is_short: bool, reason: str = "") -> None:
        if is_short == self._is_short:
            return
        self._is_short = is_short
        reserved = self._memory.reserved_bytes / MIB
        planned = self._size_bytes / MIB
        if is_short:
            text = "event=kv_memory_short reserved_mib=%.0f planned_mib=%.0f reason=%r"
            logger.warning(text, reserved, planned, reason)
        else:
            logger.warning(
                "event=kv_memory_back reserved_mib=%.0f planned_mib=%.0f", reserved, planned
            )
