"""The stream of one request's outputs, for the code that submitted it."""

import asyncio
from collections.abc import AsyncIterator, Callable

from tandem.core.wire import RequestOutput

__all__ = ["OutputStream"]


class OutputStream:
    """The outputs of one request, in order; see ``tandem.server.engine.RequestStream``.

    Args:
        request_id: id of the request.
        cancel: called with that id if reading stops early; never after the last output.
    """

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        self._request_id = request_id
        self._cancel = cancel
        self._queue: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._has_ended = False

    def put(self, output: RequestOutput) -> None:
        """Append an output to the stream; the last one has a finish reason."""
        self._queue.put_nowait(output)

    async def cancel(self) -> None:
        """Cancel the request and end the stream. Idempotent; no effect after the last output."""
        if not self._has_ended:
            self._has_ended = True
            self._cancel(self._request_id)
            self._queue.put_nowait(None)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._has_ended:
            raise StopAsyncIteration
        output = await self._queue.get()
        if output is None:
            raise StopAsyncIteration
        self._has_ended = output.finish_reason is not None
        return output
