"""A real etcd of one member on loopback, in a folder of its own."""

import contextlib
import secrets
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

START_TIMEOUT_S = 60.0
needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="etcd is missing: apt-get install etcd-server"
)


def find_free_port() -> int:
    """Return a port that is free and that the kernel gives to nobody who asks for any."""
    for _ in range(100):
        port = 20_000 + secrets.randbelow(12_000)  # From 32,768 on it gives them out.
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


class EtcdServer:
    """Started by ``start``; its data survive ``kill``. ``flags`` are added to the command."""

    def __init__(self, folder: Path, *flags: str, scheme: str = "http") -> None:
        self.url = f"{scheme}://127.0.0.1:{find_free_port()}"
        peer = f"http://127.0.0.1:{find_free_port()}"
        self._command = [
            "etcd", "--name", "m0", "--data-dir", str(folder / "data"), "--log-level", "error",
            "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"m0={peer}", "--unsafe-no-fsync", *flags,
        ]  # fmt: skip
        if b"unsafe-no-fsync" not in subprocess.run(["etcd", "--help"], capture_output=True).stdout:
            self._command.remove("--unsafe-no-fsync")
        self._log = folder / "log"
        self.process: subprocess.Popen | None = None

    def start(self, *, wait: bool = True) -> "EtcdServer":
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        end_s = time.monotonic() + START_TIMEOUT_S
        while wait and not self._is_healthy():
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < end_s, "etcd did not become healthy"
            time.sleep(0.05)
        return self

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                return b"true" in answer.read()
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        """Stop it dead; ``go_on`` wakes it."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
            self.process = None
