"""The election of one of several masters: when to ask the backend, to renew, and to stop serving.
Pure.

The backend (such as etcd) gives leadership for a limited time; each term has an epoch above all
earlier ones. A leader measures the time on its own clock, from *before* it asked, and serves only a
share of it. So it has stopped when the backend can choose another, unless its clock runs slower
than ``SERVE_SHARE`` of the backend's. A term that has lapsed is never resumed.
"""

from enum import Enum
from typing import NamedTuple

__all__ = ["SERVE_SHARE", "Election", "Holder", "Question"]

SERVE_SHARE = 0.8
"""Share of a lease during which the leader serves. The rest allows for clocks of different rates
(real ones differ by less than a thousandth) and for orders in flight at the end; late orders are
also refused by their epoch.
"""
RENEW_SHARE = 0.25
"""Share of a lease after which it is renewed: two renewals may fail before the term is lost."""
POLL_SHARE = 0.1
"""Share of a lease between two queries of a follower, and between two attempts after a failure."""


class Holder(NamedTuple):
    """The leader, as the election's backend (such as etcd) names it."""

    address: str
    """The address at which hosts and clients reach the leader."""
    epoch: int
    """Epoch of the leader's term, above those of all earlier terms."""


class Question(Enum):
    """The next request to the election's backend (such as etcd), which decides who leads."""

    OBSERVE = "observe"
    """Ask the backend for the leader."""
    ACQUIRE = "acquire"
    """Take the leadership, since there is no leader."""
    RENEW = "renew"
    """Renew the leadership of this process."""


class Election:
    """One candidate's view of the election. Times are seconds of its own clock.

    Args:
        ttl_s: length of a leadership lease, seconds.
        now_s: the current time.
    """

    def __init__(self, ttl_s: float, now_s: float) -> None:
        self.ttl_s = ttl_s
        self.leader: Holder | None = None
        """The leader as last heard; this process itself while it leads."""
        self.epoch = 0
        """Epoch of this process's term; 0 without a term."""
        self.min_epoch = 0
        """Epoch that a host has seen, 0 if none: the next term's must be above it, or that host
        would refuse its orders.
        """
        self.next_step = Question.OBSERVE
        self.next_at_s = now_s
        self.serve_until_s = now_s

    def holds(self, now_s: float) -> bool:
        """Return True if this process may serve now."""
        return self.epoch > 0 and now_s < self.serve_until_s

    def is_lapsed(self, now_s: float) -> bool:
        """Return True if this process counts as leader and its time is over, so that the term must
        be ended.
        """
        return self.epoch > 0 and now_s >= self.serve_until_s

    def timeout_s(self, limit_s: float, now_s: float) -> float:
        """Return how long the next request to the election's backend may take, seconds. A leader's
        must end before its term does.
        """
        if self.epoch == 0:
            return limit_s
        return max(0.0, min(limit_s, self.serve_until_s - now_s))

    def note_observed(self, holder: Holder | None, now_s: float) -> None:
        """Note the backend's answer to who leads; None for nobody."""
        self.leader = holder
        if holder is None:
            self._plan(Question.ACQUIRE, now_s)
        else:
            self._plan(Question.OBSERVE, now_s + POLL_SHARE * self.ttl_s)

    def note_acquired(self, holder: Holder, *, is_ours: bool, sent_s: float, now_s: float) -> None:
        """Note the backend's answer to a claim of leadership that was sent at ``sent_s``."""
        self.leader = holder
        if not is_ours:
            self._plan(Question.OBSERVE, now_s + POLL_SHARE * self.ttl_s)
            return
        self.epoch = holder.epoch
        self.serve_until_s = sent_s + SERVE_SHARE * self.ttl_s
        self._plan(Question.RENEW, sent_s + RENEW_SHARE * self.ttl_s)

    def note_renewed(self, *, is_alive: bool, sent_s: float, now_s: float) -> None:
        """Note the backend's answer to a renewal that was sent at ``sent_s``. ``is_alive`` is False
        if the term is lost.
        """
        if not is_alive:
            self.serve_until_s = min(self.serve_until_s, now_s)
        elif self.holds(now_s):
            # A lapsed term is not resumed, since others may have noticed the lapse.
            self.serve_until_s = max(self.serve_until_s, sent_s + SERVE_SHARE * self.ttl_s)
            self._plan(Question.RENEW, sent_s + RENEW_SHARE * self.ttl_s)

    def note_failed(self, now_s: float) -> None:
        """Note that a request had no answer. Its effect is unknown, so the state is not changed by
        it.
        """
        if self.epoch == 0:
            self.leader = None
            self.next_step = Question.OBSERVE
        self.next_at_s = now_s + POLL_SHARE * self.ttl_s

    def end_term(self, now_s: float) -> None:
        """Stop serving in this term (the time for which this process was elected) for good, and
        pause so that other candidates go first.
        """
        self.epoch = 0
        self.leader = None
        self.serve_until_s = min(self.serve_until_s, now_s)
        self._plan(Question.OBSERVE, now_s + 2 * POLL_SHARE * self.ttl_s)

    def _plan(self, step: Question, at_s: float) -> None:
        self.next_step, self.next_at_s = step, at_s
