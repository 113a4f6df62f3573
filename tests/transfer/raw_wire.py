"""The wire format spoken by hand, to say what no proper peer would (transfer_wire.md).

Written from the page and not from the code, so that the two cannot drift apart unseen.
"""

import hashlib
import hmac
import os
import socket
import struct

from tandem._native import crc32c

HEADER = struct.Struct("<4sBBHIIQQQI")
HELLO, CHALLENGE, PROOF, READY = 1, 2, 3, 4
READ, DESCRIBE, DESCRIPTION, PING, PONG = 18, 32, 33, 40, 41
GRANT, GRANTED, BYE = 34, 35, 42
CALL, REPLY = 48, 49
CONTROL, RAIL, CALLS = 0, 1, 2
TIMEOUT_S = 60


def frame(
    kind: int, payload: bytes = b"", *, code=0, id_=0, offset=0, length=0, size=None
) -> bytes:
    """Encode a frame; ``size`` claims another length than the payload has."""
    flags = 1 if payload else 0
    count = len(payload) if size is None else size
    crc = crc32c(payload) if payload else 0
    head = HEADER.pack(b"TNX1", kind, code, flags, count, crc, id_, offset, length, 0)
    return head + struct.pack("<I", crc32c(head)) + payload


def text(value: str) -> bytes:
    return struct.pack("<H", len(value)) + value.encode()


def prove(side: str, secret: str, hello: bytes, challenge: bytes) -> bytes:
    bare = challenge[:-32] + bytes(32)
    label = f"tandem transfer v1 {side}".encode()
    parts = label + hashlib.sha256(hello).digest() + hashlib.sha256(bare).digest()
    return hmac.digest(secret.encode(), parts, "sha256")


def say_hello(role: int, max_version: int, process: bytes) -> bytes:
    hello = struct.pack("<HHB", 1, max_version, role) + os.urandom(16)
    return hello + struct.pack("<IQ", 1, 0) + os.urandom(32) + process + text("raw")


def greet(address: str, role: int, *, max_version: int) -> bytes:
    """Say hello; returns the challenge and goes."""
    host, port = address.rsplit(":", 1)
    with RawPeer(socket.create_connection((host, int(port)), timeout=TIMEOUT_S)) as peer:
        nobody = text("") + struct.pack("<IQ", 0, 0)
        peer.stream.sendall(frame(HELLO, say_hello(role, max_version, nobody)))
        return peer.receive()[1]


def listen() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(TIMEOUT_S)
    return listener


class RawPeer:
    """One connection, as client or as server. A context manager."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        stream.settimeout(TIMEOUT_S)

    @classmethod
    def connect(
        cls, address: str, secret: str, role: int, *, max_version=2, process=None
    ) -> "RawPeer":
        host, port = address.rsplit(":", 1)
        peer = cls(socket.create_connection((host, int(port)), timeout=TIMEOUT_S))
        if process is None:
            process = text("") + struct.pack("<IQ", 0, 0)
        hello = say_hello(role, max_version, process)
        peer.stream.sendall(frame(HELLO, hello))
        _, challenge = peer.receive()
        assert challenge[-32:] == prove("server", secret, hello, challenge)
        peer.stream.sendall(frame(PROOF, prove("client", secret, hello, challenge)))
        (kind, code, _), _ = peer.receive()
        assert (kind, code) == (READY, 0)
        return peer

    def accept(self, secret: str, version: int) -> int:
        """Serve a handshake; returns the role."""
        _, hello = self.receive()
        challenge = struct.pack("<HHHQ", version, 1, version, 7) + os.urandom(32) + text("raw")
        challenge += bytes(32)
        proof = prove("server", secret, hello, challenge)
        self.stream.sendall(frame(CHALLENGE, challenge[:-32] + proof))
        self.receive()
        self.stream.sendall(frame(READY))
        return hello[4]

    def refuse_versions(self, secret: str, lowest: int, highest: int) -> None:
        """Answer a hello that there is no common version."""
        _, hello = self.receive()
        challenge = struct.pack("<HHHQ", 0, lowest, highest, 7) + os.urandom(32) + text("raw")
        challenge += bytes(32)
        proof = prove("server", secret, hello, challenge)
        self.stream.sendall(frame(CHALLENGE, challenge[:-32] + proof))
        self.is_closed()

    def receive(self) -> tuple[tuple[int, int, int], bytes]:
        """Return ((type, code, id), payload). Raises EOFError at the end."""
        head = HEADER.unpack(self._take(HEADER.size))
        self._take(4)
        return (head[1], head[2], head[6]), self._take(head[4])

    def receive_at(self) -> tuple[int, bytes, int]:
        """Return (type, payload, offset). Raises EOFError at the end."""
        head = HEADER.unpack(self._take(HEADER.size))
        self._take(4)
        return head[1], self._take(head[4]), head[7]

    def is_closed(self) -> bool:
        """Whether the other side closes the connection, in time."""
        try:
            while self.stream.recv(65536):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True

    def _take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.stream.recv(size - len(data))
            if not part:
                raise EOFError("the connection was closed")
            data += part
        return data

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
