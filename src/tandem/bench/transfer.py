"""`tandem bench transfer`: transfers to another process of this machine, by transport and size.

Cases are ``transport=tcp|shm|cma op=read|write size=BYTES batch=COUNT``, microseconds per batch.
The ceiling of tcp is a plain blocking socket to the same process, one request and one confirmation
a batch; that of shm and cma a memcpy of as many bytes. Bytes are compared before a time counts.
"""

import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Literal

import numpy as np

from tandem.bench.harness import BenchCase, time_call
from tandem.core.errors import PeerLostError
from tandem.transfer import Op, Transfer, TransferConfig, TransferEngine

__all__ = ["make_cases"]

BUFFER_BYTES = 64 * 2**20
SIZES = (4096, 65_536, 2**20, 2**24, 2**26)
QUICK_SIZES = (4096, 2**20, 2**24)
BATCHES = (1, 256)
MEASURE_S = 0.02
"""A measurement repeats short batches until it has lasted this long."""

SERVER = """
import socket, sys
import numpy as np
from tandem.transfer import TransferConfig, TransferEngine
engine = TransferEngine(TransferConfig(name="bench", secret=sys.argv[1]))
buffer = engine.allocate(int(sys.argv[2]), name="buffer")
listener = socket.create_server(("127.0.0.1", 0))
print(engine.address, listener.getsockname()[1], flush=True)
peer, _ = listener.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
view = memoryview(np.ones(int(sys.argv[2]), np.uint8))
while head := peer.recv(16, socket.MSG_WAITALL):
    op, size = int.from_bytes(head[:8], "little"), int.from_bytes(head[8:], "little")
    if op == 0:
        peer.sendall(view[:size])
    else:
        done = 0
        while done < size:
            done += peer.recv_into(view[done:size])
        peer.sendall(b"k")
"""


class _Pair:
    """This process and a child that offers one buffer, by our engine and by a plain socket."""

    def __init__(self) -> None:
        secret = secrets.token_urlsafe(32)
        self.child = subprocess.Popen(
            [sys.executable, "-c", SERVER, secret, str(BUFFER_BYTES)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.child.stdout is not None
        line = self.child.stdout.readline().split()
        if len(line) != 2:
            raise PeerLostError("bench.start", "the serving process did not start")
        self.engine = TransferEngine(TransferConfig(secret=secret))
        self.segment = self.engine.open(line[0])
        self.remote = self.segment.buffer("buffer")
        self.local = self.engine.allocate(BUFFER_BYTES)
        self.local.array[:] = np.random.default_rng(0).integers(0, 256, BUFFER_BYTES, np.uint8)
        self.scratch = np.ones(BUFFER_BYTES, np.uint8)
        self.socket = socket.create_connection(("127.0.0.1", int(line[1])))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def transfers(self, op: Op, size: int, batch: int) -> list[Transfer]:
        """Return the transfers of a batch, side by side in the buffer as far as it reaches."""
        places = [i * size % max(size, BUFFER_BYTES - size + 1) for i in range(batch)]
        return [
            Transfer(op, self.local, self.segment, self.remote.offset + at, size, local_offset=at)
            for at in places
        ]

    def move_plain(self, op: Op, size: int) -> None:
        """Move ``size`` bytes over the plain socket."""
        self.socket.sendall(int(op).to_bytes(8, "little") + size.to_bytes(8, "little"))
        if op == Op.READ:
            view = self.scratch.data
            done = 0
            while done < size:
                done += self.socket.recv_into(view[done:size])
        else:
            self.socket.sendall(self.scratch.data[:size])
            self.socket.recv(1)

    def close(self) -> None:
        """End the child."""
        self.socket.close()
        self.engine.close(deadline_s=5)
        self.child.kill()
        self.child.wait(10)
        assert self.child.stdout is not None
        self.child.stdout.close()


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases; the child lives as long as the iteration."""
    pair = _Pair()
    try:
        for transport in ("tcp", "shm", "cma"):
            for op in (Op.WRITE, Op.READ):
                for size in QUICK_SIZES if quick else SIZES:
                    for batch in BATCHES:
                        if size * batch <= BUFFER_BYTES:
                            yield _make_case(pair, transport, op, size, batch)
    finally:
        pair.close()


def _make_case(
    pair: _Pair, transport: Literal["tcp", "shm", "cma"], op: Op, size: int, batch: int
) -> BenchCase:
    transfers = pair.transfers(op, size, batch)
    total = size * batch

    def move() -> None:
        pair.engine.submit(transfers, transport=transport).wait()

    def move_at_ceiling() -> None:
        if transport == "tcp":
            pair.move_plain(op, total)
        else:
            np.copyto(pair.scratch[:total], pair.local.array[:total])

    def check() -> str:
        expected = pair.local.array[:total].copy()
        pair.engine.submit(pair.transfers(Op.WRITE, size, batch), transport=transport).wait()
        pair.local.array[:total] = 0
        pair.engine.submit(pair.transfers(Op.READ, size, batch), transport=transport).wait()
        same = np.array_equal(pair.local.array[:total], expected)
        pair.local.array[:total] = expected
        return "ok" if same else "bytes differ"

    return BenchCase(
        name=f"transport={transport} op={op.name.lower()} size={size} batch={batch}",
        unit="us",
        ours=lambda: _measure_us(move),
        check=check,
        baseline=lambda: _measure_us(move_at_ceiling),
        baseline_name="plain socket" if transport == "tcp" else "memcpy",
        ceiling=lambda: _measure_us(move_at_ceiling),
    )


def _measure_us(function: object) -> float:
    assert callable(function)
    times: list[float] = []
    end = time.monotonic() + MEASURE_S
    while not times or time.monotonic() < end:
        times.append(time_call(function))
    return sorted(times)[len(times) // 2] * 1e6
