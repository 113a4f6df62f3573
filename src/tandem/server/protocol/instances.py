"""Requests and responses of ``/instances``."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.core.instance_status import InstanceRole, InstanceStatus

__all__ = ["ChangeInstances", "InstanceList"]


class ChangeInstances(msgspec.Struct, kw_only=True):
    """POST /instances."""

    action: Literal["role", "drain", "undrain", "restart", "add", "remove"]
    instance: Annotated[str, Meta(max_length=256)] = ""
    """Name; with ``restart``, empty is all, one after the other."""
    role: InstanceRole | None = None
    """With ``role`` and ``add``."""
    patience_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 30.0
    """Seconds that the requests of an instance get to end before they go on elsewhere."""


class InstanceList(msgspec.Struct, kw_only=True):
    """The instances and their states."""

    instances: list[InstanceStatus]
