"""The fields that the official clients can send: which are served, ignored or refused.

A field is served if the request's struct has it, refused if the dialect's table names it, and
ignored only if it is listed here, with the reason why that changes no answer. ``tools/page/api.py``
writes the page of it and a test compares with the clients themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from tandem.server.dialects import anthropic, ollama
from tandem.server.dialects.options import CHAT_REFUSED_FIELDS, REFUSED_FIELDS
from tandem.server.dialects.responses.endpoints import REFUSED_RESPONSE_FIELDS
from tandem.server.protocol.anthropic import CountRequest, MessagesRequest
from tandem.server.protocol.ollama import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
)
from tandem.server.protocol.openai import ChatRequest, CompletionRequest
from tandem.server.protocol.responses import ResponsesRequest
from tandem.server.protocol.vectors import EmbeddingRequest, EmbedRequest, OldEmbedRequest

__all__ = ["REQUEST_TYPES", "RequestType"]

_ACCOUNT = "names whom the provider bills or watches; there is no account here"
_CACHE = "prefixes are cached without being asked"
_SPEED = "about speed and price at the provider"
_RUNNER = "of Ollama's own runner; the server's configuration says this"
_OPENAI = {
    "metadata": "labels of requests that the provider keeps; none is kept",
    "prediction": "makes an answer faster, not another",
    "prompt_cache_key": _CACHE,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": _CACHE,
    "safety_identifier": _ACCOUNT,
    "service_tier": _SPEED,
    "store": "chat completions are not kept; /v1/responses keeps its own",
    "user": _ACCOUNT,
    "max_tool_calls": "limits tools that run at the provider; none do",
}
_ANTHROPIC = {
    "betas": "only switches fields on, which are listed here themselves",
    "billing_policy": _ACCOUNT,
    "diagnostics": "asks for remarks beside the answer",
    "fallback_credit_token": _ACCOUNT,
    "inference_geo": "about the place where the provider computes",
    "metadata": _ACCOUNT,
    "service_tier": _SPEED,
    "speed": _SPEED,
    "user_profile_id": _ACCOUNT,
    "workspace_id": _ACCOUNT,
}
_RUNNER_OPTIONS = (
    *("f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_gpu", "num_thread"),
    *("numa", "use_mlock", "use_mmap", "vocab_only", "embedding_only"),
)
_OPTIONS = {
    **dict.fromkeys(_RUNNER_OPTIONS, _RUNNER),
    "mirostat_eta": "of mirostat, which is refused",
    "mirostat_tau": "of mirostat, which is refused",
    "num_keep": "of shifting a full context; answers end there instead",
}


@dataclass(frozen=True, slots=True)
class RequestType:
    """A type of requests of an official client."""

    path: str
    """Endpoint, and the part of its body if it is not the whole."""
    sdk_types: tuple[str, ...]
    """Names of the client's types, as module and name."""
    struct: type[msgspec.Struct]
    """Struct that the body is decoded to."""
    refused: Mapping[str, str]
    """Reason by refused field that the struct does not have."""
    ignored: Mapping[str, str]
    """Reason by ignored field; may list fields of other types, too."""

    def find_answer(self, name: str) -> str:
        """Return what becomes of a field; empty if nobody has decided."""
        if name in self.refused:
            return f"refused: {self.refused[name]}"
        if any(each.encode_name == name for each in msgspec.structs.fields(self.struct)):
            return "served"
        return f"ignored: {self.ignored[name]}" if name in self.ignored else ""


REQUEST_TYPES = (
    RequestType(
        "POST /v1/chat/completions",
        ("openai.types.chat.completion_create_params:CompletionCreateParamsBase",),
        ChatRequest,
        CHAT_REFUSED_FIELDS,
        _OPENAI,
    ),
    RequestType(
        "POST /v1/completions",
        ("openai.types.completion_create_params:CompletionCreateParamsBase",),
        CompletionRequest,
        REFUSED_FIELDS,
        _OPENAI,
    ),
    RequestType(
        "POST /v1/responses",
        ("openai.types.responses.response_create_params:ResponseCreateParamsBase",),
        ResponsesRequest,
        REFUSED_RESPONSE_FIELDS,
        _OPENAI,
    ),
    RequestType(
        "POST /v1/embeddings",
        ("openai.types.embedding_create_params:EmbeddingCreateParams",),
        EmbeddingRequest,
        {},
        _OPENAI,
    ),
    RequestType(
        "POST /v1/messages",
        (
            "anthropic.types.message_create_params:MessageCreateParamsBase",
            "anthropic.types.beta.message_create_params:MessageCreateParamsBase",
        ),
        MessagesRequest,
        anthropic.REFUSED_FIELDS,
        _ANTHROPIC,
    ),
    RequestType(
        "POST /v1/messages/count_tokens",
        (
            "anthropic.types.message_count_tokens_params:MessageCountTokensParams",
            "anthropic.types.beta.message_count_tokens_params:MessageCountTokensParams",
        ),
        CountRequest,
        anthropic.REFUSED_FIELDS,
        _ANTHROPIC,
    ),
    RequestType(
        "POST /api/chat",
        ("ollama._types:ChatRequest",),
        OllamaChatRequest,
        ollama.REFUSED_FIELDS,
        {},
    ),
    RequestType(
        "POST /api/generate",
        ("ollama._types:GenerateRequest",),
        OllamaGenerateRequest,
        ollama.REFUSED_FIELDS,
        {},
    ),
    RequestType("POST /api/embed", ("ollama._types:EmbedRequest",), EmbedRequest, {}, {}),
    RequestType(
        "POST /api/embeddings", ("ollama._types:EmbeddingsRequest",), OldEmbedRequest, {}, {}
    ),
    RequestType(
        "options of POST /api/chat and /api/generate",
        ("ollama._types:Options",),
        OllamaOptions,
        ollama.REFUSED_OPTIONS,
        _OPTIONS,
    ),
)
