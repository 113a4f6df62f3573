"""Packed weights written to their cache behind a model that serves.

The first start of a large model should not wait for its disk: what it packed is written by one
thread of the lowest priority, a file after the other, while the memory that holds it is in use.
Whatever ends that early loses the file it was at; the next start maps the finished ones and writes
the others. A full disk, or another process that writes, costs the cache and no request.
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
"""A disk may take seconds for one sync; a thread left behind ends with the process."""


class PackedWriter:
    """Writes what caches have noted, once, in a thread of its own.

    Begun by ``start``, after the model serves; ended by ``close`` at any time.

    Args:
        caches: with weights to write; owned.
    """

    def __init__(self, caches: list[PackedCache]) -> None:
        self._caches = caches
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="packed-writer", daemon=True)

    def start(self) -> None:
        """Begin to write; once."""
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all is written or given up; whether that is so."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop where it is. Nothing half-written is left, unless the disk takes seconds; then its
        name says what it is, and the next writer removes it. Idempotent.
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
        """Return the bytes of a cache that were written before it refused, or all of them."""
        num_bytes = 0
        for name in list(cache.unwritten):
            if not cache.write(name, cache.unwritten[name], self._stopping.is_set):
                break
            num_bytes += len(cache.unwritten.pop(name))
        return num_bytes
