"""The rivals of `tandem bench store`: Mooncake's store over tcp, and Redis."""

import contextlib
from pathlib import Path
from typing import Protocol

from tandem.bench.rivals.processes import RivalProcess, install_rival
from tandem.core.errors import PeerLostError

__all__ = ["MooncakeStore", "Redis", "Rival"]

MEASURE_S = 0.05
MOONCAKE = (
    "mooncake-transfer-engine-non-cuda==0.3.13",
    "numpy>=1.26",
    # Even this "non-cuda" build of Mooncake links its store's library to the CUDA runtime.
    "nvidia-cuda-runtime-cu12",
)
REDIS = ("redis[hiredis]==5.2.1", "numpy>=1.26")


class Rival(Protocol):
    """Another project's store, with the batch that it was last prepared for."""

    @property
    def name(self) -> str:
        """Name of the rival in the benchmark's record (the result of a case)."""
        ...

    def prepare(self, api: str, size: int, batch: int) -> None:
        """Put a batch and get it back.

        Raises: PeerLostError (the bytes differ).
        """
        ...

    def measure_us(self, op: str) -> float:
        """Return the microseconds to put that batch under new keys, or to get it."""
        ...


class MooncakeStore:
    """Mooncake's store: its master, one process that provides memory, and one client process."""

    name = "mooncake tcp"

    def __init__(self, stack: contextlib.ExitStack, segment_bytes: int) -> None:
        python = install_rival("mooncake-store", MOONCAKE)
        libraries = python.parents[1].glob("lib/python3*/site-packages/nvidia/cuda_runtime/lib")
        environment = {"LD_LIBRARY_PATH": ":".join(map(str, libraries)), "PATH": "/usr/bin:/bin"}
        provider, self._client = (
            stack.enter_context(
                RivalProcess(python, "mooncake_store_rival.py", environment=environment)
            )
            for _ in range(2)
        )
        ports = provider.call("start_master")
        provider.call("start", ports=ports, segment_bytes=segment_bytes)
        self._client.call("start", ports=ports, segment_bytes=0)
        self._client.call("touch", total_bytes=int(segment_bytes * 0.85))

    def prepare(self, api: str, size: int, batch: int) -> None:
        """Put a batch and get it back, so that later calls measure it. Raises: PeerLostError (the
        bytes differ).
        """
        if not self._client.call("prepare", api=api, size=size, batch=batch):
            raise PeerLostError("bench.check", "mooncake gave other bytes than it was given")

    def measure_us(self, op: str) -> float:
        """Return the microseconds to put the prepared batch under new keys, or to get it."""
        return self._client.call("measure", op=op, seconds=MEASURE_S)

    def measure_exists(self, count: int) -> float:
        """Return the keys per second of one existence query for ``count`` keys."""
        return self._client.call("measure_exists", count=count)


class Redis:
    """A Redis server and a client process; ``path`` is tcp or unix."""

    def __init__(self, stack: contextlib.ExitStack, path: str, memory_bytes: int) -> None:
        self.name = f"redis {path}"
        self._path = path
        python: Path = install_rival("redis", REDIS)
        self._client = stack.enter_context(RivalProcess(python, "redis_rival.py"))
        self._client.call("start", memory_bytes=memory_bytes)

    def prepare(self, api: str, size: int, batch: int) -> None:
        """Put a batch and get it back, so that later calls measure it. Raises: PeerLostError (the
        bytes differ).
        """
        if not self._client.call("prepare", path=self._path, size=size, batch=batch):
            raise PeerLostError("bench.check", "redis gave other bytes than it was given")

    def measure_us(self, op: str) -> float:
        """Return the microseconds to put the prepared batch under new keys, or to get it."""
        return self._client.call("measure", op=op, seconds=MEASURE_S)
