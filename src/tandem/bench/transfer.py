"""`tandem bench transfer`: transfers to another process of this machine, by transport and size.

Cases are ``transport=tcp|shm|cma|best op=read|write size=BYTES batch=COUNT walk=no|yes``,
microseconds a batch; ``walk`` goes over a gibibyte instead of one place, ``best`` leaves the choice
to the engine. ``workload=kv`` is the cache of a prompt of 4K tokens: 61 layers of 32 blocks of 144
KiB, each as 128 and 16. Batches are prepared. Bytes are compared before a time counts.

The ceiling of tcp is a plain blocking socket to the same process, one request and one confirmation
a batch; that of the others a memcpy of as many bytes. The baseline is the ceiling, or, with peers,
Mooncake's transfer engine over tcp in processes of its own, measured in turns with ours.
"""

import contextlib
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Literal

import numpy as np

from tandem.bench.harness import BenchCase, time_call
from tandem.bench.peers import PeerProcess, install_peer
from tandem.core.errors import PeerLostError
from tandem.transfer import Op, PreparedBatch, Transfer, TransferConfig, TransferEngine

__all__ = ["make_cases"]

SMALL_BUFFER_BYTES = 256 * 2**20
WALK_BUFFER_BYTES = 2**30
QUICK_BUFFER_BYTES = 64 * 2**20
SIZES = (4096, 65_536, 2**20, 2**24, 2**26, 2**28)
QUICK_SIZES = (4096, 2**20, 2**24)
BATCHES = (1, 256)
MAX_PREPARED = 64
"""Places that a walk has batches for: enough that no cache holds them."""
MEASURE_S = 0.02
"""A measurement repeats short batches until it has lasted this long."""
KV_LAYERS, KV_BLOCKS, KV_PARTS = 61, 32, (128 * 1024, 16 * 1024)
PEERS = ("mooncake-transfer-engine-non-cuda==0.3.13", "numpy>=1.26")

TransportChoice = Literal["tcp", "shm", "cma", "best"]

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
view = memoryview(np.ones(1 << 28, np.uint8))
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

    def __init__(self, buffer_bytes: int) -> None:
        secret = secrets.token_urlsafe(32)
        self.buffer_bytes = buffer_bytes
        self.child = subprocess.Popen(
            [sys.executable, "-c", SERVER, secret, str(buffer_bytes)],
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
        self.local = self.engine.allocate(buffer_bytes)
        chunk = np.random.default_rng(0).integers(0, 256, min(buffer_bytes, 2**26), np.uint8)
        for at in range(0, buffer_bytes, len(chunk)):
            self.local.array[at : at + len(chunk)] = chunk
        self.scratch = np.ones(min(buffer_bytes, 2**28), np.uint8)
        self.socket = socket.create_connection(("127.0.0.1", int(line[1])))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def transfers(self, op: Op, parts: list[tuple[int, int]]) -> list[Transfer]:
        """Return a transfer for each (place, length), at the same place on both sides."""
        return [
            Transfer(op, self.local, self.segment, self.remote.offset + at, size, local_offset=at)
            for at, size in parts
        ]

    def prepare(
        self, op: Op, parts: list[tuple[int, int]], transport: TransportChoice
    ) -> PreparedBatch:
        """Make a batch ready."""
        only = None if transport == "best" else transport
        return self.engine.prepare(self.transfers(op, parts), transport=only)

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


class _Mooncake:
    """Two processes of the rival; one offers, one moves."""

    def __init__(self, stack: contextlib.ExitStack, buffer_bytes: int) -> None:
        python = install_peer("mooncake", PEERS)
        giver, self._taker = (
            stack.enter_context(PeerProcess(python, "mooncake_peer.py")) for _ in range(2)
        )
        self._at = giver.call("start", size=buffer_bytes)
        self._taker.call("start", size=buffer_bytes)
        if not self._taker.call(
            "check", target=self._at["name"], address=self._at["address"], size=2**20
        ):
            raise PeerLostError("bench.start", "the peer moved other bytes than it was given")

    def measure_us(self, op: Op, batches: list[list[tuple[int, int]]]) -> float:
        """Microseconds a batch; each is a list of (place, length)."""
        return self._taker.call(
            "measure",
            target=self._at["name"],
            address=self._at["address"],
            op=op.name.lower(),
            batches=batches,
            seconds=MEASURE_S,
        )


def make_cases(*, quick: bool, with_peers: bool = False) -> Iterator[BenchCase]:
    """Yield the cases; the processes live as long as the iteration.

    Args:
        quick: few sizes, one place, 64 MiB.
        with_peers: the baseline is the rival, installed if need be.
    """
    buffer_bytes = QUICK_BUFFER_BYTES if quick else WALK_BUFFER_BYTES
    with contextlib.ExitStack() as stack:
        pair = _Pair(buffer_bytes)
        stack.callback(pair.close)
        mooncake = _Mooncake(stack, buffer_bytes) if with_peers else None
        for transport in ("tcp", "shm", "cma", "best"):
            for op in (Op.WRITE, Op.READ):
                for size in QUICK_SIZES if quick else SIZES:
                    for count in BATCHES:
                        for walk in (False,) if quick else (False, True):
                            limit = buffer_bytes if walk else min(buffer_bytes, SMALL_BUFFER_BYTES)
                            if size * count <= limit:
                                yield _make_case(pair, mooncake, transport, op, size, count, walk)
                if not quick:
                    yield _make_kv_case(pair, mooncake, transport, op)


def _make_case(
    pair: _Pair,
    mooncake: _Mooncake | None,
    transport: TransportChoice,
    op: Op,
    size: int,
    count: int,
    walk: bool,
) -> BenchCase:
    total = size * count
    places = list(range(0, pair.buffer_bytes - total + 1, total))[:MAX_PREPARED] if walk else [0]
    batches = [[(at + i * size, size) for i in range(count)] for at in places]
    name = f"transport={transport} op={op.name.lower()} size={size} batch={count}"
    return _compare(
        f"{name} walk={'yes' if walk else 'no'}", pair, mooncake, transport, op, batches
    )


def _make_kv_case(
    pair: _Pair, mooncake: _Mooncake | None, transport: TransportChoice, op: Op
) -> BenchCase:
    """Blocks lie apart, as a cache has them: nothing can be merged."""
    parts, at = [], 0
    for _ in range(KV_LAYERS * KV_BLOCKS):
        for size in KV_PARTS:
            parts.append((at, size))
            at += size + 4096
    name = f"workload=kv transport={transport} op={op.name.lower()}"
    return _compare(name, pair, mooncake, transport, op, [parts])


def _compare(
    name: str,
    pair: _Pair,
    mooncake: _Mooncake | None,
    transport: TransportChoice,
    op: Op,
    batches: list[list[tuple[int, int]]],
) -> BenchCase:
    case = _Comparison(pair, transport, op, batches)
    baseline: Callable[[], float] = case.at_ceiling_us
    if mooncake is not None:
        baseline = lambda: mooncake.measure_us(op, batches)  # noqa: E731
    return BenchCase(
        name=name,
        unit="us",
        ours=case.ours_us,
        check=case.check,
        baseline=baseline,
        baseline_name=case.ceiling_name if mooncake is None else "mooncake tcp",
        ceiling=case.at_ceiling_us,
    )


class _Comparison:
    """Ours, the ceiling and the check of the same batches, submitted in turn."""

    def __init__(
        self,
        pair: _Pair,
        transport: TransportChoice,
        op: Op,
        batches: list[list[tuple[int, int]]],
    ) -> None:
        self._pair = pair
        self._transport: TransportChoice = transport
        self._op = op
        self._parts = batches[0]
        self._total = sum(size for _, size in batches[0])
        # Preparing is for those that are run: a generator of cases makes many that are not.
        self._prepared: Iterator[PreparedBatch] | None = None
        self._batches = batches
        self.ceiling_name = "plain socket" if transport == "tcp" else "memcpy"

    def ours_us(self) -> float:
        if self._prepared is None:
            self._prepared = cycle(
                [self._pair.prepare(self._op, parts, self._transport) for parts in self._batches]
            )
        return _measure_us(lambda: next(self._prepared).submit().wait())  # type: ignore[arg-type]

    def at_ceiling_us(self) -> float:
        return _measure_us(self._move_at_ceiling)

    def _move_at_ceiling(self) -> None:
        pair = self._pair
        left = self._total
        while left > 0:
            part = min(left, len(pair.scratch))
            if self._transport == "tcp":
                pair.move_plain(self._op, part)
            else:
                np.copyto(pair.scratch[:part], pair.local.array[:part])
            left -= part

    def check(self) -> str:
        pair = self._pair
        end = max(at + size for at, size in self._parts)
        view = pair.local.array[:end]
        moved = np.zeros(end, bool)
        for at, size in self._parts:
            moved[at : at + size] = True
        expected = view.copy()
        pair.prepare(Op.WRITE, self._parts, self._transport).submit().wait()
        view[:] = 0
        pair.prepare(Op.READ, self._parts, self._transport).submit().wait()
        is_same = np.array_equal(view[moved], expected[moved]) and not view[~moved].any()
        view[:] = expected
        return "ok" if is_same else "bytes differ"


def _measure_us(function: Callable[[], object]) -> float:
    times: list[float] = []
    end = time.monotonic() + MEASURE_S
    while not times or time.monotonic() < end:
        times.append(time_call(function))
    return sorted(times)[len(times) // 2] * 1e6
