"""Planning of requests of the Responses API: their generation, and the response to fill."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tandem.core.errors import ConfigError, TandemError
from tandem.server.api.kept_responses import KeptResponse
from tandem.server.context import RequestOptions, ServerContext
from tandem.server.dialects.chat import plan_conversation
from tandem.server.dialects.dialect import Task
from tandem.server.dialects.responses.answer import ResponseAnswer
from tandem.server.dialects.responses.items import (
    read_answer,
    read_choice,
    read_items,
    read_tools,
)
from tandem.server.protocol import openai as oai
from tandem.server.protocol.responses import (
    ReasoningConfig,
    ResponseDocument,
    ResponsesRequest,
    TextConfig,
    TextFormat,
)

__all__ = ["PlannedResponse", "plan_response"]

_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""Values of ``include`` that ask for something here."""
_FIELDS = {
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "max_completion_tokens": "max_output_tokens",
}
"""Names in the Responses API of fields of chat completions, to name the right field in errors."""
_encode = msgspec.json.Encoder().encode
_decode_messages = msgspec.json.Decoder(list[oai.InputMessage]).decode


@dataclass(slots=True)
class PlannedResponse:
    """A response that is planned and does not run yet.

    Args:
        task: task to run.
        answer: renderer of the response.
        kept: stored form of the response, once it is added to the store; None: it is not stored.
        owner: digest of the key that owns it.
    """

    task: Task
    answer: ResponseAnswer
    kept: KeptResponse | None
    owner: bytes


def plan_response(
    context: ServerContext, request: ResponsesRequest, owner: bytes
) -> PlannedResponse:
    """Plan the one generation of a response, which continues a stored conversation or begins one.

    Args:
        context: context of the server, with the stored responses.
        request: request of the client.
        owner: digest of the client's key.

    Raises:
        NotFoundError: the previous response is not stored, or is another client's.
        TandemError: errors of chat completions, with ``field`` named as in this API.
    """
    parent = _find_parent(context, request, owner)
    own = read_items(request.input or [])
    messages = [] if parent is None else _read_history(parent)
    messages += own
    if request.instructions:
        messages.insert(0, oai.InputMessage("system", request.instructions))
    if not messages:
        raise ConfigError("server.responses", "input is missing or empty", field="input")
    is_kept = request.store is not False and context.kept_responses.max_bytes > 0
    if request.background is True and not is_kept:
        what = "background needs store, and server.response_memory_bytes: else nobody can read it"
        raise ConfigError("server.responses", what, field="background")
    if request.background is True and request.stream is True:
        what = "background and stream exclude each other: read the response by its id"
        raise ConfigError("server.responses", what, field="stream")
    chat = _translate(request, _join_system(messages))
    try:
        model, plans = plan_conversation(context, chat)
    except TandemError as error:
        raise _rename_field(error) from error
    document = _make_document(context, request, model.name)
    kept = KeptResponse(document.id, parent, b"", _encode(own)) if is_kept else None
    answer = ResponseAnswer(
        document,
        now_s=context.now_unix_s,
        tokenizer=context.encoder.tokenizer if chat.logprobs is True else None,
        custom_tools=frozenset(t.name or "" for t in request.tools or () if t.type == "custom"),
        hides_reasoning=_ENCRYPTED in (request.include or ()),
        keep=None if kept is None else _make_keep(context, kept, owner, own),
    )
    options = RequestOptions(
        name=document.id,
        model=model,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        timeout_s=request.timeout,
    )
    task = Task(plans, options, answer, request.stream is True, answer.frame_failure)
    return PlannedResponse(task, answer, kept, owner)


def _find_parent(
    context: ServerContext, request: ResponsesRequest, owner: bytes
) -> KeptResponse | None:
    if request.previous_response_id is None:
        return None
    field, now_s = "previous_response_id", context.clock.now_s()
    found = context.kept_responses.find(owner, request.previous_response_id, now_s, field)
    if found.is_running:
        raise ConfigError("server.responses", f"{field}: that response still runs", field=field)
    return found


def _read_history(parent: KeptResponse) -> list[oai.InputMessage]:
    return [message for part in parent.list_messages() for message in _decode_messages(part)]


def _make_keep(
    context: ServerContext, kept: KeptResponse, owner: bytes, own: list[oai.InputMessage]
) -> Callable[[ResponseDocument, bytes], None]:
    def keep(document: ResponseDocument, encoded: bytes) -> None:
        messages = _encode(own + read_answer(document.output))
        if kept.is_running:
            context.kept_responses.update(owner, kept, encoded, messages)
            return
        kept.document, kept.messages = encoded, messages
        context.kept_responses.add(owner, kept, context.clock.now_s())

    return keep


def _join_system(messages: list[oai.InputMessage]) -> list[oai.InputMessage]:
    """Join the leading system and developer messages into one.

    Agents send instructions and then developer messages, but many chat templates allow only one
    system message, at the beginning.
    """
    count = 0
    while count < len(messages) and messages[count].role in ("system", "developer"):
        count += 1
    if count < 2:
        return messages
    text = "\n\n".join(str(message.content) for message in messages[:count])
    return [oai.InputMessage("system", text), *messages[count:]]


def _translate(request: ResponsesRequest, messages: list[oai.InputMessage]) -> oai.ChatRequest:
    """Return the request of chat completions that is equivalent to one of the Responses API."""
    choice, tools = read_choice(request, read_tools(request.tools))
    chat = oai.ChatRequest(
        model=request.model,
        messages=messages,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop=request.stop,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    form = None if request.text is None else request.text.format
    if form is not None:
        chat.response_format = _translate_form(form)
    if _LOGPROBS in (request.include or ()) or request.top_logprobs:
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs or 0
    effort = None if request.reasoning is None else request.reasoning.effort
    if effort == "none":
        # Chat templates of different families read either `enable_thinking` or `thinking`: both are
        # set.
        off = {"enable_thinking": False, "thinking": False}
        chat.chat_template_kwargs = off | (chat.chat_template_kwargs or {})
    elif effort is not None:
        chat.reasoning_effort = effort
    return chat


def _translate_form(form: TextFormat) -> oai.ResponseFormat:
    schema = form.schema if isinstance(form.schema, dict) else None
    return oai.ResponseFormat(form.type, {"schema": schema})


def _rename_field(error: TandemError) -> TandemError:
    """Return an error of chat completions with the field that it blames named as in the Responses
    API.
    """
    if error.field not in _FIELDS:
        return error
    name = _FIELDS[error.field]
    return type(error)(error.where, f"{name}: {error.what}", field=name)


def _make_document(
    context: ServerContext, request: ResponsesRequest, model: str
) -> ResponseDocument:
    text = TextConfig() if request.text is None else request.text
    if text.format is None:
        text = TextConfig(format=TextFormat(type="text"), verbosity=text.verbosity)
    return ResponseDocument(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=context.now_unix_s(),
        status="in_progress",
        background=request.background is True,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=request.reasoning or ReasoningConfig(),
        store=request.store is not False,
        temperature=request.temperature,
        text=text,
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=request.top_p,
        truncation=request.truncation or "disabled",
    )
