"""The decision which of several masters leads: when to ask, to renew, and to stop serving. Pure.

The backend (etcd, say) gives leadership for a time; every term has an epoch above all before it.
A leader measures that time on its own clock, from *before* it asked, and serves only for a share of
it: when the backend can give leadership to another, this one has stopped, unless its clock runs
slower than ``SERVE_SHARE`` of the backend's. A term that was let lapse is never taken up again.
"""

from enum import Enum
from typing import NamedTuple

__all__ = ["SERVE_SHARE", "Election", "Holder", "Question"]

SERVE_SHARE = 0.8
"""Share of a lease that is served. The rest covers clocks of different rates (real ones differ by
less than a thousandth), and orders under way when it ends; epochs stand behind that."""
RENEW_SHARE = 0.25
"""Share of a lease after which it is renewed: two renewals may fail before the term is lost."""
POLL_SHARE = 0.1
"""Share of a lease between two looks of a follower, and between two tries after a failure."""


class Holder(NamedTuple):
    """The leader."""

    address: str
    """The address at which hosts and clients reach it."""
    epoch: int
    """Epoch of its term; each term's is above those of all before."""


class Question(Enum):
    """The next question to the backend."""

    OBSERVE = "observe"
    """Ask the backend for the leader."""
    ACQUIRE = "acquire"
    """There is no leader: take the leadership."""
    RENEW = "renew"
    """It is ours: keep it."""


class Election:
    """One candidate's view. Times are seconds of its own clock.

    Args:
        ttl_s: for how long the backend gives the leadership.
        now_s: the time.
    """

    def __init__(self, ttl_s: float, now_s: float) -> None:
        self.ttl_s = ttl_s
        self.leader: Holder | None = None
        """The same as last heard; ourselves while we lead."""
        self.epoch = 0
        """Epoch of our term; 0 while there is none."""
        self.min_epoch = 0
        """A host has obeyed this one, so the next term must be above it."""
        self.next_step = Question.OBSERVE
        self.next_at_s = now_s
        self.serve_until_s = now_s

    def holds(self, now_s: float) -> bool:
        """Return True if we may serve now."""
        return self.epoch > 0 and now_s < self.serve_until_s

    def is_lapsed(self, now_s: float) -> bool:
        """Return True if there is a term that must be ended."""
        return self.epoch > 0 and now_s >= self.serve_until_s

    def timeout_s(self, limit_s: float, now_s: float) -> float:
        """Return how long the next step may take: a leader must notice in time that it was."""
        if self.epoch == 0:
            return limit_s
        return max(0.0, min(limit_s, self.serve_until_s - now_s))

    def note_observed(self, holder: Holder | None, now_s: float) -> None:
        """Note that the backend has named the leader; None: there is none."""
        self.leader = holder
        if holder is None:
            self._plan(Question.ACQUIRE, now_s)
        else:
            self._plan(Question.OBSERVE, now_s + POLL_SHARE * self.ttl_s)

    def note_acquired(self, holder: Holder, *, is_ours: bool, sent_s: float, now_s: float) -> None:
        """Note that the backend has named the leader after our claim, which was sent at
        ``sent_s``.
        """
        self.leader = holder
        if not is_ours:
            self._plan(Question.OBSERVE, now_s + POLL_SHARE * self.ttl_s)
            return
        self.epoch = holder.epoch
        self.serve_until_s = sent_s + SERVE_SHARE * self.ttl_s
        self._plan(Question.RENEW, sent_s + RENEW_SHARE * self.ttl_s)

    def note_renewed(self, *, is_alive: bool, sent_s: float, now_s: float) -> None:
        """Note that the backend has (not) prolonged our term, after we asked at ``sent_s``."""
        if not is_alive:
            self.serve_until_s = min(self.serve_until_s, now_s)
        elif self.holds(now_s):
            # Otherwise our term has lapsed, which others may have seen: it is not resumed.
            self.serve_until_s = max(self.serve_until_s, sent_s + SERVE_SHARE * self.ttl_s)
            self._plan(Question.RENEW, sent_s + RENEW_SHARE * self.ttl_s)

    def note_failed(self, now_s: float) -> None:
        """Note that the step had no answer. Its effect is unknown, so nothing is concluded from
        it.
        """
        if self.epoch == 0:
            self.leader = None
            self.next_step = Question.OBSERVE
        self.next_at_s = now_s + POLL_SHARE * self.ttl_s

    def end_term(self, now_s: float, *, min_epoch: int = 0) -> None:
        """Stop serving for good in this term; others get a chance before we ask again."""
        self.epoch = 0
        self.leader = None
        self.serve_until_s = min(self.serve_until_s, now_s)
        self.min_epoch = max(self.min_epoch, min_epoch)
        self._plan(Question.OBSERVE, now_s + 2 * POLL_SHARE * self.ttl_s)

    def _plan(self, step: Question, at_s: float) -> None:
        self.next_step, self.next_at_s = step, at_s
