"""Somebody on the path: reads every frame and record, and sends on what it likes.

It knows the format and no key: the numbers, sizes and check sums that need none it makes right.
Written from transfer_wire.md and not from the code.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

from tandem._native import crc32c

FRAME_HEADER, RECORD_HEADER, TAG = 48, 8, 16
HELLO, CHALLENGE, PROOF = 1, 2, 3
CONTROL, RAIL, CALLS = 0, 1, 2
TO_SERVER, TO_CLIENT = 0, 1
TIMEOUT_S = 60


@dataclass
class Way:
    """One direction of a connection, as far as the proxy has seen it."""

    role: int
    direction: int
    seen: list[bytes] = field(default_factory=list)
    """Records as they came."""
    other: "Way | None" = None
    """The same connection's other direction."""
    held: bytes | None = None


Attack = Callable[[Way, bytes], list[bytes]]
"""Given a record as it came, returns what is sent in its place."""


def number(record: bytes) -> int:
    return struct.unpack_from("<I", record, 4)[0]


def renumber(record: bytes, sequence: int) -> bytes:
    return record[:4] + struct.pack("<I", sequence) + record[8:]


def rebuild(record: bytes, body: bytes) -> bytes:
    """A record of another body, with its size and the frame's check sums right."""
    return struct.pack("<I", len(body)) + record[4:8] + fix_frame(body) + record[-TAG:]


def fix_frame(body: bytes) -> bytes:
    """Make the check sums of a frame right, as far as it lies in these bytes."""
    if not body.startswith(b"TNX1") or len(body) < FRAME_HEADER:
        return body
    head, payload = body[: FRAME_HEADER - 4], body[FRAME_HEADER:]
    (size,) = struct.unpack_from("<I", head, 8)
    if head[6] & 1 and len(payload) >= size:
        head = head[:12] + struct.pack("<I", crc32c(payload[:size])) + head[16:]
    return head + struct.pack("<I", crc32c(head)) + payload


class RecordProxy:
    """Listens on loopback and forwards to ``target``, records through ``attack``.

    ``attack`` may be changed at any time; None passes everything on. ``greet`` may alter a frame of
    the handshake: it is given its type and payload. A context manager.
    """

    def __init__(self, target: str = "") -> None:
        self.target = target
        self.attack: Attack | None = None
        self.greet: Callable[[int, bytes], bytes] | None = None
        self.num_attacks = 0
        self.ways: list[Way] = []
        self._streams: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def ways_of(self, role: int, direction: int) -> Iterator[Way]:
        """The directions of connections of a role, oldest first."""
        return (way for way in list(self.ways) if (way.role, way.direction) == (role, direction))

    def close(self) -> None:
        for stream in [self._listener, *self._streams]:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()
        for thread in list(self._threads):
            thread.join(TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                host, _, port = self.target.rpartition(":")
                far = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
            except OSError:
                return
            for stream in (near, far):
                stream.settimeout(None)
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._streams += [near, far]
            to_server, to_client = Way(-1, TO_SERVER), Way(-1, TO_CLIENT)
            to_server.other, to_client.other = to_client, to_server
            self.ways += [to_server, to_client]
            self._start(self._pump, to_server, near, far, (HELLO, PROOF))
            self._start(self._pump, to_client, far, near, (CHALLENGE,))

    def _pump(
        self, way: Way, source: socket.socket, sink: socket.socket, greetings: tuple[int, ...]
    ) -> None:
        with contextlib.suppress(OSError, EOFError):
            for kind in greetings:
                head = _take(source, FRAME_HEADER)
                payload = _take(source, struct.unpack_from("<I", head, 8)[0])
                assert head[4] == kind
                if kind == HELLO:
                    assert way.other is not None
                    way.role = way.other.role = payload[4]
                if self.greet is not None:
                    payload = self.greet(kind, payload)
                head = head[:8] + struct.pack("<I", len(payload)) + head[12:]
                sink.sendall(fix_frame(head + payload))
            while True:
                head = _take(source, RECORD_HEADER)
                record = head + _take(source, struct.unpack_from("<I", head)[0] + TAG)
                way.seen.append(record)
                sent = [record] if self.attack is None else self.attack(way, record)
                self.num_attacks += sent != [record]
                for one in sent:
                    sink.sendall(one)
        for stream in (source, sink):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)


def _take(stream: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = stream.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
