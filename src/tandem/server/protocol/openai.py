"""Requests and answers of the OpenAI API, with the extensions that vLLM and SGLang have made
common.

Field names are the wire names. Answers leave out unset fields, except where clients read null.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tandem.server.protocol import fields

__all__ = [
    "CallFunction",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatDelta",
    "ChatLogprob",
    "ChatLogprobs",
    "ChatMessage",
    "ChatRequest",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionRequest",
    "ContentPart",
    "DetokenizeRequest",
    "Function",
    "InputCall",
    "InputFunction",
    "InputMessage",
    "ModelCard",
    "ModelList",
    "NamedChoice",
    "NamedFunction",
    "PromptLogprob",
    "PromptLogprobList",
    "PromptTokensDetails",
    "ResponseFormat",
    "SamplingFields",
    "StreamOptions",
    "TokenizeRequest",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "TopLogprob",
    "Usage",
]


class StreamOptions(msgspec.Struct):
    """The options of a stream: which counts it reports."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct):
    """The format of the answer: text, json_object or json_schema."""

    type: str
    json_schema: Any = None
    """Object with ``schema``, and perhaps OpenAI's ``name`` and ``strict``."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """The common fields of chat completions and completions. ``null`` means the same as leaving a
    field out.
    """

    model: fields.Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: fields.Count | None = None
    min_tokens: fields.Count | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.TopP | None = None
    top_k: fields.TopK | None = None
    min_p: fields.MinP | None = None
    repetition_penalty: fields.RepetitionPenalty | None = None
    frequency_penalty: fields.FrequencyPenalty | None = None
    presence_penalty: fields.FrequencyPenalty | None = None
    logit_bias: fields.LogitBias | None = None
    seed: fields.Seed | None = None
    n: fields.NumChoices | None = None
    best_of: fields.NumChoices | None = None
    stop: fields.Stop | None = None
    stop_token_ids: fields.StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    """SGLang's name of ``include_stop_str_in_output``."""
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: fields.Schema | None = None
    guided_regex: fields.Pattern | None = None
    guided_choice: fields.Choices | None = None
    guided_grammar: fields.Pattern | None = None
    """Grammar in Lark or GBNF."""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's newer form of the four guided fields, by their names without "guided_"."""
    json_schema: fields.Schema | None = None
    """SGLang's name of ``guided_json``; the next two fields are SGLang's too."""
    regex: fields.Pattern | None = None
    ebnf: fields.Pattern | None = None
    priority: fields.Priority | None = None
    cache_salt: fields.Name | None = None
    timeout: fields.Timeout | None = None
    """Time limit in seconds; the server's own limit applies too."""
    request_id: fields.Name | None = None
    rid: fields.Name | None = None
    """SGLang's name of ``request_id``."""


class ContentPart(msgspec.Struct):
    """A part of a message's content; only text is supported."""

    type: str
    text: str | None = None


class InputFunction(msgspec.Struct):
    """The function that a tool call in an earlier answer names, with its arguments."""

    name: fields.Name
    arguments: str | dict[str, Any] | Annotated[list[Any], Meta(max_length=0)] | None = ""
    """Arguments as the text of a JSON object, or as an object; null or an empty list: none."""


class InputCall(msgspec.Struct):
    """A tool call of an earlier answer."""

    function: InputFunction
    id: fields.Name | None = None
    type: Literal["function"] = "function"


class Function(msgspec.Struct, omit_defaults=True):
    """A function that a model may call."""

    name: fields.FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the function's arguments."""
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool of a request; only functions are supported."""

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct):
    """The function, by name, that ``tool_choice`` forces the model to call."""

    name: fields.Name


class NamedChoice(msgspec.Struct):
    """The choice of one tool that must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


Tools = Annotated[list[Tool], Meta(max_length=1024)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class InputMessage(msgspec.Struct):
    """A message of the conversation so far."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: fields.Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's name of ``reasoning_content``."""
    tool_call_id: fields.Name | None = None
    tool_calls: list[InputCall] | None = None


Messages = Annotated[list[InputMessage], Meta(min_length=1, max_length=2**16)]


class ChatRequest(SamplingFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: fields.Count | None = None
    logprobs: bool | None = None
    top_logprobs: fields.LogprobCount | None = None
    reasoning_effort: fields.Name | None = None
    """Effort of reasoning, passed to the chat template, which may use it."""
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prompt_logprobs: fields.LogprobCount | None = None
    """vLLM's field: number of likeliest tokens at each position of the prompt to report, with
    log-probabilities."""
    separate_reasoning: bool | None = None
    """False leaves reasoning in the text, with its marks."""
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[Any]
    """A text, token ids, or a list of either; ``prompts.read_prompts`` checks lists."""
    suffix: str | None = None
    """Text after the answer, for models that can fill in the middle."""
    echo: bool | None = None
    logprobs: fields.LogprobCount | None = None
    prompt_logprobs: fields.LogprobCount | None = None
    """vLLM's field: number of likeliest tokens at each position of the prompt to report, with
    log-probabilities."""
    add_special_tokens: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize: a text, several texts or a conversation."""

    model: fields.Name | None = None
    prompt: str | list[str] | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[Any]
    """Token ids, or a list of lists of them; ``prompts.read_prompts`` checks them."""
    model: fields.Name | None = None
    skip_special_tokens: bool | None = None


class PromptTokensDetails(msgspec.Struct):
    """Number of prompt tokens that were found in the cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Numbers of tokens of a request, as counted by the engine."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, gc=False):
    """One of the likeliest tokens at a position.

    An answer may have a million of these objects, so they are exempt from garbage collection, which
    would stop the event loop.
    """

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatLogprob(TopLogprob, gc=False):
    """A generated token and the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat choice."""

    content: list[ChatLogprob]


class CallFunction(msgspec.Struct):
    """The function that a tool call names; in a stream, the additions of one event."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call of an answer."""

    id: str
    type: str = "function"
    function: CallFunction


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The additions of one event to a tool call; the first has its id and name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CallFunction


class ChatMessage(msgspec.Struct):
    """The message of an answer."""

    content: str | None
    role: str = "assistant"
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer of a chat completion."""

    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    """Stop string or stop token id that ended the text; None if none did."""


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer of chat completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: "PromptLogprobList | UnsetType" = UNSET


class ChatDelta(msgspec.Struct):
    """The additions of a chunk to the message."""

    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """One choice in a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """An event of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET


class PromptLogprob(msgspec.Struct, gc=False):
    """A token at a position of the prompt, in vLLM's form."""

    logprob: float
    rank: int
    """Rank of the token among all, 1 for the likeliest."""
    decoded_token: str


PromptLogprobList = list[dict[str, PromptLogprob] | None]
"""Log-probabilities by position, then by token id; the first token has none."""


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a completion, as parallel lists."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct):
    """One text of a completion, whole or as an event of a stream."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | UnsetType = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The answer of completions, and each event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that can be asked for."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "tandem"
    root: str
    parent: str | None = None
    """Name of the model to which an adapter belongs; None for a model."""
    max_model_len: int | None
    default_sampling: dict[str, float] = {}
    """Values of sampling where a conversation names none, by the names of its fields."""
    note: str = ""
    """A sentence for whoever begins to chat with the model; empty if there is none."""


class ModelList(msgspec.Struct, kw_only=True):
    """The answer of GET /v1/models."""

    object: str = "list"
    data: list[ModelCard]
