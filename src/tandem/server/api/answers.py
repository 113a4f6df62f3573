"""How the answer of a group goes to its client: whole or as a stream of chunks."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tandem.server.api.usage import count_piece_usage, count_usage
from tandem.server.context import ServedModel, ServerContext
from tandem.server.edge.connection import run_while_connected
from tandem.server.edge.sse import DONE, EventStream, encode_event
from tandem.server.generation import Generation, GenerationGroup, Piece, measure_logprobs
from tandem.server.protocol.openai import ChatRequest, CompletionRequest, Usage

__all__ = ["OpenAIAnswer", "answer_stream", "answer_whole", "make_events"]

_CHOICE_BYTES = 128
"""Of an answer, what every choice takes beside its text."""
T = TypeVar("T")
R = TypeVar("R", ChatRequest, CompletionRequest)
_encode = msgspec.json.Encoder().encode


class Chunk(Protocol):
    """An event of an OpenAI stream."""

    usage: Usage | UnsetType | None


@dataclass(slots=True)
class OpenAIAnswer(Generic[R]):
    """What every part of one answer in OpenAI's form repeats."""

    context: ServerContext
    request: R
    id: str
    model: ServedModel
    n: int
    """Choices of each prompt."""
    created: int = field(init=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.created = self.context.now_unix_s()
        self.fingerprint = self.context.find_fingerprint(self.model)

    def make(self, kind: Callable[..., T], choices: list[Any], **more: object) -> T:
        """Return a whole answer or a chunk of one, of the struct ``kind``, with these choices."""
        return kind(
            id=self.id,
            created=self.created,
            model=self.model.name,
            choices=choices,
            system_fingerprint=self.fingerprint,
            **more,
        )


def answer_stream(
    context: ServerContext, group: GenerationGroup, events: AsyncGenerator[bytes, None]
) -> Response:
    """Return the response that sends the events; the group is closed with it."""
    return EventStream(group, events, context.config.send_timeout_s)


async def answer_whole(
    context: ServerContext,
    http: Request,
    group: GenerationGroup,
    work: Coroutine[Any, Any, T],
    shape: Callable[[T], object] = lambda result: result,
    *,
    echo_bytes: int = 0,
) -> Response:
    """Wait for the result while the client is there and return it as JSON, made by ``shape``.

    The group is closed in any case. ``echo_bytes``: of the prompts that the answer repeats.
    """
    try:
        result = await run_while_connected(http.receive, work)
    finally:
        await group.close()
    size = sum(each.size_bytes + _CHOICE_BYTES for each in group.generations) + echo_bytes
    document = await context.shape(size, lambda: _encode(shape(result)))
    return Response(document, media_type="application/json")


async def make_events(
    answer: OpenAIAnswer[R],
    group: GenerationGroup,
    kind: Callable[..., Chunk],
    make_chunks: Callable[[Generation, Piece], Iterable[Chunk]],
    echoes: Sequence[str] = (),
) -> AsyncGenerator[bytes, None]:
    """Yield the events of an OpenAI stream, usage and end included.

    Args:
        answer: what the events repeat; its request says what the client wants beside the text.
        group: what generates; not closed here.
        kind: struct of a chunk.
        make_chunks: of a piece; the last one carries its usage.
        echoes: texts of the prompts that the first chunks repeat.
    """
    options = answer.request.stream_options
    has_usage = options is not None and options.include_usage is True
    is_continuous = options is not None and options.continuous_usage_stats is True
    async with aclosing(group.pieces()) as pieces:
        async for generation, piece in pieces:
            size = piece.size_bytes
            if piece.num_tokens <= len(piece.token_ids):  # The first one.
                size += measure_logprobs(generation.prompt_logprobs)
                size += len(echoes[generation.index // answer.n]) if echoes else 0

            def encode(generation: Generation = generation, piece: Piece = piece) -> list[bytes]:
                *before, chunk = make_chunks(generation, piece)
                if is_continuous:
                    chunk.usage = count_piece_usage(generation, piece)
                elif has_usage:
                    # OpenAI sends null until the last event.
                    chunk.usage = None
                return [encode_event(_encode(each)) for each in (*before, chunk)]

            for event in await answer.context.shape(size, encode):
                yield event
    if has_usage:
        last = answer.make(kind, [])
        last.usage = count_usage(group.generations, answer.n)
        yield encode_event(_encode(last))
    yield DONE
