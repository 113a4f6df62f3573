"""True if a host answers as soon as it usually does. Pure: time is an argument."""

from tandem.store.usual_time import UsualTime

__all__ = ["Answering"]

USUAL_FACTOR = 4.0
"""So many times what a host usually takes are waited for it, where another would do as well."""
MIN_WRITE_S = 0.25
"""A process that has to share its core may be away for a tenth of a second."""
OBJECT_ANSWER_S = 50e-6
"""For each object of an order; sealing one takes some 2 us."""


class Answering:
    """The quick orders of one host: those that wait for nothing but the host's own thread.

    Args:
        most_s: how long any order is waited for.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._usual = UsualTime()
        self._unanswered: dict[object, float] = {}
        """Quick orders under way: when each was sent, oldest first."""
        self._doubted_s: float | None = None
        """The moment at which an order to it was last too late; None once it has answered an order
        sent since."""

    @property
    def is_doubted(self) -> bool:
        """True if an order was too late, and no order sent since has been answered."""
        return self._doubted_s is not None

    def is_silent(self, now_s: float) -> bool:
        """Return True if it keeps others waiting for much longer than usual: better ask another."""
        if self._doubted_s is not None:
            return True
        oldest_s = next(iter(self._unanswered.values()), None)
        return oldest_s is not None and now_s - oldest_s > self.answer_timeout_s()

    def answer_timeout_s(self, num_objects: int = 0) -> float:
        """Return how long to wait for a quick order about so many objects, if others can do it."""
        usual_s = self._usual.multiply(USUAL_FACTOR, least_s=MIN_WRITE_S, most_s=self._most_s)
        return min(usual_s + num_objects * OBJECT_ANSWER_S, self._most_s)

    def note_sent(self, order: object, now_s: float) -> None:
        """Note that an order is under way; it is known by its identity."""
        self._unanswered[order] = now_s

    def note_ended(self, order: object) -> None:
        """Note that it is under way no more."""
        self._unanswered.pop(order, None)

    def note_answer(self, sent_s: float, now_s: float) -> bool:
        """Note that an order was answered; return True if that ends a doubt."""
        self._usual.note(now_s - sent_s)
        if self._doubted_s is None or sent_s < self._doubted_s:
            return False
        self._doubted_s = None
        return True

    def doubt(self, now_s: float) -> bool:
        """Note that it did not answer, or bytes did not arrive there; return True if that is
        news.
        """
        is_new = self._doubted_s is None
        self._doubted_s = now_s
        return is_new

    def reset(self) -> None:
        """Its session is over, and so are its orders in progress."""
        self._unanswered.clear()
        self._doubted_s = None
