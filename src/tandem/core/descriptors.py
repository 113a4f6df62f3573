"""The last descriptors of a process are its own: no connection of others takes them.

Where none is left, a process cannot write a file or accept: ZeroMQ's thread, which accepts for
``tandem.rpc``, then spins (tcp) or aborts the process (ipc). So whoever accepts shuts what comes by
one of the last. As ``is_scarce`` in ``native/transfer/connections/server.cc``.
"""

import contextlib
import resource
import socket

__all__ = ["is_scarce", "raise_limit", "shut"]

RESERVE_SHARE = 4
MIN_RESERVE = 16
MAX_RESERVE = 256
WANTED = 2**20
"""File descriptors to allow this process, far more than any process here needs."""


def raise_limit() -> None:
    """Raise the limit of file descriptors: the usual limit of 1,024 is too low for servers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some sandboxes refuse setrlimit, and so do systems that lowered their limit below the hard
        # one.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_scarce(descriptor: int) -> bool:
    """Return True if a descriptor is one of the last that this process may have.

    The kernel gives the lowest that is free, so its number tells.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return False
    return descriptor + min(max(limit // RESERVE_SHARE, MIN_RESERVE), MAX_RESERVE) >= limit


def shut(descriptor: int) -> None:
    """Shut a connection down by its descriptor; the descriptor's owner will close it."""
    with contextlib.suppress(OSError):  # The descriptor may be closed already.
        connection = socket.socket(fileno=descriptor)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()
