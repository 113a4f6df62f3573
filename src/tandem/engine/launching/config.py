"""Settings of a launcher: its endpoint, its name and its instances."""

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.core.errors import ConfigError

__all__ = ["LauncherConfig"]

_NAME = re.compile(r"[A-Za-z0-9._-]{0,64}")


class LauncherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a launcher, a process that owns instances for servers elsewhere."""

    listen: Annotated[
        str,
        Meta(
            description="Address of a launcher: ipc:///path/launcher.sock on one machine, or "
            "tcp://host:port with cluster.secret; its instances listen at the ports after it."
        ),
    ] = ""
    name: Annotated[
        str,
        Meta(
            description="Name of the launcher, which its instances' names begin with; it must be "
            "another one on each machine of a cluster."
        ),
    ] = ""

    drain_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="Seconds that requests on the launcher's instances get after SIGTERM, "
            "while servers send new ones elsewhere.",
        ),
    ] = 30.0

    def __post_init__(self) -> None:
        """Check the launcher's name: up to 64 letters, digits, dots, underscores and hyphens.

        Raises: ConfigError (the name has other characters, or is empty or too long).
        """
        if _NAME.fullmatch(self.name) is None:
            raise ConfigError(
                "launcher.configure",
                f"{self.name[:100]!r} is no name: use up to 64 letters, digits and ._-",
                field="launcher.name",
            )
