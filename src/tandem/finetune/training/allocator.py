"""The C library's allocator in a run: what a step frees goes back to the system.

glibc maps large blocks one by one and returns them when they are freed, but raises the size that
counts as large to that of any block it has seen freed, up to 32 MiB. The tensors of a step then
come from one heap, whose holes the next tensors do not fit: half as much again as the step needs at
once stays resident. A fixed size turns that off.
"""

import ctypes

__all__ = ["MAPPED_BYTES", "map_large_blocks"]

MAPPED_BYTES = 256 << 10
"""Blocks from this size on are mapped; glibc begins with half of it."""
_M_MMAP_THRESHOLD = -3
"""The option's number in malloc.h."""


def map_large_blocks() -> bool:
    """Give large blocks pages of their own for the life of the process.

    Returns: False where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES))
