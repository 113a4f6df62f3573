"""Transfers of files between clients and the store: so many at a time, and none stands still.

A transfer has up to two file descriptors beside its connection's. They are of the reserve that
connections leave to the server (``core/descriptors.py``), so transfers may take a part of it alone,
and a client half of that part.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tandem.core.descriptors import count_reserve
from tandem.core.errors import CapacityError, NotFoundError, TandemError
from tandem.server.edge.connection import ClientGoneError, run_while_connected
from tandem.server.edge.http_errors import describe_error, error_response

__all__ = ["FileAnswer", "Transfers", "make_steady"]

_RESERVE_SHARE = 4
_PIECE_BYTES = 1 << 16
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})")


class Transfers:
    """The transfers that run. To be used on one event loop."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()

    @property
    def num_running(self) -> int:
        """Number of transfers that run."""
        return self._running.total()

    @contextmanager
    def take_place(self, client: str) -> Iterator[None]:
        """Count a transfer of a client while the block runs.

        Raises: CapacityError (too many run, of this client or of all).
        """
        limit = count_reserve() // _RESERVE_SHARE
        own = self._running[client]
        if self.num_running >= limit or own >= limit // 2:
            what = f"{self.num_running} transfers of files run, {own} of this client: try later"
            raise CapacityError("server.files", what)
        self._running[client] += 1
        try:
            yield
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]


def make_steady(receive: Receive, pause_s: float) -> Receive:
    """Return a function that receives a body and raises ``TimeoutError`` once a client has kept it
    waiting for ``pause_s`` since the last 64 KiB.
    """
    loop = asyncio.get_running_loop()
    waited_s, num_new = 0.0, 0

    async def receive_in_time() -> Message:
        nonlocal waited_s, num_new
        began_s = loop.time()
        async with asyncio.timeout(max(pause_s - waited_s, 0)):
            message = await receive()
        waited_s += loop.time() - began_s
        num_new += len(message.get("body", b""))
        if num_new >= _PIECE_BYTES:
            waited_s, num_new = 0.0, 0
        return message

    return receive_in_time


class FileAnswer(Response):
    """The first bytes of a file, which may grow meanwhile, as an answer; or those of them that a
    header ``Range: bytes=BEGIN-`` or ``bytes=BEGIN-LAST`` asks for.

    Args:
        path: the file.
        num_bytes: number of bytes that the file has for the client.
        transfers: the transfers of which this is one.
        client: the client that gets it.
    """

    def __init__(self, path: Path, num_bytes: int, transfers: Transfers, client: str) -> None:
        super().__init__(
            media_type="application/octet-stream",
            headers={"Content-Length": str(num_bytes), "Accept-Ranges": "bytes"},
        )
        self._path = path
        self._num_bytes = num_bytes
        self._transfers = transfers
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; return when its file is closed."""
        if scope["method"] == "HEAD":
            await super().__call__(scope, receive, send)
            return
        part = self._find_part(Headers(scope=scope))
        try:
            with self._transfers.take_place(self._client):
                await run_while_connected(receive, self._send_part(part, send))
        except ClientGoneError:
            return
        except TandemError as error:
            await error_response(describe_error(error))(scope, receive, send)

    def _find_part(self, headers: Headers) -> range:
        """Return the bytes to send, and note in the answer's head which these are."""
        whole = range(self._num_bytes)
        asked = _RANGE.fullmatch(headers.get("range", ""))
        # Whether the file is the one that a client with `If-Range` has is not known here.
        if asked is None or "if-range" in headers:
            return whole
        begin, last = int(asked[1]), int(asked[2] or self._num_bytes)
        if last < begin < self._num_bytes:
            return whole
        part = whole[begin : last + 1]
        self.status_code = 206 if part else 416
        span = f"{part[0]}-{part[-1]}" if part else "*"
        self.headers["Content-Range"] = f"bytes {span}/{self._num_bytes}"
        self.headers["Content-Length"] = str(len(part))
        return part

    async def _send_part(self, part: range, send: Send) -> None:
        try:
            content = await asyncio.to_thread(self._path.open, "rb")
        except FileNotFoundError as error:
            raise NotFoundError("server.files", "the file was deleted") from error
        with content:
            content.seek(part.start)
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
            left = len(part)
            while left > 0:
                piece = await asyncio.to_thread(content.read, min(left, _PIECE_BYTES))
                if not piece:
                    return  # It was cut: the connection ends before the answer does.
                left -= len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": left > 0})
            if not part:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
