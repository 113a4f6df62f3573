"""The file that describes a cluster: which processes there are, whatever starts them."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from tandem.core.config import YamlLoader
from tandem.core.errors import ConfigError
from tandem.core.instance_status import InstanceRole

__all__ = ["ClusterSpec", "GroupSpec", "Resources", "ServerSpec", "StoreSpec", "load_spec"]

Name = Annotated[str, Meta(pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$")]
"""A word that is a name for every one of those who start processes."""
Count = Annotated[int, Meta(ge=1, le=1000)]
Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
"""An amount as Kubernetes writes it."""
Port = Annotated[int, Meta(ge=1, le=65535)]
MAX_INSTANCES = 64


class Resources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The resources that a process needs of its machine."""

    cpu: Quantity | None = None
    """Cores."""
    memory: Quantity | None = None
    gpu: Annotated[int, Meta(ge=0, le=64)] = 0


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Launchers that are alike, each with instances of one role, each on a machine of its own."""

    name: Name
    role: InstanceRole = "unified"
    launchers: Count = 1
    instances: Annotated[int, Meta(ge=1, le=MAX_INSTANCES)] = 1
    """Instances of each launcher."""
    settings: dict[str, Any] = {}
    """The same as in a file for ``--config``; they come before those of the cluster."""
    resources: Resources = Resources()
    node_selector: dict[str, str] = {}
    """Labels of the nodes that it may run on; Kubernetes alone."""


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The API servers."""

    count: Count = 1
    host: str = "127.0.0.1"
    """The interface that plain processes and Ray bind; a pod binds its own address."""
    port: Port = 8000
    """Port of the first; plain processes and Ray count up from it."""
    settings: dict[str, Any] = {}
    resources: Resources = Resources()


class StoreSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A store for KV: one master, and hosts that lend memory."""

    hosts: Count = 1
    memory: Quantity = "1Gi"
    """Memory of each host, for objects."""
    port: Port = 7400
    """Port of the master."""
    resources: Resources = Resources()


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster."""

    name: Name
    model: str
    """The same as `tandem serve` is given it."""
    settings: dict[str, Any] = {}
    """Settings of all processes, as in a file for ``--config``."""
    groups: Annotated[list[GroupSpec], Meta(min_length=1, max_length=100)]
    servers: ServerSpec = ServerSpec()
    store: StoreSpec | None = None
    port: Port = 7100
    """Port of the first launcher; its instances listen at the ports after it."""
    drain_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """Seconds that running requests get when a process is to end."""
    image: str = "tandem:latest"
    """Container image; Kubernetes alone."""
    namespace: Name = "default"
    """Kubernetes alone."""
    leader_worker_sets: bool = False
    """Groups become LeaderWorkerSets, whose pods come and go together; Kubernetes alone."""
    monitoring: bool = False
    """Render a ServiceMonitor for the Prometheus operator; Kubernetes alone."""

    def __post_init__(self) -> None:
        """Refuse what no process could carry out.

        Raises: ConfigError.
        """
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise ConfigError("cluster.read", "two groups have one name", field="groups")
        roles = {group.role for group in self.groups}
        if ("prefill" in roles) != ("decode" in roles) and "unified" not in roles:
            raise ConfigError(
                "cluster.read", "prefill and decode need each other: name both", field="groups"
            )
        for place, settings in [
            ("settings", self.settings),
            ("servers.settings", self.servers.settings),
            *((f"groups.{group.name}.settings", group.settings) for group in self.groups),
        ]:
            for section, keys in (
                ("launcher", ("listen", "name")),
                ("cluster", ("launchers", "prefill", "decode", "unified", "secret", "secret_file")),
                ("server", ("host", "port")),
                ("store", ("master", "secret", "memory")),
            ):
                set_here = [key for key in keys if key in settings.get(section, {})]
                if set_here:
                    raise ConfigError(
                        "cluster.read",
                        f"{section}.{set_here[0]} follows from the cluster: leave it out",
                        field=f"{place}.{section}.{set_here[0]}",
                    )


def load_spec(file: Path) -> ClusterSpec:
    """Read the description of a cluster.

    Raises: ConfigError (names the place).
    """
    try:
        values = yaml.load(file.read_text(), YamlLoader)  # noqa: S506 - a safe one
        return msgspec.convert(values, type=ClusterSpec)
    except OSError as error:
        raise ConfigError("cluster.read", f"{file}: {error.strerror}: give a file") from None
    except UnicodeDecodeError:
        raise ConfigError("cluster.read", f"{file} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        text = " ".join(str(error).split())
        raise ConfigError("cluster.read", f"{file} is no YAML: {text}") from None
    except msgspec.ValidationError as error:
        raise ConfigError("cluster.read", f"{file}: {error}") from None
