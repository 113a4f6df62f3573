"""A second host: a network namespace with a serving process, reached over shaped veth pairs.

Needs root and ``iproute2``. Everything is removed at the end, whatever happened.
"""

import contextlib
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path as FilePath

import numpy as np
import pytest
from tests_transfer_world import SECRET

from tandem._native import RailState
from tandem.transfer import Op, Segment, Transfer, TransferConfig, TransferEngine

PLAIN_PORT = 7001
_numbers = itertools.count()
IPERF_PORT = 7002
BENCHMARK_BLOCKS = ("198.18.", "198.19.")
"""Set aside for benchmarks by RFC 2544."""
MIB = 1 << 20
BUFFER_BYTES = 64 * MIB

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="needs root, ip and tc (iproute2)",
)

SERVER = """
import socket, sys, threading
from tandem.transfer import TransferConfig, TransferEngine
hosts = sys.argv[2].split(",")
engine = TransferEngine(TransferConfig(secret=sys.argv[1],
                                       listen=tuple(f"{host}:7000" for host in hosts)))
engine.allocate(64 << 20, name="buffer")
def drain(peer):
    scratch = bytearray(1 << 18)
    with peer:
        left = int.from_bytes(peer.recv(8, socket.MSG_WAITALL), "little")
        while left and (got := peer.recv_into(scratch)):
            left -= got
        peer.sendall(b"k")
def sink():
    listener = socket.create_server(("0.0.0.0", 7001))
    while True:
        threading.Thread(target=drain, args=(listener.accept()[0],), daemon=True).start()
threading.Thread(target=sink, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""

LOADER = """
import socket, sys, threading
def fill(host):
    with socket.create_connection((host, 7001), timeout=30) as stream:
        stream.sendall((1 << 40).to_bytes(8, "little"))
        while True:
            stream.sendall(bytes(1 << 16))
for host in sys.argv[1:] * 4:
    threading.Thread(target=fill, args=(host,), daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


class TwoHosts:
    """Links, by index: our address, theirs, our device."""

    def __init__(self, space: str) -> None:
        self.space = space
        self.ours: list[str] = []
        self.theirs: list[str] = []
        self.links: list[str] = []
        self._changes = subprocess.Popen(
            ["ip", "-n", space, "-force", "-batch", "-"], stdin=subprocess.PIPE, text=True
        )

    def close(self) -> None:
        """End what changes addresses."""
        self._changes.communicate(timeout=10)

    def shape(self, index: int, rate_mbit: float) -> None:
        """Limit both directions of a link."""
        burst = max(int(rate_mbit * 1e6 / 8 * 0.004), 32768)  # 4 ms, or a few packets of GSO.
        how = ("root", "tbf", "rate", f"{rate_mbit}mbit", "burst", str(burst), "latency", "20ms")
        run("tc", "qdisc", "replace", "dev", self.links[index], *how)
        run("tc", "-n", self.space, "qdisc", "replace", "dev", f"rail{index}", *how)

    def set_link(self, index: int, state: str) -> float:
        """Take our device down or up; returns when that was begun."""
        begin = time.monotonic()
        run("ip", "link", "set", self.links[index], state)
        return begin

    def silence(self, index: int) -> float:
        """Let the other host forget its address: packets vanish, the link stays."""
        begin = time.monotonic()
        self._address(index, "del")
        return begin

    def mend(self, index: int) -> float:
        """Give the other host its address back."""
        self._address(index, "add")
        return time.monotonic()

    def _address(self, index: int, verb: str) -> None:
        # By a process that runs already: to start one takes as long as what is measured.
        assert self._changes.stdin is not None
        self._changes.stdin.write(f"addr {verb} {self.theirs[index]}/30 dev rail{index}\n")
        self._changes.stdin.flush()

    def measure_plain(self, index: int, nbytes: int) -> float:
        """Bytes per second of one blocking socket over a link, or of iperf3 where it is there."""
        if shutil.which("iperf3"):
            return self._measure_iperf(index, nbytes)
        data = bytes(MIB)
        with socket.create_connection((self.theirs[index], PLAIN_PORT), timeout=30) as plain:
            begin = time.monotonic()
            plain.sendall(nbytes.to_bytes(8, "little"))
            for begin_at in range(0, nbytes, MIB):
                plain.sendall(data[: nbytes - begin_at])
            assert plain.recv(1) == b"k"
            return nbytes / (time.monotonic() - begin)

    def _measure_iperf(self, index: int, nbytes: int) -> float:
        server = subprocess.Popen(
            ["ip", "netns", "exec", self.space, "iperf3", "-s", "-1", "-p", str(IPERF_PORT)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            client = ["iperf3", "-J", "-c", self.theirs[index], "-p", str(IPERF_PORT)]
            limit = time.monotonic() + 60
            while True:
                done = subprocess.run(
                    [*client, "-n", str(nbytes)], capture_output=True, timeout=60, check=False
                )
                report = json.loads(done.stdout)
                if "error" not in report:
                    return report["end"]["sum_received"]["bits_per_second"] / 8
                assert time.monotonic() < limit, report["error"]
                time.sleep(0.02)
        finally:
            server.kill()
            server.wait(60)

    @contextlib.contextmanager
    def load(self, *indexes: int) -> Iterator[None]:
        """Another process fills these links, with four plain streams each."""
        process = subprocess.Popen(
            [sys.executable, "-c", LOADER, *(self.theirs[index] for index in indexes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "ready"
            yield
        finally:
            process.kill()
            process.communicate(timeout=10)


def choose_block() -> str:
    """Three bytes of addresses for benchmarks (RFC 2544) that nobody has a route to.

    The tests may run twice on a machine: with the same addresses one would meet the other's hosts.
    """
    routes = subprocess.run(
        ("ip", "-4", "route", "show"), capture_output=True, text=True, timeout=30, check=True
    ).stdout
    for _ in range(100):
        block = f"198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}"
        if f"{block}." not in routes:
            return block
    raise AssertionError("every block of 198.18.0.0/15 has a route")


@contextlib.contextmanager
def two_hosts(rates_mbit: tuple[float, ...]) -> Iterator[TwoHosts]:
    """Make the links and start the serving process."""
    # The kernel takes its time to remove a namespace: each has names of its own.
    unique = f"{os.getpid() % 100000}n{next(_numbers)}"
    run("ip", "netns", "add", f"tandem{unique}")
    hosts = TwoHosts(f"tandem{unique}")
    block = choose_block()
    process = None
    try:
        for index, rate in enumerate(rates_mbit):
            here, there = f"t{unique}x{index}", f"rail{index}"
            run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns",
                hosts.space)  # fmt: skip
            hosts.ours.append(f"{block}.{4 * index + 1}")
            hosts.theirs.append(f"{block}.{4 * index + 2}")
            hosts.links.append(here)
            run("ip", "addr", "add", f"{hosts.ours[-1]}/30", "dev", here)
            run("ip", "-n", hosts.space, "addr", "add", f"{hosts.theirs[-1]}/30", "dev", there)
            hosts.shape(index, rate)
            run("ip", "link", "set", here, "up")
            run("ip", "-n", hosts.space, "link", "set", there, "up")
        process = subprocess.Popen(
            ["ip", "netns", "exec", hosts.space, sys.executable, "-c", SERVER, SECRET,
             ",".join(hosts.theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        yield hosts
    finally:
        if process is not None:
            process.kill()
            process.communicate(timeout=10)
        hosts.close()
        run("ip", "netns", "del", hosts.space)
        for link in hosts.links:  # Boards of NICs that are no more.
            for board in FilePath("/dev/shm").glob(f"tandem-{os.getuid()}-*-{link}"):
                board.unlink()


class Path:
    """An engine of ours with one rail a link, a segment over there and data for it."""

    def __init__(self, hosts: TwoHosts, rates_mbit: tuple[float, ...], **settings) -> None:
        settings = {
            "secret": SECRET,
            "transports": ("tcp",),
            "local_addresses": tuple(hosts.ours),
            "rail_gbps": tuple(rate / 1e3 for rate in rates_mbit),
            **settings,
        }
        self.engine = TransferEngine(TransferConfig(**settings))
        self.segment: Segment = self.engine.open(f"{hosts.theirs[0]}:7000", deadline_s=60)
        self.data = np.random.default_rng(0).integers(0, 256, BUFFER_BYTES, np.uint8)
        self.local = self.engine.register(self.data)
        self.remote = self.segment.buffer("buffer")
        wait_until(lambda: all(r.state == RailState.HEALTHY for r in self.segment.rails))

    def begin(self, nbytes: int, op: Op = Op.WRITE):
        """Submit one transfer."""
        transfer = Transfer(op, self.local, self.segment, self.remote.offset, nbytes)
        return self.engine.submit([transfer], deadline_s=60)

    def move(self, nbytes: int, op: Op = Op.WRITE) -> float:
        """Move that much; returns the seconds it took."""
        begin = time.monotonic()
        self.begin(nbytes, op).wait()
        return time.monotonic() - begin

    def check(self, nbytes: int) -> None:
        """Read back and compare."""
        expected = self.data[:nbytes].copy()
        self.data[:nbytes] = 0
        self.move(nbytes, Op.READ)
        assert np.array_equal(self.data[:nbytes], expected)

    def latencies(self) -> dict[float, int]:
        """Slices so far by upper bound of their latency in seconds, over all rails."""
        counts: dict[float, int] = {}
        for rail in self.segment.rails:
            for bound, count in rail.latency_buckets:
                counts[bound] = counts.get(bound, 0) + count
        return counts

    def __enter__(self):
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close(deadline_s=5)


def quantile(after: dict[float, int], before: dict[float, int], part: float) -> float:
    """The latency that ``part`` of the slices between two looks did not exceed."""
    counts = sorted((bound, n - before.get(bound, 0)) for bound, n in after.items())
    left = part * sum(n for _, n in counts)
    for bound, n in counts:
        left -= n
        if left <= 0:
            return bound
    raise AssertionError("no slices")


def wait_until(condition, limit_s: float = 60.0, pause_s: float = 0.001) -> float:
    """Wait for a condition; returns when it was seen."""
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "did not come true in time"
        time.sleep(pause_s)
    return time.monotonic()
