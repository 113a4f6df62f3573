"""Redis as a peer of the store, run by an interpreter with redis-py (see ``processes``).

Starts its own ``redis-server``, which must be installed. Imports no module of Tandem.
"""

import importlib
import shutil
import socket
import subprocess
import tempfile
import time
from typing import Any

import numpy as np
from children import start_child
from rival_loop import answer_calls

START_TIMEOUT_S = 10.0


class Rival:
    """A server with one client over TCP and one over a unix socket; the benchmark can call each
    public method.
    """

    def __init__(self) -> None:
        # The package is imported by name, since it is installed only in the rival's own virtual
        # environment.
        self._redis = importlib.import_module("redis")
        self._server: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.mkdtemp(prefix="bench-redis-")

    def start(self, memory_bytes: int) -> str:
        """Start the server; return its version."""
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("no redis-server on this machine: install it")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        path = f"{self._folder}/s"
        settings = {
            "bind": "127.0.0.1",
            "port": str(port),
            "unixsocket": path,
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "maxmemory": str(memory_bytes),
            "maxmemory-policy": "allkeys-lru",
            "dir": self._folder,
        }
        flags = [part for key, value in settings.items() for part in (f"--{key}", value)]
        self._server = start_child([program, *flags], stdout=2, stderr=2)
        self._clients = {
            "tcp": self._redis.Redis(host="127.0.0.1", port=port),
            "unix": self._redis.Redis(unix_socket_path=path),
        }
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                for client in self._clients.values():
                    client.ping()
                return self._clients["tcp"].info("server")["redis_version"]
            except self._redis.exceptions.ConnectionError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def prepare(self, path: str, size: int, batch: int) -> bool:
        """Prepare the objects of the next calls: put them, get them and return True if they are
        equal.
        """
        source = np.random.default_rng(size).integers(0, 256, size * batch, dtype=np.uint8)
        self._client = self._clients[path]
        self._client.flushall()
        self._keys = [f"bench/{size}/{i:032}" for i in range(batch)]
        self._values = [source[i * size : (i + 1) * size].tobytes() for i in range(batch)]
        self._put()
        return self._get() == self._values

    def _put(self) -> None:
        if len(self._keys) == 1:
            self._client.set(self._keys[0], self._values[0])
        else:
            self._client.mset(dict(zip(self._keys, self._values, strict=True)))

    def _get(self) -> list[Any]:
        if len(self._keys) == 1:
            return [self._client.get(self._keys[0])]
        return self._client.mget(self._keys)

    def measure(self, op: str, seconds: float) -> float:
        """Put or get (``op``) the prepared batch of objects repeatedly for ``seconds``; return the
        median microseconds of a batch. Puts use new keys.
        """
        times: list[float] = []
        end = time.monotonic() + seconds
        while not times or time.monotonic() < end:
            if op == "put":
                self._client.delete(*self._keys)
            begin = time.perf_counter()
            (self._put if op == "put" else self._get)()
            times.append(time.perf_counter() - begin)
        return sorted(times)[len(times) // 2] * 1e6

    def stop(self) -> None:
        """End the server and remove its folder."""
        if self._server is not None:
            self._server.terminate()
            self._server.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)


def main() -> None:
    """Answer the benchmark's calls, one JSON line each, until standard input ends."""
    peer = answer_calls(Rival)
    peer.stop()


if __name__ == "__main__":
    main()
