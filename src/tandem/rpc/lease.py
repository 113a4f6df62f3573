"""Leases of peers: pure arithmetic on times that the caller passes."""

__all__ = ["Lease"]


class Lease:
    """Decides when a silent peer is lost and when we have been silent too long ourselves.

    Args:
        lease_s: the peer is lost after this much silence.
        beat_s: we say something at least this often.
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
        """Seconds between two questions: half a beat, so that a beat is at most half an interval
        late.
        """
        return self.beat_s / 2

    def note_heard(self, now_s: float) -> None:
        """Something of the peer was read."""
        self._heard_s = now_s

    def note_said(self, now_s: float) -> None:
        """Something was sent to the peer."""
        self._said_s = now_s

    def note_look(self, now_s: float) -> None:
        """All that has arrived was read, as is to be done every ``check_interval_s``.

        A look that comes more than half a lease late means that we were not scheduled, and often
        that the whole machine stood still with its peers: that time does not count as silence.
        """
        slept_s = now_s - self._looked_s - self.check_interval_s
        self._looked_s = now_s
        if slept_s > self.lease_s / 2:
            self._heard_s = min(now_s, self._heard_s + slept_s)

    def silence_s(self, now_s: float) -> float:
        """Return for how long nothing of the peer was read, less what we slept through."""
        return now_s - self._heard_s

    def is_expired(self, now_s: float) -> bool:
        """Return whether the peer has to be taken for lost."""
        return now_s - self._heard_s > self.lease_s

    def is_beat_due(self, now_s: float) -> bool:
        """Return whether we should say something now."""
        return now_s - self._said_s >= self.check_interval_s
