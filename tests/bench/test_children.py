"""What a benchmark starts does not outlive it, whatever ends it."""

import os
import select
import signal
import subprocess
import sys

import pytest

from tandem.bench.children import start_child

PARENT = """
import sys, time
from tandem.bench.children import start_child
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
