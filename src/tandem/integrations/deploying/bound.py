"""A ``tandem`` command that ends with the process that started it.

``python -m tandem.integrations.deploying.bound CORES COMMAND...`` runs the command in this process,
on some cores, and ends it when standard input is closed. CORES is a list with commas, or ``all``.
"""

import os
import runpy
import select
import signal
import sys
import threading

__all__ = ["main"]


def _watch() -> None:
    """Wait until the process that started this one has ended (standard input is closed), then send
    SIGTERM to this process.
    """
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLHUP | select.POLLRDHUP)
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run, in a process that ends with the one that started it, the command in the arguments."""
    cores, *command = sys.argv[1:]
    if cores != "all":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    threading.Thread(target=_watch, name="starter-watch", daemon=True).start()
    sys.argv = ["tandem", *command]
    runpy.run_module("tandem", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
