"""Properties of the NICs behind an engine's local addresses: speed, distance, shared boards."""

import os
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import msgspec

from tandem._native import list_interfaces
from tandem.core.errors import ConfigError
from tandem.transfer.config import TransferConfig
from tandem.transfer.topology import Topology, read_topology

__all__ = ["NicPlan", "load_topology", "plan_nics"]

DEFAULT_GBPS = 10.0
"""Speed in Gbit/s assumed if neither user nor driver gives one; measured from then on."""


class NicPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The NICs of an engine: lists have one entry for each local address, in order."""

    rail_gbps: list[float]
    penalties: dict[str, list[float]]
    """Distance factor of each NIC in the prediction of transfer times, by location of memory."""
    quota_boards: list[str]
    """Names of the shared-memory boards on which processes of this host divide the NICs among them;
    empty if the NICs are not shared.
    """


def load_topology(config: TransferConfig) -> Topology:
    """Read the configured topology file, or this host's topology without one.

    Raises: ConfigError (the file cannot be read, or does not describe a topology).
    """
    if not config.topology_file:
        return read_topology()
    try:
        text = Path(config.topology_file).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(
            "transfer.topology", f"{config.topology_file}: {error}", field="transfer.topology_file"
        ) from error
    return Topology.from_json(text)


def plan_nics(config: TransferConfig, topology: Topology) -> NicPlan:
    """Determine the NICs of the configured local addresses.

    An address that no interface has is no error here; connecting from it fails later.
    """
    by_address = {ip_address(address): name for name, address in list_interfaces()}
    names = [_find(by_address, address) for address in config.local_addresses]
    found = [None if name is None else topology.nic(name) for name in names]
    gbps = [
        DEFAULT_GBPS if nic is None or nic.speed_gbps is None else nic.speed_gbps for nic in found
    ]
    boards: list[str] = []
    if config.nic_weight is not None:
        # The network namespace is part of the board's name, since two namespaces may both have an
        # eth0.
        space = os.stat("/proc/self/ns/net").st_ino
        boards = [f"{space}-{name or 'any'}" for name in names or [None]]
    return NicPlan(
        rail_gbps=list(config.rail_gbps) or gbps,
        penalties={
            location: topology.penalties(location, names) for location in topology.locations()
        }
        if any(names)
        else {},
        quota_boards=boards,
    )


def _find(by_address: dict[IPv4Address | IPv6Address, str], address: str) -> str | None:
    try:
        return by_address.get(ip_address(address.strip("[]").partition("%")[0]))
    except ValueError:
        return None  # A host name: the kernel resolves it, we cannot tell its NIC.
