"""Mooncake's transfer engine as a peer, run by its own interpreter (see ``processes``).

Two processes run this script: one offers a buffer, the other moves bytes. Imports no module of
Tandem.
"""

import importlib
import os
import time
from typing import Any

import numpy as np
from rival_loop import answer_calls

PAGE = 4096
MAX_BATCH = 256
"""Most transfers in one call: a batch of 3,904 transfers fails with -1, so longer batches are
split.
"""


class Rival:
    """A transfer engine with one registered buffer; the benchmark can call each public method."""

    def __init__(self) -> None:
        # The package is imported by name, since it is installed only in the rival's own virtual
        # environment.
        self._engine = importlib.import_module("mooncake.engine").TransferEngine()
        self._memory = np.ones(0, np.uint8)
        self._address = 0

    def start(self, size: int) -> dict[str, Any]:
        """Register a buffer; return the facts that the other process needs to reach it."""
        code = self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        if code != 0:
            raise RuntimeError(f"initialize gave {code}")
        self._memory = np.ones(size + PAGE, np.uint8)
        self._address = (self._memory.ctypes.data + PAGE - 1) // PAGE * PAGE
        if self._engine.register_memory(self._address, size) != 0:
            raise RuntimeError("register_memory failed")
        return {"name": f"127.0.0.1:{self._engine.get_rpc_port()}", "address": self._address}

    def measure(
        self, target: str, address: int, op: str, batches: list[list[list[int]]], seconds: float
    ) -> float:
        """Return the median microseconds of a batch; each batch is a list of (offset, length)."""
        prepared = [self._prepare(address, parts) for parts in batches]
        times: list[float] = []
        end = time.monotonic() + seconds
        while not times or time.monotonic() < end:
            batch = prepared[len(times) % len(prepared)]
            begin = time.perf_counter()
            self._move(target, op, *batch)
            times.append(time.perf_counter() - begin)
        return sorted(times)[len(times) // 2] * 1e6

    def check(self, target: str, address: int, size: int) -> bool:
        """Write bytes, read them back and return True if they are equal."""
        begin = self._address - self._memory.ctypes.data
        view = self._memory[begin : begin + size]
        view[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        expected = view.copy()
        batch = self._prepare(address, [[0, size]])
        self._move(target, "write", *batch)
        view[:] = 0
        self._move(target, "read", *batch)
        return bool(np.array_equal(view, expected))

    def _prepare(
        self, address: int, parts: list[list[int]]
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the arguments of a call: local addresses, remote addresses, lengths."""
        near = [self._address + at for at, _ in parts]
        far = [address + at for at, _ in parts]
        return near, far, [size for _, size in parts]

    def _move(
        self, target: str, op: str, near: list[int], far: list[int], sizes: list[int]
    ) -> None:
        for at in range(0, len(sizes), MAX_BATCH):
            part = slice(at, at + MAX_BATCH)
            if len(sizes) == 1:
                code = getattr(self._engine, f"transfer_sync_{op}")(
                    target, near[0], far[0], sizes[0]
                )
            else:
                call = getattr(self._engine, f"batch_transfer_sync_{op}")
                code = call(target, near[part], far[part], sizes[part])
            if code != 0:
                raise RuntimeError(f"transfer gave {code}")


def main() -> None:
    """Answer the benchmark's calls, one JSON line each, until standard input ends."""
    answer_calls(Rival)
    os._exit(0)  # Mooncake's threads do not end by themselves.


if __name__ == "__main__":
    main()
