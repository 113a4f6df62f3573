"""Mooncake's transfer engine as a peer: run by its own interpreter (see ``peers``).

Two processes run this script: one offers a buffer, the other moves bytes. Imports nothing of ours.
"""

import importlib
import json
import os
import sys
import time
from typing import Any

import numpy as np

PAGE = 4096


class Peer:
    """One engine with one registered buffer; each public method is a call."""

    def __init__(self) -> None:
        # By name: it is there only in the peer's own venv.
        self._engine = importlib.import_module("mooncake.engine").TransferEngine()
        self._memory = np.ones(0, np.uint8)
        self._address = 0
        self._size = 0

    def start(self, size: int) -> dict[str, Any]:
        """Register a buffer; returns what the other process needs."""
        code = self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        if code != 0:
            raise RuntimeError(f"initialize gave {code}")
        self._memory = np.ones(size + PAGE, np.uint8)
        self._address = (self._memory.ctypes.data + PAGE - 1) // PAGE * PAGE
        self._size = size
        if self._engine.register_memory(self._address, size) != 0:
            raise RuntimeError("register_memory failed")
        return {"name": f"127.0.0.1:{self._engine.get_rpc_port()}", "address": self._address}

    def measure(
        self, *, target: str, address: int, op: str, size: int, count: int, walk: bool,
        seconds: float,
    ) -> float:  # fmt: skip
        """Return the median microseconds of a batch."""
        times: list[float] = []
        step = 0
        end = time.monotonic() + seconds
        while not times or time.monotonic() < end:
            base = step * size * count % max(self._size - size * count + 1, 1) if walk else 0
            places = [base + i * size for i in range(count)]
            step += 1
            begin = time.perf_counter()
            self._move(target, address, op, size, places)
            times.append(time.perf_counter() - begin)
        return sorted(times)[len(times) // 2] * 1e6

    def check(self, target: str, address: int, size: int) -> bool:
        """Write, read back and compare."""
        begin = self._address - self._memory.ctypes.data
        view = self._memory[begin : begin + size]
        view[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        expected = view.copy()
        self._move(target, address, "write", size, [0])
        view[:] = 0
        self._move(target, address, "read", size, [0])
        return bool(np.array_equal(view, expected))

    def _move(self, target: str, address: int, op: str, size: int, places: list[int]) -> None:
        if len(places) == 1:
            call = getattr(self._engine, f"transfer_sync_{op}")
            code = call(target, self._address + places[0], address + places[0], size)
        else:
            near = [self._address + at for at in places]
            far = [address + at for at in places]
            call = getattr(self._engine, f"batch_transfer_sync_{op}")
            code = call(target, near, far, [size] * len(places))
        if code != 0:
            raise RuntimeError(f"transfer gave {code}")


def main() -> None:
    """Answer calls until standard input ends."""
    # The library prints to standard output, which is ours for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer = Peer()
    for line in sys.stdin:
        arguments = json.loads(line)
        call = arguments.pop("call")
        try:
            answer = {"result": getattr(peer, call)(**arguments)}
        except Exception as error:  # noqa: BLE001 - the edge of the process
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # Its threads do not end by themselves.


if __name__ == "__main__":
    main()
