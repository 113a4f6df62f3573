"""Goal: the report is complete, agrees with its sources, and survives JSON and the terminal."""

import http.server
import importlib.metadata
import io
import threading

import msgspec
import pytest
from rich.console import Console

from tandem import _native
from tandem.cli.commands import doctor
from tandem.core.errors import ConfigError


@pytest.fixture(scope="module")
def report() -> doctor.DoctorReport:
    return doctor.collect_report()


def render_text(report: doctor.DoctorReport, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(doctor.render(report))
    return out.getvalue()


def test_report_agrees_with_its_sources(report: doctor.DoctorReport):
    topology = _native.read_topology()
    assert report.cpu.num_physical_cores == len(topology.cores)
    assert report.compute_threads.threads == _native.recommend_threads(topology).threads
    assert report.memory.total_bytes == topology.memory_total_bytes
    assert [node.node_id for node in report.numa_nodes] == [
        node.node_id for node in topology.numa_nodes
    ]
    assert report.versions["numpy"] == importlib.metadata.version("numpy")
    assert ("avx2" in report.cpu.isa) == _native.cpu_features().avx2


def test_json_is_the_report(report: doctor.DoctorReport):
    encoded = msgspec.json.encode(report)
    assert msgspec.json.decode(encoded, type=doctor.DoctorReport) == report


def test_every_optional_part_has_state_reason_and_use(report: doctor.DoctorReport):
    parts = {part.name: part for part in report.optional_parts}
    assert set(parts) == {"CUDA", "io_uring", "cma", "etcd", "Ray"}
    assert all(part.detail and part.gives for part in parts.values())


def test_text_names_every_part_and_the_reason_of_the_threads(report: doctor.DoctorReport):
    text = render_text(report, width=400)
    assert all(part.name in text and part.gives in text for part in report.optional_parts)
    assert report.compute_threads.reason in text
    assert report.cpu.brand in text


def test_absent_things_are_told(report: doctor.DoctorReport):
    bare = msgspec.structs.replace(
        report,
        versions={"tandem": "1", "torch": None},
        cpu=msgspec.structs.replace(
            report.cpu, isa=[], amx_blocker="blocked", cpu_quota=1.5, cpu_quota_source="/x/cpu.max"
        ),
        hugepages=doctor.HugepageReport(transparent=None, num_pages={}, num_free={}),
    )
    text = render_text(bare, width=400)
    for expected in (
        "torch (absent)",
        "baseline only",
        "not usable: blocked",
        "1.5 CPUs (/x/cpu.max",
    ):
        assert expected in text
    assert "transparent: absent" in text


def test_detail_is_not_taken_for_markup(report: doctor.DoctorReport):
    part = doctor.OptionalPart(name="x", is_available=False, detail="[red]text", gives="[/]y")
    assert "[red]text" in render_text(msgspec.structs.replace(report, optional_parts=[part]))


@pytest.mark.parametrize(
    ("ids", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 8], "0-2,8"), ([1, 3, 5, 6], "1,3,5-6")]
)
def test_format_ids(ids: list[int], text: str):
    assert doctor.format_ids(ids) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (2048, "2 KiB"), (1536, "1.5 KiB"), (3 * 1024**3, "3 GiB")],
)
def test_format_bytes(size: int, text: str):
    assert doctor.format_bytes(size) == text


class EtcdStandIn(http.server.BaseHTTPRequestHandler):
    body = b""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *args):
        pass


@pytest.mark.parametrize(
    ("body", "is_available", "detail"),
    [
        (b'{"etcdserver":"3.5.9","etcdcluster":"3.5.0"}', True, "etcd 3.5.9 at 127.0.0.1"),
        (b'{"version":"1"}', False, "not as an etcd does"),
        (b"\xff\xfe", False, "not as an etcd does"),
        (b"[]", False, "not as an etcd does"),
    ],
)
def test_etcd_endpoint_is_asked(body: bytes, is_available: bool, detail: str):
    handler = type("Handler", (EtcdStandIn,), {"body": body})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        report = doctor.collect_report(f"127.0.0.1:{server.server_port}")
        thread.join(timeout=60)
    (etcd,) = (part for part in report.optional_parts if part.name == "etcd")
    assert etcd.is_available is is_available
    assert detail in etcd.detail


def test_closed_endpoint_does_not_answer():
    with http.server.HTTPServer(("127.0.0.1", 0), EtcdStandIn) as server:
        port = server.server_port
    report = doctor.collect_report(f"127.0.0.1:{port}")
    (etcd,) = (part for part in report.optional_parts if part.name == "etcd")
    assert not etcd.is_available
    assert "does not answer" in etcd.detail


@pytest.mark.parametrize("endpoint", ["", "host", "host:", ":1", "host:0", "host:99999", "host:x"])
def test_malformed_endpoint_is_a_config_error(endpoint: str):
    with pytest.raises(ConfigError):
        doctor.collect_report(endpoint)
