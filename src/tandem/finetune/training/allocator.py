"""Setting of the C library's allocator by which memory that a step frees returns to the system.

glibc maps large blocks one by one and returns them when they are freed. But each time a mapped
block is freed, the size from which a block counts as large rises to that block's, up to 32 MiB. The
tensors of a step then come from one heap, with holes that the next tensors do not fit: half as much
memory again as a step needs at once would stay in use. A fixed size prevents that.
"""

import ctypes

__all__ = ["MAPPED_BYTES", "map_large_blocks"]

MAPPED_BYTES = 256 << 10
"""Size in bytes from which a block is mapped by itself; twice the size with which glibc begins."""
_M_MMAP_THRESHOLD = -3
"""Number of the option in malloc.h."""


def map_large_blocks() -> bool:
    """Have the C library map large blocks one by one, for the rest of this process's life.

    Returns: False if the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES))
