"""How idle the threads of a process are, told by counts and not by times.

A thread that polls is never found asleep; one that wakes up by a timer is asleep nearly always, and
its sleeps are counted by the kernel. A stall of the machine stops the observer as well: it makes
neither count larger.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

LOOK_S = 0.004
MAX_PERIODS = 10
"""Periods of observation in one of which an idle program must be seen idle."""


class Observed(NamedTuple):
    """What was seen of one thread."""

    num_looks: int
    num_awake: int
    """Looks that found it on a CPU, or waiting for one."""
    num_sleeps: int
    """Times that it went to sleep meanwhile: it was woken as often."""


def list_threads(pid: int | str = "self") -> set[str]:
    """Return the ids of the threads of a process."""
    return {task.name for task in Path(f"/proc/{pid}/task").iterdir()}


def is_awake(thread: str, pid: int | str = "self") -> bool:
    """Return whether a thread is on a CPU or waits for one; False if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] == "R"


def count_sleeps(thread: str, pid: int | str = "self") -> int:
    """Return how often a thread has gone to sleep by itself; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def observe(
    threads: Iterable[str],
    pid: int | str = "self",
    *,
    max_looks: int = 250,
    until: Callable[[], bool] = lambda: False,
) -> dict[str, Observed]:
    """Look at threads again and again, not at the calling one; returns what was seen by thread."""
    own = str(threading.get_native_id())
    before = {thread: count_sleeps(thread, pid) for thread in threads if thread != own}
    awake, num_looks = dict.fromkeys(before, 0), 0
    while num_looks < max_looks and not until():
        time.sleep(LOOK_S)
        num_looks += 1
        for thread in before:
            awake[thread] += is_awake(thread, pid)
    return {
        thread: Observed(num_looks, awake[thread], max(0, count_sleeps(thread, pid) - sleeps))
        for thread, sleeps in before.items()
    }


def check_idle_child(program: str) -> None:
    """Start a program, and check that nothing in it runs soon after it has said that it is ready.

    Args:
        program: Python that prints a line when it is ready, and ends when its standard input does.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        seen = observe(list_threads(child.pid), child.pid)
        # On a busy machine what it did before may go on for a while, as a peer that was silent is
        # asked whether it lives. What polls, or wakes up by a timer, does so in every period.
        for _ in range(MAX_PERIODS - 1):
            if all(map(_is_idle, seen.values())):
                break
            seen = observe(list_threads(child.pid), child.pid)
        child.communicate(timeout=60)
        assert child.returncode == 0
    finally:
        child.kill()
        child.communicate()
    assert len(seen) > 1, "the threads of what is idle"
    assert all(map(_is_idle, seen.values())), seen


def _is_idle(seen: Observed) -> bool:
    return seen.num_awake * 20 <= seen.num_looks and seen.num_sleeps * 40 <= seen.num_looks
