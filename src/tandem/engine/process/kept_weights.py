"""Mappings that keep a sleeping model's packed weights in the page cache for the next start.

When an instance ends, nothing maps its weight files any more, and their pages are the first that
the kernel reclaims under memory pressure. While this process maps them and has touched the pages,
the kernel reclaims them only if they were long unused and nothing cheaper is left. The mappings
take no memory of their own, and the next instance maps the same pages.
"""

import logging
import mmap
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tandem.models.loading.packed_cache import list_packed_files

__all__ = ["KeptWeights"]

logger = logging.getLogger(__name__)

MADV_POPULATE_READ = 22
"""madvise flag of Linux 5.14 that maps all pages of a range, reading those not in the page
cache."""


class KeptWeights:
    """Read-only mappings of all complete files of packed weights in some folders, which keep these
    files in memory while an instance sleeps.

    Args:
        folders: folders on this machine (``InstanceInfo.packed_folders``).
    """

    def __init__(self, folders: Iterable[str]) -> None:
        self._mapped: list[mmap.mmap] = []
        self.size_bytes = 0
        for folder in folders:
            for path in list_packed_files(Path(folder)):
                self._map(path)

    def _map(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file.
            logger.warning("event=weights_not_kept path=%s reason=%s", path, error)
            return
        # Kernels without this madvise flag load the pages when they are first read.
        with suppress(OSError):
            mapped.madvise(MADV_POPULATE_READ)
        self._mapped.append(mapped)
        self.size_bytes += len(mapped)

    def close(self) -> None:
        """Unmap all files of packed weights. Idempotent."""
        for mapped in self._mapped:
            mapped.close()
        self._mapped.clear()
        self.size_bytes = 0
