"""A staging buffer: KV blocks are copied to it before they are stored, so that their own memory may
be reused meanwhile.

It has a fixed number of slots of one block each, in memory that the store's client has registered.
Slots may be taken and given back by any thread.
"""

import threading

import numpy as np
import numpy.typing as npt

__all__ = ["StagingSlots"]


class StagingSlots:
    """The memory for copies of blocks that wait to be stored, and its free list.

    Args:
        num_slots: number of blocks that fit.
        block_bytes: bytes of one block.
    """

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.memory: npt.NDArray[np.uint8] = np.empty(num_slots * block_bytes, dtype=np.uint8)
        self._free = list(range(num_slots))
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        """Number of free slots, each for the copy of one block."""
        return len(self._free)

    def take(self) -> int | None:
        """Take a free slot and return its number; None if there is none."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Return a slot to the free list, when its copy has been stored."""
        with self._lock:
            self._free.append(slot)

    def view(self, slot: int) -> npt.NDArray[np.uint8]:
        """Return the memory of a slot (a view, not a copy)."""
        return self.memory[slot * self.block_bytes : (slot + 1) * self.block_bytes]
