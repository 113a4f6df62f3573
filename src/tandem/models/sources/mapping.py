"""Files of a checkpoint, mapped while their source is open."""

import mmap
from contextlib import suppress
from pathlib import Path

__all__ = ["MappedFiles", "map_file"]


def map_file(path: Path) -> mmap.mmap:
    """Map a file that is not empty.

    Copy-on-write: torch wants a writable buffer, and nothing writes to it, so the pages stay the
    page cache's and cost no memory of ours.
    """
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


class MappedFiles:
    """Maps each file when it is first asked for; owns the maps. Not thread-safe."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def get(self, path: Path) -> mmap.mmap:
        """Return the map of a file, valid until ``close``."""
        if path not in self._maps:
            self._maps[path] = map_file(path)
        return self._maps[path]

    def close(self) -> None:
        """Unmap all; idempotent. A file with a view alive is unmapped when the view is gone."""
        while self._maps:
            # The frames of an exception in flight may still hold views of the mapping, which then
            # cannot be closed.
            with suppress(BufferError):
                self._maps.popitem()[1].close()
