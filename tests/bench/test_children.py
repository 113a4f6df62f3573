"""What a benchmark starts does not outlive it, whatever ends it."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.bench.children import start_child

PARENT = """
import signal, sys, time
from tandem.bench.children import start_child
# A shell has its background commands ignore it, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
child = start_child([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
WAIT_S = 60


def has_ended(pid_fd: int) -> bool:
    return bool(select.select([pid_fd], [], [], WAIT_S)[0])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_child_ends_with_its_parent(how):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        child = int(parent.stdout.readline())
        pid_fd = os.pidfd_open(child)
        try:
            assert not select.select([pid_fd], [], [], 0)[0], "it lives while its parent does"
            parent.send_signal(how)
            parent.wait(WAIT_S)
            assert has_ended(pid_fd)
        finally:
            os.close(pid_fd)
    finally:
        parent.kill()
        parent.wait(WAIT_S)
        parent.stdout.close()


def test_a_child_is_the_command_itself():
    """Its output, its input and its pid, and the code that it ends with."""
    program = "import os, sys; print(os.getpid(), sys.argv[1], sys.stdin.read()); sys.exit(3)"
    child = start_child(
        [sys.executable, "-c", program, "a b"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = child.communicate("words", WAIT_S)
    assert out.split() == [str(child.pid), "a", "b", "words"]
    assert child.returncode == 3


def list_children(pid: int) -> set[int]:
    """Return the processes that a process has started, and those that they have."""
    found: set[int] = set()
    for task in Path("/proc").glob(f"{pid}/task/*/children"):
        try:
            found |= {int(child) for child in task.read_text().split()}
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found.union(*map(list_children, found))


def is_store(pid: int, role: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    # As the command itself: not yet while it asks the kernel to be killed with its parent.
    return words[1:5] == [b"-m", b"tandem", b"store", role.encode()]


@pytest.mark.e2e
def test_a_killed_bench_leaves_no_store():
    """A master and a host that it has started end with it, though nobody is left to end them."""
    bench = subprocess.Popen(
        [sys.executable, "-m", "tandem", "bench", "store", "--quick", "--cases", "op=first_put*"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pid_fds: list[int] = []
    try:
        end_s = time.monotonic() + WAIT_S
        while True:
            children = list_children(bench.pid)
            if all(any(is_store(pid, role) for pid in children) for role in ("master", "host")):
                break
            assert bench.poll() is None, "the bench ended by itself"
            assert time.monotonic() < end_s, "the bench started no store"
            time.sleep(0.01)
        pid_fds = [os.pidfd_open(pid) for pid in children]
        bench.kill()
        bench.wait(WAIT_S)
        assert all(map(has_ended, pid_fds))
    finally:
        bench.kill()
        bench.wait(WAIT_S)
        for pid_fd in pid_fds:
            os.close(pid_fd)
