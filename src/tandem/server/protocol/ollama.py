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
    """Options of sampling; those that concern Ollama's own runner are ignored."""

    num_predict: _Limit | None = None
    """0 and below: all that fits."""
    num_ctx: fields.Count | None = None
    """Tokens of prompt and answer together; more than the server's context is as much as that."""
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


class OllamaRequest(msgspec.Struct, kw_only=True):
    """The fields that chat and generate have in common."""

    model: fields.Name | None = None
    stream: bool | None = None
    """Unset is a stream."""
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    """"json", or a JSON Schema."""
    think: bool | Annotated[str, Meta(max_length=16)] | None = None
    """A switch, or how hard, for templates that know it."""
    keep_alive: _KeepAlive | None = None
    """Accepted; the model stays."""
    logprobs: bool | None = None
    top_logprobs: fields.LogprobCount | None = None
    timeout: fields.Timeout | None = None
    """Seconds; an extension."""


class OllamaCallFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The function of a call."""

    name: fields.Name
    arguments: dict[str, Any]
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
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=2**16)] = []
    """None: nothing is generated."""
    tools: Tools | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """POST /api/generate."""

    prompt: str = ""
    """Empty: nothing is generated."""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    """The prompt is not put into the chat template."""
    images: list[str] | None = None


class _Reply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An answer, or an event of it; only the last has counts and durations, in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    """All tokens of the prompt, those of a cached prefix too."""
    prompt_eval_duration: int | None = None
    """Until the first token, the wait in the queue included."""
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[ChatLogprob] | None = None


class ChatReply(_Reply, kw_only=True):
    """The answer of chat, or an event of it."""

    message: OllamaMessage


class GenerateReply(_Reply, kw_only=True, omit_defaults=True):
    """The answer of generate, or an event of it."""

    response: str
    thinking: str | None = None


class Details(msgspec.Struct, kw_only=True):
    """The kind of a model."""

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
    """GET /api/tags."""

    models: list[OllamaModel]


class ProcessList(msgspec.Struct):
    """GET /api/ps."""

    models: list[RunningModel]


class ShowRequest(msgspec.Struct):
    """POST /api/show."""

    model: fields.Name | None = None
    name: fields.Name | None = None
    """The older name of ``model``."""


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
    """GET /api/version."""

    version: str
