"""How the answer of a group goes to its client: whole or as a stream of chunks."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tandem.server.api.usage import count_piece_usage, count_usage
from tandem.server.context import ServerContext
from tandem.server.edge.connection import run_while_connected
from tandem.server.edge.sse import DONE, EventStream, encode_event
from tandem.server.generation import Generation, GenerationGroup, Piece
from tandem.server.protocol.openai import StreamOptions, Usage

__all__ = ["answer_stream", "answer_whole", "make_events"]

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


class Chunk(Protocol):
    """An event of an OpenAI stream."""

    usage: Usage | UnsetType | None


def answer_stream(
    context: ServerContext, group: GenerationGroup, events: AsyncGenerator[bytes, None]
) -> Response:
    """Return the response that sends the events; the group is closed with it."""
    return EventStream(group, events, context.config.send_timeout_s)


async def answer_whole(
    http: Request,
    group: GenerationGroup,
    work: Coroutine[Any, Any, T],
    shape: Callable[[T], object] = lambda result: result,
) -> Response:
    """Wait for the result while the client is there and return it as JSON, made by ``shape``.

    The group is closed in any case.
    """
    try:
        result = await run_while_connected(http.receive, work)
    finally:
        await group.close()
    return Response(_encode(shape(result)), media_type="application/json")


async def make_events(
    group: GenerationGroup,
    n: int,
    options: StreamOptions | None,
    make_chunks: Callable[[Generation, Piece], Iterable[Chunk]],
    make_last: Callable[[], Chunk],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of an OpenAI stream, usage and end included.

    Args:
        group: what generates; not closed here.
        n: choices of each prompt.
        options: what the client wants beside the text.
        make_chunks: of a piece; the last one carries its usage.
        make_last: the chunk without choices that carries the usage of all.
    """
    has_usage = options is not None and options.include_usage is True
    is_continuous = options is not None and options.continuous_usage_stats is True
    async with aclosing(group.pieces()) as pieces:
        async for generation, piece in pieces:
            *before, chunk = make_chunks(generation, piece)
            for early in before:
                yield encode_event(_encode(early))
            if is_continuous:
                chunk.usage = count_piece_usage(generation, piece)
            elif has_usage:
                # OpenAI sends null until the last event.
                chunk.usage = None
            yield encode_event(_encode(chunk))
    if has_usage:
        last = make_last()
        last.usage = count_usage(group.generations, n)
        yield encode_event(_encode(last))
    yield DONE
