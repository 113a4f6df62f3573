"""NIXL as a peer, run by its own interpreter (see ``processes``).

Two processes run this script: one offers a buffer, the other moves bytes over UCX, which chooses
its transport by ``UCX_TLS``. Batches are prepared in advance, as ours are: a list of descriptors
for each side and one request, which is posted repeatedly. Imports no module of Tandem.
"""

import base64
import importlib
import json
import os
import time
from typing import Any

import numpy as np
from rival_loop import answer_calls

PAGE = 4096
DRAM = "DRAM"


class Rival:
    """An agent with one registered buffer; the benchmark can call each public method."""

    def __init__(self) -> None:
        self._agent: Any = None
        self._memory = np.ones(0, np.uint8)
        self._address = 0
        self._remotes: dict[str, str] = {}
        self._handles: dict[str, list[Any]] = {}

    def start(self, size: int) -> dict[str, Any]:
        """Register a buffer; return the facts that the other process needs to reach it."""
        # The package is imported by name, since it is installed only in the rival's own virtual
        # environment.
        api = importlib.import_module("nixl_cu12._api")
        self._agent = api.nixl_agent(f"bench-{os.getpid()}")
        self._memory = np.ones(size + PAGE, np.uint8)
        self._address = (self._memory.ctypes.data + PAGE - 1) // PAGE * PAGE
        self._agent.register_memory([(self._address, size, 0, "")], DRAM)
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"name": metadata, "address": self._address}

    def measure(
        self, target: str, address: int, op: str, batches: list[list[list[int]]], seconds: float
    ) -> float:
        """Return the median microseconds of a batch; each batch is a list of (offset, length)."""
        handles = self._prepare(target, address, op, batches)
        times: list[float] = []
        end = time.monotonic() + seconds
        while not times or time.monotonic() < end:
            handle = handles[len(times) % len(handles)]
            begin = time.perf_counter()
            self._move(handle)
            times.append(time.perf_counter() - begin)
        return sorted(times)[len(times) // 2] * 1e6

    def check(self, target: str, address: int, size: int) -> bool:
        """Write bytes, read them back and return True if they are equal."""
        begin = self._address - self._memory.ctypes.data
        view = self._memory[begin : begin + size]
        view[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        expected = view.copy()
        for op in ("write", "read"):
            self._move(self._prepare(target, address, op, [[[0, size]]])[0])
            if op == "write":
                view[:] = 0
        return bool(np.array_equal(view, expected))

    def _prepare(
        self, target: str, address: int, op: str, batches: list[list[list[int]]]
    ) -> list[Any]:
        """Return a prepared request for each batch; a call with the last call's arguments returns
        the same requests.
        """
        key = json.dumps([target, address, op, batches])
        if key in self._handles:
            return self._handles[key]
        for handle in [handle for kept in self._handles.values() for handle in kept]:
            self._agent.release_xfer_handle(handle)
        self._handles.clear()
        if target not in self._remotes:
            self._remotes[target] = self._agent.add_remote_agent(base64.b64decode(target))
        remote = self._remotes[target]
        handles = []
        for parts in batches:
            near, far = (
                self._agent.prep_xfer_dlist(
                    agent, [(base + at, size, 0) for at, size in parts], DRAM
                )
                for agent, base in (("NIXL_INIT_AGENT", self._address), (remote, address))
            )
            indices = list(range(len(parts)))
            handles.append(self._agent.make_prepped_xfer(op.upper(), near, indices, far, indices))
        self._handles[key] = handles
        return handles

    def _move(self, handle: Any) -> None:
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"transfer gave {state}")


def main() -> None:
    """Answer the benchmark's calls, one JSON line each, until standard input ends."""
    answer_calls(Rival)
    os._exit(0)  # NIXL's threads do not end by themselves.


if __name__ == "__main__":
    main()
