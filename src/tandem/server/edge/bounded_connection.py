"""The connection class that uvicorn uses: HTTP/1.1 with limits on the size of what a client may
send, on the time it may take for a head and to read an answer, and on the number of connections
that only wait.
"""

import asyncio
import itertools
import logging
import ssl
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem.core.descriptors import is_scarce

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["BoundedConnection", "make_connection_class"]

_logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 1 << 18
"""Largest size of a request's head, and of its trailers. The parser keeps them in memory, and
copies an incomplete header with each packet."""
_MAX_HEADERS = 1000
"""Largest number of headers of a head with its trailers. Each costs the event loop time, again
whenever one is looked up."""
_MIN_READ_BYTES = 1 << 16
"""Bytes of an answer that a client must read in ``send_timeout_s``, if there are so many."""
_MAX_LOOKED_AT = 1000
"""Number of connections among which one is looked for that may be closed for a new one."""


def _write_refusal(status: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 " + status, b"content-length: 0", b"connection: close", *headers, b"", b""]
    return b"\r\n".join(lines)


_TOO_LARGE = _write_refusal(b"431 Too Large")
_TOO_LATE = _write_refusal(b"408 Request Timeout")
_TOO_MANY = _write_refusal(b"503 Service Unavailable", b"retry-after: 1")


class _Parser(httptools.HttpRequestParser):
    """The HTTP parser of a connection, which ignores a client's offer of another protocol.

    After a head with ``Upgrade``, llhttp takes all further bytes as the other protocol, and the
    body would be lost. Java's HTTP client offers HTTP/2 in that way with every request.
    """

    def __init__(self, connection: "BoundedConnection") -> None:
        super().__init__(connection)
        self._connection = connection

    def feed_data(self, data: "Buffer") -> None:
        """Parse bytes. Raises ``httptools.HttpParserError``."""
        rest = memoryview(data)
        while True:
            try:
                super().feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                if self.get_method() == b"CONNECT":
                    what = "no tunnels here"
                    raise httptools.HttpParserInvalidMethodError(what) from None
                rest = rest[offer.args[0] :]
            except httptools.HttpParserCallbackError:
                if not self._connection.has_too_many_headers:
                    raise
                return  # The connection refuses the head.
            else:
                return
            super().feed_data(self._connection.repeat_head())


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection over httptools, with eight changes that no setting of uvicorn makes.

    - A head that is not complete ``head_timeout_s`` after its first byte, or after the connection
      was made, is answered 408; a connection that has sent nothing by then is closed.
    - TLS begins after the connection was made, so that its handshake is within that time, and
      connections in it count among those that wait.
    - A connection whose descriptor is one of the last (``core/descriptors.py``) takes the place of
      the one that has waited longest for its client to send or read something; if there is none it
      is answered 503.
    - A head, or trailers, of more than ``_MAX_HEAD_BYTES`` or ``_MAX_HEADERS`` is answered 431, and
      the connection closed.
    - A client that does not read an answer for ``send_timeout_s`` ends the connection, also when
      all of the answer has been written and the connection waits to be closed.
    - A client that closes its side and does not read ends the connection at once. asyncio would
      wait until all bytes are sent, which such a client can delay for ever.
    - A request that offers another protocol is answered in HTTP/1.1; see ``_Parser``.
    - Trailers do not count as headers of the request.

    It uses these members of ``HttpToolsProtocol``, which uvicorn does not promise to keep:
    ``parser``, ``cycle``, ``transport``, ``url``, ``headers``, and the callbacks of httptools.
    ``tests/server/edge/test_uvicorn_versions.py`` runs the tests of connections with each release
    that pyproject.toml allows.
    """

    head_timeout_s = 30.0
    """Seconds a client may take to send a request's head."""
    send_timeout_s = 60.0
    """Seconds a client may leave an answer unread."""
    tls: ssl.SSLContext | None = None
    """Certificate and settings of TLS; None: the server speaks without."""
    open_connections: "dict[BoundedConnection, None]"
    """The open connections, ordered by when their clients last sent a whole head or a piece of a
    body. A class of its own for each server has it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = _Parser(self)
        # uvicorn sets the same leniency on its own parser: data after "Connection: close" does not
        # keep the request from being answered.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._kept_bytes = 0  # Bytes received since the last complete head or piece of a body.
        self._handshake: asyncio.Task[None] | None = None
        self._early: list[bytes] | None = None  # Bytes that came before the handshake was noted.
        self._encrypted: asyncio.Transport | None = None  # What TLS writes to.
        self._num_headers = 0
        self._is_in_head = self._is_in_body = False
        self._is_paused = False  # True while the transport wants nothing written.
        self._unread_bytes = 0  # Bytes to be sent when `_send_timer` was started.
        self._send_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, in the place of another one if descriptors are scarce."""
        super().connection_made(transport)
        self.open_connections[self] = None
        if is_scarce(transport.get_extra_info("socket").fileno()) and not self._free_another():
            if self.tls is None:
                transport.write(_TOO_MANY)
            transport.close()
            return
        self._start_head_timer()
        if self.tls is not None:
            transport.pause_reading()
            self._early = []
            self._handshake = asyncio.get_running_loop().create_task(
                self._shake_hands(transport, self.tls)
            )

    async def _shake_hands(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        if transport.is_closing():  # It gave way to another connection.
            return
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=self.head_timeout_s
            )
        except OSError as error:  # ssl.SSLError and the client's leaving are such.
            _logger.debug("event=handshake_failed error=%s", error)
            transport.abort()
            self.connection_lost(error)
            return
        if secured is None:  # The connection was closed meanwhile, here or by its client.
            self.connection_lost(None)
            return
        if self not in self.open_connections:
            return
        early, self._early = self._early or [], None
        super().connection_made(secured)
        self._encrypted = transport
        for data in early:
            self.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.open_connections.pop(self, None)
        self._stop_head_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; close the connection if its head or trailers are too large."""
        if self._early is not None:
            self._early.append(data)
            return
        self._kept_bytes += len(data)
        if not self._is_in_body or self._is_answered:
            # Bytes end uvicorn's own limit of an idle connection, also those that belong to no head
            # and those of a body after its answer.
            self._start_head_timer()
        super().data_received(data)
        is_too_large = self._kept_bytes > _MAX_HEAD_BYTES or self.has_too_many_headers
        if is_too_large and not self.transport.is_closing():
            _logger.warning(
                "event=head_refused bytes=%d headers=%d", self._kept_bytes, self._num_headers
            )
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_TOO_LARGE)
            self.transport.close()
        if self.transport.is_closing() and self._send_timer is None:
            # It was closed here or, because of bytes that are no request, by uvicorn.
            self._watch_sending()

    def on_message_begin(self) -> None:
        """Record that a request's head begins."""
        self._is_in_head, self._num_headers = True, 0
        self._start_head_timer()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header of the head; trailers are ignored. Raises: ValueError (it is one too many,
        the parser must not go on).
        """
        self._num_headers += 1
        if self.has_too_many_headers:
            raise ValueError(self._num_headers)
        if self._is_in_head:
            super().on_header(name, value)

    def on_chunk_header(self) -> None:
        """Reset the count of bytes of head or trailers, because a chunk of a body begins."""
        self._kept_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body, and reset the count of bytes of head or trailers."""
        self._kept_bytes = 0
        self._note_progress()
        super().on_body(body)

    def eof_received(self) -> None:
        """Abort the connection if the client has closed its side with unsent bytes left."""
        if self._count_unsent():
            self.transport.abort()

    def on_headers_complete(self) -> None:
        """Begin the request; do nothing if the head must be parsed again without ``Upgrade``."""
        self._kept_bytes, self._is_in_head, self._is_in_body = 0, False, True
        self._stop_head_timer()
        if not self._is_paused:
            # A client that asks again has read its answer, as clients do that do not pipeline.
            self._stop_send_timer()
        self._note_progress()
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the request's body; do nothing if the head must be parsed again without
        ``Upgrade``.
        """
        self._is_in_body = False
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """End an answer, whose last bytes the client must read in bounded time."""
        super().on_response_complete()
        self._watch_sending()

    def pause_writing(self) -> None:
        """Stop writing: the client must read in bounded time."""
        self._is_paused = True
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        """Go on with writing, because the client has read."""
        self._is_paused = False
        super().resume_writing()
        self._stop_send_timer()
        if self._is_answered:
            self._watch_sending()

    def repeat_head(self) -> bytes:
        """Return the head that was parsed last, without its header ``Upgrade``."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    @property
    def has_too_many_headers(self) -> bool:
        """True if the head, with its trailers, is refused for the number of its headers."""
        return self._num_headers > _MAX_HEADERS

    @property
    def _is_answered(self) -> bool:
        """True if no request of this connection is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            loop = asyncio.get_running_loop()
            self._head_timer = loop.call_later(self.head_timeout_s, self._end_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_head(self) -> None:
        self._head_timer = None
        if not self._is_answered:  # A part of the next head came while this request is answered.
            self._start_head_timer()
        elif not self.transport.is_closing():
            _logger.info("event=head_late bytes=%d", self._kept_bytes)
            if self._is_in_head:
                self.transport.write(_TOO_LATE)
            self.transport.close()
            self._watch_sending()

    def _count_unsent(self) -> int:
        size = self.transport.get_write_buffer_size()
        # TLS counts only what it has not encrypted yet.
        return size if self._encrypted is None else size + self._encrypted.get_write_buffer_size()

    def _watch_sending(self) -> None:
        self._stop_send_timer()
        self._unread_bytes = self._count_unsent()
        if self._unread_bytes:
            loop = asyncio.get_running_loop()
            self._send_timer = loop.call_later(self.send_timeout_s, self._end_sending)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _end_sending(self) -> None:
        self._send_timer = None
        left = self._count_unsent()
        if left > max(self._unread_bytes - _MIN_READ_BYTES, 0):
            _logger.info("event=answer_unread bytes=%d", left)
            self.transport.abort()
        else:
            self._watch_sending()

    def _note_progress(self) -> None:
        if self.open_connections.pop(self, self) is None:
            self.open_connections[self] = None

    def _free_another(self) -> bool:
        """Abort the connection that has waited longest for a head, or else for a body, or else for
        an answer to be read; return False if there is none.
        """
        looked_at = [*itertools.islice(self.open_connections, _MAX_LOOKED_AT)]
        others = [each for each in looked_at if each is not self]
        open_ones = [each for each in others if not each.transport.is_closing()]
        waiting = [each for each in open_ones if each._is_answered]
        waiting += [each for each in open_ones if each._is_in_body]
        waiting += [each for each in others if each._send_timer is not None]
        if not waiting:
            return False
        _logger.warning("event=connection_given_up waiting=%d", len(waiting))
        self.open_connections.pop(waiting[0])
        waiting[0].transport.abort()
        return True


def make_connection_class(
    head_timeout_s: float, send_timeout_s: float, tls: ssl.SSLContext | None
) -> type[BoundedConnection]:
    """Return the class of a server's connections, which know each other.

    Args:
        head_timeout_s: seconds a client may take to send a request's head.
        send_timeout_s: seconds a client may leave an answer unread.
        tls: certificate and settings of TLS; None: the server speaks without.
    """
    members = {
        "head_timeout_s": head_timeout_s,
        "send_timeout_s": send_timeout_s,
        "tls": tls,
        "open_connections": {},
    }
    return type("ServerConnection", (BoundedConnection,), members)
