"""Requests and responses of OpenAI's Responses API. Field names are the wire names."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tandem.server.protocol import fields
from tandem.server.protocol.openai import ChatLogprob

__all__ = [
    "CallItem",
    "CustomCallItem",
    "DeletedResponse",
    "IncompleteDetails",
    "InputItem",
    "InputTokensDetails",
    "MessageItem",
    "OutputItem",
    "OutputTokensDetails",
    "ReasoningConfig",
    "ReasoningItem",
    "ReasoningPart",
    "ResponseDocument",
    "ResponseFailure",
    "ResponseTool",
    "ResponseUsage",
    "ResponsesRequest",
    "Status",
    "TextConfig",
    "TextFormat",
    "TextPart",
]

Metadata = Annotated[dict[str, str], Meta(max_length=16)]


class InputPart(msgspec.Struct, kw_only=True):
    """A part of an item's content; only text is supported."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """An item of a conversation, of any type; fields that belong to other types are ignored."""

    type: Annotated[str, Meta(max_length=64)] | None = None
    """Type of the item; None: a message."""
    id: fields.Name | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    call_id: fields.Name | None = None
    name: fields.Name | None = None
    arguments: str | None = None
    """Arguments of a function_call, as the text of a JSON object."""
    input: str | None = None
    """Input text of a custom_tool_call."""
    output: str | list[InputPart] | None = None


class ResponseTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool; types other than function and custom run at OpenAI and are left out."""

    type: Annotated[str, Meta(max_length=64)]
    name: fields.FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    """Format of a custom tool's input text."""


class AllowedTool(msgspec.Struct):
    """A tool in ``tool_choice.tools``, the list of those that the model may call."""

    type: str
    name: fields.Name | None = None


class ToolChoiceObject(msgspec.Struct, kw_only=True):
    """The tool that must be called, or the tools that may be."""

    type: Annotated[str, Meta(max_length=64)]
    name: fields.Name | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedTool], Meta(max_length=1024)] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """The format of the answer's text: text, json_object or json_schema."""

    type: Annotated[str, Meta(max_length=64)]
    name: fields.Name | UnsetType = UNSET
    description: str | UnsetType = UNSET
    schema: dict[str, Any] | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET


class TextConfig(msgspec.Struct, kw_only=True):
    """Settings of the answer's text."""

    format: TextFormat | None = None
    verbosity: fields.Name | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """Options of reasoning."""

    effort: fields.Name | None = None
    summary: fields.Name | None = None


class StreamConfig(msgspec.Struct, kw_only=True):
    """Options of a stream. ``include_obfuscation`` asks for padding of events and is accepted, but
    events are never padded.
    """

    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/responses. ``null`` means the same as leaving a field out."""

    model: fields.Name | None = None
    input: str | Annotated[list[InputItem], Meta(max_length=2**16)] | None = None
    instructions: str | None = None
    previous_response_id: fields.Name | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamConfig | None = None
    include: Annotated[list[fields.Name], Meta(max_length=64)] | None = None
    metadata: Metadata | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=fields.MAX_COUNT)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    temperature: fields.Temperature | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceObject | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=1024)] | None = None
    top_logprobs: fields.LogprobCount | None = None
    top_p: fields.TopP | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """Accepted; a conversation beyond the context is refused with both values."""
    top_k: fields.TopK | None = None
    seed: fields.Seed | None = None
    stop: fields.Stop | None = None
    priority: fields.Priority | None = None
    cache_salt: fields.Name | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    timeout: fields.Timeout | None = None
    """Time limit in seconds; this field and the five above are extensions."""


Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed", "queued"]


class TextPart(msgspec.Struct, kw_only=True):
    """The text of a message."""

    type: str = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class ReasoningPart(msgspec.Struct, kw_only=True):
    """The text of a reasoning item."""

    type: str = "reasoning_text"
    text: str = ""


class MessageItem(msgspec.Struct, kw_only=True):
    """A message of the model."""

    type: str = "message"
    id: str
    role: str = "assistant"
    status: Status = "in_progress"
    content: list[TextPart]


class ReasoningItem(msgspec.Struct, kw_only=True):
    """The model's reasoning before its answer."""

    type: str = "reasoning"
    id: str
    status: Status = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningPart]
    encrypted_content: str | UnsetType = UNSET


class CallItem(msgspec.Struct, kw_only=True):
    """A call of a function."""

    type: str = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


class CustomCallItem(msgspec.Struct, kw_only=True):
    """A call of a tool whose input is a text."""

    type: str = "custom_tool_call"
    id: str
    call_id: str
    name: str
    input: str = ""
    status: Status = "in_progress"


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class InputTokensDetails(msgspec.Struct):
    """Numbers of prompt tokens that were read from the cache, and written to it."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """Number of the answer's tokens that were reasoning, counted per event."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Numbers of tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """The reason why a response is not complete."""

    reason: str


class ResponseFailure(msgspec.Struct):
    """The reason why a response failed."""

    code: str
    message: str


class ResponseDocument(msgspec.Struct, kw_only=True):
    """A response, whole or as far as it has come."""

    id: str
    object: str = "response"
    created_at: int
    status: Status
    background: bool
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Any]
    """Items of the answer; see ``OutputItem``."""
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningConfig
    store: bool
    temperature: float | None
    text: TextConfig
    tool_choice: str | ToolChoiceObject
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float | None
    truncation: str
    usage: ResponseUsage | None = None


class DeletedResponse(msgspec.Struct, kw_only=True):
    """The answer of DELETE /v1/responses/{id}."""

    id: str
    object: str = "response"
    deleted: bool = True
