"""The distances between NICs and memory: NICs, GPUs and NUMA nodes as sysfs shows them.

``read_topology`` reads a host, ``Topology.tiers`` ranks its NICs, and ``to_json`` and ``from_json``
store a topology in a file that replaces the reading. Pure except for files under ``root``; loads no
extension. GPUs are numbered by PCI address, as CUDA does with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
"""

from pathlib import Path

import msgspec

from tandem.core.errors import ConfigError

__all__ = ["TIER_PENALTIES", "Gpu", "Nic", "Topology", "read_topology"]

TIER_PENALTIES = (1.0, 2.0, 4.0)
"""Distance factors, for a NIC of each tier, in the prediction of transfer times.

The factor multiplies the slice and not the queue: an idle rail of the second tier is chosen when
the near ones have more than one slice queued, one of the third when they have more than three. So
distance decides between idle rails, and load between busy ones.
"""

_GPU_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380")
_MAX_TEXT_BYTES = 65_536


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """A hardware network interface, or a virtual one that is up."""

    name: str
    speed_gbps: float | None = None
    """Speed that the driver reports; None if it reports none."""
    numa_node: int | None = None
    pci_path: tuple[str, ...] = ()
    """PCI addresses from the root complex down to the device; empty for virtual interfaces."""
    rdma_device: str | None = None
    is_up: bool = False


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU. Its memory is the location ``cuda:<index>``."""

    index: int
    vendor: str
    numa_node: int | None = None
    pci_path: tuple[str, ...] = ()


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The NICs, GPUs and memory nodes of a host, and their distances."""

    numa_nodes: tuple[int, ...] = (0,)
    nics: tuple[Nic, ...] = ()
    gpus: tuple[Gpu, ...] = ()

    def locations(self) -> list[str]:
        """Return the memory locations of this host: ``cpu:<node>`` and ``cuda:<index>``."""
        return [f"cpu:{node}" for node in self.numa_nodes] + [
            f"cuda:{gpu.index}" for gpu in self.gpus
        ]

    def tiers(self, location: str) -> tuple[list[str], list[str], list[str]]:
        """Return the names of the NICs in three tiers of distance from memory at a location,
        nearest first.

        GPU memory: the NICs with the fewest PCIe steps to it below one root complex, then the
        others of its NUMA node, then the rest. Host memory: the NICs of its node, none, the rest.
        An unknown location (``*``): none, none, all.
        """
        kind, _, number = location.partition(":")
        if kind == "cuda" and number.isdecimal():
            for gpu in self.gpus:
                if gpu.index == int(number):
                    return self._tiers_of_gpu(gpu)
        if kind == "cpu" and number.isdecimal() and int(number) in self.numa_nodes:
            near = [nic.name for nic in self.nics if self._is_on(nic, int(number))]
            return near, [], [nic.name for nic in self.nics if nic.name not in near]
        return [], [], [nic.name for nic in self.nics]

    def penalties(self, location: str, nics: list[str | None]) -> list[float]:
        """Return the distance factor of each named NIC for memory at a location; 1 for a NIC of
        None.
        """
        place = {
            name: TIER_PENALTIES[tier]
            for tier, names in enumerate(self.tiers(location))
            for name in names
        }
        return [1.0 if name is None else place.get(name, 1.0) for name in nics]

    def nic(self, name: str) -> Nic | None:
        """Return the NIC with a name; None without one."""
        return next((nic for nic in self.nics if nic.name == name), None)

    def to_json(self) -> bytes:
        """Return this topology as indented JSON, with the tiers of every location for human
        readers.
        """
        shown = msgspec.to_builtins(self)
        shown["tiers"] = {location: self.tiers(location) for location in self.locations()}
        return msgspec.json.format(msgspec.json.encode(shown), indent=2) + b"\n"

    @staticmethod
    def from_json(text: bytes) -> "Topology":
        """Return the topology in a text of ``to_json``. Its ``tiers`` are ignored, since they
        follow from the rest.

        Raises: ConfigError (names the place).
        """
        try:
            shown = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            shown.pop("tiers", None)
            return msgspec.json.decode(msgspec.json.encode(shown), type=Topology)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                "transfer.topology", f"no topology: {error}", field="transfer.topology_file"
            ) from error

    def _is_on(self, nic: Nic, node: int) -> bool:
        # A NIC whose NUMA node is unknown counts as near only if the host has a single NUMA node.
        if nic.numa_node is None:
            return len(self.numa_nodes) == 1
        return nic.numa_node == node

    def _tiers_of_gpu(self, gpu: Gpu) -> tuple[list[str], list[str], list[str]]:
        steps = {nic.name: _count_steps(nic.pci_path, gpu.pci_path) for nic in self.nics}
        least = min((n for n in steps.values() if n is not None), default=None)
        near = [name for name, n in steps.items() if n is not None and n == least]
        node = [
            nic.name
            for nic in self.nics
            if nic.name not in near
            and gpu.numa_node is not None
            and self._is_on(nic, gpu.numa_node)
        ]
        rest = [name for name in steps if name not in near and name not in node]
        return near, node, rest


def _count_steps(a: tuple[str, ...], b: tuple[str, ...]) -> int | None:
    """Return the number of PCIe steps between two devices below one root complex; None if they have
    none in common.
    """
    if not a or not b or a[0] != b[0]:
        return None
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    return len(a) + len(b) - 2 * common


def read_topology(root: Path = Path("/")) -> Topology:
    """Read a host's topology from sysfs. Never fails: unreadable facts are unknown or absent.

    Args:
        root: folder that has ``sys``; a recorded tree in tests.
    """
    nodes = sorted(
        int(path.name[4:])
        for path in _list(root / "sys/devices/system/node")
        if path.name.startswith("node") and path.name[4:].isdecimal()
    )
    rdma = {
        net.name: device.name
        for device in _list(root / "sys/class/infiniband")
        for net in _list(device / "device/net")
    }
    nics = [_read_nic(path, rdma.get(path.name)) for path in _list(root / "sys/class/net")]
    gpus = sorted(
        (path for path in _list(root / "sys/bus/pci/devices") if _is_gpu(path)),
        key=lambda path: path.name,
    )
    return Topology(
        numa_nodes=tuple(nodes) or (0,),
        nics=tuple(nic for nic in nics if nic is not None),
        gpus=tuple(
            Gpu(
                index=index,
                vendor=_GPU_VENDORS[_read(path / "vendor")],
                numa_node=_read_node(path),
                pci_path=_pci_path(path),
            )
            for index, path in enumerate(gpus)
        ),
    )


def _read_nic(path: Path, rdma_device: str | None) -> Nic | None:
    is_up = _read(path / "operstate") in ("up", "unknown")
    device = path / "device"
    is_virtual = not device.exists()
    # Keep virtual NICs that are up, since a bond or a veth pair carries transfers as well.
    if path.name == "lo" or (is_virtual and not is_up):
        return None
    speed = _read(path / "speed")
    return Nic(
        name=path.name,
        # The driver reports -1 for a speed that it does not know.
        speed_gbps=int(speed) / 1e3 if speed.isdecimal() and int(speed) > 0 else None,
        numa_node=_read_node(device),
        pci_path=() if is_virtual else _pci_path(device),
        rdma_device=rdma_device,
        is_up=is_up,
    )


def _is_gpu(path: Path) -> bool:
    return _read(path / "vendor") in _GPU_VENDORS and _read(path / "class")[:6] in _GPU_CLASSES


def _read_node(device: Path) -> int | None:
    text = _read(device / "numa_node")
    return int(text) if text.isdecimal() else None  # The kernel reports -1 for no node.


def _pci_path(device: Path) -> tuple[str, ...]:
    try:
        parts = device.resolve().parts
    except (OSError, RuntimeError):
        return ()
    for index, part in enumerate(parts):
        if part.startswith("pci") and ":" in part:
            # The path's address parts: the host bridge, then one PCI address for each level below
            # it.
            return tuple(p for p in parts[index:] if ":" in p)
    return ()


def _list(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    # Reading some attributes of a link that is down raises OSError.
    try:
        with path.open("rb") as file:
            return file.read(_MAX_TEXT_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""
