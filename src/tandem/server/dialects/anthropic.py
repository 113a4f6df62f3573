"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's API.

A request is converted to one of chat completions and planned as such; only the form of the answer
differs. Prefixes are cached without being asked; a ``cache_control`` mark makes the KV store evict
the prefix that ends there late.
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.models.tokenizing.schemas.json_text import parse_begun_object
from tandem.server.context import ServedModel, ServerContext
from tandem.server.dialects.chat import (
    can_continue,
    count_shared,
    encode_conversation,
    plan_conversation,
)
from tandem.server.dialects.dialect import Dialect, Task
from tandem.server.dialects.options import read_options
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
from tandem.server.protocol import openai as oai
from tandem.server.protocol.anthropic import (
    AnthropicBlock,
    AnthropicMessage,
    AnthropicUsage,
    CacheControl,
    CacheCreation,
    ContextManagement,
    CountReply,
    CountRequest,
    MessagesReply,
    MessagesRequest,
    ReplyBlock,
)

__all__ = ["REFUSED_FIELDS", "answer_messages", "count_message_tokens"]

_encode = msgspec.json.Encoder().encode
_BILLING = "x-anthropic-billing-header"
"""Beginning of a block in Claude Code's system prompt that differs from call to call, so that no
cached prefix would match. The block is dropped: it means nothing to a model."""
REFUSED_FIELDS = {
    "compaction": "conversations are not compacted: send the messages that count",
    "container": "there are no containers in which code runs",
    "fallbacks": "name one model",
    "mcp_servers": "the server calls no tools: list them under tools and call them yourself",
    "thread": "no conversation is kept: send all messages",
}
"""Reason by unsupported field that would change the answer."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class _Caching:
    """The last ``cache_control`` of a request (a mark that asks to keep the prompt up to there in
    the cache), and the length of the prompt before it.
    """

    num_tokens: int = 0
    """Number of prompt tokens before the latest ``cache_control`` mark of the client."""
    control: CacheControl | None = None

    @property
    def pin_s(self) -> float:
        """Seconds for which the prompt is to be kept in the cache."""
        if self.control is None:
            return 0.0
        return 3600.0 if self.control.ttl == "1h" else 300.0

    def count_usage(self, generation: Generation, num_tokens: int) -> AnthropicUsage:
        """Return the usage (token counts) of a generation that has written ``num_tokens``
        tokens.
        """
        read = generation.cached_len
        created = max(self.num_tokens - read, 0)
        usage = AnthropicUsage(
            input_tokens=generation.prompt_len - read - created,
            output_tokens=num_tokens,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=read,
        )
        if self.control is not None:
            is_long = self.control.ttl == "1h"
            usage.cache_creation = CacheCreation(0 if is_long else created, created * is_long)
        return usage


@dataclass(slots=True)
class _Answer:
    """The renderer of answers in the form of Anthropic's messages."""

    id: str
    model: ServedModel
    caching: "_Caching"
    blocks: list[ReplyBlock] = field(default_factory=list[ReplyBlock])
    arguments: list[str] = field(default_factory=list[str])
    """Text of the arguments of each tool call, by index of the call."""
    stop_reason: str | None = None
    has_begun: bool = False
    kind: str = ""
    """Kind of the block that is open in a stream; empty: none is open."""
    num_blocks: int = 0
    num_calls: int = 0
    is_cumulative: bool = field(init=False, default=False)

    def measure(self, generation: Generation, piece: Piece) -> int:
        """Return about how many bytes of the answer a piece (new output of a generation) takes."""
        return piece.size_bytes

    def add(self, generation: Generation, piece: Piece) -> None:
        """Add a piece (new output of a generation) to an answer that is sent as a whole."""
        for delta in piece.deltas:
            last = self.blocks[-1] if self.blocks else None
            match delta:
                case TextDelta(text) if last is not None and last.type == "text":
                    last.text = f"{last.text}{text}"
                case TextDelta(text):
                    self.blocks.append(ReplyBlock(type="text", text=text))
                case ReasoningDelta(text) if last is not None and last.type == "thinking":
                    last.thinking = f"{last.thinking}{text}"
                case ReasoningDelta(text):
                    block = ReplyBlock(type="thinking", thinking=text, signature="")
                    self.blocks.append(block)
                case CallStart(_, name, call_id):
                    self.blocks.append(
                        ReplyBlock(type="tool_use", id=call_id or _make_id(), name=name, input={})
                    )
                    self.arguments.append("")
                    self.num_calls += 1
                case ArgumentsDelta(call, text):
                    self.arguments[call] += text

    def make_document(self, generations: Sequence[Generation]) -> MessagesReply:
        """Return the whole answer, as an object that msgspec encodes."""
        (generation,) = generations
        calls = [block for block in self.blocks if block.type == "tool_use"]
        for block, text in zip(calls, self.arguments, strict=True):
            block.input = parse_begun_object(text)
        return self._make_message(generation, self.blocks, generation.num_tokens)

    def make_events(self, generation: Generation, piece: Piece) -> list[bytes]:
        """Return the encoded stream events for a piece (new output of a generation)."""
        events: list[bytes] = []
        if not self.has_begun:
            self.has_begun = True
            begin = self._make_message(generation, [], 0)
            begin.stop_reason = begin.stop_sequence = None
            events.append(_frame("message_start", message=begin))
        for delta in piece.deltas:
            events += self._make_delta(delta)
        if piece.finish_reason is not None:
            events += self._close_block()
            reason, sequence = self._find_reason(generation)
            events.append(
                _frame(
                    "message_delta",
                    delta={"stop_reason": reason, "stop_sequence": sequence},
                    usage=self.caching.count_usage(generation, piece.num_tokens),
                )
            )
        return events

    def end_events(self, generations: Sequence[Generation]) -> list[bytes]:
        """Return the encoded events that end a stream."""
        return [_frame("message_stop")]

    def _make_delta(self, delta: Delta) -> list[bytes]:
        match delta:
            case TextDelta(text):
                events = self._open_block("text", ReplyBlock(type="text", text=""))
                change = {"type": "text_delta", "text": text}
            case ReasoningDelta(text):
                block = ReplyBlock(type="thinking", thinking="", signature="")
                events = self._open_block("thinking", block)
                change = {"type": "thinking_delta", "thinking": text}
            case CallStart(call, name, call_id):
                self.num_calls += 1
                block = ReplyBlock(type="tool_use", id=call_id or _make_id(), name=name, input={})
                return self._open_block(f"tool_use {call}", block)
            case ArgumentsDelta(_, text):
                events = []
                change = {"type": "input_json_delta", "partial_json": text}
        index = self.num_blocks - 1
        return [*events, _frame("content_block_delta", index=index, delta=change)]

    def _open_block(self, kind: str, block: ReplyBlock) -> list[bytes]:
        if self.kind == kind:
            return []
        events = self._close_block()
        self.kind = kind
        self.num_blocks += 1
        start = _frame("content_block_start", index=self.num_blocks - 1, content_block=block)
        return [*events, start]

    def _close_block(self) -> list[bytes]:
        if not self.kind:
            return []
        kind, self.kind = self.kind, ""
        events: list[bytes] = []
        index = self.num_blocks - 1
        if kind == "thinking":
            # A thinking block ends with a signature, which clients send back with the block; the
            # server checks none, so the signature is empty.
            change = {"type": "signature_delta", "signature": ""}
            events.append(_frame("content_block_delta", index=index, delta=change))
        return [*events, _frame("content_block_stop", index=index)]

    def _find_reason(self, generation: Generation) -> tuple[str, str | None]:
        """Return Anthropic's stop reason, and the stop sequence that was found (None: none was)."""
        reason = generation.finish_reason or "stop"
        if reason == "stop" and isinstance(generation.stop_reason, str):
            return "stop_sequence", generation.stop_reason
        if reason == "stop" and self.num_calls:
            return "tool_use", None
        return _STOP_REASONS[reason], None

    def _make_message(
        self, generation: Generation, blocks: list[ReplyBlock], num_tokens: int
    ) -> MessagesReply:
        reason, sequence = self._find_reason(generation)
        return MessagesReply(
            id=self.id,
            model=self.model.name,
            content=blocks,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self.caching.count_usage(generation, num_tokens),
        )


def _frame(kind: str, **values: object) -> bytes:
    return encode_named_event(kind, _encode({"type": kind, **values}))


def _make_id() -> str:
    return f"toolu_{uuid.uuid4().hex[:24]}"


async def answer_messages(context: ServerContext, http: Request) -> Response:
    """Answer a conversation in Anthropic's form, whole or as a stream."""
    return await _DIALECT.answer(context, http)


async def count_message_tokens(context: ServerContext, http: Request) -> Response:
    """Count the tokens of a conversation in Anthropic's form."""
    http.state.write_error = _write_error
    origin = context.note_arrival(http)
    request = await context.read_request(http, _count_decoder, REFUSED_FIELDS)

    def count() -> CountReply:
        return CountReply(len(encode_conversation(context, _translate(request)).prompt_ids))

    reply = await context.prepare(http, origin, request.timeout, count)
    return Response(_encode(reply), media_type="application/json")


def _plan(context: ServerContext, request: MessagesRequest) -> Task:
    chat = _translate(request)
    chat.max_tokens, chat.temperature = request.max_tokens, request.temperature
    chat.top_p, chat.top_k, chat.stop = request.top_p, request.top_k, request.stop_sequences
    chat.timeout = request.timeout
    model, plans = plan_conversation(context, chat)
    caching = _find_caching(context, request, chat, plans[0].prompt_ids)
    options = replace(
        read_options(chat, "msg", model),
        pin_len=caching.num_tokens,
        pin_s=caching.pin_s,
    )
    answer = _Answer(options.name.replace("-", "_"), model, caching)
    return Task(plans, options, answer, request.stream is True)


def _translate(request: CountRequest) -> oai.ChatRequest:
    """Return the request of chat completions that is equivalent to one of Anthropic's messages
    API.
    """
    _check_edits(request.context_management)
    messages: list[oai.InputMessage] = []
    system = _read_system(request.system)
    if system:
        messages.append(oai.InputMessage("system", system))
    for index, message in enumerate(request.messages):
        messages += _translate_message(message, f"messages[{index}]")
    tools = [
        oai.Tool(
            oai.Function(
                tool.name, tool.description, tool.input_schema or {"type": "object"}, tool.strict
            )
        )
        for tool in request.tools or ()
        if tool.type in (None, "custom")
    ]
    chat = oai.ChatRequest(
        model=request.model,
        messages=messages,
        tools=tools or None,
        continue_final_message=can_continue(messages),
    )
    choice = request.tool_choice
    if choice is not None:
        if choice.type == "tool":
            chat.tool_choice = oai.NamedChoice(oai.NamedFunction(choice.name or ""))
        else:
            chat.tool_choice = "required" if choice.type == "any" else choice.type
        chat.parallel_tool_calls = choice.disable_parallel_tool_use is not True
    if request.thinking is not None:
        is_on = request.thinking.type != "disabled"
        # Chat templates of different families read either `enable_thinking` or `thinking`: both are
        # set.
        chat.chat_template_kwargs = {"enable_thinking": is_on, "thinking": is_on}
    settings = request.output_config
    form = request.output_format
    if settings is not None:
        chat.reasoning_effort = settings.effort
        form = settings.format or form
    if form is not None:
        chat.response_format = oai.ResponseFormat("json_schema", {"schema": form.schema})
    return chat


def _check_edits(management: ContextManagement | None) -> None:
    """Check that no edit changes the conversation. Claude Code asks to clear thinking, and to keep
    all of it, which is what a conversation that nobody edits has.

    Raises: UnsupportedError (an edit would change it).
    """
    edits = management.edits if management is not None else None
    for index, edit in enumerate(edits or ()):
        if edit.type.startswith("clear_thinking") and edit.keep in ("all", {"type": "all"}):
            continue
        field = f"context_management.edits[{index}]"
        what = (
            f"{field} is {edit.type!r}: conversations are not edited: send the messages that count"
        )
        raise UnsupportedError("server.messages", what, field=field)


def _find_caching(
    context: ServerContext, request: MessagesRequest, chat: oai.ChatRequest, prompt_ids: list[int]
) -> _Caching:
    """Return the last ``cache_control`` of a request, which also covers those before it."""
    if request.cache_control is not None:
        return _Caching(len(prompt_ids), request.cache_control)
    for number in range(len(request.messages) - 1, -1, -1):
        control = _find_control(request.messages[number].content)
        if control is not None:
            # One Anthropic message may become several chat messages, so the marked message's place
            # is found by subtracting the chat messages of all later ones.
            after = sum(len(_translate_message(m, "")) for m in request.messages[number + 1 :])
            count = len(chat.messages) - after
            return _Caching(count_shared(context, chat, count, prompt_ids), control)
    control = _find_control(request.system)
    if control is None:
        controls = [tool.cache_control for tool in request.tools or ()]
        control = next((each for each in reversed(controls) if each is not None), None)
    if control is None or not chat.messages or chat.messages[0].role != "system":
        return _Caching()
    return _Caching(count_shared(context, chat, 1, prompt_ids), control)


def _find_control(content: str | list[AnthropicBlock] | None) -> CacheControl | None:
    """Return the last ``cache_control`` in the content of a message or of a tool's result; else
    None.
    """
    if content is None or isinstance(content, str):
        return None
    for block in reversed(content):
        control = block.cache_control or _find_control(block.content)
        if control is not None:
            return control
    return None


def _read_system(system: str | list[AnthropicBlock] | None) -> str:
    texts = [system] if isinstance(system, str) else [block.text or "" for block in system or ()]
    return "\n".join(text for text in texts if text and not text.startswith(_BILLING))


def _translate_message(message: AnthropicMessage, place: str) -> list[oai.InputMessage]:
    """Return the chat messages for an Anthropic message: tool results first, then the user's
    text.
    """
    if isinstance(message.content, str):
        return [oai.InputMessage(message.role, message.content)]
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[oai.InputCall] = []
    results: list[oai.InputMessage] = []
    for index, block in enumerate(message.content):
        field = f"{place}.content[{index}]"
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = json.dumps(block.input or {}, ensure_ascii=False)
                function = oai.InputFunction(block.name or "", arguments)
                calls.append(oai.InputCall(function, block.id))
            case "tool_result":
                text = _read_result(block, field)
                results.append(oai.InputMessage("tool", text, tool_call_id=block.tool_use_id))
            case kind:
                what = f"{field}.type is {kind!r}: text and tools alone are supported"
                raise UnsupportedError("server.messages", what, field=f"{field}.type")
    if not (texts or calls or results or thoughts):
        raise ConfigError("server.messages", f"{place}.content is empty", field=f"{place}.content")
    if not (texts or calls) and not thoughts:
        return results
    spoken = oai.InputMessage(message.role, "\n".join(texts))
    spoken.reasoning_content = "\n".join(thoughts) if thoughts else None
    spoken.tool_calls = calls or None
    return [*results, spoken]


def _read_result(block: AnthropicBlock, field: str) -> str:
    if isinstance(block.content, str):
        return block.content
    texts: list[str] = []
    for index, part in enumerate(block.content or ()):
        if part.type != "text":
            place = f"{field}.content[{index}].type"
            what = f"{place} is {part.type!r}: text alone is supported"
            raise UnsupportedError("server.messages", what, field=place)
        texts.append(part.text or "")
    return "\n".join(texts)


def _write_error(body: ErrorBody, status: int) -> bytes:
    kind = _ERROR_TYPES.get(status, "api_error")
    return _encode({"type": "error", "error": {"type": kind, "message": body.message}})


def _frame_error(body: ErrorBody, status: int) -> bytes:
    return encode_named_event("error", _write_error(body, status))


_count_decoder = msgspec.json.Decoder(CountRequest)
_DIALECT = Dialect(
    msgspec.json.Decoder(MessagesRequest), _plan, REFUSED_FIELDS, _write_error, _frame_error
)
