"""What a server tells about one of its instances, and about its store."""

from typing import Literal

import msgspec

from tandem.core.wire import StageChanged

__all__ = ["InstanceRole", "InstanceStatus", "StoreStatus"]

InstanceRole = Literal["unified", "prefill", "decode"]


class StoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The store that a server runs for its instances."""

    stage: Literal["starting", "serving", "restarting"]
    detail: str = ""
    """Why it restarts, or did last."""
    pid: int | None = None
    """None while no process runs."""
    num_restarts: int = 0


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One instance, as ``/server_info`` lists it."""

    name: str
    role: str
    """``unified``, ``prefill`` or ``decode``."""
    stage: StageChanged
    pid: int | None = None
    """None while no process runs."""
    num_restarts: int = 0
    sources: list[str] = []
    """Prefill instances whose blocks it can read."""
    refusals: dict[str, str] = {}
    """Why it cannot read the others, by name: what differs, or what was the matter last."""
