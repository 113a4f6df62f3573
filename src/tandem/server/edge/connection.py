"""The connection of one HTTP request: reading its body within limits, noticing that the client
left.

uvicorn reports a lost connection only to a task that awaits ``receive``. So one task waits for that
report while another does the work of the request, and the work is cancelled as soon as the client
has left, not at the next token.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from tandem.core.errors import DeadlineError, TandemError
from tandem.server.edge.http_errors import HttpError

__all__ = ["ClientGoneError", "limit_time", "read_body", "run_while_connected"]

_T = TypeVar("_T")

_DISCARD_S = 1.0
"""Seconds for which a body that is too large is read and discarded: a client that is still sending
would otherwise see a broken connection instead of the answer."""


class ClientGoneError(Exception):
    """The client has closed the connection, so that no answer can be sent."""


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Read the whole body of a request.

    Raises:
        HttpError: 413 once it is known to be longer than ``max_bytes``, 408 if it takes longer than
            ``timeout_s``.
        ClientGoneError: the client left before its end.
    """
    declared = request.headers.get("content-length", "")
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            is_last = False
            is_waiting = request.headers.get("expect", "").lower() == "100-continue"
            if declared.isdigit() and int(declared) > max_bytes:
                if not is_waiting:
                    await _discard(request.receive)
                raise _too_large(max_bytes)
            while not is_last:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                chunk = message.get("body", b"")
                is_last = not message.get("more_body", False)
                size += len(chunk)
                if size > max_bytes:
                    chunks.clear()
                    if not is_last:
                        await _discard(request.receive)
                    raise _too_large(max_bytes)
                chunks.append(chunk)
    except TimeoutError as error:
        raise HttpError(
            408,
            f"the body did not arrive within {timeout_s:g} s",
            code="body_timeout",
            headers={"Connection": "close"},
        ) from error
    return b"".join(chunks)


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(
        413,
        f"the body is longer than {max_bytes} bytes (server.max_body_bytes)",
        code="body_too_large",
        headers={"Connection": "close"},
    )


async def _discard(receive: Receive) -> None:
    try:
        async with asyncio.timeout(_DISCARD_S):
            message = await receive()
            while message["type"] == "http.request" and message.get("more_body", False):
                message = await receive()
    except TimeoutError:
        return


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Await ``work``, and cancel it as soon as the client leaves.

    The body must have been read. ``work`` has ended when this returns or raises.

    Raises:
        ClientGoneError: the client left.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


@asynccontextmanager
async def limit_time(seconds: float) -> AsyncIterator[None]:
    """Limit the time of the block to ``seconds``.

    Raises:
        DeadlineError: the block took longer.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        if isinstance(error, TandemError):
            raise
        # The message names no seconds: `seconds` is only what was left of the request's limit when
        # this block began.
        what = (
            "the request took longer than its time limit: give a larger timeout, or set "
            "server.request_timeout_s"
        )
        raise DeadlineError("server.limit_time", what) from error


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
