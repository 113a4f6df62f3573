"""Ctrl-C ends a command within a second: one line on standard error, status 130, no traceback.

Python raises KeyboardInterrupt in the main thread when that next runs Python code, and ``finally``
blocks and contexts clean up. They have ``GRACE_S`` seconds for it. Then a second thread ends the
process; that thread is told of the signal even while the main thread computes in native code.
During an import the process ends at once. Child processes end by themselves when their standard
input or their parent does.
"""

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

__all__ = ["STATUS", "end_interrupted", "handle_interrupts", "keep_interrupts"]

GRACE_S = 0.5
"""Seconds that an interrupted command has for cleaning up."""
_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"
STATUS = 130
"""Exit status of an interrupted command, as in shells: 128 plus the signal's number."""


class _State:
    num_keepers = 0
    kept_s = -math.inf
    """Time at which ``keep_interrupts`` last handled an interrupt, monotonic seconds."""
    is_interrupted = False
    is_told = False


@contextlib.contextmanager
def handle_interrupts() -> Iterator[None]:
    """End the process with one line and ``STATUS`` if Ctrl-C comes while the context is open.

    Does nothing if SIGINT is ignored, as for background commands of a shell, or outside the main
    thread.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or handler in (signal.SIG_IGN, None):
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    _State.is_interrupted = _State.is_told = False
    ended = threading.Event()
    threading.Thread(target=_watch, args=(reader, ended), name="interrupts", daemon=True).start()
    signal.signal(signal.SIGINT, _raise)
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        if _State.is_interrupted:
            # Some code (a library, say) turned the interrupt into an error of its own: the command
            # still ends as interrupted.
            raise KeyboardInterrupt from None
        raise
    finally:
        ended.set()
        signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(previous_fd)
        writer.close()


@contextlib.contextmanager
def keep_interrupts() -> Iterator[None]:
    """Leave Ctrl-C to the code inside the context, which catches KeyboardInterrupt, so that the
    command goes on.
    """
    _State.num_keepers += 1
    try:
        yield
    finally:
        _State.num_keepers -= 1


def end_interrupted() -> NoReturn:
    """Print that the command was interrupted and exit with ``STATUS``; if that takes long, the
    watching thread ends the process.
    """
    _tell()
    # Python remembers that an `exec` of text (dataclasses use it) ended in KeyboardInterrupt, and
    # would die of the signal at its end instead of exiting with this status. Another `exec` clears
    # that.
    exec("")  # noqa: S102
    sys.exit(STATUS)


def _tell() -> None:
    if not _State.is_told:
        _State.is_told = True
        with contextlib.suppress(OSError):
            sys.stderr.write("tandem: interrupted\n")
            sys.stderr.flush()


def _leave() -> NoReturn:
    _tell()
    os._exit(STATUS)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_SYSTEM:
            return True
        frame = frame.f_back
    return False


def _raise(_: int, frame: FrameType | None) -> None:
    if _State.num_keepers:
        _State.kept_s = time.monotonic()
    else:
        # During an import the process is ended at once: torch's native code calls Python while it
        # is imported, partly where an exception would abort the process (`terminate called`). An
        # import has nothing to undo.
        if _State.is_interrupted or _is_importing(frame):
            _leave()
        _State.is_interrupted = True
        # Errors that the interrupt causes in destructors and threads are not shown.
        sys.unraisablehook = lambda _: None
        threading.excepthook = lambda _: None
    raise KeyboardInterrupt


def _watch(reader: socket.socket, ended: threading.Event) -> None:
    """End the process ``GRACE_S`` after an interrupt (noticed at ``reader``), unless the context
    has ended or has handled it.
    """
    with reader:
        while data := reader.recv(1):
            heard_s = time.monotonic()
            if data[0] != signal.SIGINT or _State.num_keepers:
                continue
            if ended.wait(GRACE_S):
                return
            # The context that postpones interrupts may have handled this one and ended before this
            # thread noticed: then the process continues.
            if _State.kept_s < heard_s - GRACE_S:
                _leave()
