"""Counters of one RPC endpoint, as plain numbers that the metrics of a process read."""

from dataclasses import dataclass

__all__ = ["RpcCounters"]


@dataclass(slots=True)
class RpcCounters:
    """Totals since the endpoint was made. Only the endpoint's event loop writes them; any thread
    may read.
    """

    calls_started: int = 0
    """Calls of peers for which a handler was started."""
    calls_failed: int = 0
    """Calls of peers that were answered with an error, refused calls included."""
    calls_expired: int = 0
    """Handlers stopped because the caller's deadline passed."""
    calls_cancelled: int = 0
    """Handlers stopped because the caller cancelled the call."""
    unknown_methods: int = 0
    events_received: int = 0
    unknown_events: int = 0
    """Events refused: unknown tag, wrong fields, or no listener."""
    callback_errors: int = 0
    """Exceptions raised by event and peer callbacks; each is logged with its traceback."""
    malformed_frames: int = 0
    oversized_frames: int = 0
    frames_without_session: int = 0
    """Frames on connections without a session: before the hello, or after the session was
    dropped.
    """
    notices_received: int = 0
    """Fault notices received: one-way messages of this side that the peer refused."""
    handshakes_refused: int = 0
    connections_shed: int = 0
    """Connections closed at once, because this process has few file descriptors left."""
    peers_joined: int = 0
    peers_lost: int = 0
    peers_overflowed: int = 0
    """Peers dropped because they left too much unread. They also count as lost."""
