"""Files of a checkpoint that are mapped while their source is open."""

import mmap
from contextlib import suppress
from pathlib import Path

__all__ = ["MappedFiles", "map_file"]


def map_file(path: Path) -> mmap.mmap:
    """Map a file that is not empty.

    The mapping is copy-on-write, because torch requires a writable buffer; nothing writes to it, so
    its pages remain those of the page cache and take no memory of the process.
    """
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


class MappedFiles:
    """Mappings of files, made on first use and owned here. Not thread-safe."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def get(self, path: Path) -> mmap.mmap:
        """Return the mapping of a file, valid until ``close``."""
        if path not in self._maps:
            self._maps[path] = map_file(path)
        return self._maps[path]

    def close(self) -> None:
        """Unmap all files; idempotent. A mapping with live views is released when they are gone."""
        while self._maps:
            # The frames of an exception in flight may still hold views of the mapping, which then
            # cannot be closed.
            with suppress(BufferError):
                self._maps.popitem()[1].close()
