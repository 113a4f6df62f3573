"""The common parts of answers of OpenAI's chat completions and completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import UnsetType

from tandem.server.context import ServedModel, ServerContext
from tandem.server.dialects.usage import count_piece_usage, count_usage
from tandem.server.edge.sse import DONE, encode_event
from tandem.server.generation import Generation, Piece, measure_prompt_logprobs
from tandem.server.protocol.openai import ChatRequest, CompletionRequest, Usage

__all__ = ["OpenAIAnswer"]

T = TypeVar("T")
R = TypeVar("R", ChatRequest, CompletionRequest)
C = TypeVar("C", bound="Chunk")
_encode = msgspec.json.Encoder().encode


class Chunk(Protocol):
    """An event of a stream in OpenAI's form."""

    usage: Usage | UnsetType | None


@dataclass(slots=True)
class OpenAIAnswer(Generic[R]):
    """The fields and events that every answer in OpenAI's form has."""

    context: ServerContext
    request: R
    id: str
    model: ServedModel
    created: int = field(init=False)
    fingerprint: str = field(init=False)
    is_cumulative: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.created = self.context.now_unix_s()
        self.fingerprint = self.context.find_fingerprint(self.model)

    @property
    def n(self) -> int:
        """Number of choices (generations) for each prompt."""
        return self.request.n if self.request.n is not None else 1

    def make(self, kind: Callable[..., T], choices: list[Any], **more: object) -> T:
        """Return an answer or chunk of type ``kind`` with these choices, the fields common to all,
        and the fields ``more``.
        """
        return kind(
            id=self.id,
            created=self.created,
            model=self.model.name,
            choices=choices,
            system_fingerprint=self.fingerprint,
            **more,
        )

    def measure(self, generation: Generation, piece: Piece) -> int:
        """Return about how many bytes of the answer a piece (new output of a generation) takes."""
        size = piece.size_bytes
        # The first piece also carries the log-probabilities of the prompt.
        if piece.num_tokens <= len(piece.token_ids):
            size += measure_prompt_logprobs(generation.prompt_logprobs)
        return size

    def encode_chunks(
        self, generation: Generation, piece: Piece, chunks: Sequence[Chunk]
    ) -> list[bytes]:
        """Return the chunks for a piece (new output of a generation) as encoded events; the last
        one carries the usage, if asked for.
        """
        options = self.request.stream_options
        if options is not None and options.continuous_usage_stats is True:
            chunks[-1].usage = count_piece_usage(generation, piece)
        elif options is not None and options.include_usage is True:
            # With include_usage OpenAI's chunks carry `usage: null`; only the last event has the
            # counts.
            chunks[-1].usage = None
        return [encode_event(_encode(each)) for each in chunks]

    def encode_end(self, kind: Callable[..., C], generations: Sequence[Generation]) -> list[bytes]:
        """Return the encoded events that end a stream: the usage, if asked for, and the end
        mark.
        """
        options = self.request.stream_options
        if options is None or options.include_usage is not True:
            return [DONE]
        last = self.make(kind, [])
        last.usage = count_usage(generations, self.n)
        return [encode_event(_encode(last)), DONE]
