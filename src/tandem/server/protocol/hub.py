"""Requests and responses of ``/models``."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["ChangeModels", "HostedModelStatus", "HostedModels"]


class ChangeModels(msgspec.Struct, kw_only=True):
    """The body of POST /models."""

    action: Literal["load", "wake", "sleep", "evict", "pin", "unpin"]
    model: Annotated[str, Meta(min_length=1, max_length=256)]


class HostedModelStatus(msgspec.Struct, kw_only=True):
    """One model of the address."""

    name: str
    state: Literal["new", "waking", "awake", "draining", "asleep", "evicted"]
    need_bytes: int
    """Bytes of memory that the model needs while awake."""
    num_live: int
    """Number of the model's requests that have not ended."""
    is_pinned: bool


class HostedModels(msgspec.Struct, kw_only=True):
    """All models of the address."""

    models: list[HostedModelStatus]
    used_bytes: int
    """Bytes of memory that all awake models need together."""
