"""Child processes of a benchmark or a command, which end whenever their parent ends.

A process that is killed has no chance to end its children, and a server would wait for clients for
ever. A child therefore begins as a short program that asks the kernel to signal it when its parent
ends (Linux, PR_SET_PDEATHSIG, which survives exec) and then executes the command.

Imports no other module of Tandem: the rivals' scripts, which run in other interpreters, import it
from their own folder.
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
# The kernel sends no signal for a parent that ended before this call. This process then has
# another parent already, so it ends itself.
if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) or os.getppid() != parent:
    os._exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def start_child(
    command: Sequence[str], *, end_signal: int = signal.SIGKILL, **options: Any
) -> "subprocess.Popen[Any]":
    """Start a command as ``subprocess.Popen`` does, to be signalled when this process ends.

    Call this from a thread that lives as long as the process, such as the main thread: the kernel
    sends the signal when the thread that started the child ends.

    Args:
       command: program and arguments.
       end_signal: the signal the child gets when this process ends.
       options: passed to ``subprocess.Popen``.
    """
    own = [str(os.getpid()), str(int(end_signal))]
    wrapped = [sys.executable, "-I", "-S", "-c", PROGRAM, *own, *command]
    return subprocess.Popen(wrapped, **options)
