"""A reserve of file descriptors: connections from outside never take the last ones of a process.

Without a free descriptor, a process cannot write a file or accept a connection; ZeroMQ's thread,
which accepts for ``tandem.rpc``, then spins (tcp) or aborts the process (ipc). So a server shuts
down an accepted connection whose descriptor is one of the last. ``is_scarce`` in
``native/transfer/connections/server.cc`` does the same.
"""

import contextlib
import resource
import socket

__all__ = ["count_reserve", "is_scarce", "raise_limit", "shut"]

RESERVE_SHARE = 4
MIN_RESERVE = 16
MAX_RESERVE = 256
WANTED = 2**20
"""Limit on open file descriptors that a process requests from the system, far more than any process
here needs.
"""


def raise_limit() -> None:
    """Raise this process's limit of file descriptors, because the usual 1,024 are too few for
    servers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Ignore errors: some sandboxes refuse setrlimit, as do systems where the hard limit was
        # lowered.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_scarce(descriptor: int) -> bool:
    """Return True if a descriptor is one of the last that this process may have.

    The kernel assigns the lowest free number, so the number shows how many are in use.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor + count_reserve() >= limit


def count_reserve() -> int:
    """Return the number of descriptors that no connection from outside takes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_RESERVE
    return min(max(limit // RESERVE_SHARE, MIN_RESERVE), MAX_RESERVE)


def shut(descriptor: int) -> None:
    """Shut down the connection of a socket's descriptor, which its owner closes. Does nothing if it
    is closed already.
    """
    with contextlib.suppress(OSError):  # The descriptor may be closed already.
        connection = socket.socket(fileno=descriptor)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()
