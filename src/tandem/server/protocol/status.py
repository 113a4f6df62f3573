"""Answers about the server itself, and of its tokenizer. Field names are the wire names."""

from typing import Any

import msgspec

from tandem.core.instance_status import InstanceStats, InstanceStatus, StoreStatus
from tandem.core.wire import InstanceInfo, StageChanged

__all__ = [
    "AbortReply",
    "DetokenizeReply",
    "FlushReply",
    "Health",
    "ModelInfo",
    "Readiness",
    "ServerInfo",
    "TokenizeReply",
    "Version",
]


class Health(msgspec.Struct):
    """The answer of GET /health, /ping and /live."""

    status: str


class Readiness(Health):
    """The answer of GET /ready."""

    detail: str
    done: int
    total: int
    """Units of work in this stage, of which ``done`` are done; 0: unknown."""


class Version(msgspec.Struct):
    """The answer of GET /version."""

    version: str


class ModelInfo(msgspec.Struct, kw_only=True):
    """The answer of GET /model_info, with SGLang's names."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool = True
    preferred_sampling_params: dict[str, float]
    model_type: str
    max_model_len: int
    num_parameters: int
    weight_version: str


class ServerInfo(msgspec.Struct, kw_only=True):
    """The answer of GET /server_info."""

    version: str
    served_model_name: str
    config: dict[str, Any]
    """The server's settings without secrets."""
    instance: InstanceInfo | None
    """Facts about the first instance that serves; the others differ only in their names."""
    stats: InstanceStats | None
    """Statistics summed over all instances."""
    stage: StageChanged
    instances: list[InstanceStatus]
    store: StoreStatus | None
    """State of the server's own store; None: it runs none."""
    max_total_num_tokens: int
    internal_states: list[Any] = []
    """Empty list, because SGLang's benchmark client expects one."""


class FlushReply(msgspec.Struct):
    """The answer of GET or POST /flush_cache."""

    success: bool
    num_freed_blocks: int


class AbortReply(msgspec.Struct):
    """The answer of POST /abort_request."""

    num_aborted: int


class TokenizeReply(msgspec.Struct, kw_only=True):
    """The answer of POST /tokenize. If prompts were a list, every field is a list with one entry
    for each.
    """

    tokens: list[Any]
    """Token ids, or a list of lists of them."""
    count: int | list[int]
    max_model_len: int | None
    token_strs: list[Any] | None
    """Tokens as spelled in the vocabulary, if asked for."""


class DetokenizeReply(msgspec.Struct):
    """The answer of POST /detokenize. If lists were sent, fields are lists."""

    prompt: str | list[str]
    """Text, under vLLM's name."""
    text: str | list[str]
    """Text, under SGLang's name."""
