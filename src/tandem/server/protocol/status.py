"""Responses about the server itself, and those of its tokenizer. Field names are the wire names."""

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
    """GET /health, /ping and /live."""

    status: str


class Readiness(Health):
    """GET /ready."""

    detail: str
    done: int
    total: int
    """Units of work done of those in this stage; 0 of 0 is unknown."""


class Version(msgspec.Struct):
    """GET /version."""

    version: str


class ModelInfo(msgspec.Struct, kw_only=True):
    """GET /model_info, with SGLang's names."""

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
    """GET /server_info."""

    version: str
    served_model_name: str
    config: dict[str, Any]
    """The server's settings without secrets."""
    instance: InstanceInfo | None
    """Instance of the first instance that serves; all are alike but for their names."""
    stats: InstanceStats | None
    """Sums over all instances."""
    stage: StageChanged
    instances: list[InstanceStatus]
    store: StoreStatus | None
    """Store of the server's own store; None: it runs none."""
    max_total_num_tokens: int
    internal_states: list[Any] = []
    """SGLang's benchmark client looks for a list here."""


class FlushReply(msgspec.Struct):
    """GET or POST /flush_cache."""

    success: bool
    num_freed_blocks: int


class AbortReply(msgspec.Struct):
    """POST /abort_request."""

    num_aborted: int


class TokenizeReply(msgspec.Struct, kw_only=True):
    """POST /tokenize; every field is a list with one entry a prompt where prompts were a list."""

    tokens: list[Any]
    """Token ids, or lists of them."""
    count: int | list[int]
    max_model_len: int | None
    token_strs: list[Any] | None
    """The tokens as the vocabulary spells them, if asked for."""


class DetokenizeReply(msgspec.Struct):
    """POST /detokenize; lists where lists were sent."""

    prompt: str | list[str]
    """vLLM's name."""
    text: str | list[str]
    """SGLang's name."""
