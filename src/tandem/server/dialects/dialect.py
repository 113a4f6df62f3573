"""The steps that all APIs of generation have in common.

A request is decoded, planned on the threads into a ``Task``, generated, and rendered: as a whole
from all pieces, or as events, piece by piece. The struct of the body, the planning and the
``Renderer`` differ from API to API; everything else is here.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.server.context import ChoicePlan, RequestOptions, ServerContext
from tandem.server.edge.connection import limit_time, run_while_connected
from tandem.server.edge.http_errors import WriteError, encode_error
from tandem.server.edge.sse import EventStream, frame_error
from tandem.server.generation import Generation, GenerationGroup, Piece
from tandem.server.telemetry.timelines import Origin

__all__ = ["Body", "Dialect", "Renderer", "Task", "collect_answer"]

_encode = msgspec.json.Encoder().encode
_CHOICE_BYTES = 128
"""Estimated bytes of a choice in an answer beside its text."""


class Body(Protocol):
    """The fields of a request's body that are needed before it is planned (see ``Task``)."""

    timeout: float | None
    """Time limit in seconds that the client sets for the request; None: the server's own limit."""


R = TypeVar("R", bound=Body)


class Renderer(Protocol):
    """The object that writes one answer in the form of its API.

    Call either ``add`` for each piece and then ``make_document``, or ``make_events`` for each piece
    and then ``end_events``. Calls may come from different threads, one at a time.
    """

    is_cumulative: bool
    """True if each event of the stream has the whole text so far, as at SGLang, and not only what
    is new.
    """

    def measure(self, generation: Generation, piece: Piece) -> int:
        """Return about how many bytes of the answer a piece (new output of a generation) takes."""
        ...

    def add(self, generation: Generation, piece: Piece) -> None:
        """Add a piece (new output of a generation) to an answer that is sent as a whole."""
        ...

    def make_document(self, generations: Sequence[Generation]) -> object:
        """Return the whole answer, as an object that msgspec encodes."""
        ...

    def make_events(self, generation: Generation, piece: Piece) -> list[bytes]:
        """Return the encoded stream events for a piece (new output of a generation)."""
        ...

    def end_events(self, generations: Sequence[Generation]) -> list[bytes]:
        """Return the encoded events that end a stream."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """The work that a request asks for: the generations to run, and the renderer of the answer."""

    plans: list[ChoicePlan]
    """Generations to run. Empty if the answer needs none, such as one to an empty prompt at Ollama;
    then the renderer's document is the answer as it is.
    """
    options: RequestOptions
    renderer: Renderer
    is_stream: bool
    frame_error: WriteError | None = None
    """Function that encodes an error as an event of this stream; None: the API's general function
    does.
    """


@dataclass(frozen=True, slots=True)
class Dialect(Generic[R]):
    """One API of generation: how its bodies are read, and its answers and errors written.

    Args:
        decoder: decoder of the body.
        plan: checks the body and returns its task; it blocks and runs on the threads.
        refused: unsupported fields with reasons, or a function that refuses them; see
            ``ServerContext.read_request``.
        write_error: encodes an error with its status as an answer.
        frame_error: encodes an error with its status as an event of a stream that has begun.
        stream_type: media type of a stream.
    """

    decoder: msgspec.json.Decoder[R]
    plan: Callable[[ServerContext, R], Task]
    refused: Mapping[str, str] | Callable[[bytes], None]
    write_error: WriteError = encode_error
    frame_error: WriteError = frame_error
    stream_type: str = "text/event-stream"

    async def answer(self, context: ServerContext, http: Request) -> Response:
        """Answer a request, whole or as a stream."""
        task, origin = await self.prepare(context, http)
        return await self.run(context, http, task, origin)

    async def prepare(self, context: ServerContext, http: Request) -> tuple[Task, Origin]:
        """Read a request and return its task (the generations to run) and its origin (time of
        arrival, digest of its API key, headers); nothing runs yet.
        """
        http.state.write_error = self.write_error
        origin = context.note_arrival(http)
        request = await context.read_request(http, self.decoder, self.refused)
        task = await context.prepare(http, origin, request.timeout, self.plan, context, request)
        return task, origin

    async def run(
        self, context: ServerContext, http: Request, task: Task, origin: Origin
    ) -> Response:
        """Run the task of a request and answer its client, whole or as a stream."""
        if not task.plans:
            return Response(_encode(task.renderer.make_document([])), media_type="application/json")
        group = await context.start(task.plans, task.options, origin, http.receive)
        if task.is_stream:
            events = _make_events(context, group, task.renderer)
            frame = self.frame_error if task.frame_error is None else task.frame_error
            return EventStream(group, events, frame, self.stream_type)
        try:
            document = await run_while_connected(
                http.receive, collect_answer(context, group, task.renderer)
            )
        finally:
            await group.close()
        return Response(document, media_type="application/json")


async def collect_answer(
    context: ServerContext, group: GenerationGroup, renderer: Renderer
) -> bytes:
    """Run all generations of a group to their ends; return the encoded answer."""
    total = _CHOICE_BYTES * len(group.generations)
    async with limit_time(group.time_limit_s), aclosing(group.pieces()) as pieces:
        async for generation, piece in pieces:
            size = renderer.measure(generation, piece)
            total += size
            await context.shape(size, partial(renderer.add, generation, piece))
    return await context.shape(total, lambda: _encode(renderer.make_document(group.generations)))


async def _make_events(
    context: ServerContext, group: GenerationGroup, renderer: Renderer
) -> AsyncGenerator[bytes, None]:
    sizes = [0 for _ in group.generations]
    async with aclosing(group.pieces()) as pieces:
        async for generation, piece in pieces:
            size = renderer.measure(generation, piece)
            sizes[generation.index] += size
            if renderer.is_cumulative:
                size = sizes[generation.index]
            make = partial(renderer.make_events, generation, piece)
            for event in await context.shape(size, make):
                yield event
    for event in renderer.end_events(group.generations):
        yield event
