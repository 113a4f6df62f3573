"""Counts of one endpoint, as plain numbers; the metrics of a process read them."""

from dataclasses import dataclass

__all__ = ["RpcCounters"]


@dataclass(slots=True)
class RpcCounters:
    """Totals since the endpoint was made. Written by its loop alone; reading is always safe."""

    calls_started: int = 0
    """Calls of peers for which a handler was started."""
    calls_failed: int = 0
    """Calls of peers that were answered with an error, refusals included."""
    calls_expired: int = 0
    """Handlers stopped because the caller's deadline passed."""
    calls_cancelled: int = 0
    """Handlers stopped because the caller gave up."""
    unknown_methods: int = 0
    events_received: int = 0
    unknown_events: int = 0
    """Events refused: unknown tag, wrong fields, or nobody listens."""
    callback_errors: int = 0
    """Exceptions out of event and peer callbacks; each is logged with its trace."""
    malformed_frames: int = 0
    oversized_frames: int = 0
    frames_without_session: int = 0
    """Frames of peers that had not said hello, or that were dropped before."""
    notices_received: int = 0
    """One-way messages of ours that the other side refused."""
    handshakes_refused: int = 0
    connections_shed: int = 0
    """Connections ended at once, since this process has few descriptors left."""
    peers_joined: int = 0
    peers_lost: int = 0
    peers_overflowed: int = 0
    """Peers dropped because they left too much unread; also counted as lost."""
