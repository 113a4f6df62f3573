"""Runs an ``Election``: calls a backend within deadlines and reports terms won and lost.

No socket of its own: the backend is a Protocol, so that the simulator runs this very class.
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
"""Less would not be seen by clocks that count from long ago."""


class Claim(NamedTuple):
    """Answer to ``ElectionBackend.acquire``."""

    holder: Holder
    is_ours: bool


class ElectionBackend(Protocol):
    """A lock with a time limit and a count, kept elsewhere. One call at a time.

    Every call raises PeerLostError or DeadlineError if it cannot be answered within ``timeout_s``;
    it may have been carried out all the same.
    """

    async def observe(self, timeout_s: float) -> Holder | None:
        """Return the leader; None if there is none."""
        ...

    async def acquire(self, address: str, *, ttl_s: int, min_epoch: int, timeout_s: float) -> Claim:
        """Take the leadership for ``ttl_s``, counted from this call or later, if it is free.

        The epoch of the new term is above those of all earlier terms, and above ``min_epoch``.
        """
        ...

    async def renew(self, timeout_s: float) -> bool:
        """Renew for ``ttl_s``; False if the leadership is not ours any more."""
        ...

    async def release(self, timeout_s: float) -> None:
        """Give the leadership up, if we have it."""
        ...


class Campaign:
    """Keeps one process a candidate. ``run`` is the whole of it; ``holds`` may be asked any time.

    Args:
        backend: owned by the caller.
        clock: must also count while the machine sleeps; its rate within 20 % of the backend's.
        address: where hosts and clients reach us.
        ttl_s: for how long the leadership is taken at a time.
        timeout_s: of one question to the backend.
        on_elected: called with the epoch when a term begins.
        on_deposed: called once when it ends; ``holds`` is false by then.
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
        """Begun by this process."""
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
        """The leader, as last reported."""
        return self._election.leader

    def holds(self) -> bool:
        """Return True if we lead now and may serve."""
        return self._election.holds(self._clock.now_s())

    def resign(self, *, min_epoch: int) -> None:
        """End our term because a host has obeyed ``min_epoch``; the next will be above it."""
        self._election.serve_until_s = self._clock.now_s()
        self._election.min_epoch = max(self._election.min_epoch, min_epoch)
        self._woken.set()

    async def run(self) -> None:
        """Campaign until cancelled; then give a leadership up that we have."""
        try:
            while True:
                await self._pause()
                if self._election.is_lapsed(self._clock.now_s()):
                    await self._end_term()
                else:
                    await self._take_step()
        finally:
            if self._election.epoch:
                self._depose()
                await self._release()

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
            # The first of a row is news; a backend that stays away is asked several times a second.
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
        # An answer that took too long brings a term that is over before it has begun.
        if self.holds():
            self.num_terms += 1
            logger.info("event=elected epoch=%d address=%s", holder.epoch, self._address)
            self._on_elected(holder.epoch)

    async def _end_term(self) -> None:
        self._depose()
        await self._release()

    def _depose(self) -> None:
        epoch = self._election.epoch
        self._election.end_term(self._clock.now_s())
        logger.warning("event=deposed epoch=%d", epoch)
        self._on_deposed()

    async def _release(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._backend.release(self._timeout_s)
        except (TandemError, TimeoutError) as error:
            logger.info("event=leadership_unreleased reason=%s", error)  # It ends by itself.
