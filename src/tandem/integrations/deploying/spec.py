"""The file that describes a cluster: its processes, independent of the program that starts them."""

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
"""A name that is valid for Kubernetes, for Ray and as a file name."""
Count = Annotated[int, Meta(ge=1, le=1000)]
Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
"""A quantity in Kubernetes' notation."""
Port = Annotated[int, Meta(ge=1, le=65535)]
MAX_INSTANCES = 64


class Resources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The resources (cores, memory, devices) that a process needs on its machine."""

    cpu: Quantity | None = None
    """Number of cores."""
    memory: Quantity | None = None
    gpu: Annotated[int, Meta(ge=0, le=64)] = 0


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of launchers (processes that own instances) that are alike: each has a machine of its
    own, and instances of one role.
    """

    name: Name
    role: InstanceRole = "unified"
    launchers: Count = 1
    instances: Annotated[int, Meta(ge=1, le=MAX_INSTANCES)] = 1
    """Number of instances of each launcher."""
    settings: dict[str, Any] = {}
    """Settings as in a file for ``--config``; they take precedence over the cluster's."""
    resources: Resources = Resources()
    node_selector: dict[str, str] = {}
    """Labels of the nodes that the group's pods may run on; for Kubernetes only."""


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The API servers of a cluster to deploy: how many, and what each needs."""

    count: Count = 1
    host: str = "127.0.0.1"
    """Interface that plain processes and Ray bind; a pod binds its own address."""
    port: Port = 8000
    """Port of the first server; with plain processes and Ray the others have the next ports."""
    settings: dict[str, Any] = {}
    resources: Resources = Resources()


class StoreSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A store for KV in a cluster: one master, and hosts that lend memory."""

    hosts: Count = 1
    memory: Quantity = "1Gi"
    """Memory of each host for objects."""
    port: Port = 7400
    """Port of the master."""
    resources: Resources = Resources()


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of a cluster to deploy: launchers, servers, and perhaps a store."""

    name: Name
    model: str
    """The model, as given to ``tandem serve``."""
    settings: dict[str, Any] = {}
    """Settings of all processes, as in a file for ``--config``."""
    groups: Annotated[list[GroupSpec], Meta(min_length=1, max_length=100)]
    servers: ServerSpec = ServerSpec()
    store: StoreSpec | None = None
    port: Port = 7100
    """Port of the first launcher; its instances have the ports after it."""
    drain_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """Seconds that running requests get when a process is to end."""
    image: str = "tandem:latest"
    """Container image; for Kubernetes only."""
    namespace: Name = "default"
    """Namespace of the manifests; for Kubernetes only."""
    leader_worker_sets: bool = False
    """True to render groups as LeaderWorkerSets, whose pods start and end together; for Kubernetes
    only.
    """
    monitoring: bool = False
    """True to render a ServiceMonitor for the Prometheus operator; for Kubernetes only."""

    def __post_init__(self) -> None:
        """Refuse a description that no process could follow.

        Raises: ConfigError (it is such a description; ``field`` names what to change).
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
    """Read the description of a cluster from a YAML file.

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
