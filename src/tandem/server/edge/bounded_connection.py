"""The connection class that uvicorn uses: HTTP/1.1 with limits on the size of what a client may
send.
"""

import logging
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["BoundedConnection"]

_logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 1 << 18
"""Largest size of a request's head, and of its trailers. The parser keeps them in memory, and
copies an incomplete header with each packet."""
_TOO_LARGE = b"\r\n".join(
    [b"HTTP/1.1 431 Too Large", b"content-length: 0", b"connection: close", b"", b""]
)


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
            else:
                return
            super().feed_data(self._connection.repeat_head())


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection over httptools, with four changes that no setting of uvicorn makes.

    - A head, or trailers, of more than ``_MAX_HEAD_BYTES`` is answered 431, and the connection
      closed.
    - A client that closes its side and does not read ends the connection at once. asyncio would
      wait until all bytes are sent, which such a client can delay for ever.
    - A request that offers another protocol is answered in HTTP/1.1; see ``_Parser``.
    - Trailers do not count as headers of the request.

    It uses these members of ``HttpToolsProtocol``, which uvicorn does not promise to keep:
    ``parser``, ``cycle``, ``transport``, ``url``, ``headers``, and the callbacks of httptools.
    ``tests/server/edge/test_uvicorn_versions.py`` runs the tests of connections with each release
    that pyproject.toml allows.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = _Parser(self)
        # uvicorn sets the same leniency on its own parser: data after "Connection: close" does not
        # keep the request from being answered.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._kept_bytes = 0  # Bytes received since the last complete head or piece of a body.
        self._is_in_head = False

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; close the connection if its head or trailers are too large."""
        self._kept_bytes += len(data)
        super().data_received(data)
        if self._kept_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            _logger.warning("event=head_refused bytes=%d", self._kept_bytes)
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        """Record that a request's head begins."""
        self._is_in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header of the head; trailers are ignored."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_chunk_header(self) -> None:
        """Reset the count of bytes of head or trailers, because a chunk of a body begins."""
        self._kept_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body, and reset the count of bytes of head or trailers."""
        self._kept_bytes = 0
        super().on_body(body)

    def eof_received(self) -> None:
        """Abort the connection if the client has closed its side with unsent bytes left."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def on_headers_complete(self) -> None:
        """Begin the request; do nothing if the head must be parsed again without ``Upgrade``."""
        self._kept_bytes, self._is_in_head = 0, False
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the request's body; do nothing if the head must be parsed again without
        ``Upgrade``.
        """
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def repeat_head(self) -> bytes:
        """Return the head that was parsed last, without its header ``Upgrade``."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])
