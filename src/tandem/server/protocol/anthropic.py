"""Requests and responses of Anthropic's Messages API. Field names are the wire names."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tandem.server.protocol import fields

__all__ = [
    "AnthropicBlock",
    "AnthropicMessage",
    "AnthropicTool",
    "AnthropicUsage",
    "CacheControl",
    "CacheCreation",
    "ContextManagement",
    "CountReply",
    "CountRequest",
    "MessagesReply",
    "MessagesRequest",
    "ReplyBlock",
]


class CacheControl(msgspec.Struct):
    """The request to keep the prompt up to this point in the cache."""

    type: str = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class AnthropicBlock(msgspec.Struct, kw_only=True):
    """A block of a message, of any type; fields that belong to other types are ignored."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None
    thinking: str | None = None
    id: fields.Name | None = None
    name: fields.Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: fields.Name | None = None
    content: "str | list[AnthropicBlock] | None" = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicMessage(msgspec.Struct):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[AnthropicBlock]


class AnthropicTool(msgspec.Struct):
    """A tool; those with a ``type`` of their own run at Anthropic and are left out."""

    name: fields.Name
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicChoice(msgspec.Struct):
    """The choice of the tools that may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: fields.Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """The switch that makes the model reason before it answers."""

    type: str
    budget_tokens: fields.Count | None = None


class OutputFormat(msgspec.Struct):
    """The format that the answer must have."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """The settings of the answer."""

    effort: fields.Name | None = None
    """Effort of reasoning, passed to the chat template, which may use it."""
    format: OutputFormat | None = None


class ContextEdit(msgspec.Struct):
    """A change of the conversation before the model reads it; fields of each type are its own."""

    type: fields.Name
    keep: Any = None
    """The part that the change leaves: ``"all"``, or an object with a ``type``."""


class ContextManagement(msgspec.Struct):
    """The changes of the conversation that are asked for."""

    edits: Annotated[list[ContextEdit], Meta(max_length=64)] | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""

    model: fields.Name | None = None
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=2**16)]
    system: str | list[AnthropicBlock] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=1024)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Older name of ``output_config.format``."""
    cache_control: CacheControl | None = None
    """Mark that asks to keep the whole prompt in the cache."""
    context_management: ContextManagement | None = None
    """Changes of the conversation; only those that leave all of it are served."""
    timeout: fields.Timeout | None = None
    """Time limit in seconds; an extension."""


class MessagesRequest(CountRequest, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=fields.MAX_COUNT)]
    stream: bool | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.TopP | None = None
    top_k: fields.TopK | None = None
    stop_sequences: fields.Stop | None = None


class CacheCreation(msgspec.Struct):
    """Numbers of tokens that ``cache_control`` asked to keep in the cache, by duration."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class AnthropicUsage(msgspec.Struct, kw_only=True):
    """Numbers of tokens of a request."""

    input_tokens: int
    """Number of prompt tokens that neither ``cache_creation_input_tokens`` nor
    ``cache_read_input_tokens`` includes."""
    output_tokens: int
    cache_creation_input_tokens: int = 0
    """Prompt tokens before the last ``cache_control`` that were computed."""
    cache_read_input_tokens: int = 0
    cache_creation: CacheCreation | UnsetType = UNSET


class ReplyBlock(msgspec.Struct, kw_only=True):
    """A block of an answer: text, thinking or tool_use."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class MessagesReply(msgspec.Struct, kw_only=True):
    """An answer; in the event ``message_start``, without blocks."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[ReplyBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage


class CountReply(msgspec.Struct):
    """The answer of count_tokens."""

    input_tokens: int
