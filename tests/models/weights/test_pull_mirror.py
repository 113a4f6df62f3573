"""Goal: `tandem pull` works through a mirror, in each process continues what one before it began,
and obeys offline mode.

Method: a small hub on loopback serves a made-up repository; it breaks the first download of the
weights off in the middle, refuses the next, and records which ranges were asked for.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

REPO = "someone/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "model.safetensors": bytes(range(256)) * 40_000,
    "pytorch_model.bin": b"never fetched",
}


class Mirror(ThreadingHTTPServer):
    """The hub's API as far as a download needs it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.is_cut = True
        """Whether the weights end in the middle, and are refused from then on."""
        self.gets: list[tuple[str, int]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Mirror

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(sends_body=False)

    def do_GET(self) -> None:
        self.answer(sends_body=True)

    def answer(self, *, sends_body: bool) -> None:
        path = self.path.split("?")[0]
        if path.startswith(f"/api/models/{REPO}/tree"):
            self.reply(json.dumps([self.describe(name) for name in FILES]).encode(), sends_body)
        elif path.startswith(f"/api/models/{REPO}"):
            siblings = [{"rfilename": name} for name in FILES]
            info = {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": siblings}
            self.reply(json.dumps(info).encode(), sends_body)
        elif path.startswith(f"/{REPO}/resolve/"):
            self.send_file(path.rsplit("/", 1)[1], sends_body)
        else:
            self.send_error(404)

    def describe(self, name: str) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(FILES[name]), "oid": "0" * 40}

    def reply(self, body: bytes, sends_body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if sends_body:
            self.wfile.write(body)

    def send_file(self, name: str, sends_body: bool) -> None:
        body = FILES.get(name)
        if body is None:
            self.send_error(404)
            return
        if sends_body and self.server.is_cut and self.server.gets:
            self.send_error(503)
            return
        match = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(match.group(1)) if match else 0
        self.send_response(206 if match else 200)
        if match:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if not sends_body:
            return
        self.server.gets.append((name, start))
        if name == "model.safetensors" and self.server.is_cut:
            self.wfile.write(body[start : start + len(body) // 2])
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True
            return
        self.wfile.write(body[start:])


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    server = Mirror()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(timeout=60)


def pull(home: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tandem", "pull", REPO, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
            **environment,
        },
    )


def test_pull_through_a_mirror_resumes_and_works_offline_afterwards(mirror, tmp_path):
    result = pull(tmp_path, HF_ENDPOINT=mirror.url)
    assert result.returncode == 1
    assert result.stderr.startswith("tandem: [models.download]"), result.stderr
    assert "try again, it resumes" in result.stderr
    mirror.is_cut = False
    result = pull(tmp_path, HF_ENDPOINT=mirror.url)
    assert result.returncode == 0, result.stderr
    folder = Path(json.loads(result.stdout)["folder"])
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not (folder / "pytorch_model.bin").exists()
    starts = [start for name, start in mirror.gets if name == "model.safetensors"]
    assert starts == [0, len(FILES["model.safetensors"]) // 2]
    # All is there: nothing is fetched again, and offline it is found.
    count = len(mirror.gets)
    again = pull(tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["folder"] == str(folder)
    assert len(mirror.gets) == count


def test_nobody_there_is_an_error_in_one_line(tmp_path):
    result = pull(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert result.returncode == 1
    assert result.stderr.startswith("tandem: [models.")
    assert "Traceback" not in result.stderr
