"""Children of a process that has imported what loads, packs and exports models.

To import it takes seconds, for each child that starts from nothing.
"""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

__all__ = ["fork"]

PROGRAM = """
import json, os, sys, traceback
import torch
import tandem.models.convert, tandem.models.export
import tandem.models.loading.loader, tandem.models.planning.planner

torch.set_num_threads(1)
for line in sys.stdin:
    code, arguments, output = json.loads(line)
    pid = os.fork()
    if not pid:
        status = 1
        try:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.argv = ["-c", *arguments]
            exec(code, {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@functools.cache
def _start() -> subprocess.Popen:
    parent = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(parent.communicate)
    return parent


def fork(code: str, arguments: list[str], output: Path, timeout_s: float = 180.0) -> int:
    """Run Python in a child as ``python -c`` would, and wait for its end.

    Args:
        code: the program.
        arguments: ``sys.argv[1:]`` of the program.
        output: a file that does not exist; what the child prints and its traceback.
        timeout_s: after which the child is killed, and an error raised.
    Returns: the exit status, or minus the number of the signal that ended it.
    """
    parent = _start()
    watchdog = threading.Timer(timeout_s, os.killpg, (parent.pid, signal.SIGKILL))
    watchdog.start()
    try:
        parent.stdin.write(json.dumps([code, arguments, str(output)]) + "\n")
        parent.stdin.flush()
        if not (line := parent.stdout.readline()):
            _start.cache_clear()
            raise TimeoutError(f"the child took more than {timeout_s} s, or its parent died")
        return int(line)
    finally:
        watchdog.cancel()
        watchdog.join()
