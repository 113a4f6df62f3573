"""The answer of the Responses API: items that grow, sent as events or as a whole."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tandem.models.tokenizing.schemas.json_text import parse_json
from tandem.models.tokenizing.tokenizer import Tokenizer
from tandem.server.dialects.parsing import make_call_id
from tandem.server.dialects.responses.items import hide_reasoning
from tandem.server.dialects.usage import make_chat_logprobs
from tandem.server.edge.http_errors import ErrorBody
from tandem.server.edge.sse import encode_named_event
from tandem.server.generation import Generation, Piece
from tandem.server.outputs.deltas import (
    ArgumentsDelta,
    CallStart,
    Delta,
    ReasoningDelta,
    TextDelta,
)
from tandem.server.protocol.openai import ChatLogprob
from tandem.server.protocol.responses import (
    CallItem,
    CustomCallItem,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningPart,
    ResponseDocument,
    ResponseFailure,
    ResponseUsage,
    Status,
    TextPart,
)

__all__ = ["ResponseAnswer"]

_encode = msgspec.json.Encoder().encode
_FINAL_EVENTS: Mapping[str, str] = {"completed": "response.completed", "failed": "response.failed"}
"""Name of the last event by status; for all other statuses it is "response.incomplete"."""

Event = tuple[str, dict[str, Any]]
"""Name and fields of an event, without its sequence number."""


@dataclass(slots=True)
class ResponseAnswer:
    """The renderer of one response of the Responses API.

    Args:
        document: response, which grows with the answer.
        now_s: returns the wall-clock time in whole seconds.
        tokenizer: spells the tokens of log-probabilities; None if none were asked for.
        custom_tools: names of tools whose input is a text.
        hides_reasoning: True if reasoning is also to be sent as ``encrypted_content``.
        keep: called with the finished answer and its encoding; None: it is not stored.
    """

    document: ResponseDocument
    now_s: Callable[[], int]
    tokenizer: Tokenizer | None
    custom_tools: frozenset[str]
    hides_reasoning: bool
    keep: Callable[[ResponseDocument, bytes], None] | None
    is_cumulative: bool = field(init=False, default=False)
    _open: OutputItem | None = field(init=False, default=None)
    _num_events: int = field(init=False, default=0)
    _num_tokens: int = field(init=False, default=0)
    _num_reasoning: int = field(init=False, default=0)

    def measure(self, generation: Generation, piece: Piece) -> int:
        """Return about how many bytes of the answer a piece (new output of a generation) takes."""
        return piece.size_bytes

    def add(self, generation: Generation, piece: Piece) -> None:
        """Add a piece (new output of a generation) to an answer that is sent as a whole."""
        self._take(generation, piece)

    def make_document(self, generations: Sequence[Generation]) -> object:
        """Return the whole answer, as an object that msgspec encodes."""
        return msgspec.Raw(self._end())

    def make_events(self, generation: Generation, piece: Piece) -> list[bytes]:
        """Return the encoded stream events for a piece (new output of a generation)."""
        frames: list[bytes] = []
        if self._num_events == 0:
            begin = ("response.created", "response.in_progress")
            frames = [self._frame(kind, response=self.document) for kind in begin]
        return frames + [self._frame(k, **values) for k, values in self._take(generation, piece)]

    def end_events(self, generations: Sequence[Generation]) -> list[bytes]:
        """Return the encoded events that end a stream."""
        return [self._frame_end()]

    def frame_failure(self, body: ErrorBody, status: int) -> bytes:
        """Return the encoded event that tells the client of an error and ends the stream that has
        begun.
        """
        self.fail(body)
        return self._frame_end()

    def fail(self, body: ErrorBody) -> None:
        """Mark the response as failed; its items so far stay."""
        self._close("incomplete")
        self.document.status = "failed"
        self.document.error = ResponseFailure(body.code or "server_error", body.message)

    def cancel(self) -> bytes:
        """Mark the response as cancelled by its client; return its encoding."""
        self._close("incomplete")
        self.document.status = "cancelled"
        return self._end()

    def end_failed(self, body: ErrorBody) -> bytes:
        """Mark a background response as failed; return its encoding."""
        self.fail(body)
        return self._end()

    def _end(self) -> bytes:
        encoded = _encode(self.document)
        if self.keep is not None:
            self.keep(self.document, encoded)
        return encoded

    def _frame_end(self) -> bytes:
        kind = _FINAL_EVENTS.get(self.document.status, "response.incomplete")
        return self._frame(kind, response=msgspec.Raw(self._end()))

    def _frame(self, kind: str, **values: object) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        event = {"type": kind, "sequence_number": number, **values}
        return encode_named_event(kind, _encode(event))

    def _take(self, generation: Generation, piece: Piece) -> list[Event]:
        """Add a piece (new output of the generation) to the response; return the events of its
        changes.
        """
        new, self._num_tokens = piece.num_tokens - self._num_tokens, piece.num_tokens
        if piece.deltas and isinstance(piece.deltas[-1], ReasoningDelta):
            self._num_reasoning += new
        events: list[Event] = []
        is_text = len(piece.deltas) == 1 and isinstance(piece.deltas[0], TextDelta)
        logprobs = self._make_logprobs(piece) if is_text else []
        for delta in piece.deltas:
            events += self._add_delta(delta, logprobs)
        if piece.finish_reason is not None:
            is_whole = piece.finish_reason == "stop"
            events += self._close("completed" if is_whole else "incomplete")
            self._finish(generation, piece.finish_reason)
        return events

    def _make_logprobs(self, piece: Piece) -> list[ChatLogprob]:
        if self.tokenizer is None:
            return []
        return make_chat_logprobs(self.tokenizer, piece.logprobs).content

    def _add_delta(self, delta: Delta, logprobs: list[ChatLogprob]) -> list[Event]:
        item = self._open
        match delta:
            case TextDelta(text):
                events: list[Event] = []
                if not isinstance(item, MessageItem):
                    item = MessageItem(id=_make_id("msg"), content=[])
                    part = TextPart(annotations=[], logprobs=[])
                    events = self._begin(item)
                    events.append(self._tell("response.content_part.added", part=part))
                    item.content.append(TextPart(annotations=[], logprobs=[]))
                item.content[0].text += text
                item.content[0].logprobs += logprobs
                kind = "response.output_text.delta"
                return [*events, self._tell(kind, delta=text, logprobs=logprobs)]
            case ReasoningDelta(text):
                events = []
                if not isinstance(item, ReasoningItem):
                    item = ReasoningItem(id=_make_id("rs"), content=[], summary=[])
                    events = self._begin(item)
                    part = ReasoningPart()
                    events.append(self._tell("response.content_part.added", part=part))
                    item.content.append(ReasoningPart())
                item.content[0].text += text
                return [*events, self._tell("response.reasoning_text.delta", delta=text)]
            case CallStart(_, name, call_id):
                kind = CustomCallItem if name in self.custom_tools else CallItem
                prefix = "ctc" if name in self.custom_tools else "fc"
                return self._begin(
                    kind(id=_make_id(prefix), call_id=call_id or make_call_id(), name=name)
                )
            case ArgumentsDelta(_, text):
                if isinstance(item, CustomCallItem):
                    # A custom tool's input is written as JSON around one text, so its pieces are
                    # collected, and the text is sent when the JSON is complete.
                    item.input += text
                    return []
                assert isinstance(item, CallItem)
                item.arguments += text
                kind = "response.function_call_arguments.delta"
                return [self._tell(kind, content=False, delta=text)]

    def _begin(self, item: OutputItem) -> list[Event]:
        """End the item that the answer is writing, and begin another; return the events of both."""
        events = self._close("completed")
        self._open = item
        self.document.output.append(item)
        added = {"output_index": self._index, "item": msgspec.Raw(_encode(item))}
        return [*events, ("response.output_item.added", added)]

    @property
    def _index(self) -> int:
        return len(self.document.output) - 1

    def _tell(self, kind: str, *, content: bool = True, **values: object) -> Event:
        """Return an event about the item that the answer is writing now."""
        assert self._open is not None
        place: dict[str, Any] = {"item_id": self._open.id, "output_index": self._index}
        if content:
            place["content_index"] = 0
        return kind, place | values

    def _close(self, status: Status) -> list[Event]:
        """End the item that the answer is writing now, if there is one; return the events that tell
        this.
        """
        item = self._open
        events: list[Event] = []
        match item:
            case None:
                return []
            case MessageItem(content=[part]):
                events = [
                    self._tell("response.output_text.done", text=part.text, logprobs=part.logprobs),
                    self._tell("response.content_part.done", part=part),
                ]
            case ReasoningItem(content=[part]):
                if self.hides_reasoning:
                    item.encrypted_content = hide_reasoning(part.text)
                events = [
                    self._tell("response.reasoning_text.done", text=part.text),
                    self._tell("response.content_part.done", part=part),
                ]
            case CallItem(arguments=text):
                kind = "response.function_call_arguments.done"
                events = [self._tell(kind, content=False, name=item.name, arguments=text)]
            case CustomCallItem():
                item.input = _read_input(item.input)
                kind = "response.custom_tool_call_input"
                events = [
                    self._tell(f"{kind}.delta", content=False, delta=item.input),
                    self._tell(f"{kind}.done", content=False, input=item.input),
                ]
            case _:
                pass
        item.status = status
        done = {"output_index": self._index, "item": item}
        self._open = None
        return [*events, ("response.output_item.done", done)]

    def _finish(self, generation: Generation, reason: str) -> None:
        document = self.document
        document.usage = ResponseUsage(
            generation.prompt_len,
            InputTokensDetails(generation.cached_len),
            self._num_tokens,
            OutputTokensDetails(self._num_reasoning),
            generation.prompt_len + self._num_tokens,
        )
        if reason == "stop":
            document.status = "completed"
            document.completed_at = self.now_s()
            return
        document.status = "incomplete"
        # OpenAI's API has no reason for a request that was aborted by an administrator: "aborted"
        # is ours.
        what = "max_output_tokens" if reason == "length" else "aborted"
        document.incomplete_details = IncompleteDetails(what)


def _make_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _read_input(text: str) -> str:
    """Return the text in a custom tool's arguments; if these are incomplete JSON, all of them."""
    try:
        value = parse_json(text)
    except ValueError:
        return text
    found = value.get("input") if isinstance(value, dict) else None
    return found if isinstance(found, str) else text
