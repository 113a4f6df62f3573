"""Packed weights of a model that sleeps, mapped by the process that will start it again.

The instance that mapped them has ended, and files that nobody maps are the first that memory
pressure takes. Mapped and read once, their pages are in this process's page table: the kernel takes
them only if they have not been used for long and nothing cheaper is left. They take no memory of
this process's own, and the next instance maps the same pages.
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
"""Linux 5.14: put all pages into the page table, from the page cache where they are there."""


class KeptWeights:
    """Read-only mappings of all finished files of some folders.

    Args:
        folders: ``InstanceInfo.packed_folders``, of this machine.
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
        """Unmap all. Idempotent."""
        for mapped in self._mapped:
            mapped.close()
        self._mapped.clear()
        self.size_bytes = 0
