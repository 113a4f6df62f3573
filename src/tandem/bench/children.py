"""Children of a benchmark: they end when it does, however it ends.

A benchmark that is killed cannot end what it started, and a store's master waits for clients for
ever. So a child begins as a short program that asks the kernel to kill it with its parent (Linux,
PR_SET_PDEATHSIG, which an exec keeps) and becomes the command.

Imports nothing of ours: peers' scripts, which other interpreters run, find it by their folder.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["start_child"]

PROGRAM = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
# A parent that has ended meanwhile is not noticed any more.
if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) or os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def start_child(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a command as ``subprocess.Popen`` does; it is killed when this process ends.

    To be called from a thread that lasts, as the main thread does: the kernel takes the end of the
    thread that started a child for the end of its parent.

    Args:
        command: program and arguments.
        options: of ``subprocess.Popen``.
    """
    wrapped = [sys.executable, "-I", "-S", "-c", PROGRAM, str(os.getpid()), *command]
    return subprocess.Popen(wrapped, **options)
