"""Detection of the transports (ways to move bytes, such as RDMA) on this host: each known
transport, with the reason if it is missing.

``present`` means that Tandem uses it here; ``absent`` that the host lacks it; ``unsupported`` that
the host has it and this version of Tandem does not use it.
"""

from pathlib import Path
from typing import Literal

import msgspec

__all__ = ["TransportReport", "probe_transports"]


class TransportReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one transport on this host."""

    name: str
    state: Literal["present", "absent", "unsupported"]
    detail: str


def probe_transports(root: Path = Path("/")) -> list[TransportReport]:
    """Look for each known transport.

    Args:
        root: folder that has ``sys``, ``dev`` and ``proc``; kernel features are always tried for
            real.

    Raises: UnsupportedError (the extension is not built).
    """
    from tandem import _native

    reports = [
        TransportReport(name="tcp", state="present", detail="any address; several rails and lanes"),
        _probe_shm(root),
        *(
            TransportReport(
                name=name, state="present" if probe.is_available else "absent", detail=probe.detail
            )
            for name, probe in (
                ("cma", _native.probe_cma()),
                ("io_uring", _native.probe_io_uring()),
            )
        ),
    ]
    rdma = _list_rdma(root)
    for name, title in (("rdma_roce", "RoCE"), ("rdma_ib", "InfiniBand"), ("rdma_erdma", "eRDMA")):
        found = rdma.get(name, [])
        reports.append(
            _unsupported(name, found) if found else _absent(name, f"no {title} device in sysfs")
        )
    nvidia = _names(root / "proc/driver/nvidia/gpus")
    reports += [
        _probe_device(root, "nvlink", ["dev/nvidia-nvswitchctl", "dev/nvidia-nvlink"], nvidia),
        _probe_device(root, "mnnvl", ["dev/nvidia-caps-imex-channels"], nvidia),
        _probe_cxl(root),
        _probe_device(root, "gds", ["dev/nvidia-fs0", "proc/driver/nvidia-fs"], nvidia),
        _probe_nvmeof(root),
        _probe_device(root, "ascend", ["dev/davinci_manager"], None),
    ]
    return reports


def _absent(name: str, why: str) -> TransportReport:
    return TransportReport(name=name, state="absent", detail=why)


def _unsupported(name: str, found: list[str]) -> TransportReport:
    detail = f"{', '.join(found)} found; this version has no transport for it"
    return TransportReport(name=name, state="unsupported", detail=detail)


def _probe_shm(root: Path) -> TransportReport:
    if (root / "proc/self/fd").is_dir():
        return TransportReport(
            name="shm", state="present", detail="memory of allocate(), to processes of one user"
        )
    return _absent("shm", "no /proc/self/fd: peers cannot map memory files")


def _list_rdma(root: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for device in _paths(root / "sys/class/infiniband"):
        layers = {_read(port / "link_layer") for port in _paths(device / "ports")}
        kind = "rdma_ib" if "InfiniBand" in layers else "rdma_roce"
        if device.name.startswith("erdma"):
            kind = "rdma_erdma"
        found.setdefault(kind, []).append(device.name)
    return found


def _probe_device(
    root: Path, name: str, marks: list[str], nvidia: list[str] | None
) -> TransportReport:
    found = [f"/{mark}" for mark in marks if (root / mark).exists()]
    if found:
        return _unsupported(name, found)
    if nvidia is not None and not nvidia:
        return _absent(name, "no NVIDIA driver")
    return _absent(name, f"no {' or '.join('/' + mark for mark in marks)}")


def _probe_cxl(root: Path) -> TransportReport:
    memories = [n for n in _names(root / "sys/bus/cxl/devices") if n.startswith(("mem", "region"))]
    if memories:
        return _unsupported("cxl", memories)
    return _absent("cxl", "no CXL memory in sysfs")


def _probe_nvmeof(root: Path) -> TransportReport:
    found = [
        f"{path.name} ({transport})"
        for path in _paths(root / "sys/class/nvme")
        if (transport := _read(path / "transport")) in ("tcp", "rdma", "fc")
    ]
    if found:
        shown = f"{', '.join(found)}: as a block device, by the transport 'file'"
        return TransportReport(name="nvmeof", state="present", detail=shown)
    return _absent("nvmeof", "no NVMe controller over fabrics in sysfs")


def _paths(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _names(folder: Path) -> list[str]:
    return [path.name for path in _paths(folder)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
