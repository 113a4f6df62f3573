"""Processes that run out of descriptors.

Goal: a flood of connections takes nothing from those who are served, whatever port it comes by,
and all is as before when it has ended. Method: real processes with a low RLIMIT_NOFILE, sockets
that say nothing, and looks at whether a process's threads are asleep.
"""

import contextlib
import os
import resource
import shutil
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
from store_cluster import RPC, Cluster

from idleness import list_threads, observe
from tandem.rpc import generate_secret, make_runtime_dir
from tandem.store import PutOptions, StoreClient

LIMIT = 256
FLOOD = 500
PAUSE_S = 0.004


@pytest.fixture(params=["ipc", "tcp"])
def cluster(request):
    folder = make_runtime_dir()
    segments = Path("/dev/shm") / folder.name
    cluster = Cluster(folder, segments)
    if request.param == "tcp":
        cluster.config = msgspec.structs.replace(
            cluster.config, master=f"tcp://127.0.0.1:{find_port()}", secret=generate_secret()
        )
    yield cluster
    cluster.close()
    shutil.rmtree(folder)
    shutil.rmtree(segments, ignore_errors=True)


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def limit_descriptors(pid: int) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (LIMIT, hard))


def count_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def list_ports(pid: int) -> list[int]:
    """Return the TCP ports at which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(f[1].split(":")[1], 16) for f in lines if f[3] == "0A" and f[9] in inodes]


class Flood:
    """Connects to all ports of a process, again and again, and holds what it gets."""

    def __init__(self, pid: int, path: str) -> None:
        self._ports = list_ports(pid)
        assert self._ports
        self._path = path
        self._held: list[socket.socket] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            while len(self._held) >= FLOOD:
                self._held.pop(0).close()
            if self._path:
                self._connect(socket.AF_UNIX, self._path)
            for port in self._ports:
                self._connect(socket.AF_INET, ("127.0.0.1", port))
            time.sleep(PAUSE_S)

    def _connect(self, family: int, address) -> None:
        connection = socket.socket(family)
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # Under way, or the queue is full.
            connection.connect(address)
        self._held.append(connection)

    def end(self) -> None:
        self._is_over = True
        self._thread.join()
        for connection in self._held:
            connection.close()


def check_served_beside_a_flood(cluster: Cluster, client: StoreClient, pid: int, path: str) -> None:
    """Put and get while connections come; all descriptors are given back when they go."""
    before = count_descriptors(pid)
    flood = Flood(pid, path)
    try:
        cluster.wait_for(lambda: count_descriptors(pid) > LIMIT - 80, "descriptors in use")
        for count in range(100):
            value = os.urandom(100_000)
            client.put(f"k{count % 20}", value, PutOptions(upsert=True))
            assert client.get(f"k{count % 20}") == value
            assert count_descriptors(pid) < LIMIT, "none is left for itself"
    finally:
        flood.end()
    cluster.wait_for(lambda: count_descriptors(pid) <= before + 8, "descriptors given back")
    with StoreClient(cluster.config, RPC) as another:
        assert another.get("k0") is not None


@pytest.mark.parametrize("role", ["master", "host"])
def test_a_flood_of_connections_takes_nothing_from_those_who_are_served(cluster, role):
    master = cluster.start("master", metrics_port=find_port())
    host = cluster.start("host", name="h1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    client.put("warm", b"x" * 100_000)
    flooded = master if role == "master" else host
    limit_descriptors(flooded.process.pid)
    path = ""
    if role == "master" and cluster.config.master.startswith("ipc://"):
        path = cluster.config.master.removeprefix("ipc://")
    check_served_beside_a_flood(cluster, client, flooded.process.pid, path)


def test_a_process_without_descriptors_does_not_spin(cluster):
    """Whoever listens with the transfer engine waits with connections that it cannot take."""
    cluster.start("master")
    host = cluster.start("host", name="h1")
    client = cluster.client()
    cluster.wait_hosts(client, 1)
    client.put("k", b"x" * 100_000)
    pid = host.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count_descriptors(pid) // 2, limits[1]))
    with contextlib.ExitStack() as stack:
        waiting = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for port in list_ports(pid)
        ]
        assert waiting
        seen = observe(list_threads(pid), pid)
        assert client.get("k") == b"x" * 100_000
    for each in seen.values():
        assert each.num_awake * 2 <= each.num_looks, seen
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    with StoreClient(cluster.config, RPC) as another:
        assert another.get("k") == b"x" * 100_000
