"""Mooncake's store as a peer, run by its own interpreter (see ``processes``).

Two processes run this script: one provides memory (and starts the master), the other is the
measured client. Imports no module of Tandem.
"""

import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from children import start_child
from rival_loop import answer_calls

LOCAL_BUFFER_BYTES = 512 * 2**20
START_TIMEOUT_S = 20.0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Rival:
    """One client of Mooncake's store; the benchmark can call each public method."""

    def __init__(self) -> None:
        # The package is imported by name, since it is installed only in the rival's own virtual
        # environment.
        self._store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        self._master: subprocess.Popen[bytes] | None = None
        self._source = self._target = np.zeros(0, np.uint8)

    def start_master(self) -> dict[str, int]:
        """Start Mooncake's master; return its ports."""
        ports = {"rpc": _free_port(), "http": _free_port(), "metrics": _free_port()}
        self._master = start_child(
            [
                os.path.join(os.path.dirname(sys.executable), "mooncake_master"),
                f"--rpc_port={ports['rpc']}",
                "--rpc_address=127.0.0.1",
                "--enable_http_metadata_server=true",
                "--http_metadata_server_host=127.0.0.1",
                f"--http_metadata_server_port={ports['http']}",
                f"--metrics_port={ports['metrics']}",
            ],
            stdout=2,
            stderr=2,
        )
        end = time.monotonic() + START_TIMEOUT_S
        for name in ("rpc", "http"):
            while True:
                try:
                    socket.create_connection(("127.0.0.1", ports[name]), 1).close()
                    break
                except OSError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.05)
        return ports

    def start(self, ports: dict[str, int], segment_bytes: int) -> bool:
        """Start the client, which gives ``segment_bytes`` of memory to the store."""
        code = self._store.setup(
            f"127.0.0.1:{_free_port()}",
            f"http://127.0.0.1:{ports['http']}/metadata",
            segment_bytes,
            LOCAL_BUFFER_BYTES,
            "tcp",
            "",
            f"127.0.0.1:{ports['rpc']}",
        )
        if code != 0:
            raise RuntimeError(f"setup gave {code}")
        return True

    def touch(self, total_bytes: int) -> int:
        """Write ``total_bytes``, so that no measured case touches memory for the first time; return
        the number of objects.
        """
        value = np.zeros(2**24, np.uint8).tobytes()
        count = sum(
            self._store.put(f"touch/{i}", value) == 0 for i in range(total_bytes // len(value))
        )
        self._store.remove_all(True)
        return count

    def prepare(self, api: str, size: int, batch: int) -> bool:
        """Prepare the objects of the next calls: put them, get them and return True if they are
        equal.
        """
        if self._source.size:
            for memory in (self._source, self._target):
                self._store.unregister_buffer(memory.ctypes.data)
        self._source = np.random.default_rng(size).integers(0, 256, size * batch, dtype=np.uint8)
        self._target = np.zeros_like(self._source)
        for memory in (self._source, self._target):
            if self._store.register_buffer(memory.ctypes.data, memory.size) != 0:
                raise RuntimeError("register_buffer failed")
        self._keys = [f"bench/{api}/{size}/{i:032}" for i in range(batch)]
        self._size = size
        self._put, self._get = self._make_calls(api, size, batch)
        self._remove()
        self._put()
        self._get()
        return bool(np.array_equal(self._source, self._target))

    def _make_calls(
        self, api: str, size: int, batch: int
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        store, keys, single = self._store, self._keys, batch == 1
        if api == "zerocopy":
            sizes = [size] * batch
            sources = [self._source.ctypes.data + i * size for i in range(batch)]
            targets = [self._target.ctypes.data + i * size for i in range(batch)]

            def put() -> None:
                if single:
                    codes = [store.put_from(keys[0], sources[0], size)]
                else:
                    codes = store.batch_put_from(keys, sources, sizes)
                if any(codes):
                    raise RuntimeError(f"put gave {codes}")

            def get() -> None:
                if single:
                    counts = [store.get_into(keys[0], targets[0], size)]
                else:
                    counts = store.batch_get_into(keys, targets, sizes)
                if any(count != size for count in counts):
                    raise RuntimeError(f"get gave {counts}")

            return put, get
        values = [self._source[i * size : (i + 1) * size].tobytes() for i in range(batch)]

        def put_bytes() -> None:
            code = store.put(keys[0], values[0]) if single else store.put_batch(keys, values)
            if code != 0:
                raise RuntimeError(f"put gave {code}")

        def get_bytes() -> None:
            found = [store.get(keys[0])] if single else store.get_batch(keys)
            if any(len(value) != size for value in found):
                raise RuntimeError("get gave values of other lengths")
            if not self._target[0]:  # Only the check reads the buffer.
                self._target[:] = np.frombuffer(b"".join(found), np.uint8)

        return put_bytes, get_bytes

    def _remove(self) -> None:
        self._store.remove_all(True)  # True removes objects in spite of their leases.

    def measure(self, op: str, seconds: float) -> float:
        """Put or get (``op``) the prepared batch of objects repeatedly for ``seconds``; return the
        median microseconds of a batch.
        """
        times: list[float] = []
        end = time.monotonic() + seconds
        while not times or time.monotonic() < end:
            if op == "put":
                self._remove()
            begin = time.perf_counter()
            (self._put if op == "put" else self._get)()
            times.append(time.perf_counter() - begin)
        return sorted(times)[len(times) // 2] * 1e6

    def measure_exists(self, count: int) -> float:
        """Return the keys per second of one ``batch_is_exist`` of ``count`` keys, half of which
        exist.
        """
        keys = [f"{i:064}" for i in range(count)]
        if self._store.put_batch(keys[::2], [b"x"] * len(keys[::2])) != 0:
            raise RuntimeError("put failed")
        begin = time.perf_counter()
        found = self._store.batch_is_exist(keys)
        taken = time.perf_counter() - begin
        if [code == 1 for code in found] != [i % 2 == 0 for i in range(count)]:
            raise RuntimeError("wrong answers")
        return count / taken

    def stop(self) -> None:
        """End the master, if this process started it."""
        if self._master is not None:
            self._master.terminate()
            self._master.wait(10)


def main() -> None:
    """Answer the benchmark's calls, one JSON line each, until standard input ends."""
    peer = answer_calls(Rival)
    peer.stop()
    os._exit(0)  # Mooncake's threads do not end by themselves.


if __name__ == "__main__":
    main()
