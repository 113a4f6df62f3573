"""Runs an ``Election``: calls a backend within deadlines and reports terms won and lost.

Opens no socket: the backend is a Protocol, so that the simulator runs this same class.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tandem.core.clock import Clock
from tandem.core.errors import TandemError
from tandem.store.election.election import Election, Holder, Question

__all__ = ["Campaign", "Claim", "ElectionBackend"]

logger = logging.getLogger(__name__)

MIN_PAUSE_S = 0.001
"""Shortest pause in seconds: a clock that counts from long ago may not resolve a shorter one."""


class Claim(NamedTuple):
    """The answer to ``ElectionBackend.acquire``: the leader, and whether it is this process."""

    holder: Holder
    is_ours: bool


class ElectionBackend(Protocol):
    """A lock with a time limit and a counter, kept outside of the process: who has the lock is the
    leader. One call at a time.

    Each call raises PeerLostError or DeadlineError if there is no answer within ``timeout_s``. The
    call may have taken effect nevertheless.
    """

    async def observe(self, timeout_s: float) -> Holder | None:
        """Return the current leader; None if there is none."""
        ...

    async def acquire(self, address: str, *, ttl_s: int, min_epoch: int, timeout_s: float) -> Claim:
        """Take the leadership for ``ttl_s`` from this call on, if it is free.

        The epoch of the new term is above those of all earlier terms, and above ``min_epoch``.
        """
        ...

    async def renew(self, timeout_s: float) -> bool:
        """Renew the leadership for ``ttl_s``. Return False if this process no longer has it."""
        ...

    async def release(self, timeout_s: float) -> None:
        """Give up the leadership if this process has it."""
        ...


class Campaign:
    """Keeps one process a candidate for the leadership of a store: ``run`` does all the work,
    ``holds`` may be called at any time.

    Args:
        backend: owned by the caller.
        clock: must advance while the machine sleeps, at the backend's rate within 20 %.
        address: address at which hosts and clients reach this process.
        ttl_s: length of a leadership lease, seconds.
        timeout_s: time limit of one call to the backend, seconds.
        on_elected: called with the epoch when a term begins.
        on_deposed: called once when the term ends; ``holds`` is False by then.
    """

    def __init__(
        self,
        backend: ElectionBackend,
        *,
        clock: Clock,
        address: str,
        ttl_s: int,
        timeout_s: float,
        on_elected: Callable[[int], None],
        on_deposed: Callable[[], None],
    ) -> None:
        self.num_terms = 0
        """Number of terms that this process has begun."""
        self._backend = backend
        self._clock = clock
        self._address = address
        self._timeout_s = timeout_s
        self._on_elected = on_elected
        self._on_deposed = on_deposed
        self._election = Election(ttl_s, clock.now_s())
        self._ttl_s = ttl_s
        self._woken = asyncio.Event()
        self._is_failing = False

    @property
    def leader(self) -> Holder | None:
        """The current leader, as last reported by the backend."""
        return self._election.leader

    def holds(self) -> bool:
        """Return True if this process leads now and may serve."""
        return self._election.holds(self._clock.now_s())

    def resign(self, *, min_epoch: int) -> None:
        """End this process's term (time as leader) because a host has obeyed a master of epoch
        ``min_epoch``. The next term's epoch (number) will be above that.
        """
        self._election.serve_until_s = self._clock.now_s()
        self._election.min_epoch = max(self._election.min_epoch, min_epoch)
        self._woken.set()

    async def run(self) -> None:
        """Campaign until cancelled; then give up the leadership if this process has it."""
        try:
            while True:
                await self._pause()
                if self._election.is_lapsed(self._clock.now_s()):
                    await self._end_term()
                else:
                    await self._take_step()
        finally:
            if self._election.epoch:
                await self._end_term()

    async def _pause(self) -> None:
        election, now_s = self._election, self._clock.now_s()
        at_s = election.next_at_s
        if election.epoch:
            at_s = min(at_s, election.serve_until_s)
        if at_s > now_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(at_s - now_s, MIN_PAUSE_S)):
                    await self._woken.wait()
        self._woken.clear()

    async def _take_step(self) -> None:
        election, sent_s = self._election, self._clock.now_s()
        if sent_s < election.next_at_s:
            return
        timeout_s = election.timeout_s(self._timeout_s, sent_s)
        step = election.next_step
        try:
            async with asyncio.timeout(timeout_s):
                if step is Question.RENEW:
                    is_alive = await self._backend.renew(timeout_s)
                    election.note_renewed(
                        is_alive=is_alive, sent_s=sent_s, now_s=self._clock.now_s()
                    )
                elif step is Question.OBSERVE:
                    holder = await self._backend.observe(timeout_s)
                    election.note_observed(holder, self._clock.now_s())
                else:
                    await self._acquire(sent_s, timeout_s)
        except (TandemError, TimeoutError) as error:
            election.note_failed(self._clock.now_s())
            # Log only the first failure of a series as a warning, since a lost backend is asked
            # several times a second.
            level = logging.DEBUG if self._is_failing else logging.WARNING
            logger.log(level, "event=election_step_failed step=%s reason=%r", step.value, error)
            self._is_failing = True
        else:
            self._is_failing = False

    async def _acquire(self, sent_s: float, timeout_s: float) -> None:
        election = self._election
        holder, is_ours = await self._backend.acquire(
            self._address,
            ttl_s=self._ttl_s,
            min_epoch=election.min_epoch,
            timeout_s=timeout_s,
        )
        election.note_acquired(holder, is_ours=is_ours, sent_s=sent_s, now_s=self._clock.now_s())
        # Check the term again: after a slow answer it may be over already.
        if self.holds():
            self.num_terms += 1
            logger.info("event=elected epoch=%d address=%s", holder.epoch, self._address)
            self._on_elected(holder.epoch)

    async def _end_term(self) -> None:
        epoch = self._election.epoch
        self._election.end_term(self._clock.now_s())
        logger.warning("event=deposed epoch=%d", epoch)
        self._on_deposed()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._backend.release(self._timeout_s)
        except (TandemError, TimeoutError) as error:
            # A failed release is harmless, since the lease at the backend ends by itself.
            logger.info("event=leadership_unreleased reason=%s", error)
