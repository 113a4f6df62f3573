"""The memory of an instance's KV blocks, taken from the machine as blocks are first used.

Addresses for all blocks are there from the start, so that the cache, its views and what is
registered with the transfer engine never move. Memory is reserved behind them extent by extent,
from block 0 on, each before the scheduler gives a block of it away: memory that is reserved can be
touched whatever other processes take meanwhile. An idle instance has one extent.

Threads: ``reserve_blocks`` is called by the engine's thread alone.
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
"""Bytes reserved at a time. The first step that uses an extent waits until it is zeroed."""

KEEP_FREE_BYTES = 256 << 20
"""Left to the other needs of this process and of the machine: below it the kernel ends processes
rather than refuse memory."""

MIB = 1 << 20


class KvMemory(Reservation, Protocol):
    """A reservation in host memory."""

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes; those beyond ``reserved_bytes`` must not be touched."""
        ...


class KvExtents:
    """Reserves the memory of blocks, as long as the machine has it; a ``BlockMemory``.

    Args:
        memory: of all blocks, one after the other.
        num_blocks: of the pool.
        block_bytes: of one.
        extent_bytes: reserved at a time, at least.
        read_free_bytes: how much the machine and the control groups have left; None: unknown.
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
        """Reserve memory for the first blocks; log when memory runs short and when that ends."""
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
