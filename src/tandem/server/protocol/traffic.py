"""Requests and responses of ``/traffic``."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.core.loads.traces import BLOCK_TOKENS, TraceRow

__all__ = ["RecordTraffic", "TrafficReply"]


class RecordTraffic(msgspec.Struct, kw_only=True):
    """POST /traffic."""

    action: Literal["start", "read", "stop"]
    """stop reads what is left, and ends the recording."""
    recording: Annotated[str, Meta(max_length=64)] = ""
    """Name, as ``start`` gave it."""
    block_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = BLOCK_TOKENS
    """With ``start``: tokens that one hash stands for."""


class TrafficReply(msgspec.Struct, kw_only=True):
    """The state of a recording."""

    recording: str
    rows: list[TraceRow] = []
    """Rows of the requests that ended since the last answer, in that order; times from the
    start."""
    num_lost: int = 0
    """Requests of the whole recording that no row tells of, because nobody asked in time."""
