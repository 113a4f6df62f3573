"""Requests and responses of ``/traffic``."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.core.loads.traces import BLOCK_TOKENS, TraceRow

__all__ = ["RecordTraffic", "TrafficReply"]


class RecordTraffic(msgspec.Struct, kw_only=True):
    """The body of POST /traffic."""

    action: Literal["start", "read", "stop"]
    """``stop`` returns the remaining rows and ends the recording."""
    recording: Annotated[str, Meta(max_length=64)] = ""
    """Name of the recording, as ``start`` returned it."""
    block_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = BLOCK_TOKENS
    """Number of tokens per hash, for ``start``."""


class TrafficReply(msgspec.Struct, kw_only=True):
    """The state of a recording."""

    recording: str
    rows: list[TraceRow] = []
    """Rows of the requests that have ended since the last answer, in order of their ends; times
    count from the recording's start."""
    num_lost: int = 0
    """Number of requests of the whole recording without a row, because rows were not read in
    time."""
