"""Leases of peers: arithmetic on times that the caller passes. Pure."""

__all__ = ["Lease"]


class Lease:
    """Decides when a silent peer is lost, and when this side must send a heartbeat.

    Args:
        lease_s: silence after which the peer is lost, seconds.
        beat_s: longest silence of this side, seconds.
        now_s: time of the handshake, which counts as heard and said.
    """

    __slots__ = ("_heard_s", "_looked_s", "_said_s", "beat_s", "lease_s")

    def __init__(self, lease_s: float, beat_s: float, now_s: float) -> None:
        self.lease_s = lease_s
        self.beat_s = beat_s
        self._heard_s = now_s
        self._looked_s = now_s
        self._said_s = now_s

    @property
    def check_interval_s(self) -> float:
        """Seconds between two checks of this lease: half of ``beat_s`` (this side's longest
        silence), so that a heartbeat is late by half an interval at most.
        """
        return self.beat_s / 2

    def note_heard(self, now_s: float) -> None:
        """Note that a message of the peer was read."""
        self._heard_s = now_s

    def note_said(self, now_s: float) -> None:
        """Note that a message was sent to the peer."""
        self._said_s = now_s

    def note_look(self, now_s: float) -> None:
        """Note that all arrived messages were read, as must happen every ``check_interval_s``.

        If the call is late by more than half a lease, this process was not scheduled, and often the
        whole machine and its peers stood still. The delay then does not count as silence of the
        peer.
        """
        slept_s = now_s - self._looked_s - self.check_interval_s
        self._looked_s = now_s
        if slept_s > self.lease_s / 2:
            self._heard_s = min(now_s, self._heard_s + slept_s)

    def silence_s(self, now_s: float) -> float:
        """Return for how long no message of the peer was read, without the time that this process
        slept.
        """
        return now_s - self._heard_s

    def is_expired(self, now_s: float) -> bool:
        """Return True if the peer was silent for so long that it counts as lost."""
        return now_s - self._heard_s > self.lease_s

    def is_beat_due(self, now_s: float) -> bool:
        """Return True if a heartbeat must be sent now."""
        return now_s - self._said_s >= self.check_interval_s
