"""Two hosts, four rails of unequal rate: network namespaces, veth pairs, ``tc tbf``.

Goal: the sum of the rails is used, and a rail whose link goes down costs no error. Ceiling: a plain
socket over each rail alone, measured in the same run. The bounds leave room for a shared machine;
the figures are printed.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tests_transfer_world import SECRET

from tandem._native import RailState
from tandem.transfer import Op, Transfer, TransferConfig, TransferEngine

RATES_MBIT = (400, 400, 100, 100)
PLAIN_PORT = 7001
MIB = 1 << 20

pytestmark = pytest.mark.skipif(
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
def sink():
    listener = socket.create_server(("0.0.0.0", 7001))
    scratch = bytearray(1 << 20)
    while True:
        peer, _ = listener.accept()
        left = int.from_bytes(peer.recv(8, socket.MSG_WAITALL), "little")
        while left and (got := peer.recv_into(scratch)):
            left -= got
        peer.sendall(b"k")
        peer.close()
threading.Thread(target=sink, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def two_hosts():
    """A namespace with the serving process; yields its addresses and our ends of the links."""
    space = f"tandem{os.getpid()}"
    run("ip", "netns", "add", space)
    process = None
    try:
        ours, theirs, links = [], [], []
        for index, rate in enumerate(RATES_MBIT):
            here, there = f"tdm{os.getpid() % 100000}x{index}", f"rail{index}"
            run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", space)
            ours.append(f"10.213.{index}.1")
            theirs.append(f"10.213.{index}.2")
            links.append(here)
            shape = ("root", "tbf", "rate", f"{rate}mbit", "burst", "64kb", "latency", "20ms")
            run("ip", "addr", "add", f"{ours[-1]}/24", "dev", here)
            run("ip", "-n", space, "addr", "add", f"{theirs[-1]}/24", "dev", there)
            run("tc", "qdisc", "add", "dev", here, *shape)
            run("tc", "-n", space, "qdisc", "add", "dev", there, *shape)
            run("ip", "link", "set", here, "up")
            run("ip", "-n", space, "link", "set", there, "up")
        process = subprocess.Popen(
            ["ip", "netns", "exec", space, sys.executable, "-c", SERVER, SECRET, ",".join(theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        yield ours, theirs, links
    finally:
        if process is not None:
            process.kill()
            process.communicate(timeout=10)
        run("ip", "netns", "del", space)


def measure_plain(host: str, nbytes: int) -> float:
    """Bytes per second of one blocking socket."""
    data = bytes(MIB)
    with socket.create_connection((host, PLAIN_PORT), timeout=10) as plain:
        begin = time.monotonic()
        plain.sendall(nbytes.to_bytes(8, "little"))
        for _ in range(nbytes // MIB):
            plain.sendall(data)
        assert plain.recv(1) == b"k"
        return nbytes / (time.monotonic() - begin)


def test_unequal_rails_add_up_and_a_dead_link_costs_no_error():
    with two_hosts() as (ours, theirs, links):
        config = TransferConfig(
            secret=SECRET,
            transports=("tcp",),
            local_addresses=tuple(ours),
            rail_gbps=tuple(rate / 1e3 for rate in RATES_MBIT),
        )
        with TransferEngine(config) as engine:
            segment = engine.open(f"{theirs[0]}:7000", deadline_s=10)
            assert [rail.local.rsplit(":", 1)[0] for rail in segment.rails] == ours
            limit = time.monotonic() + 10
            while not all(rail.state == RailState.HEALTHY for rail in segment.rails):
                assert time.monotonic() < limit
                time.sleep(0.01)
            remote = segment.buffer("buffer")
            data = np.random.default_rng(0).integers(0, 256, 64 * MIB, np.uint8)
            local = engine.register(data)

            def send(op: Op = Op.WRITE) -> float:
                begin = time.monotonic()
                transfer = Transfer(op, local, segment, remote.offset, 64 * MIB)
                engine.submit([transfer], deadline_s=30).wait()
                return 64 * MIB / (time.monotonic() - begin)

            send()  # Learns the rails.
            ratios = []
            while len(ratios) < 8 and max(ratios, default=0) < 0.85:  # Others use this machine.
                ceiling = sum(
                    measure_plain(host, rate * MIB // 20)
                    for host, rate in zip(theirs, RATES_MBIT, strict=True)
                )
                ratios.append(send() / ceiling)
            print(f"sprayed / sum of rails: {ratios}")
            assert max(ratios) > 0.8

            cutter = threading.Timer(0.2, run, ("ip", "link", "set", links[0], "down"))
            cutter.start()
            rate_cut = send()
            cutter.join()
            print(f"one of four rails cut: {rate_cut / 1e6:.0f} MB/s")
            expected = data.copy()
            data[:] = 0
            send(Op.READ)
            assert np.array_equal(data, expected)
            run("ip", "link", "set", links[0], "up")
