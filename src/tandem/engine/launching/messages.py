"""Messages between a launcher and the servers that use its instances."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.core.instance_status import InstanceRole
from tandem.core.wire import InstanceStage

__all__ = ["CHANGE", "LAUNCHER_ROLE", "ROSTER", "ChangeRoster", "Roster", "RosterEntry"]

LAUNCHER_ROLE = "launcher"
ROSTER = "roster"
"""Method: returns the ``Roster``; later ones are pushed."""
CHANGE = "change"
"""Method: takes a ``ChangeRoster`` and returns the roster after it."""


class RosterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of a launcher."""

    name: str
    """Unique in the cluster."""
    role: InstanceRole
    stage: InstanceStage
    endpoint: str = ""
    """Endpoint of its process; over TCP the host is that of the launcher, as the server reaches
    it."""
    run: str = ""
    """Id of the instance's process, changed by each restart; empty while none was started."""
    pid: int | None = None
    is_draining: bool = False
    num_restarts: int = 0
    reads_others: bool = False
    """True if it may take the roles prefill and decode."""


class Roster(msgspec.Struct, frozen=True, kw_only=True, tag="roster"):
    """A reply and an event: all instances of a launcher."""

    launcher: str
    instances: list[RosterEntry]


class ChangeRoster(msgspec.Struct, frozen=True, kw_only=True):
    """A request to change an instance of the launcher."""

    action: Literal["role", "drain", "undrain", "restart", "add", "remove"]
    instance: str = ""
    role: InstanceRole | None = None
    """New role, or the role of the instance to add."""
    patience_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 30.0
