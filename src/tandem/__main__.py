"""The ``tandem`` command, also as ``python -m tandem``."""

import signal

__all__ = ["main"]


def main() -> None:
    """Load the commands, which takes a second, and run one.

    Meanwhile Ctrl-C ends the process as if Python had no word in it: an exception in the middle of
    an import would be a traceback.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_ours = handler is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tandem.cli.main import main as run

    if is_ours:
        signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
