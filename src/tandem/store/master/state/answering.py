"""Detection of a host that answers later than usual. Pure: time is an argument."""

from tandem.store.usual_time import UsualTime

__all__ = ["Answering"]

USUAL_FACTOR = 4.0
"""A host is waited for this many times its usual answer time, if another host could do the work."""
MIN_WRITE_S = 0.25
"""Minimum of that wait in seconds: a process that shares its core may be away for 0.1 s."""
OBJECT_ANSWER_S = 50e-6
"""Seconds added to the wait for each object of an order. Sealing an object takes some 2 us."""


class Answering:
    """The answer times of one host to a master's quick orders: those that wait for nothing but the
    host's own thread.

    Args:
        most_s: upper bound of the wait for any order, seconds.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._usual = UsualTime()
        self._unanswered: dict[object, float] = {}
        """Time at which each unanswered quick order was sent, oldest first."""
        self._doubted_s: float | None = None
        """Time of the last order that timed out; None once an order sent later was answered."""

    @property
    def is_doubted(self) -> bool:
        """True if an order to the host timed out and none that was sent after it has been
        answered.
        """
        return self._doubted_s is not None

    def is_silent(self, now_s: float) -> bool:
        """Return True if the host has been silent for much longer than usual, so that another host
        is the better choice.
        """
        if self._doubted_s is not None:
            return True
        oldest_s = next(iter(self._unanswered.values()), None)
        return oldest_s is not None and now_s - oldest_s > self.answer_timeout_s()

    def answer_timeout_s(self, num_objects: int = 0) -> float:
        """Return how long to wait for a quick order about ``num_objects`` objects if other hosts
        could do it, seconds.
        """
        usual_s = self._usual.multiply(USUAL_FACTOR, least_s=MIN_WRITE_S, most_s=self._most_s)
        return min(usual_s + num_objects * OBJECT_ANSWER_S, self._most_s)

    def note_sent(self, order: object, now_s: float) -> None:
        """Note that a quick order was sent to the host. ``order`` is any object that
        identifies it.
        """
        self._unanswered[order] = now_s

    def note_ended(self, order: object) -> None:
        """Note that an order to the host is over, with or without an answer."""
        self._unanswered.pop(order, None)

    def note_answer(self, sent_s: float, now_s: float) -> bool:
        """Note that the host has answered an order. Return True if it counted as silent (see
        ``doubt``) and no longer does.
        """
        self._usual.note(now_s - sent_s)
        if self._doubted_s is None or sent_s < self._doubted_s:
            return False
        self._doubted_s = None
        return True

    def doubt(self, now_s: float) -> bool:
        """Count the host as silent until it answers an order that is sent later: it did not answer,
        or bytes did not reach it.

        Returns: True if the host did not count as silent before.
        """
        is_new = self._doubted_s is None
        self._doubted_s = now_s
        return is_new

    def reset(self) -> None:
        """Forget all unanswered orders and any doubt, since the host's session is over."""
        self._unanswered.clear()
        self._doubted_s = None
