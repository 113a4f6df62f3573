"""Requests and responses of Ollama's API. Field names are the wire names."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.server.protocol import fields
from tandem.server.protocol.openai import ChatLogprob, Tools

__all__ = [
    "ChatReply",
    "Details",
    "GenerateReply",
    "OllamaCall",
    "OllamaCallFunction",
    "OllamaChatRequest",
    "OllamaGenerateRequest",
    "OllamaMessage",
    "OllamaModel",
    "OllamaOptions",
    "OllamaRequest",
    "OllamaVersion",
    "ProcessList",
    "RunningModel",
    "ShowReply",
    "ShowRequest",
    "TagList",
]

_Limit = Annotated[int, Meta(ge=-2, le=fields.MAX_COUNT)]
_KeepAlive = int | float | str


class OllamaOptions(msgspec.Struct, kw_only=True):
    """Options of sampling; options of Ollama's own runner are ignored."""

    num_predict: _Limit | None = None
    """Largest number of output tokens; 0 and below: all that fits."""
    num_ctx: fields.Count | None = None
    """Largest number of prompt and output tokens; at most the server's context counts."""
    temperature: fields.Temperature | None = None
    top_k: fields.TopK | None = None
    top_p: fields.TopP | None = None
    min_p: fields.MinP | None = None
    seed: fields.Seed | None = None
    stop: fields.Stop | None = None
    repeat_penalty: fields.RepetitionPenalty | None = None
    presence_penalty: fields.FrequencyPenalty | None = None
    frequency_penalty: fields.FrequencyPenalty | None = None
    mirostat: int | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    repeat_last_n: int | None = None
    """Window of the penalties; only -1, the whole text, is supported with them."""
    penalize_newline: bool | None = None
    """Only True is supported with penalties."""


class OllamaRequest(msgspec.Struct, kw_only=True):
    """The common fields of chat and generate."""

    model: fields.Name | None = None
    stream: bool | None = None
    """True, or unset, for a stream."""
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    """Format of the answer: "json", or a JSON Schema."""
    think: bool | Annotated[str, Meta(max_length=16)] | None = None
    """Switch, or effort, of reasoning, for templates that support it."""
    keep_alive: _KeepAlive | None = None
    """Accepted and ignored: the model stays loaded."""
    logprobs: bool | None = None
    top_logprobs: fields.LogprobCount | None = None
    timeout: fields.Timeout | None = None
    """Time limit in seconds; an extension."""


class OllamaCallFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The function that a tool call names, with its arguments."""

    name: fields.Name
    arguments: dict[str, Any] | None = None
    index: int | None = None


class OllamaCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool call."""

    function: OllamaCallFunction
    id: fields.Name | None = None


class OllamaMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of a conversation, or of an answer."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_name: fields.Name | None = None
    tool_call_id: fields.Name | None = None
    tool_calls: list[OllamaCall] | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """The body of POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=2**16)] = []
    """Conversation so far; empty: nothing is generated."""
    tools: Tools | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """The body of POST /api/generate."""

    prompt: str = ""
    """Prompt; empty: nothing is generated."""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    """True if the chat template is not applied to the prompt."""
    images: list[str] | None = None


class _Reply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An answer or one of its events. Only the last event has counts and durations, in
    nanoseconds.
    """

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    """Number of tokens of the prompt, including a cached prefix."""
    prompt_eval_duration: int | None = None
    """Nanoseconds until the first token, including the wait in the queue."""
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[ChatLogprob] | None = None


class ChatReply(_Reply, kw_only=True):
    """The answer of chat, or one of its events."""

    message: OllamaMessage


class GenerateReply(_Reply, kw_only=True, omit_defaults=True):
    """The answer of generate, or one of its events."""

    response: str
    thinking: str | None = None


class Details(msgspec.Struct, kw_only=True):
    """Family, size and format of a model."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    """A model that can be asked for."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class RunningModel(OllamaModel, kw_only=True):
    """A model in memory."""

    expires_at: str
    size_vram: int
    context_length: int


class TagList(msgspec.Struct):
    """The answer of GET /api/tags."""

    models: list[OllamaModel]


class ProcessList(msgspec.Struct):
    """The answer of GET /api/ps."""

    models: list[RunningModel]


class ShowRequest(msgspec.Struct):
    """The body of POST /api/show."""

    model: fields.Name | None = None
    name: fields.Name | None = None
    """Older name of ``model``."""


class ShowReply(msgspec.Struct, kw_only=True):
    """The description of a model."""

    modelfile: str = ""
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct):
    """The answer of GET /api/version."""

    version: str
