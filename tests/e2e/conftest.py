"""A real server of the demo model, started as a user starts it, once a process of the tests."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # Sibling modules of these tests.

START_TIMEOUT_S = 120.0
WAIT_S = 60.0


@dataclass
class LiveServer:
    """One ``tandem serve`` process."""

    process: subprocess.Popen
    url: str
    log: list[str]
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def stats(self) -> dict:
        """The instance's counters."""
        return self.client.get("/server_info").json()["stats"]

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> float:
        """Poll until true; return the seconds it took."""
        begin_s = time.monotonic()
        while time.monotonic() - begin_s < timeout_s:
            with contextlib.suppress(httpx.HTTPError, KeyError):
                if condition():
                    return time.monotonic() - begin_s
            time.sleep(0.005)
        raise AssertionError(f"not within {timeout_s} s; log:\n{''.join(self.log[-30:])}")

    def is_idle(self) -> bool:
        """No request lives and no block has an owner."""
        stats = self.stats()
        return not (stats["num_used_blocks"] or stats["num_running"] or stats["num_waiting"])

    def instance_pid(self) -> int:
        return self.client.get("/server_info").json()["instance"]["pid"]


@contextlib.contextmanager
def serve(*flags: str, env: dict[str, str] | None = None) -> Iterator[LiveServer]:
    """Run ``tandem serve demo FLAGS`` on a free port."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tandem",
            "serve",
            os.environ.get("TANDEM_TEST_MODEL", "demo"),
            "--served-model-name",
            "demo",
            "--port",
            "0",
            "--json",
            *flags,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # `auto` asks the CPU whether it multiplies bfloat16.
        env={"TANDEM_MODEL__DTYPE": "float32", **os.environ, **(env or {})},
    )
    log: list[str] = []
    thread = threading.Thread(target=lambda: log.extend(process.stderr), daemon=True)
    thread.start()
    try:
        url = _read_url(process, log)
        server = LiveServer(process, url, log)
        yield server
        server.client.close()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        thread.join(timeout=60)
        process.stdout.close()
        process.stderr.close()
    # Pipes see nothing of the bar that a terminal sees while weights load.
    assert not [line for line in log if "\x1b" in line or "━" in line]


def _read_url(process: subprocess.Popen, log: list[str]) -> str:
    """Read the JSON document that ``serve --json`` prints once it is ready."""
    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    text = ""
    try:
        for line in process.stdout:
            text += line
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(text)["url"]
    finally:
        timer.cancel()
    raise AssertionError(f"the server did not start: {text}\n{''.join(log[-30:])}")


@pytest.fixture
def serve_demo():
    """``serve``, for tests that need a server of their own."""
    return serve


@pytest.fixture(scope="module")
def serve_demo_module():
    """``serve``, for a server that a module's tests share."""
    return serve


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with serve() as live:
        yield live


@pytest.fixture
def idle_after(server: LiveServer) -> Iterator[LiveServer]:
    """The server; afterwards no block may have an owner."""
    yield server
    server.wait_until(server.is_idle)
