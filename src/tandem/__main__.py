"""The ``tandem`` command, also as ``python -m tandem``."""

import atexit
import os
import signal

__all__ = ["main"]


def main() -> None:
    """Load the commands, which takes a moment, and run one.

    Meanwhile Ctrl-C ends the process at once: an exception in the middle of an import would be a
    traceback, and there is nothing to undo.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda _, __: _leave())
        # At exit, after all threads have ended, SIGINT is ignored: Python would otherwise restore
        # the default action, and an interrupt in its last moments would replace the exit status of
        # a command that is done.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    from tandem.cli.main import main as run

    run()


def _leave() -> None:
    os.write(2, b"tandem: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
