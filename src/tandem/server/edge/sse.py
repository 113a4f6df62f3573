"""Server-sent events: the response class of every stream.

Owns the request's generations while the stream runs, and closes them on every path, which cancels
those still running. An error after the first byte is sent as an event, which ends the stream.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.core.errors import InternalError, TandemError
from tandem.server.edge.connection import ClientGoneError, limit_time, run_while_connected
from tandem.server.edge.http_errors import ErrorBody, WriteError, describe_error, encode_error
from tandem.server.generation import GenerationGroup

__all__ = ["DONE", "EventStream", "encode_event", "encode_named_event", "frame_error"]

_logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def encode_event(document: bytes) -> bytes:
    """Return a JSON document as a server-sent event; it must have no line break."""
    return b"data: " + document + b"\n\n"


def encode_named_event(kind: str, document: bytes) -> bytes:
    """Return a JSON document as a server-sent event with the name ``kind``."""
    return f"event: {kind}\n".encode() + encode_event(document)


def frame_error(body: ErrorBody, status: int) -> bytes:
    """Return an error in OpenAI's form as a server-sent event."""
    return encode_event(encode_error(body, status))


class EventStream(Response):
    """A response that sends events until they end or the client leaves. The connection ends if the
    client stops reading (``BoundedConnection``).

    Args:
        group: generations; owned from now on.
        events: encoded events made from the pieces of ``group``, the final one included.
        frame_error: encodes an error as an event.
        media_type: media type of the stream.
    """

    def __init__(
        self,
        group: GenerationGroup,
        events: AsyncGenerator[bytes, None],
        frame_error: WriteError = frame_error,
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(
            media_type=media_type,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        # Starlette's Response sets content-length 0 for its empty body, which a stream must not
        # have.
        del self.headers["content-length"]
        self._group = group
        self._events = events
        self._frame_error = frame_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; return when all its resources are freed."""
        try:
            await run_while_connected(receive, self._send_all(send))
        except ClientGoneError:
            _logger.debug("event=client_gone name=%s", self._group.name)
        finally:
            await self._group.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with limit_time(self._group.time_limit_s), aclosing(self._events) as events:
                async for event in events:
                    await self._send_event(send, event)
        except TandemError as error:
            await self._send_event(send, self._describe(error))
        except Exception:
            _logger.exception("event=stream_failed name=%s", self._group.name)
            failure = InternalError("server.stream", "the server failed; its log says why")
            await self._send_event(send, self._describe(failure))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _describe(self, error: TandemError) -> bytes:
        described = describe_error(error)
        return self._frame_error(described.body, described.status)

    async def _send_event(self, send: Send, event: bytes) -> None:
        await send({"type": "http.response.body", "body": event, "more_body": True})
        # asyncio reports a failed send in the loop's next turn: without a turn between events that
        # are ready together, all of them would be written to a closed socket.
        await asyncio.sleep(0)
