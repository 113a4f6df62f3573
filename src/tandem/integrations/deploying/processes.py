"""The processes of a cluster and their arguments, whichever program starts them. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from tandem.integrations.deploying.spec import ClusterSpec, GroupSpec

__all__ = [
    "PORTS_PER_LAUNCHER",
    "Addresses",
    "ProcessPlan",
    "count_bytes",
    "merge_settings",
    "plan_groups",
    "plan_servers",
    "plan_store",
]

PORTS_PER_LAUNCHER = 100
"""Ports reserved for a launcher if several share an address: one for itself, one for each instance,
and spare ones.
"""
Kind = Literal["store-master", "store-host", "launcher", "server"]


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses at which the processes of a cluster find each other."""

    launchers: Sequence[str]
    """Addresses at which servers look for launchers."""
    store: str = ""
    """Address of the store's master for its clients; empty without a store."""
    store_listen: str = ""
    """Address at which the store's master listens."""
    data_host: str = "127.0.0.1"
    """Address of the machine for bulk transfers."""


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a cluster: its name, arguments and settings."""

    name: str
    kind: Kind
    arguments: tuple[str, ...]
    """Arguments after ``tandem``, without secrets."""
    settings: dict[str, Any] = {}
    """Settings for the file of ``--config``."""
    port: int = 0
    """Port of the process's HTTP server; 0 without one."""


def merge_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return two nested mappings of settings merged; values of the second win."""
    merged = dict(first)
    for key, value in second.items():
        known = merged.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            merged[key] = merge_settings(
                cast("Mapping[str, Any]", known), cast("Mapping[str, Any]", value)
            )
        else:
            merged[key] = value
    return merged


def plan_groups(
    spec: ClusterSpec,
    addresses: Addresses,
    listen: Callable[[GroupSpec, int], str],
    name: Callable[[GroupSpec, int], str],
    *,
    one_each: bool = False,
) -> list[ProcessPlan]:
    """Return the launcher processes of a cluster.

    Args:
        spec: describes the cluster.
        addresses: addresses that the launchers use.
        listen: returns a launcher's address, from its group and its number in the cluster.
        name: returns a launcher's name, from its group and its number in the group.
        one_each: True for one launcher of each group, as a template of the others.
    """
    plans: list[ProcessPlan] = []
    for group in spec.groups:
        settings = merge_settings(spec.settings, group.settings)
        for index in range(1 if one_each else group.launchers):
            called = name(group, index)
            arguments = ["cluster", "launch", spec.model, f"--cluster.{group.role}"]
            arguments += [str(group.instances), "--launcher.listen", listen(group, len(plans))]
            arguments += ["--launcher.name", called]
            arguments += ["--launcher.drain-timeout-s", f"{spec.drain_s:g}"]
            arguments += _name_store(addresses)
            plans.append(
                ProcessPlan(
                    name=called,
                    kind="launcher",
                    arguments=tuple(arguments),
                    settings=settings,
                )
            )
    return plans


def plan_servers(
    spec: ClusterSpec,
    addresses: Addresses,
    host: str,
    *,
    one: bool = False,
    allowed_hosts: Sequence[str] = (),
) -> list[ProcessPlan]:
    """Return the API server processes of a cluster.

    Args:
        spec: describes the cluster.
        addresses: addresses that the servers use.
        host: interface that they bind.
        one: True for one server, as a template of the others.
        allowed_hosts: names by which clients reach the servers.
    """
    servers = spec.servers
    settings = merge_settings(spec.settings, servers.settings)
    plans: list[ProcessPlan] = []
    for index in range(1 if one else servers.count):
        port = servers.port + index
        arguments = ["serve", spec.model, "--host", host, "--port", str(port)]
        arguments += ["--cluster.launchers", ",".join(addresses.launchers)]
        arguments += ["--server.drain-timeout-s", f"{spec.drain_s:g}"]
        if allowed_hosts:
            arguments += ["--server.allowed-hosts", ",".join(allowed_hosts)]
        plans.append(
            ProcessPlan(
                name=f"server-{index}",
                kind="server",
                arguments=tuple(arguments),
                settings=settings,
                port=port,
            )
        )
    return plans


def plan_store(spec: ClusterSpec, addresses: Addresses, *, one: bool = False) -> list[ProcessPlan]:
    """Return the processes of the cluster's store, the master first; none if it has no store."""
    store = spec.store
    if store is None:
        return []
    master = ProcessPlan(
        name="store-master",
        kind="store-master",
        arguments=("store", "master", "--store.master", addresses.store_listen),
    )
    hosts = [
        ProcessPlan(
            name=f"store-{index}",
            kind="store-host",
            arguments=(
                *("store", "host", "--store.master", addresses.store),
                *("--store.listen", f"{addresses.data_host}:0"),
                *("--store.segment-bytes", str(count_bytes(store.memory))),
            ),
        )
        for index in range(1 if one else store.hosts)
    ]
    return [master, *hosts]


def _name_store(addresses: Addresses) -> list[str]:
    return ["--store.master", addresses.store] if addresses.store else []


def count_bytes(quantity: str) -> int:
    """Return a memory quantity in Kubernetes' notation in bytes, rounded down to whole pages."""
    powers = {"k": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
    powers |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    number = quantity.rstrip("kmKMGTi")
    unit = quantity[len(number) :]
    if unit == "m":
        return 0
    return int(float(number) * powers.get(unit, 1)) // 4096 * 4096
