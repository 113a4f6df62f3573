"""Children of a benchmark, or of a command: they end when it does, however it ends.

A process that is killed cannot end what it started, and servers wait for clients for ever. So a
child begins as a short program that asks the kernel to signal it at the end of its parent (Linux,
PR_SET_PDEATHSIG, which an exec keeps) and becomes the command.

Imports nothing of ours: peers' scripts, which other interpreters run, find it by their folder.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["start_child"]

PROGRAM = """
import ctypes, os, sys
PR_SET_PDEATHSIG = 1
parent, number = int(sys.argv[1]), int(sys.argv[2])
# A parent that has ended meanwhile is not noticed any more.
if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) or os.getppid() != parent:
    os._exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def start_child(
    command: Sequence[str], *, end_signal: int = signal.SIGKILL, **options: Any
) -> "subprocess.Popen[Any]":
    """Start a command as ``subprocess.Popen`` does; it is signalled when this process ends.

    To be called from a thread that lasts, as the main thread does: the kernel takes the end of the
    thread that started a child for the end of its parent.

    Args:
        command: program and arguments.
        end_signal: what it gets then.
        options: of ``subprocess.Popen``.
    """
    own = [str(os.getpid()), str(int(end_signal))]
    wrapped = [sys.executable, "-I", "-S", "-c", PROGRAM, *own, *command]
    return subprocess.Popen(wrapped, **options)
