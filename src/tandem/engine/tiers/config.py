"""Settings of the tiers below the device's own blocks."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["TierConfig"]


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of KV that is stored in and loaded from the store; without effect if there is no
    store.
    """

    write: Annotated[
        Literal["write_through", "on_evict", "off"],
        Meta(
            description="When a full block is stored: write_through as soon as it is full; "
            "on_evict when the device needs its memory; off never."
        ),
    ] = "write_through"
    prefetch: Annotated[
        Literal["best_effort", "wait", "timeout"],
        Meta(
            description="How long a request waits for blocks that the store holds: best_effort "
            "uses what comes while it is in the queue; wait until they are there or "
            "load_deadline_ms is over; timeout as long as computing them would take."
        ),
    ] = "timeout"
    decision: Annotated[
        Literal["auto", "load", "compute"],
        Meta(
            description="What to do with blocks that the store holds: auto loads them if that is "
            "faster than to compute them, by the rates measured here."
        ),
    ] = "auto"
    lookup_timeout_ms: Annotated[
        int,
        Meta(ge=1, le=60_000, description="Longest time a request waits to learn what is stored."),
    ] = 100
    load_deadline_ms: Annotated[
        int, Meta(ge=10, le=600_000, description="Deadline of one read from the store.")
    ] = 2000
    min_wait_ms: Annotated[
        int,
        Meta(ge=0, le=60_000, description="A request under timeout waits at least this long."),
    ] = 50
    pin_gib: Annotated[
        float,
        Meta(
            ge=0.0,
            le=2**20,
            description="KV that one client's cache_control may have the store evict late, GiB, "
            "for as long as it says; 0 is none.",
        ),
    ] = 1.0
    staging_blocks: Annotated[
        int,
        Meta(ge=1, le=65536, description="Blocks copied aside and not yet stored, at most."),
    ] = 64
    max_queued_stores: Annotated[
        int,
        Meta(
            ge=1,
            le=2**20,
            description="Blocks that may wait to be stored; the oldest are dropped beyond it.",
        ),
    ] = 4096
