"""POST /v1/chat/completions."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.server.api.answers import OpenAIAnswer, answer_stream, answer_whole, make_events
from tandem.server.api.options import (
    REFUSED_FIELDS,
    TokenLimit,
    check_format,
    plan_choices,
    read_options,
)
from tandem.server.api.usage import count_usage, make_chat_logprobs
from tandem.server.context import ChoicePlan, ServedModel, ServerContext
from tandem.server.edge.connection import limit_time
from tandem.server.generation import Generation, GenerationGroup, Piece
from tandem.server.protocol.openai import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
)

__all__ = ["answer_chat", "plan_chat"]

_decoder = msgspec.json.Decoder(ChatRequest)


class _Answer(OpenAIAnswer[ChatRequest]):
    """An answer of chat completions."""

    def make_logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if self.request.logprobs is not True:
            return None
        return make_chat_logprobs(self.context.encoder.tokenizer, piece.logprobs)


async def answer_chat(context: ServerContext, http: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    origin = context.note_arrival(http)
    request = await context.read_request(http, _decoder, REFUSED_FIELDS)
    model, plans = await context.prepare(http, origin, request.timeout, plan_chat, context, request)
    n = request.n if request.n is not None else 1
    options = read_options(request, "chatcmpl", model.adapter)
    group = await context.start(plans, options, origin, http.receive)
    answer = _Answer(context, request, options.name, model, n)
    if request.stream is True:
        return answer_stream(context, group, _events(answer, group))
    return await answer_whole(context, http, group, _collect(answer, group))


def plan_chat(context: ServerContext, request: ChatRequest) -> tuple[ServedModel, list[ChoicePlan]]:
    """Return what was asked for, and its generations."""
    _check(request)
    model = context.find_model(request.model)
    info = context.ready_info()
    context.check_choices(request.n if request.n is not None else 1)
    prompt_ids = _encode_prompt(context, request, info.max_model_len)
    plans = plan_choices(
        context,
        request,
        [prompt_ids],
        limit=_read_limit(context, request),
        prompt_field="messages",
        logprobs=_num_logprobs(request),
    )
    return model, plans


def _check(request: ChatRequest) -> None:
    check_format(request)
    if request.tool_choice not in (None, "none", "auto"):
        raise UnsupportedError(
            "server.chat", "tool_choice: tools are not supported", field="tool_choice"
        )
    if request.modalities is not None and any(kind != "text" for kind in request.modalities):
        raise UnsupportedError(
            "server.chat", "modalities: only 'text' is supported", field="modalities"
        )
    if request.top_logprobs is not None and request.logprobs is not True:
        raise ConfigError(
            "server.chat", "top_logprobs needs logprobs to be true", field="top_logprobs"
        )


def _num_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs is not True:
        return None
    return request.top_logprobs if request.top_logprobs is not None else 0


def _read_limit(context: ServerContext, request: ChatRequest) -> TokenLimit:
    field, asked = "max_completion_tokens", request.max_completion_tokens
    if asked is None:
        field, asked = "max_tokens", request.max_tokens
    if asked == 0:
        raise ConfigError("server.chat", f"{field} is 0: ask for at least 1", field=field)
    return TokenLimit(field, asked, context.config.default_max_tokens)


def _encode_prompt(context: ServerContext, request: ChatRequest, max_model_len: int) -> list[int]:
    arguments = request.chat_template_kwargs
    if request.reasoning_effort is not None:
        arguments = {"reasoning_effort": request.reasoning_effort} | (arguments or {})
    text = context.encoder.render(
        request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        arguments=arguments,
    )
    # The template writes the special tokens itself.
    return context.encoder.encode(
        [text], add_special_tokens=False, max_model_len=max_model_len, field="messages"
    )[0]


async def _collect(answer: _Answer, group: GenerationGroup) -> ChatCompletion:
    texts = ["" for _ in group.generations]
    logprobs: list[ChatLogprobs | None] = [None for _ in group.generations]
    async with limit_time(group.time_limit_s), aclosing(group.pieces()) as pieces:
        async for generation, piece in pieces:
            texts[generation.index] += piece.text
            new = answer.make_logprobs(piece)
            seen = logprobs[generation.index]
            if new is not None and seen is not None:
                seen.content.extend(new.content)
            elif new is not None:
                logprobs[generation.index] = new
    choices = [
        ChatChoice(
            generation.index,
            ChatMessage(texts[generation.index]),
            generation.finish_reason,
            logprobs[generation.index],
            generation.stop_reason,
        )
        for generation in group.generations
    ]
    usage = count_usage(group.generations, answer.n)
    return answer.make(ChatCompletion, choices, usage=usage)


def _events(answer: _Answer, group: GenerationGroup) -> AsyncGenerator[bytes, None]:
    has_role = [False for _ in group.generations]

    def make_chunks(generation: Generation, piece: Piece) -> Iterator[ChatChunk]:
        if not has_role[generation.index]:
            has_role[generation.index] = True
            first = ChatChunkChoice(generation.index, ChatDelta("", "assistant"))
            yield answer.make(ChatChunk, [first])
        yield answer.make(ChatChunk, [_make_choice(answer, generation, piece)])

    return make_events(answer, group, ChatChunk, make_chunks)


def _make_choice(answer: _Answer, generation: Generation, piece: Piece) -> ChatChunkChoice:
    choice = ChatChunkChoice(
        generation.index,
        ChatDelta(piece.text) if piece.text else ChatDelta(UNSET),
        piece.finish_reason,
        answer.make_logprobs(piece),
    )
    if piece.finish_reason is not None and generation.stop_reason is not None:
        choice.stop_reason = generation.stop_reason
    return choice
