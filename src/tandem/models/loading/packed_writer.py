"""Background writing of packed weights to their cache while the model serves.

The first start of a large model should not wait for its disk: one thread of the lowest priority
writes the packed weights, file by file, while they are in use in memory. An early end loses only
the file being written; the next start maps the finished files and writes the others. A full disk,
or another process that writes, costs the cache but no request.
"""

import logging
import os
import threading
import time

from tandem.models.loading.packed_cache import PackedCache

__all__ = ["PackedWriter"]

logger = logging.getLogger(__name__)

LOWEST_PRIORITY = 19
CLOSE_TIMEOUT_S = 5.0
"""Seconds to wait for the writing thread to end. A sync may take longer; the thread then ends with
the process.
"""


class PackedWriter:
    """A thread that writes the caches' unwritten weights, once.

    Started by ``start``, after the model serves; ended by ``close`` at any time.

    Args:
        caches: caches with weights to write; owned.
    """

    def __init__(self, caches: list[PackedCache]) -> None:
        self._caches = caches
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="packed-writer", daemon=True)

    def start(self) -> None:
        """Start the thread that writes; call once."""
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all packed weights are on disk, or the thread has given up; return True if so,
        False after the timeout.
        """
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop writing. Idempotent.

        No partly written file is left, unless the disk takes seconds; such a file is marked by its
        name, and the next writer removes it.
        """
        self._stopping.set()
        if self._thread.ident is not None:
            self.wait(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        # Linux sets the priority by thread id, so only this writer thread gets the lowest priority.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        begin_s, num_bytes = time.monotonic(), 0
        try:
            for cache in self._caches:
                with cache:
                    num_bytes += self._write(cache)
        finally:
            logger.info(
                "event=packed_cache_written size_bytes=%d seconds=%.1f is_whole=%s",
                num_bytes,
                time.monotonic() - begin_s,
                not any(cache.unwritten for cache in self._caches),
            )
            for cache in self._caches:
                cache.unwritten.clear()

    def _write(self, cache: PackedCache) -> int:
        """Write a cache's waiting packed weights to its folder; return the bytes that were
        written.
        """
        num_bytes = 0
        for name in list(cache.unwritten):
            if not cache.write(name, cache.unwritten[name], self._stopping.is_set):
                break
            num_bytes += len(cache.unwritten.pop(name))
        return num_bytes
