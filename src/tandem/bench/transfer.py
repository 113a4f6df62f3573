"""`tandem bench transfer`: transfers to another process of this machine, by transport and size.

Cases are ``transport=tcp|shm|cma|best op=read|write size=BYTES batch=COUNT walk=no|yes``, in
microseconds per batch. ``walk=yes`` moves through a gibibyte instead of using one place; ``best``
lets the engine choose the transport. ``workload=kv`` is the KV cache of a prompt of 4K tokens: 61
layers of 32 blocks of 144 KiB, each moved as 128 KiB and 16 KiB. Batches are prepared. Bytes are
compared before a time counts, and all memory is touched before.

The ceiling of tcp is a plain blocking socket to the same process, with one request and one
confirmation per batch, at the same addresses as ours; with peers, iperf3 for a mebibyte and more.
Both use the congestion control that is fastest inside a host (see
`docs/design/transfer/transfer.md`). The ceiling of the other transports is a memcpy of as many
bytes. iperf3 sends and receives one buffer of 128 KiB repeatedly, which stays in a CPU cache. The
plain socket moves all bytes of a batch from source to destination, so its figure is reported too,
as ``keeping socket``: it is the limit for a receiver that keeps the data. The baseline is the
ceiling or, with peers, the best of the rivals, each in processes of its own and measured in turn
with ours: Mooncake's engine over TCP (also with TENT, if the wheel has it) and NIXL, with its
default for the same host or ``UCX_TLS=tcp``.

``polling=no`` is ours without polling. Plain sockets that sleep too, between the same two processes
(``blocking sockets``), show the limit of two sleeping processes; the rivals always poll. The
placement of the two processes matters more than either: waking a process on another, halted core
takes several times as long as on the same core. There are therefore three cases: cores chosen by
the system, ``cores=one`` with both processes on one core, and ``cores=two`` with one core each. The
system always chooses the cores of rivals.

``tags=gmac|hmac`` is ours with keyed tags, as between two hosts; its baseline is ours without tags,
between the same two processes.

``workload=call size=BYTES`` is a call and its answer between two Python processes; its baseline is
the same over pyzmq.
"""

import contextlib
import copy
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import zmq

from tandem._native import has_gmac
from tandem.bench.children import start_child
from tandem.bench.harness import BenchCase, time_call
from tandem.bench.placement import on_cores
from tandem.bench.rivals.processes import RivalProcess, install_rival
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
"""Largest number of batches that are prepared for a walk through memory, each at another address:
together they exceed every cache.
"""
MEASURE_S = 0.02
"""Shortest measurement in seconds: short batches are repeated until it has passed."""
KV_LAYERS, KV_BLOCKS, KV_PARTS = 61, 32, (128 * 1024, 16 * 1024)
MOONCAKE = ("mooncake-transfer-engine-non-cuda==0.3.13", "numpy>=1.26")
NIXL = ("nixl-cu12==1.5.1", "numpy>=1.26")
IPERF_BYTES = 256 * 2**20
IPERF_FROM_BYTES = 2**20
"""Bytes that one iperf3 measurement moves; with fewer, iperf3's rate means nothing."""
CALL_SIZES = (200, 65_536)
TAGGED = ((2**20, 1), (2**24, 1), (65_536, 256))
"""(size in bytes, batch) of the cases with tags."""

UNPACED = b"reno"
"""Congestion control of the ceilings: an algorithm that paces, such as BBR, halves the rate on
loopback.
"""

TransportChoice = Literal["tcp", "shm", "cma", "best"]

POLLING_SIZES = (4096, 65_536)
"""Sizes in bytes at which polling makes a difference."""

Cores = Literal["any", "one", "two"]
"""Placement of a pair's two processes: chosen by the system, both on one core, or on one core each.
"""

SERVER = """
import socket, sys, threading
import numpy as np
import zmq
from tandem.transfer import TransferConfig, TransferEngine
polling = {} if len(sys.argv) < 5 else {"polling_us": int(sys.argv[4])}
engine = TransferEngine(TransferConfig(name="bench", secret=sys.argv[1], **polling))
engine.serve_calls(lambda calls: [call.payload for call in calls])
buffer = engine.allocate(int(sys.argv[2]), name="buffer")
buffer.array[:] = 1
plain = np.ones(int(sys.argv[2]), np.uint8)
engine.register(plain, name="plain")
def answer(replies=zmq.Context.instance().socket(zmq.REP)):
    bound.append(replies.bind_to_random_port("tcp://127.0.0.1"))
    ready.set()
    while True:
        replies.send(replies.recv())
bound, ready = [], threading.Event()
threading.Thread(target=answer, daemon=True).start()
ready.wait(30)
listener = socket.create_server(("127.0.0.1", 0))
print(engine.address, listener.getsockname()[1], bound[0], flush=True)
peer, _ = listener.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, sys.argv[3].encode())
view = memoryview(np.ones(1 << 28, np.uint8))
while head := peer.recv(24, socket.MSG_WAITALL):
    op, at, size = (int.from_bytes(head[i : i + 8], "little") for i in (0, 8, 16))
    part = view[at : at + size]
    if op == 0:
        peer.sendall(part)
    else:
        done = 0
        while done < size:
            done += peer.recv_into(part[done:])
        peer.sendall(b"k")
"""


class _Pair:
    """This process and a child that offers memory, connected by our engine and by a
    plain socket.
    """

    def __init__(self, buffer_bytes: int, *, has_polling: bool = True) -> None:
        self.secret = secret = secrets.token_urlsafe(32)
        self.buffer_bytes = buffer_bytes
        self.child = start_child(
            [sys.executable, "-c", SERVER, secret, str(buffer_bytes), UNPACED.decode()]
            + ([] if has_polling else ["0"]),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.child.stdout is not None
        line = self.child.stdout.readline().split()
        if len(line) != 3:
            raise PeerLostError("bench.start", "the serving process did not start")
        config = TransferConfig(secret=secret)
        if not has_polling:
            config = msgspec.structs.replace(config, polling_us=0)
        self.engine = TransferEngine(config)
        self.address = line[0]
        self.segment = self.engine.open(self.address)
        self.remote = self.segment.buffer("buffer")
        self.plain = self.segment.buffer("plain")
        self.local = self.engine.allocate(buffer_bytes)
        self.array = self.local.array
        chunk = np.random.default_rng(0).integers(0, 256, min(buffer_bytes, 2**26), np.uint8)
        for at in range(0, buffer_bytes, len(chunk)):
            self.array[at : at + len(chunk)] = chunk
        self.scratch = np.ones(min(buffer_bytes, 2**28), np.uint8)
        self.socket = socket.create_connection(("127.0.0.1", int(line[1])))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)
        self.context = zmq.Context()
        self.zmq = self.context.socket(zmq.REQ)
        self.zmq.connect(f"tcp://127.0.0.1:{line[2]}")

    def prepare(
        self, op: Op, parts: list[tuple[int, int]], transport: TransportChoice
    ) -> PreparedBatch:
        """Prepare a batch with a transfer for each (offset, length), the same offset on both sides.

        cma accesses ordinary memory, as rivals offer it, instead of mapped memory: for mapped
        memory shm is faster, and cma would look up each small page if the system provides no huge
        pages.
        """
        far = self.plain if transport == "cma" else self.remote
        transfers = [
            Transfer(op, self.local, self.segment, far.offset + at, size, local_offset=at)
            for at, size in parts
        ]
        return self.engine.prepare(transfers, transport=None if transport == "best" else transport)

    def move_plain(self, op: Op, at: int, size: int) -> None:
        """Move ``size`` bytes over the plain socket, at offset ``at`` on both sides."""
        head = b"".join(word.to_bytes(8, "little") for word in (int(op), at, size))
        view = self.scratch.data[at : at + size]
        if op == Op.READ:
            self.socket.sendall(head)
            done = 0
            while done < size:
                done += self.socket.recv_into(view[done:])
        else:
            # The header of the message and its data are sent in one call: sending the header alone
            # would wake the other process before there is data to read.
            sent = self.socket.sendmsg([head, view])
            self.socket.sendall(view[sent - len(head) :])
            self.socket.recv(1)

    def on_cores(self, cores: Cores) -> contextlib.AbstractContextManager[None]:
        """Pin both processes to cores, as ``cores`` says, inside the ``with`` block."""
        if cores == "any":
            return contextlib.nullcontext()
        first, second, *_ = sorted(os.sched_getaffinity(0))
        return on_cores({os.getpid(): first, self.child.pid: first if cores == "one" else second})

    def with_tags(self, stack: contextlib.ExitStack, tags: Literal["always", "hmac"]) -> "_Pair":
        """Return the same two processes and memory over connections whose messages carry keyed tags
        (authentication codes).
        """
        other = copy.copy(self)
        other.engine = TransferEngine(TransferConfig(secret=self.secret, tags=tags))
        stack.callback(other.engine.close, deadline_s=5)
        other.segment = other.engine.open(self.address)
        other.local = other.engine.register(self.array)
        return other

    def close(self) -> None:
        """End the child."""
        self.socket.close()
        self.context.destroy(linger=0)
        self.engine.close(deadline_s=5)
        self.child.kill()
        self.child.wait(10)
        assert self.child.stdout is not None
        self.child.stdout.close()


class _Rival:
    """Two processes of a rival, one that offers memory and one that moves bytes; started for the
    first measurement.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        install: Callable[[], Path],
        script: str,
        buffer_bytes: int,
        settings: dict[str, str],
    ) -> None:
        self._stack = stack
        self._install = install
        self._script = script
        self._buffer_bytes = buffer_bytes
        self._settings = settings
        self._processes: list[RivalProcess] = []
        self._at: dict[str, Any] = {}

    def _start(self) -> None:
        python = self._install()
        self._processes = [
            self._stack.enter_context(RivalProcess(python, self._script, settings=self._settings))
            for _ in range(2)
        ]
        giver, taker = self._processes
        self._at = giver.call("start", size=self._buffer_bytes)
        taker.call("start", size=self._buffer_bytes)
        if not taker.call(
            "check", target=self._at["name"], address=self._at["address"], size=2**20
        ):
            raise PeerLostError("bench.start", "the peer moved other bytes than it was given")

    def measure_us(self, op: Op, batches: list[list[tuple[int, int]]]) -> float:
        """Return the microseconds per batch; each batch is a list of (offset, length)."""
        if not self._processes:
            self._start()
        for process in self._processes:
            process.resume()
        try:
            return self._processes[1].call(
                "measure",
                target=self._at["name"],
                address=self._at["address"],
                op=op.name.lower(),
                batches=batches,
                seconds=MEASURE_S,
            )
        finally:
            for process in self._processes:
                process.pause()


class _Iperf:
    """iperf3 on loopback, with the default congestion control and with one that does not pace."""

    def __init__(self, stack: contextlib.ExitStack, program: str) -> None:
        self._program = program
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = str(probe.getsockname()[1])
        server = start_child(
            [program, "-s", "-B", "127.0.0.1", "-p", self._port], stdout=subprocess.DEVNULL
        )
        stack.callback(server.wait, 10)
        stack.callback(server.kill)

    def time_us(self, size: int) -> float:
        """Return the microseconds for ``size`` bytes, at the faster of two rates measured now."""
        return min(
            self._time_stream_us(size, ()), self._time_stream_us(size, ("-C", UNPACED.decode()))
        )

    def _time_stream_us(self, size: int, options: tuple[str, ...]) -> float:
        command = [self._program, "-c", "127.0.0.1", "-p", self._port, "-n", str(IPERF_BYTES), "-J"]
        command += options
        said = b""
        for _ in range(50):
            done = subprocess.run(command, capture_output=True, timeout=60, check=False)
            if done.returncode == 0:
                end = msgspec.json.decode(done.stdout)["end"]
                # iperf3's report has no sum if the client lost the server's last message: the
                # measurement is repeated.
                if "sum_received" in end:
                    return size * 8e6 / end["sum_received"]["bits_per_second"]
            said = done.stdout
            time.sleep(0.1)  # The server is not listening yet, or is still ending the last stream.
        raise PeerLostError("bench.iperf3", said.decode(errors="replace")[-300:])


class _Rivals:
    """The other projects' transfer engines, and the ceiling that is measured with iperf3."""

    def __init__(self, stack: contextlib.ExitStack, buffer_bytes: int) -> None:
        def rival(name: str, needs: tuple[str, ...], script: str, **settings: str) -> _Rival:
            install = lambda: install_rival(name, needs)  # noqa: E731
            return _Rival(stack, install, script, buffer_bytes, settings)

        mooncake = {"mooncake tcp": rival("mooncake", MOONCAKE, "mooncake_rival.py")}
        if _has_tent(install_rival("mooncake", MOONCAKE)):
            mooncake["mooncake tent"] = rival(
                "mooncake", MOONCAKE, "mooncake_rival.py", MC_USE_TENT="1"
            )
        else:
            sys.stderr.write("mooncake's TENT is not built into its wheel: not measured\n")
        nixl_tcp = rival("nixl", NIXL, "nixl_rival.py", UCX_TLS="tcp")
        self.over_tcp = {**mooncake, "nixl UCX_TLS=tcp": nixl_tcp}
        self.on_host = {**mooncake, "nixl": rival("nixl", NIXL, "nixl_rival.py")}
        program = shutil.which("iperf3")
        self.iperf = None if program is None else _Iperf(stack, program)


def _has_tent(python: Path) -> bool:
    """Return True if this venv's engine was built with TENT: names of TENT's C++ namespace are in
    its binary.
    """
    engines = python.parents[1].glob("lib/python*/site-packages/mooncake/engine*.so")
    return any(b"8mooncake4tent" in engine.read_bytes() for engine in engines)


def make_cases(*, quick: bool, with_peers: bool = False) -> Iterator[BenchCase]:
    """Yield the cases; the processes live as long as the iteration.

    Args:
       quick: few sizes, one place, 64 MiB.
       with_peers: the baseline is the best rival; all are installed if need be.
    """
    buffer_bytes = QUICK_BUFFER_BYTES if quick else WALK_BUFFER_BYTES
    with contextlib.ExitStack() as stack:
        pair = _Pair(buffer_bytes)
        stack.callback(pair.close)
        peers = _Rivals(stack, buffer_bytes) if with_peers else None
        for transport in ("tcp", "shm", "cma", "best"):
            for op in (Op.WRITE, Op.READ):
                for size in QUICK_SIZES if quick else SIZES:
                    for count in BATCHES:
                        for walk in (False,) if quick else (False, True):
                            limit = buffer_bytes if walk else min(buffer_bytes, SMALL_BUFFER_BYTES)
                            if size * count <= limit:
                                yield _make_case(pair, peers, transport, op, size, count, walk)
                if not quick:
                    yield _make_kv_case(pair, peers, transport, op)
        for size in CALL_SIZES:
            yield _make_call_case(pair, size)
        kinds: tuple[Literal["always", "hmac"], ...] = ("always", "hmac")
        for tags in kinds if has_gmac() else kinds[1:]:
            tagged = pair.with_tags(stack, tags)
            for op in (Op.WRITE, Op.READ):
                for size, count in TAGGED:
                    yield _make_tagged_case(pair, tagged, op, size, count)
        still = _Pair(QUICK_BUFFER_BYTES, has_polling=False)
        stack.callback(still.close)
        num_cores = len(os.sched_getaffinity(0))
        # The unpinned case comes first: pinning processes to cores has an effect for some time
        # after it ends.
        for cores in ("any", "one", "two") if num_cores > 1 else ("any",):
            for op in (Op.WRITE, Op.READ):
                for size in POLLING_SIZES:
                    yield _make_still_case(still, peers, op, size, cores)


def _make_case(
    pair: _Pair,
    peers: _Rivals | None,
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
    name += f" walk={'yes' if walk else 'no'}"
    return _compare(name, pair, peers, transport, op, batches)


def _make_still_case(
    pair: _Pair, peers: _Rivals | None, op: Op, size: int, cores: Cores
) -> BenchCase:
    """Return a case that compares our engine without polling (its threads sleep while they wait)
    with plain sockets, between processes that both sleep until an answer arrives; ``cores`` says
    where these run.
    """
    case = _Comparison(pair, "tcp", op, [[(0, size)]])

    def measure(function: Callable[[], float]) -> float:
        with pair.on_cores(cores):
            return function()

    at_sockets = partial(measure, case.at_ceiling_us)
    name = f"transport=tcp op={op.name.lower()} size={size} batch=1 walk=no polling=no"
    rivals = None if peers is None else _list_rivals(peers, "tcp", op, [[(0, size)]])
    return BenchCase(
        name=name if cores == "any" else f"{name} cores={cores}",
        unit="us",
        ours=partial(measure, case.ours_us),
        check=case.check,
        baseline=None if rivals else at_sockets,
        baseline_name="blocking sockets",
        rivals=rivals,
        limits={"blocking sockets": at_sockets} if rivals else {},
    )


def _make_tagged_case(pair: _Pair, tagged: _Pair, op: Op, size: int, count: int) -> BenchCase:
    parts = [(i * size, size) for i in range(count)]
    case = _Comparison(tagged, "tcp", op, [parts])
    kind = "gmac" if tagged.engine.config.tags == "always" else "hmac"
    return BenchCase(
        name=f"transport=tcp op={op.name.lower()} size={size} batch={count} walk=no tags={kind}",
        unit="us",
        ours=case.ours_us,
        check=case.check,
        baseline=_Comparison(pair, "tcp", op, [parts]).ours_us,
        baseline_name="without tags",
    )


def _make_kv_case(
    pair: _Pair, peers: _Rivals | None, transport: TransportChoice, op: Op
) -> BenchCase:
    """Return a case of KV blocks that lie apart in memory, as in a cache, so that none can be
    merged.
    """
    parts, at = [], 0
    for _ in range(KV_LAYERS * KV_BLOCKS):
        for size in KV_PARTS:
            parts.append((at, size))
            at += size + 4096
    name = f"workload=kv transport={transport} op={op.name.lower()}"
    return _compare(name, pair, peers, transport, op, [parts])


def _make_call_case(pair: _Pair, size: int) -> BenchCase:
    payload = pair.array[:size].tobytes()

    def call() -> bytes:
        return pair.engine.call(pair.segment, payload)

    def ask_zmq() -> bytes:
        pair.zmq.send(payload)
        return pair.zmq.recv()

    return BenchCase(
        name=f"workload=call size={size}",
        unit="us",
        ours=lambda: _measure_us(call),
        check=lambda: "ok" if call() == ask_zmq() == payload else "bytes differ",
        baseline=lambda: _measure_us(ask_zmq),
        baseline_name="pyzmq",
    )


def _compare(
    name: str,
    pair: _Pair,
    peers: _Rivals | None,
    transport: TransportChoice,
    op: Op,
    batches: list[list[tuple[int, int]]],
) -> BenchCase:
    case = _Comparison(pair, transport, op, batches)
    ceiling: Callable[[], float] = case.at_ceiling_us
    rivals: dict[str, Callable[[], float]] = {}
    limits: dict[str, Callable[[], float]] = {}
    if peers is not None:
        rivals = _list_rivals(peers, transport, op, batches)
        total = sum(size for _, size in batches[0])
        if transport == "tcp" and peers.iperf is not None and total >= IPERF_FROM_BYTES:
            ceiling = partial(peers.iperf.time_us, total)
            limits["keeping socket"] = case.at_ceiling_us
    return BenchCase(
        name=name,
        unit="us",
        ours=case.ours_us,
        check=case.check,
        baseline=None if rivals else case.at_ceiling_us,
        baseline_name=case.ceiling_name,
        rivals=rivals or None,
        ceiling=ceiling,
        limits=limits,
    )


def _list_rivals(
    peers: _Rivals, transport: TransportChoice, op: Op, batches: list[list[tuple[int, int]]]
) -> dict[str, Callable[[], float]]:
    chosen = peers.over_tcp if transport == "tcp" else peers.on_host
    return {rival: partial(process.measure_us, op, batches) for rival, process in chosen.items()}


class _Comparison:
    """The functions of a case: our engine, the ceiling and the check, on the same batches of
    transfers, submitted in turn.
    """

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
        # Batches are prepared when the case runs: the generator makes many cases that are never
        # run.
        self._prepared: Iterator[PreparedBatch] | None = None
        self._batches = batches
        self._places = cycle([parts[0][0] for parts in batches])
        self.ceiling_name = "plain socket" if transport == "tcp" else "memcpy"

    def ours_us(self) -> float:
        if self._prepared is None:
            prepare = partial(self._pair.prepare, self._op, transport=self._transport)
            batches = [prepare(parts) for parts in self._batches]
            for batch in batches:  # The first access to a mapped page has a cost of its own.
                batch.submit().wait()
            self._prepared = cycle(batches)
        return _measure_us(lambda: next(self._prepared).submit().wait())  # type: ignore[arg-type]

    def at_ceiling_us(self) -> float:
        return _measure_us(self._move_at_ceiling)

    def _move_at_ceiling(self) -> None:
        pair = self._pair
        at, left = next(self._places), self._total
        while left > 0:
            part = min(left, len(pair.scratch))
            to = at % (len(pair.scratch) - part + 1)
            if self._transport == "tcp":
                pair.move_plain(self._op, to, part)
            else:
                np.copyto(pair.scratch[to : to + part], pair.array[at : at + part])
            at, left = at + part, left - part

    def check(self) -> str:
        pair = self._pair
        end = max(at + size for at, size in self._parts)
        view = pair.array[:end]
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
