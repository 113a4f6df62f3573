"""``tandem serve`` where nothing can be written, for a second user, and with 64 descriptors."""

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = 65534
READ_ONLY = """
mount --make-rprivate / || exit 77
for folder in / /tmp /var/tmp /dev/shm "$PWD"; do
  mount --bind "$folder" "$folder" 2>/dev/null
  mount -o remount,bind,ro "$folder" || exit 77
done
exec "$@"
"""
SERVE = [sys.executable, "-m", "tandem", "serve", "demo", "--port", "0"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@needs_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, of util-linux")
def test_where_no_folder_can_be_written_the_reason_is_told_at_once(tmp_path):
    """Before the libraries are imported, which fail there in ways of their own."""
    run = subprocess.run(
        ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", *SERVE], cwd=tmp_path,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if run.returncode == 77 or run.stderr.startswith("unshare: "):
        pytest.skip(f"needs a mount namespace: {run.stderr}")
    assert run.returncode == 1, run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("tandem: ")
    assert "no folder for sockets can be made" in line
    assert "set TMPDIR" in line


@pytest.mark.slow
@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv, of util-linux")
def test_two_users_serve_with_stores_beside_each_other(serve_demo, tmp_path):
    """Each in a folder of its own under /dev/shm, which the other cannot enter.

    The second may read everything, as Python may be installed where only root can, but it writes
    and makes nothing that is not its own.
    """
    folder = Path("/dev/shm")
    tmp_path.chmod(0o700)
    os.chown(tmp_path, NOBODY, NOBODY)
    may_read = "+dac_read_search"
    as_nobody = [
        "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
        f"--inh-caps={may_read}", f"--ambient-caps={may_read}",
    ]  # fmt: skip
    its_own = {"HOME": tmp_path, "TMPDIR": tmp_path, "XDG_CACHE_HOME": tmp_path, "PYTHONPATH": ""}
    environment = {**os.environ, **{key: str(value) for key, value in its_own.items()}}
    with serve_demo("--store.memory", "64MiB") as first:
        second = subprocess.Popen(
            [*as_nobody, *SERVE, "--store.memory", "64MiB"], cwd="/", env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert second.stdout is not None
            told = []
            for line in second.stdout:
                told.append(line)
                if line.startswith("Serving"):
                    break
            owners = {uid: (folder / f"tandem-{uid}").stat() for uid in (0, NOBODY)}
        finally:
            second.terminate()
            errors = second.communicate(timeout=60)[1]
        assert told, errors
        assert told[-1].startswith("Serving"), errors
        for uid, owner in owners.items():
            assert (owner.st_uid, owner.st_mode & 0o777) == (uid, 0o700)
        body = {"prompt": "def f(x):", "max_tokens": 2}
        assert first.client.post("/v1/completions", json=body).status_code == 200


NUM_CONNECTIONS = 80
MAX_LINES = 1000
"""In the seconds of the test; 49,000 before they were throttled."""


def limit_descriptors(monkeypatch, soft: int, hard: int) -> None:
    """Give processes started from here on these limits of descriptors."""
    popen = subprocess.Popen

    def start(*arguments, **options):
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        return popen(*arguments, **options, preexec_fn=limit)

    monkeypatch.setattr(subprocess, "Popen", start)


@pytest.mark.slow
def test_the_limit_of_descriptors_is_raised_as_far_as_it_may(serve_demo, monkeypatch):
    """A shell's limit of 1,024 is fewer than the streams that a server may have."""
    limit_descriptors(monkeypatch, 64, 4096)
    with serve_demo() as server:
        metrics = server.client.get("/metrics").text
    assert "process_max_fds 4096.0" in metrics


@pytest.mark.slow
def test_64_descriptors_and_80_connections_are_few_log_lines(serve_demo, monkeypatch):
    """Clients beyond the descriptors wait; when others leave, the server answers again."""
    limit_descriptors(monkeypatch, 64, 64)
    with serve_demo() as server:
        host, port = server.url.removeprefix("http://").split(":")
        with contextlib.ExitStack() as clients:
            for _ in range(NUM_CONNECTIONS):
                client = socket.create_connection((host, int(port)), timeout=30)
                clients.enter_context(client)
            server.wait_until(lambda: any("out of system resource" in x for x in server.log), 60)
            server.wait_until(lambda: any("suppressed=" in line for line in server.log), 60)
        server.wait_until(lambda: server.client.get("/health").status_code == 200, 60)
        assert len(server.log) < MAX_LINES, server.log[:50]
