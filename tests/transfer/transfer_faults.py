"""Faults on purpose, for tests: of paths between processes, and of transports inside a host.

``FaultProxy`` stands between an engine and the address that it reaches, and does what networks and
broken boxes do: delay, throttle, corrupt, drop, reorder, duplicate, stall, die. ``inject_faults``
does the like to what local, shm, cma and file move. Both draw from a seeded generator, so a failing
run can be repeated as far as threads allow. Nothing of this is loaded by the engine itself.
"""

import contextlib
import random
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

from tandem.core.errors import ConfigError
from tandem.transfer.engine import TransferEngine

__all__ = ["FaultCount", "FaultProxy", "inject_faults"]

HEADER_BYTES = 48
MAGIC = b"TNX1"
SELECT_S = 0.02
CHUNK_BYTES = 1 << 18
MAX_QUEUED_BYTES = 1 << 20
MAX_DROPPED_BYTES = 4096


@dataclass(slots=True)
class FaultCount:
    """What ``inject_faults`` did."""

    num_faults: int = 0
    """Chunks that went wrong; 0 until the context has ended."""


@contextlib.contextmanager
def inject_faults(
    engine: TransferEngine,
    transport: Literal["local", "shm", "cma", "file"],
    *,
    seed: int = 0,
    drop: float = 0.0,
    corrupt: float = 0.0,
    duplicate: float = 0.0,
    reorder: float = 0.0,
    delay: float = 0.0,
    delay_s: float = 0.0,
    is_dead: bool = False,
) -> Iterator[FaultCount]:
    """Let chunks of a transport of this engine go wrong while the context lasts.

    The context's value counts them once it has ended.

    Args:
        engine: whose transfers.
        transport: not tcp, which has ``FaultProxy``. For file, ``delay`` is a disk that hangs, and
            every other fault an I/O error.
        seed: of the generator.
        drop: probability that a chunk is not moved, and reported as failed.
        corrupt: that wrong bytes are moved and the failure is reported (torn).
        duplicate: that it is moved twice.
        reorder: that its second half is moved before its first.
        delay: that it is moved ``delay_s`` late; a long one is a stall.
        delay_s: seconds.
        is_dead: every chunk fails.

    Raises: ConfigError (tcp; no probabilities).
    """
    rates = (drop, corrupt, duplicate, reorder, delay)
    if transport == "tcp" or min(rates) < 0 or sum(rates) > 1 or delay_s < 0:
        raise ConfigError(
            "transfer.faults", f"{transport}, rates {rates}: probabilities, and not of tcp"
        )
    engine.core.set_faults(
        transport,
        seed=seed,
        drop=drop,
        corrupt=corrupt,
        duplicate=duplicate,
        reorder=reorder,
        delay=delay,
        delay_s=delay_s,
        is_dead=is_dead,
    )
    count = FaultCount()
    try:
        yield count
    finally:
        count.num_faults = engine.core.clear_faults(transport)


class _Framer:
    """Finds where frames end in one direction of a connection."""

    def __init__(self) -> None:
        self.head = bytearray()
        self.left = 0  # Of the payload.

    @property
    def is_at_start(self) -> bool:
        return not self.head and self.left == 0

    def take(self, data: memoryview) -> tuple[int, bool]:
        """Walk over bytes up to the end of a frame; returns how many, and whether it ended."""
        used = 0
        if self.left == 0:
            used = min(HEADER_BYTES - len(self.head), len(data))
            self.head += data[:used]
            if len(self.head) < HEADER_BYTES:
                return used, False
            self.left = int.from_bytes(self.head[8:12], "little")
            if not self.head.startswith(MAGIC):
                self.left = 0  # No stream of ours: every 48 bytes are a frame.
            self.head.clear()
        part = min(self.left, len(data) - used)
        self.left -= part
        return used + part, self.left == 0


class _Way:
    """One direction of a connection: what was read and is still to be sent."""

    def __init__(self) -> None:
        self.framer = _Framer()
        self.frame = bytearray()  # A frame that is collected, for faults of whole frames.
        self.held: bytearray | None = None  # One that goes after the next.
        self.queue: list[tuple[float, bytearray]] = []


def _is_closed_by_peer(stream: socket.socket) -> bool:
    try:
        return not stream.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


class FaultProxy:
    """A TCP proxy: listens on loopback, forwards to ``target``. One thread. A context manager.

    Attributes may be changed at any time, while connections live:

    - ``corrupt``, ``drop``: probabilities per chunk that a bit is flipped, that some bytes are left
      out (a hole in the stream, as no TCP would make; the hardest form of corruption);
    - ``drop_frames``, ``duplicate``, ``reorder``: probabilities per whole frame of the engine's
      protocol that it is lost, sent twice, or sent after the next one;
    - ``delay_s`` holds each chunk back, ``rate`` is bytes per second (0 = unlimited);
    - ``is_stalled`` swallows nothing and moves nothing, ``is_dead`` refuses and cuts;
    - ``hold`` stalls the connections that exist now, later ones move; ``release`` ends that.

    ``num_faults``, ``num_bytes`` and ``num_connections`` count. A handshake is never a whole-frame
    fault, so that the path can come back.
    """

    def __init__(self, seed: int = 0, target: str = "") -> None:
        self.rng = random.Random(seed)
        self.target = target
        self.corrupt = self.drop = self.delay_s = self.rate = 0.0
        self.drop_frames = self.duplicate = self.reorder = 0.0
        self.is_stalled = self.is_dead = False
        self.num_connections = self.num_faults = self.num_bytes = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.pairs: dict[socket.socket, socket.socket] = {}
        self.targets: set[socket.socket] = set()  # Those that lead to the target.
        self.ways: dict[socket.socket, _Way] = {}  # By the socket that they lead to.
        self.ending: set[socket.socket] = set()
        self.held: frozenset[socket.socket] = frozenset()  # Replaced as a whole: by other threads.
        self.budget = 0.0
        self.budget_at = time.monotonic()
        self.is_stopping = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def cut(self) -> None:
        """Reset all connections; new ones are accepted unless ``is_dead``."""
        self._wants_cut = True

    _wants_cut = False

    def hold(self) -> None:
        """Move nothing over the connections that exist now, until ``release``."""
        self.held = frozenset(self.pairs.copy())

    def release(self) -> None:
        """Move what was held."""
        self.held = frozenset()

    @property
    def num_held_open(self) -> int:
        """Held connections that the target has not closed."""
        return sum(not _is_closed_by_peer(far) for far in self.held if far in self.targets)

    def close(self) -> None:
        """Cut everything and end the thread."""
        self.is_stopping = True
        self.thread.join(60)
        self._drop_all()
        self.listener.close()
        self.selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self.is_stopping:
            if self._wants_cut or self.is_dead:
                self._wants_cut = False
                self._drop_all()
            for key, _ in self.selector.select(SELECT_S / 10 if self._has_queued() else SELECT_S):
                source = key.fileobj
                if source is self.listener:
                    self._accept()
                elif (
                    isinstance(source, socket.socket)
                    and source in self.pairs
                    and not self.is_stalled
                    and source not in self.held
                ):
                    self._forward(source)
            self._flush()

    def _has_queued(self) -> bool:
        return any(way.queue for way in self.ways.values())

    def _accept(self) -> None:
        near, _ = self.listener.accept()
        host, _, port = self.target.rpartition(":")
        try:
            if self.is_dead or not self.target:
                raise ConnectionRefusedError
            far = socket.create_connection((host.strip("[]"), int(port)), timeout=2)
        except OSError:
            near.close()
            return
        self.num_connections += 1
        self.targets.add(far)
        for a, b in ((near, far), (far, near)):
            a.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            a.setblocking(False)
            self.pairs[a] = b
            self.ways[a] = _Way()
            self.selector.register(a, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        target = self.pairs[source]
        way = self.ways[target]
        if sum(len(chunk) for _, chunk in way.queue) > MAX_QUEUED_BYTES:
            return
        if self.rate and not self._take_budget():
            return
        try:
            size = min(CHUNK_BYTES, max(4096, int(self.rate * 0.002))) if self.rate else CHUNK_BYTES
            data = source.recv(size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # What was read before still goes out, as from a router that knows nothing of the end.
            self.ending.add(target)
            self.selector.unregister(source)
            return
        self.budget -= len(data)
        self.num_bytes += len(data)
        chunk = bytearray(data)
        if self.corrupt and self.rng.random() < self.corrupt:
            self.num_faults += 1
            chunk[self.rng.randrange(len(chunk))] ^= 1 << self.rng.randrange(8)
        if self.drop and self.rng.random() < self.drop:
            self.num_faults += 1
            begin = self.rng.randrange(len(chunk))
            del chunk[begin : begin + self.rng.randint(1, MAX_DROPPED_BYTES)]
        self._split(way, chunk)

    def _split(self, way: _Way, chunk: bytearray) -> None:
        """Pass bytes on; collect whole frames where whole frames may go wrong."""
        rest = memoryview(chunk)
        while rest:
            begins = way.framer.is_at_start
            size, ended = way.framer.take(rest)
            collects = bool(way.frame) or (begins and self._has_frame_faults)
            if collects:
                way.frame += rest[:size]
                if ended:
                    frame, way.frame = way.frame, bytearray()
                    self._send_frame(way, frame)
            else:
                self._send(way, bytearray(rest[:size]))
            rest = rest[size:]

    @property
    def _has_frame_faults(self) -> bool:
        return self.drop_frames + self.duplicate + self.reorder > 0

    def _send_frame(self, way: _Way, frame: bytearray) -> None:
        is_handshake = frame[4] <= 4
        draw = 1.0 if is_handshake else self.rng.random()
        if draw < self.drop_frames:
            self.num_faults += 1
            return
        draw -= self.drop_frames
        if 0 <= draw < self.reorder and way.held is None:
            self.num_faults += 1
            way.held = frame
            return
        self._send(way, frame)
        if 0 <= draw - self.reorder < self.duplicate:
            self.num_faults += 1
            self._send(way, bytearray(frame))
        if way.held is not None:
            self._send(way, way.held)
            way.held = None

    def _send(self, way: _Way, chunk: bytearray) -> None:
        way.queue.append((time.monotonic() + self.delay_s, chunk))

    def _take_budget(self) -> bool:
        now = time.monotonic()
        self.budget = min(self.budget + (now - self.budget_at) * self.rate, self.rate * 0.02)
        self.budget_at = now
        return self.budget > 0

    def _flush(self) -> None:
        now = time.monotonic()
        for target, way in list(self.ways.items()):
            if target in self.held:
                continue
            chunks = way.queue
            while chunks and chunks[0][0] <= now and not self.is_stalled:
                chunk = chunks[0][1]
                try:
                    sent = target.send(chunk) if chunk else 0
                except BlockingIOError:
                    break
                except OSError:
                    self._drop(target)
                    break
                if sent < len(chunk):
                    del chunk[:sent]
                    break
                chunks.pop(0)
            if not chunks and target in self.ending:
                self._drop(target)

    def _drop(self, one: socket.socket) -> None:
        other = self.pairs.get(one)
        for end in (one, other):
            if end is None or end not in self.pairs:
                continue
            del self.pairs[end]
            self.ways.pop(end, None)
            self.ending.discard(end)
            self.targets.discard(end)
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(end)
            end.close()

    def _drop_all(self) -> None:
        for one in list(self.pairs):
            self._drop(one)
