"""The methods of an instance that servers call, as one table for both ends.

A new method is an entry here, a handler in ``InstanceApi`` and a ``call`` where it is needed. The
instance registers every method of ``METHODS``; ``InstanceSession.call`` takes one of them.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tandem.core.adapter import AdapterInfo, AdapterSource, UnloadAdapter
from tandem.core.instance_status import ExpertCounts, InstanceStats
from tandem.core.timeline import InstanceTimeline, TimelineQuery
from tandem.core.wire import (
    AddRequest,
    ClosePeer,
    ContinueRequest,
    Empty,
    InstanceInfo,
    KvPeer,
)

__all__ = [
    "ADD",
    "CLOSE_PEER",
    "CONTINUE",
    "EXPERTS",
    "FLUSH_CACHE",
    "INFO",
    "LOAD_ADAPTER",
    "METHODS",
    "OPEN_PEER",
    "STATS",
    "TIMELINES",
    "UNLOAD_ADAPTER",
    "InstanceMethod",
]

Req = TypeVar("Req")
Res = TypeVar("Res")

CALL_TIMEOUT_S = 30.0
LOAD_TIMEOUT_S = 120.0
"""Time limit in seconds of loading an adapter, whose file may be on a slow disk."""


@dataclass(frozen=True, slots=True)
class InstanceMethod(Generic[Req, Res]):
    """An RPC method of an instance that servers call."""

    name: str
    """Name of the method on the wire; unique."""
    request_type: type[Req]
    response_type: type[Res]
    timeout_s: float = CALL_TIMEOUT_S


ADD = InstanceMethod("add", AddRequest, Empty)
CONTINUE = InstanceMethod("continue", ContinueRequest, bool)
INFO = InstanceMethod("info", Empty, InstanceInfo)
STATS = InstanceMethod("stats", Empty, InstanceStats)
OPEN_PEER = InstanceMethod("open_peer", KvPeer, Empty)
CLOSE_PEER = InstanceMethod("close_peer", ClosePeer, Empty)
TIMELINES = InstanceMethod("timelines", TimelineQuery, list[InstanceTimeline])
LOAD_ADAPTER = InstanceMethod("load_adapter", AdapterSource, AdapterInfo, LOAD_TIMEOUT_S)
UNLOAD_ADAPTER = InstanceMethod("unload_adapter", UnloadAdapter, Empty)
EXPERTS = InstanceMethod("experts", Empty, ExpertCounts)
FLUSH_CACHE = InstanceMethod("flush_cache", Empty, int)

METHODS: tuple[InstanceMethod[Any, Any], ...] = (
    ADD,
    CONTINUE,
    INFO,
    STATS,
    OPEN_PEER,
    CLOSE_PEER,
    TIMELINES,
    LOAD_ADAPTER,
    UNLOAD_ADAPTER,
    EXPERTS,
    FLUSH_CACHE,
)
