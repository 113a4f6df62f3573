"""Messages between a launcher and the servers that use its instances."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.core.instance_status import InstanceRole
from tandem.core.wire import InstanceStage

__all__ = ["CHANGE", "LAUNCHER_ROLE", "ROSTER", "ChangeRoster", "Roster", "RosterEntry"]

LAUNCHER_ROLE = "launcher"
ROSTER = "roster"
"""Method that returns the ``Roster``; changed rosters are pushed as events afterwards."""
CHANGE = "change"
"""Method that carries out a ``ChangeRoster`` and returns the roster after it."""


class RosterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An instance in the roster (the list of instances) that a launcher sends to servers."""

    name: str
    """Name of the instance, unique in the cluster."""
    role: InstanceRole
    stage: InstanceStage
    endpoint: str = ""
    """Endpoint of its process. For TCP, the server replaces the host by the one at which it reaches
    the launcher."""
    run: str = ""
    """Id of the instance's process, new after each restart; empty before the first start."""
    pid: int | None = None
    is_draining: bool = False
    num_restarts: int = 0
    reads_others: bool = False
    """True if the instance can read other instances' KV, so that it may take the roles prefill and
    decode.
    """


class Roster(msgspec.Struct, frozen=True, kw_only=True, tag="roster"):
    """All instances that a launcher owns; the reply to ``ROSTER`` and ``CHANGE``, and an event."""

    launcher: str
    instances: list[RosterEntry]


class ChangeRoster(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a launcher to change, add or remove one of its instances."""

    action: Literal["role", "drain", "undrain", "restart", "add", "remove"]
    instance: str = ""
    role: InstanceRole | None = None
    """New role, or the role of the instance to add."""
    patience_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 30.0
