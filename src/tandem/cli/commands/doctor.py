"""``tandem doctor``: which hardware features this machine has, which of them Tandem uses, and why.

``collect_report`` collects, ``render`` formats, ``doctor`` is the command. Everything is read or
tried at the time of the call. torch is never imported; only its version is looked up.
"""

import http.client
import importlib.metadata
import platform
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from tandem import __version__
from tandem.cli.output import JsonFlag, format_bytes, print_json, print_next
from tandem.core.config import choose_isa, list_library_caps
from tandem.core.errors import ConfigError, TandemError
from tandem.transfer.probes import TransportReport, probe_transports

if TYPE_CHECKING:
    from tandem._native import CpuFeatures, Topology
    from tandem.transfer.measure import PathReport

__all__ = [
    "CpuReport",
    "DoctorReport",
    "HugepageReport",
    "KernelReport",
    "MemoryReport",
    "NumaReport",
    "OptionalPart",
    "ThreadReport",
    "collect_report",
    "doctor",
    "measure_peer",
    "render",
    "render_path",
]

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "pyzmq")
ISA_FIELDS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni",
    "avx512_bf16", "avx512_vbmi", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
)  # fmt: skip
ETCD_TIMEOUT_S = 1.0


class CpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """The processor, and the instruction sets that kernels may use on it."""

    vendor: str
    brand: str
    architecture: str
    isa: list[str]
    amx_blocker: str | None
    """Reason why AMX is unusable although the CPU has it; None if it is usable or absent."""
    num_online_cpus: int
    allowed_cpus: str
    """CPUs allowed by affinity and cpuset, as a list of ranges (``0-3,8``)."""
    num_physical_cores: int
    """Number of cores with at least one allowed CPU."""
    has_smt: bool
    """True if any core has two or more allowed CPUs."""
    num_packages: int
    l1d_bytes: int
    l2_bytes: int
    l3_bytes: int
    cpu_quota: float | None
    """CPU quota of the control group, in CPUs."""
    cpu_quota_source: str | None


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """The instruction set that the kernels use, and why."""

    isa: str
    reason: str
    usable: list[str]
    """Instruction sets of this build that this process may use, ascending."""
    library_caps: dict[str, str]
    """Environment variables that limit torch, MKL and oneDNN to the same instruction set."""


class NumaReport(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node that this process may use."""

    node_id: int
    cpus: str
    memory_total_bytes: int
    memory_free_bytes: int


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the machine, and the limit that the process's control group sets."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    limit_source: str | None


class HugepageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Transparent huge pages, and the preallocated ones by size."""

    transparent: str | None
    num_pages: dict[str, int]
    num_free: dict[str, int]


class ThreadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The number of compute threads that Tandem uses by default, and the reason."""

    threads: int
    reason: str


class OptionalPart(msgspec.Struct, frozen=True, kw_only=True):
    """A package, device or service that Tandem uses if it is there."""

    name: str
    is_available: bool
    detail: str
    """Version or description of the part if it is usable; otherwise the reason why not."""
    gives: str
    """Feature that this package, device or service adds to Tandem."""


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """All findings of ``tandem doctor``; ``--json`` prints this struct."""

    versions: dict[str, str | None]
    cpu: CpuReport
    kernels: KernelReport
    numa_nodes: list[NumaReport]
    memory: MemoryReport
    hugepages: HugepageReport
    compute_threads: ThreadReport
    transports: list[TransportReport]
    optional_parts: list[OptionalPart]


def collect_report(etcd_endpoint: str | None = None) -> DoctorReport:
    """Examine the machine and try the optional parts.

    Args:
        etcd_endpoint: ``host:port`` of an etcd whose version is asked for; None: only look for its
            program on the path.

    Returns: the report. It also lists what is absent, which is no error.

    Raises: UnsupportedError (the extension is not built); ConfigError (malformed endpoint).

    Cost: less than a second; if there are CUDA devices, their driver is initialised.
    """
    from tandem import _native

    topology = _native.read_topology()
    advice = _native.recommend_threads(topology)
    limits = topology.limits
    pools = topology.hugepages.pools
    return DoctorReport(
        versions=_collect_versions(),
        cpu=_report_cpu(_native.cpu_features(), topology),
        kernels=_report_kernels(_native.cpu_features().cap, _native.kernel_isas()),
        numa_nodes=[
            NumaReport(
                node_id=node.node_id,
                cpus=format_ids(node.cpus),
                memory_total_bytes=node.memory_total_bytes,
                memory_free_bytes=node.memory_free_bytes,
            )
            for node in topology.numa_nodes
        ],
        memory=MemoryReport(
            total_bytes=topology.memory_total_bytes,
            available_bytes=topology.memory_available_bytes,
            limit_bytes=limits.memory_limit_bytes,
            limit_source=limits.memory_limit_source or None,
        ),
        hugepages=HugepageReport(
            transparent=topology.hugepages.transparent or None,
            num_pages={format_bytes(pool.page_size_bytes): pool.num_pages for pool in pools},
            num_free={format_bytes(pool.page_size_bytes): pool.num_free for pool in pools},
        ),
        compute_threads=ThreadReport(threads=advice.threads, reason=advice.reason),
        transports=probe_transports(),
        optional_parts=[
            _probe_cuda(),
            _probe_kernel_part("io_uring"),
            _probe_kernel_part("cma"),
            _probe_etcd(etcd_endpoint),
            _probe_ray(),
        ],
    )


def _collect_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "tandem": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    versions.update((name, _find_version(name)) for name in PACKAGES)
    return versions


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _report_cpu(features: "CpuFeatures", topology: "Topology") -> CpuReport:
    return CpuReport(
        vendor=features.vendor,
        brand=features.brand,
        architecture=platform.machine(),
        isa=[name for name in ISA_FIELDS if getattr(features, name)],
        amx_blocker=features.amx_blocker or None,
        num_online_cpus=topology.num_online_cpus,
        allowed_cpus=format_ids(topology.allowed_cpus),
        num_physical_cores=len(topology.cores),
        has_smt=any(len(cpus) > 1 for cpus in topology.cores),
        num_packages=topology.num_packages,
        l1d_bytes=topology.caches.l1d_bytes,
        l2_bytes=topology.caches.l2_bytes,
        l3_bytes=topology.caches.l3_bytes,
        cpu_quota=topology.limits.cpu_quota,
        cpu_quota_source=topology.limits.cpu_quota_source or None,
    )


def _report_kernels(cap: str, usable: list[str]) -> KernelReport:
    isa, reason = choose_isa(cap, usable)
    return KernelReport(isa=isa, reason=reason, usable=usable, library_caps=list_library_caps())


def _describe_kernels(kernels: KernelReport) -> str:
    text = f"{kernels.isa}: {kernels.reason} (usable: {', '.join(kernels.usable)})"
    if kernels.library_caps:
        caps = " ".join(f"{name}={value}" for name, value in kernels.library_caps.items())
        text += f"; torch, MKL and oneDNN by {caps}"
    return text


def _probe_cuda() -> OptionalPart:
    from tandem import _native

    probe = _native.probe_cuda()
    devices = [
        f"{device.name} (compute {device.compute_major}.{device.compute_minor}, "
        f"{format_bytes(device.memory_bytes)})"
        for device in probe.devices
    ]
    return OptionalPart(
        name="CUDA",
        is_available=probe.is_available,
        detail=": ".join(filter(None, (probe.detail, ", ".join(devices)))),
        gives="attention and shared layers on the GPU, KV cache in its memory",
    )


def _probe_kernel_part(name: str) -> OptionalPart:
    from tandem import _native

    probe = _native.probe_io_uring() if name == "io_uring" else _native.probe_cma()
    gives = {
        "io_uring": "SSD tier of the KV store without a thread per read",
        "cma": "KV between processes of this machine with one copy, without shared memory",
    }
    return OptionalPart(
        name=name, is_available=probe.is_available, detail=probe.detail, gives=gives[name]
    )


def _probe_etcd(endpoint: str | None) -> OptionalPart:
    binary = shutil.which("etcd")
    if endpoint is not None:
        is_available, detail = _ask_etcd(endpoint)
    elif binary is not None:
        is_available, detail = True, binary
    else:
        is_available, detail = False, "no `etcd` on the path, no endpoint given (--etcd-endpoint)"
    return OptionalPart(
        name="etcd",
        is_available=is_available,
        detail=detail,
        gives="cluster metadata that survives the loss of a host",
    )


def _ask_etcd(endpoint: str) -> tuple[bool, str]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            "doctor.probe", f"{endpoint!r} is no host:port: give one", field="etcd_endpoint"
        )
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=ETCD_TIMEOUT_S)
    try:
        connection.request("GET", "/version")
        body = connection.getresponse().read(4096)
        version = msgspec.json.decode(body, type=dict[str, str])["etcdserver"]
    except (OSError, http.client.HTTPException) as error:
        return False, f"{endpoint} does not answer: {error}"
    except (msgspec.DecodeError, KeyError):
        return False, f"{endpoint} answers, but not as an etcd does"
    finally:
        connection.close()
    return True, f"etcd {version} at {endpoint}"


def _probe_ray() -> OptionalPart:
    version = _find_version("ray")
    return OptionalPart(
        name="Ray",
        is_available=version is not None,
        detail="not installed" if version is None else f"ray {version}",
        gives="starting and watching the processes of a cluster of hosts",
    )


def format_ids(ids: list[int]) -> str:
    """Return sorted ids as ranges: ``[0, 1, 2, 8]`` gives ``0-2,8``."""
    ranges: list[list[int]] = []
    for number in ids:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _describe_cpu(cpu: CpuReport) -> list[tuple[str, str]]:
    smt = "several CPUs a core" if cpu.has_smt else "one CPU a core"
    caches = ", ".join(
        f"{name} {format_bytes(size) if size else 'unknown'}"
        for name, size in (("L1d", cpu.l1d_bytes), ("L2", cpu.l2_bytes), ("L3", cpu.l3_bytes))
    )
    cores = (
        f"{cpu.num_physical_cores} physical on {cpu.num_packages} "
        f"{'socket' if cpu.num_packages == 1 else 'sockets'}, {smt}; "
        f"CPUs {cpu.allowed_cpus} allowed of {cpu.num_online_cpus} online"
    )
    rows = [
        ("CPU", f"{cpu.brand or cpu.vendor} ({cpu.architecture})"),
        ("ISA", " ".join(cpu.isa) or "baseline only"),
        ("cores", cores),
        ("caches", caches),
        (
            "CPU quota",
            "none" if cpu.cpu_quota is None else f"{cpu.cpu_quota:g} CPUs ({cpu.cpu_quota_source})",
        ),
    ]
    if cpu.amx_blocker is not None:
        rows.insert(2, ("AMX", f"in the CPU, not usable: {cpu.amx_blocker}"))
    return rows


def _describe_memory(report: DoctorReport) -> list[tuple[str, str]]:
    memory, hugepages = report.memory, report.hugepages
    text = f"{format_bytes(memory.available_bytes)} available of {format_bytes(memory.total_bytes)}"
    if memory.limit_bytes is not None:
        text += f", limit {format_bytes(memory.limit_bytes)} ({memory.limit_source})"
    pools = [
        f"{hugepages.num_free[size]} of {count} pages of {size} free"
        for size, count in hugepages.num_pages.items()
    ]
    rows = [
        ("memory", text),
        ("huge pages", ", ".join([f"transparent: {hugepages.transparent or 'absent'}", *pools])),
    ]
    for node in report.numa_nodes:
        free = f"{format_bytes(node.memory_free_bytes)} free"
        text = f"CPUs {node.cpus or 'none'}; {free} of {format_bytes(node.memory_total_bytes)}"
        rows.append((f"NUMA node {node.node_id}", text))
    return rows


def render(report: DoctorReport) -> Group:
    """Return the report as tables for a terminal."""
    machine = Table.grid(padding=(0, 2))
    machine.add_column(style="bold", no_wrap=True)
    machine.add_column(overflow="fold")
    for name, text in [*_describe_cpu(report.cpu), *_describe_memory(report)]:
        machine.add_row(name, escape(text))
    machine.add_row("kernels", escape(_describe_kernels(report.kernels)))
    threads = report.compute_threads
    machine.add_row("threads", escape(f"{threads.threads}: {threads.reason}"))
    versions = [f"{name} {number or '(absent)'}" for name, number in report.versions.items()]
    machine.add_row("versions", escape(", ".join(versions)))

    parts = Table("part", "", "found", "gives", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for part in report.optional_parts:
        state = "[green]yes[/]" if part.is_available else "[yellow]no[/]"
        parts.add_row(escape(part.name), state, escape(part.detail), escape(part.gives))
    transports = Table("transport", "", "why", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    colours = {"present": "green", "absent": "yellow", "unsupported": "red"}
    for transport in report.transports:
        state = f"[{colours[transport.state]}]{transport.state}[/]"
        transports.add_row(transport.name, state, escape(transport.detail))
    return Group(machine, "", transports, "", parts)


def measure_peer(address: str, secret_file: Path) -> "PathReport":
    """Measure the network path to another transfer engine.

    Args:
        address: its ``host:port``.
        secret_file: file with the cluster's secret; a line break at its end is ignored.

    Raises: ConfigError (no such file, or the secret is too short); errors of
        ``TransferEngine.open``, with the attempts.
    """
    from tandem.transfer import TransferConfig, TransferEngine
    from tandem.transfer.measure import measure_path

    try:
        secret = secret_file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("doctor.peer", f"{secret_file}: {error}", field="secret_file") from error
    with TransferEngine(TransferConfig(name="doctor", secret=secret)) as engine:
        try:
            return measure_path(engine, address)
        except TandemError as error:
            what = (
                f"tried the transfer engine at {address} over tcp, with the secret of "
                f"{secret_file}: {error.what}"
            )
            raise type(error)("doctor.peer", what, field=error.field) from error


def render_path(report: "PathReport") -> Table:
    """Return the measurements of a network path as a table for a terminal."""
    title = f"{report.name} at {report.peer}: round trip {report.round_trip_us:.0f} us"
    if report.buffer is None:
        title += "; it offers no buffer to read, so no transport was measured"
    table = Table(
        "transport", "4 KiB", "throughput", "", title=escape(title), box=None, title_justify="left"
    )
    for path in report.transports:
        latency = "" if path.latency_us is None else f"{path.latency_us:.1f} us"
        speed = "" if path.throughput_gbps is None else f"{path.throughput_gbps:.2f} Gbit/s"
        table.add_row(path.transport, latency, speed, escape(path.reason))
    for rail in report.rails:
        table.add_row("rail", "", "", escape(rail))
    return table


def doctor(
    json: JsonFlag = False,
    etcd_endpoint: Annotated[
        str | None, typer.Option(help="host:port of an etcd to ask for its version.")
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(help="host:port of a transfer engine: measure the path to it instead."),
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="File with the cluster's secret, for --peer.")
    ] = None,
) -> None:
    """Print what this machine offers and what Tandem makes of it, with the reasons."""
    if peer is not None:
        if secret_file is None:
            raise ConfigError(
                "doctor.peer", "the peer asks for a proof: give --secret-file", field="secret_file"
            )
        path = measure_peer(peer, secret_file)
        if json:
            print_json(path)
        else:
            Console(soft_wrap=not sys.stdout.isatty()).print(render_path(path))
        return
    report = collect_report(etcd_endpoint)
    if json:
        print_json(report)
    else:
        Console(soft_wrap=not sys.stdout.isatty()).print(render(report))
        print_next("tandem", "plan", "MODEL", why="which tells what serving a model is here")
