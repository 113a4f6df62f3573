"""POST /api/chat and /api/generate, Ollama's API.

A request is converted to one of chat completions and planned as such; the answer consists of lines
of JSON. A tool call is sent as a whole when its arguments are complete, as Ollama's clients expect.
Unknown options that change the answer are refused; those of Ollama's own runner (threads, layers on
a GPU) are ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import UnsupportedError
from tandem.models.tokenizing.schemas.json_text import parse_begun_object
from tandem.server.api.grammars import read_grammar
from tandem.server.context import ChoicePlan, ServedModel, ServerContext
from tandem.server.dialects.chat import can_continue, plan_conversation
from tandem.server.dialects.dialect import Dialect, Task
from tandem.server.dialects.options import TokenLimit, plan_choices, read_options
from tandem.server.dialects.parsing import make_call_id
from tandem.server.dialects.usage import make_chat_logprobs
from tandem.server.edge.http_errors import ErrorBody
from tandem.server.generation import Generation, Piece
from tandem.server.outputs.deltas import (
    ArgumentsDelta,
    CallStart,
    Delta,
    ReasoningDelta,
    TextDelta,
)
from tandem.server.protocol import openai as oai
from tandem.server.protocol.ollama import (
    ChatReply,
    GenerateReply,
    OllamaCall,
    OllamaCallFunction,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)
from tandem.server.text.middle import find_middle_tokens

__all__ = [
    "REFUSED_FIELDS",
    "REFUSED_OPTIONS",
    "answer_ollama_chat",
    "answer_ollama_generate",
    "find_ollama_model",
    "format_time",
    "write_ollama_error",
]

_encode = msgspec.json.Encoder().encode
_REASONS = {"stop": "stop", "length": "length", "abort": "stop"}
_NS = 1_000_000_000
REFUSED_FIELDS = {
    "template": "only the checkpoint's own chat template is used",
    "context": "send the conversation to /api/chat instead",
    "images": "only text is supported as input",
    **dict.fromkeys(("width", "height", "steps"), "images are not made"),
}
_WINDOW = "penalties are over the whole text, and over all tokens: leave it out"
REFUSED_OPTIONS = {
    "mirostat": "use top_p, top_k or min_p",
    "typical_p": "use top_p, top_k or min_p",
    "tfs_z": "use top_p, top_k or min_p",
    "repeat_last_n": _WINDOW,
    "penalize_newline": _WINDOW,
}
"""Reason by option that would change the answer; values that change nothing are accepted."""
_NEUTRAL_OPTIONS = {
    "mirostat": 0,
    "typical_p": 1.0,
    "tfs_z": 1.0,
    "repeat_last_n": -1,
    "penalize_newline": True,
}


class _Parts:
    """The text, reasoning and tool calls of an answer, or of one event of it."""

    def __init__(self) -> None:
        self.text = ""
        self.thinking: str | None = None
        self.calls: list[OllamaCall] = []


@dataclass(slots=True)
class _Answer:
    """The renderer of answers to chat and generate requests in Ollama's form."""

    context: ServerContext
    request: OllamaRequest
    model: ServedModel
    is_chat: bool
    parts: _Parts = field(default_factory=_Parts)
    logprobs: list[oai.ChatLogprob] = field(default_factory=list[oai.ChatLogprob])
    num_calls: int = 0
    open_call: tuple[str, str] | None = None
    """Id and name of the tool call whose arguments are still arriving."""
    arguments: str = ""
    """Arguments of the open tool call so far."""
    is_cumulative: bool = field(init=False, default=False)

    def measure(self, generation: Generation, piece: Piece) -> int:
        """Return about how many bytes of the answer a piece (new output of a generation) takes."""
        return piece.size_bytes

    def add(self, generation: Generation, piece: Piece) -> None:
        """Add a piece (new output of a generation) to an answer that is sent as a whole."""
        self._take(self.parts, piece)
        self.logprobs += self._read_logprobs(piece)

    def make_document(self, generations: Sequence[Generation]) -> msgspec.Struct:
        """Return the whole answer, as an object that msgspec encodes."""
        if not generations:
            # A request without a prompt loads the model, or unloads it if keep_alive is 0, and
            # generates nothing.
            reply = self._make(_Parts(), [])
            reply.done = True
            reply.done_reason = "unload" if self.request.keep_alive in (0, "0", "0s") else "load"
            return reply
        (generation,) = generations
        reason = generation.finish_reason or "stop"
        return self._end(self._make(self.parts, self.logprobs), generation, reason)

    def make_events(self, generation: Generation, piece: Piece) -> list[bytes]:
        """Return the encoded stream events for a piece (new output of a generation)."""
        parts = _Parts()
        self._take(parts, piece)
        logprobs = self._read_logprobs(piece)
        events: list[bytes] = []
        if parts.text or parts.thinking or parts.calls or logprobs:
            events.append(_line(self._make(parts, logprobs)))
        if piece.finish_reason is not None:
            last = self._end(self._make(_Parts(), []), generation, piece.finish_reason)
            events.append(_line(last))
        return events

    def end_events(self, generations: Sequence[Generation]) -> list[bytes]:
        """Return the encoded events that end a stream."""
        return []

    def _take(self, parts: _Parts, piece: Piece) -> None:
        for delta in piece.deltas:
            self._take_delta(parts, delta)
        if piece.finish_reason is not None:
            self._end_call(parts)

    def _take_delta(self, parts: _Parts, delta: Delta) -> None:
        if isinstance(delta, ArgumentsDelta):
            self.arguments += delta.text
            return
        self._end_call(parts)
        match delta:
            case TextDelta(text):
                parts.text += text
            case ReasoningDelta(text):
                parts.thinking = (parts.thinking or "") + text
            case CallStart(_, name, call_id):
                self.open_call = call_id or make_call_id(), name

    def _end_call(self, parts: _Parts) -> None:
        if self.open_call is None:
            return
        call_id, name = self.open_call
        function = OllamaCallFunction(
            name=name, arguments=parse_begun_object(self.arguments), index=self.num_calls
        )
        parts.calls.append(OllamaCall(function=function, id=call_id))
        self.num_calls += 1
        self.open_call, self.arguments = None, ""

    def _read_logprobs(self, piece: Piece) -> list[oai.ChatLogprob]:
        if self.request.logprobs is not True:
            return []
        return make_chat_logprobs(self.context.encoder.tokenizer, piece.logprobs).content

    def _make(self, parts: _Parts, logprobs: list[oai.ChatLogprob]) -> ChatReply | GenerateReply:
        told: dict[str, Any] = {
            "model": self.model.name,
            "created_at": format_time(datetime.now(UTC)),
            "done": False,
            "logprobs": logprobs or None,
        }
        if not self.is_chat:
            return GenerateReply(response=parts.text, thinking=parts.thinking, **told)
        message = OllamaMessage(
            role="assistant",
            content=parts.text,
            thinking=parts.thinking,
            tool_calls=parts.calls or None,
        )
        return ChatReply(message=message, **told)

    def _end(
        self, reply: ChatReply | GenerateReply, generation: Generation, reason: str
    ) -> ChatReply | GenerateReply:
        timer = generation.timer
        total_ns = round(timer.elapsed_s * _NS)
        first_s = timer.first_token_s
        first_ns = total_ns if first_s is None else round(first_s * _NS)
        reply.done, reply.done_reason = True, _REASONS[reason]
        reply.total_duration, reply.load_duration = total_ns, 0
        reply.prompt_eval_count, reply.prompt_eval_duration = generation.prompt_len, first_ns
        reply.eval_count, reply.eval_duration = generation.num_tokens, total_ns - first_ns
        return reply


async def answer_ollama_chat(context: ServerContext, http: Request) -> Response:
    """Answer a conversation in Ollama's form, as a stream unless asked otherwise."""
    return await _CHAT.answer(context, http)


async def answer_ollama_generate(context: ServerContext, http: Request) -> Response:
    """Answer a prompt in Ollama's form, as a stream unless asked otherwise."""
    return await _GENERATE.answer(context, http)


def find_ollama_model(context: ServerContext, name: str | None) -> ServedModel:
    """Return the model with this name; Ollama's clients append ":latest" to a name without a tag.

    Raises:
        NotFoundError: there is no model of that name.
    """
    return context.find_model(None if name is None else name.removesuffix(":latest"))


def format_time(at: datetime) -> str:
    """Return a time in the form that Ollama writes."""
    return at.isoformat().replace("+00:00", "Z")


def _plan_chat(context: ServerContext, request: OllamaChatRequest) -> Task:
    model = find_ollama_model(context, request.model)
    messages = [
        _translate_message(each, f"messages[{i}]") for i, each in enumerate(request.messages)
    ]
    chat = _translate(request, model, messages)
    chat.tools = request.tools
    if not messages:
        return _make_task(context, request, chat, model, [], is_chat=True)
    return _plan(context, request, chat, model, is_chat=True)


def _plan_generate(context: ServerContext, request: OllamaGenerateRequest) -> Task:
    model = find_ollama_model(context, request.model)
    messages = [oai.InputMessage("user", request.prompt)]
    if request.system:
        messages.insert(0, oai.InputMessage("system", request.system))
    chat = _translate(request, model, messages)
    if not request.prompt:
        return _make_task(context, request, chat, model, [], is_chat=False)
    has_template = context.encoder.template_source is not None
    if has_template and request.raw is not True and not request.suffix:
        return _plan(context, request, chat, model, is_chat=False)
    info = context.ready_info()
    write = partial(context.grammars.write, info)
    grammar, name = read_grammar(chat, write, chat.response_format)
    if grammar:
        context.grammars.check(grammar, info, name)
    prompt = request.prompt
    if request.system and request.raw is not True:
        prompt = f"{request.system}\n{prompt}"
    encode = partial(context.encoder.encode, max_model_len=info.max_model_len)
    if request.suffix:
        middle = find_middle_tokens(context.encoder.tokenizer)
        [prefix_ids] = encode([prompt], add_special_tokens=False, field="prompt")
        [suffix_ids] = encode([request.suffix], add_special_tokens=False, field="suffix")
        prompt_ids = middle.join(prefix_ids, suffix_ids, adds_special=True)
    else:
        [prompt_ids] = encode([prompt], add_special_tokens=True, field="prompt")
    plans = plan_choices(
        context,
        chat,
        [prompt_ids],
        limit=_read_limit(request),
        prompt_field="prompt",
        logprobs=_num_logprobs(request),
        grammar=grammar,
        defaults=context.defaults.ollama,
    )
    return _make_task(context, request, chat, model, plans, is_chat=False)


def _plan(
    context: ServerContext,
    request: OllamaRequest,
    chat: oai.ChatRequest,
    model: ServedModel,
    *,
    is_chat: bool,
) -> Task:
    _, plans = plan_conversation(
        context, chat, _read_limit(request), defaults=context.defaults.ollama
    )
    return _make_task(context, request, chat, model, plans, is_chat=is_chat)


def _make_task(
    context: ServerContext,
    request: OllamaRequest,
    chat: oai.ChatRequest,
    model: ServedModel,
    plans: list[ChoicePlan],
    *,
    is_chat: bool,
) -> Task:
    options = request.options or OllamaOptions()
    if options.num_ctx:
        plans = [_fit_context(plan, options.num_ctx) for plan in plans]
    answer = _Answer(context, request, model, is_chat)
    return Task(plans, read_options(chat, "ollama", model), answer, request.stream is not False)


def _fit_context(plan: ChoicePlan, num_ctx: int) -> ChoicePlan:
    room = max(num_ctx - len(plan.prompt_ids), 1)
    sampling = structs.replace(plan.sampling, max_tokens=min(plan.sampling.max_tokens, room))
    return ChoicePlan(plan.prompt_ids, sampling, plan.text)


def _read_limit(request: OllamaRequest) -> TokenLimit:
    asked = request.options.num_predict if request.options is not None else None
    # `num_predict` may exceed what fits into the context: like Ollama, the server then generates as
    # much as fits.
    default = asked if asked is not None and asked > 0 else None
    return TokenLimit("options.num_predict", None, default)


def _num_logprobs(request: OllamaRequest) -> int | None:
    return request.top_logprobs or 0 if request.logprobs is True else None


def _translate(
    request: OllamaRequest, model: ServedModel, messages: list[oai.InputMessage]
) -> oai.ChatRequest:
    """Return the request of chat completions that is equivalent to one of Ollama's API."""
    options = request.options or OllamaOptions()
    has_penalty = (
        options.repeat_penalty not in (None, 1.0)
        or bool(options.presence_penalty)
        or bool(options.frequency_penalty)
    )
    for name, why in REFUSED_OPTIONS.items():
        if why == _WINDOW and not has_penalty:
            continue
        if getattr(options, name) not in (None, _NEUTRAL_OPTIONS[name]):
            what = f"options.{name} is not supported: {why}"
            raise UnsupportedError("server.ollama", what, field=f"options.{name}")
    chat = oai.ChatRequest(
        model=model.name,
        messages=messages,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        stop=options.stop,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs if request.logprobs is True else None,
        continue_final_message=can_continue(messages),
        timeout=request.timeout,
    )
    if request.format == "json":
        chat.response_format = oai.ResponseFormat("json_object")
    elif request.format:
        chat.response_format = oai.ResponseFormat("json_schema", {"schema": request.format})
    if request.think is not None:
        is_on = request.think is not False
        # Chat templates of different families read either `enable_thinking` or `thinking`: both are
        # set.
        chat.chat_template_kwargs = {"enable_thinking": is_on, "thinking": is_on}
        if isinstance(request.think, str):
            chat.reasoning_effort = request.think
    return chat


def _translate_message(message: OllamaMessage, place: str) -> oai.InputMessage:
    if message.images:
        what = f"{place}.images: only text is supported as input"
        raise UnsupportedError("server.ollama", what, field=f"{place}.images")
    return oai.InputMessage(
        message.role,
        message.content or "",
        name=message.tool_name,
        reasoning_content=message.thinking,
        tool_call_id=message.tool_call_id,
        tool_calls=[
            oai.InputCall(
                oai.InputFunction(call.function.name, _encode(call.function.arguments).decode()),
                call.id,
            )
            for call in message.tool_calls or ()
        ]
        or None,
    )


def _line(reply: msgspec.Struct) -> bytes:
    return _encode(reply) + b"\n"


def write_ollama_error(body: ErrorBody, status: int) -> bytes:
    """Encode an error in Ollama's form."""
    return _encode({"error": body.message})


def _frame_error(body: ErrorBody, status: int) -> bytes:
    return write_ollama_error(body, status) + b"\n"


_dialect = partial(
    Dialect,
    refused=REFUSED_FIELDS,
    write_error=write_ollama_error,
    frame_error=_frame_error,
    stream_type="application/x-ndjson",
)
_CHAT = _dialect(msgspec.json.Decoder(OllamaChatRequest), _plan_chat)
_GENERATE = _dialect(msgspec.json.Decoder(OllamaGenerateRequest), _plan_generate)
