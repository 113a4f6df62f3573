"""Requests and responses of ``/instances``."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.core.instance_status import InstanceRole, InstanceStatus

__all__ = ["ChangeInstances", "InstanceList"]


class ChangeInstances(msgspec.Struct, kw_only=True):
    """The body of POST /instances."""

    action: Literal["role", "drain", "undrain", "restart", "add", "remove"]
    instance: Annotated[str, Meta(max_length=256)] = ""
    """Name of the instance; for ``restart``, empty means all, one after the other."""
    role: InstanceRole | None = None
    """New role, for the actions ``role`` and ``add``."""
    patience_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 30.0
    """Seconds after which an instance's requests that have not ended continue on other
    instances."""


class InstanceList(msgspec.Struct, kw_only=True):
    """The instances and their states."""

    instances: list[InstanceStatus]
