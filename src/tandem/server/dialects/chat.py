"""The endpoint POST /v1/chat/completions, and planning that other chat APIs share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.server.context import ChoicePlan, ServedModel, ServerContext
from tandem.server.defaults import SamplingDefaults
from tandem.server.dialects.dialect import Dialect, Task
from tandem.server.dialects.openai_answer import OpenAIAnswer
from tandem.server.dialects.options import (
    CHAT_REFUSED_FIELDS,
    TokenLimit,
    plan_choices,
    read_options,
)
from tandem.server.dialects.parsing import (
    list_active_tools,
    make_call_id,
    plan_grammar,
    plan_parsing,
)
from tandem.server.dialects.usage import (
    check_prompt_logprobs,
    count_usage,
    make_chat_logprobs,
    make_prompt_logprobs,
)
from tandem.server.generation import Generation, Piece
from tandem.server.outputs.deltas import (
    ArgumentsDelta,
    CallStart,
    Delta,
    ReasoningDelta,
    TextDelta,
)
from tandem.server.protocol.openai import (
    CallFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    InputMessage,
    Tool,
    ToolCall,
    ToolCallDelta,
)

__all__ = [
    "answer_chat",
    "can_continue",
    "count_shared",
    "encode_conversation",
    "plan_chat",
    "plan_conversation",
]


@dataclass(slots=True)
class _Answer(OpenAIAnswer[ChatRequest]):
    """The renderer of answers in the form of chat completions."""

    choices: list[ChatChoice]
    """Choices by index, filled by ``add``."""
    has_role: list[bool]
    """For each choice: True once a chunk with the role "assistant" was sent, as only the first
    chunk of a choice has it.
    """
    num_calls: list[int]
    """By choice: number of tool calls that have begun."""

    def add(self, generation: Generation, piece: Piece) -> None:
        """Add a piece (new output of a generation) to an answer that is sent as a whole."""
        choice = self.choices[generation.index]
        for delta in piece.deltas:
            _add_delta(choice.message, delta)
        self._count_calls(generation, piece)
        more = self._make_logprobs(piece)
        if more is not None and choice.logprobs is not None:
            choice.logprobs.content.extend(more.content)
        elif more is not None:
            choice.logprobs = more
        choice.finish_reason = self._find_reason(generation, piece)
        choice.stop_reason = generation.stop_reason

    def make_document(self, generations: Sequence[Generation]) -> ChatCompletion:
        """Return the whole answer, as an object that msgspec encodes."""
        answer = self.make(ChatCompletion, self.choices, usage=count_usage(generations, self.n))
        packed = generations[0].prompt_logprobs
        if packed is not None:
            answer.prompt_logprobs = make_prompt_logprobs(
                self.context.encoder.tokenizer, packed, packed.num_top
            )
        return answer

    def make_events(self, generation: Generation, piece: Piece) -> list[bytes]:
        """Return the encoded stream events for a piece (new output of a generation)."""
        chunks: list[ChatChunk] = []
        if not self.has_role[generation.index]:
            self.has_role[generation.index] = True
            first = ChatChunkChoice(generation.index, ChatDelta("", "assistant"))
            chunks.append(self.make(ChatChunk, [first]))
        self._count_calls(generation, piece)
        *before, last = [_make_delta(delta) for delta in piece.deltas] or [ChatDelta()]
        chunks += [
            self.make(ChatChunk, [ChatChunkChoice(generation.index, delta)]) for delta in before
        ]
        choice = ChatChunkChoice(
            generation.index,
            last,
            self._find_reason(generation, piece),
            self._make_logprobs(piece),
        )
        if piece.finish_reason is not None and generation.stop_reason is not None:
            choice.stop_reason = generation.stop_reason
        chunks.append(self.make(ChatChunk, [choice]))
        return self.encode_chunks(generation, piece, chunks)

    def end_events(self, generations: Sequence[Generation]) -> list[bytes]:
        """Return the encoded events that end a stream."""
        return self.encode_end(ChatChunk, generations)

    def _count_calls(self, generation: Generation, piece: Piece) -> None:
        calls = [delta for delta in piece.deltas if isinstance(delta, CallStart)]
        self.num_calls[generation.index] += len(calls)

    def _find_reason(self, generation: Generation, piece: Piece) -> str | None:
        # A tool call that was cut off at the token limit keeps the reason "length", not
        # "tool_calls": its arguments are incomplete.
        if piece.finish_reason == "stop" and self.num_calls[generation.index]:
            return "tool_calls"
        return piece.finish_reason

    def _make_logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if self.request.logprobs is not True:
            return None
        return make_chat_logprobs(self.context.encoder.tokenizer, piece.logprobs)


def _add_delta(message: ChatMessage, delta: Delta) -> None:
    match delta:
        case TextDelta(text):
            message.content = (message.content or "") + text
        case ReasoningDelta(text):
            known = message.reasoning_content
            message.reasoning_content = text if known is UNSET else known + text
        case CallStart(_, name, call_id):
            if message.tool_calls is UNSET:
                message.tool_calls = []
                message.content = message.content or None
            function = CallFunction(name, "")
            message.tool_calls.append(ToolCall(id=call_id or make_call_id(), function=function))
        case ArgumentsDelta(call, text):
            assert message.tool_calls is not UNSET
            function = message.tool_calls[call].function
            assert function.arguments is not UNSET
            function.arguments += text


def _make_delta(delta: Delta) -> ChatDelta:
    match delta:
        case TextDelta(text):
            return ChatDelta(text)
        case ReasoningDelta(text):
            return ChatDelta(reasoning_content=text)
        case CallStart(call, name, call_id):
            start = ToolCallDelta(
                index=call,
                id=call_id or make_call_id(),
                type="function",
                function=CallFunction(name, ""),
            )
            return ChatDelta(tool_calls=[start])
        case ArgumentsDelta(call, text):
            more = ToolCallDelta(index=call, function=CallFunction(arguments=text))
            return ChatDelta(tool_calls=[more])


async def answer_chat(context: ServerContext, http: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    return await _DIALECT.answer(context, http)


def plan_chat(context: ServerContext, request: ChatRequest) -> Task:
    """Return the generations and the renderer for a request of chat completions."""
    model, plans = plan_conversation(context, request)
    options = read_options(request, "chatcmpl", model)
    answer = _Answer(
        context,
        request,
        options.name,
        model,
        [ChatChoice(index, ChatMessage(""), None) for index in range(len(plans))],
        [False for _ in plans],
        [0 for _ in plans],
    )
    return Task(plans, options, answer, request.stream is True)


class Conversation(NamedTuple):
    """A conversation as given to the model: its prompt and the tools that may be called."""

    prompt: str
    prompt_ids: list[int]
    tools: Sequence[Tool]
    """Tools that the answer may call."""
    begun: str
    """Text of the final message if the answer continues it, else empty."""


def encode_conversation(context: ServerContext, request: ChatRequest) -> Conversation:
    """Render the messages of a request by the chat template, and encode them to token ids."""
    tools = list_active_tools(request.tools, request.tool_choice)
    prompt = _render(context, request, tools)
    # The tokenizer adds no special tokens: the chat template has written them into the text.
    prompt_ids = context.encoder.encode(
        [prompt],
        add_special_tokens=False,
        max_model_len=context.ready_info().max_model_len,
        field="messages",
    )[0]
    content = request.messages[-1].content if request.continue_final_message is True else None
    parts = content if isinstance(content, list) else ()
    begun = content if isinstance(content, str) else "\n".join(part.text or "" for part in parts)
    return Conversation(prompt, prompt_ids, tools, begun)


def can_continue(messages: Sequence[InputMessage]) -> bool:
    """Return True if a conversation ends in an assistant's text, which APIs without a field for it
    take as the beginning of the answer. A turn that ends in tool calls is complete.
    """
    return bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls


def count_shared(
    context: ServerContext, request: ChatRequest, num_messages: int, prompt_ids: Sequence[int]
) -> int:
    """Return how many leading prompt tokens belong to the first ``num_messages`` messages.

    Args:
        context: context of the server.
        request: request whose prompt it is.
        num_messages: number of messages.
        prompt_ids: token ids of the whole prompt.
    """
    if num_messages >= len(request.messages):
        return len(prompt_ids)
    part = msgspec.structs.replace(
        request,
        messages=request.messages[:num_messages],
        add_generation_prompt=False,
        continue_final_message=None,
    )
    try:
        head = encode_conversation(context, part).prompt_ids
    except ConfigError:
        # Some templates refuse a conversation whose last messages are left out; then no shared
        # prefix is counted.
        return 0
    pairs = zip(head, prompt_ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(head), len(prompt_ids)))


def _find_message_end(
    context: ServerContext, request: ChatRequest, conversation: Conversation
) -> int:
    """Return the number of prompt tokens up to the end of the messages; 0 if it is unknown.

    A later prompt of the conversation begins with these tokens, but perhaps not with those that
    open the answer, because a template may write these differently when the answer is there.
    """
    if request.continue_final_message is True or request.add_generation_prompt is False:
        return 0
    prompt, prompt_ids, tools, _ = conversation
    messages = _render(context, request, tools, asks=False)
    if not prompt.startswith(messages):
        return 0
    opening = context.encoder.tokenizer.encode(prompt[len(messages) :], add_special_tokens=False)
    end = len(prompt_ids) - len(opening)
    return end if prompt_ids[end:] == opening else 0


def plan_conversation(
    context: ServerContext,
    request: ChatRequest,
    limit: TokenLimit | None = None,
    defaults: SamplingDefaults | None = None,
) -> tuple[ServedModel, list[ChoicePlan]]:
    """Return the model that a request asks for, and its generations; used by all chat APIs.

    Args:
        context: context of the server.
        request: request in the form of chat completions.
        limit: limit of the answer's tokens; None: that of the request.
        defaults: sampling values where the request names none; None: those of conversations.
    """
    _check(request)
    model = context.find_model(request.model)
    context.ready_info()
    context.check_choices(request.n if request.n is not None else 1)
    conversation = encode_conversation(context, request)
    prompt, prompt_ids, tools, begun = conversation
    plans = plan_choices(
        context,
        request,
        [prompt_ids],
        limit=_read_limit(context, request) if limit is None else limit,
        prompt_field="messages",
        logprobs=_num_logprobs(request),
        prompt_logprobs=request.prompt_logprobs,
        parsing=plan_parsing(context.encoder, request, prompt, tools, begun),
        grammar=plan_grammar(context, request, prompt, tools, begun),
        defaults=defaults,
    )
    if context.ready_info().num_state_slots:
        message_end = _find_message_end(context, request, conversation)
        plans = [replace(plan, message_end=message_end) for plan in plans]
    return model, plans


def _check(request: ChatRequest) -> None:
    check_prompt_logprobs(request.prompt_logprobs, is_stream=request.stream is True)
    if request.modalities is not None and any(kind != "text" for kind in request.modalities):
        raise UnsupportedError(
            "server.chat", "modalities: only 'text' is supported", field="modalities"
        )
    if request.top_logprobs and request.logprobs is not True:
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


def _render(
    context: ServerContext, request: ChatRequest, tools: Sequence[Tool], *, asks: bool | None = None
) -> str:
    """Render the messages by the chat template.

    ``asks``: True to append the tokens that open an answer; None: as the request says.
    """
    arguments = request.chat_template_kwargs
    if request.reasoning_effort is not None:
        arguments = {"reasoning_effort": request.reasoning_effort} | (arguments or {})
    return context.encoder.render(
        request.messages,
        add_generation_prompt=request.add_generation_prompt if asks is None else asks,
        continue_final_message=request.continue_final_message,
        arguments=arguments,
        tools=tools,
    )


_DIALECT = Dialect(msgspec.json.Decoder(ChatRequest), plan_chat, CHAT_REFUSED_FIELDS)
