"""A master's orders to one host: they are numbered in each session, and the host executes them by
number.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tandem.core.clock import Clock
from tandem.core.errors import DeadlineError, PeerLostError, TandemError
from tandem.store.master.state.answering import Answering
from tandem.store.messages import Ack, Order, WipeExtents
from tandem.store.sessions import Caller
from tandem.store.tasks import Tasks

__all__ = ["ORDER_TIMEOUT_S", "RETRY_S", "OrderLine"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

ORDER_TIMEOUT_S = 5.0
RETRY_S = 0.25
"""Seconds before a failed order is sent again."""
QUICK_ORDERS = frozenset({"seal", "wipe", "repin", "open_writer"})
"""Orders that wait for nothing but the host's own thread."""


class OrderLine:
    """Sends a master's orders to one host, over all its sessions, and judges whether the host
    answers in time.

    Args:
        host: the host's name.
        clock: times the answers.
        epoch: returns the master's epoch, read at each order.
        on_answers: called when a host that was silent answers again.
    """

    def __init__(
        self, host: str, clock: Clock, epoch: Callable[[], int], on_answers: Callable[[], None]
    ) -> None:
        self.host = host
        self._clock = clock
        self._epoch = epoch
        self._on_answers = on_answers
        self._caller: Caller | None = None
        self._session = -1
        self._next_number = 0
        self._tasks = Tasks()
        self._answering = Answering(ORDER_TIMEOUT_S)

    def begin(self, caller: Caller, session: int) -> None:
        """Begin a session with the host, in which calls begin in the order in which they are
        made.
        """
        self._caller, self._session, self._next_number = caller, session, 0

    def end(self) -> None:
        """Note that the session with the host has ended: no order is sent any more, and the tasks
        of the session are cancelled.
        """
        self._caller, self._session = None, -1
        self._tasks.cancel()
        self._answering.reset()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background that is cancelled when the host's session ends."""
        self._tasks.spawn(work)

    async def order(
        self,
        method: str,
        kind: type[Order],
        response: type[T],
        *,
        timeout_s: float = ORDER_TIMEOUT_S,
        **fields: Any,
    ) -> T:
        """Send an order and wait for the answer. Raises: as ``send``."""
        sent_s = self._clock.now_s()
        answer = self.send(method, kind, response, timeout_s=timeout_s, **fields)
        return await (self._watch(answer, sent_s) if method in QUICK_ORDERS else answer)

    def send(
        self, method: str, kind: type[Order], response: type[T], *, timeout_s: float, **fields: Any
    ) -> Awaitable[T]:
        """Send an order to the host, and return an awaitable of the answer. The order is sent when
        this returns.

        Raises: PeerLostError without a session; DeadlineError (the order was executed once or not
            at all); the errors of the host.
        """
        if self._caller is None:
            raise PeerLostError("store.order", f"host {self.host} is not connected")
        number, epoch = self._next_number, self._epoch()
        request = kind(epoch=epoch, session=self._session, number=number, **fields)
        self._next_number += 1
        return self._caller.begin(method, request, response, timeout_s=timeout_s)

    async def _watch(self, answering: Awaitable[T], sent_s: float) -> T:
        """Wait for the answer to an order that the host usually answers at once, and record how
        long it took.
        """
        number, session = object(), self._session
        self._answering.note_sent(number, sent_s)
        try:
            answer = await answering
        except DeadlineError:
            if session == self._session:
                self.doubt()
            raise
        finally:
            self._answering.note_ended(number)
        if self._answering.note_answer(sent_s, self._clock.now_s()):
            logger.info("event=host_answers host=%s", self.host)
            self._on_answers()
        return answer

    # The methods below judge whether the host answers in time.

    @property
    def is_silent(self) -> bool:
        """True if the host has been silent for much longer than usual, so that another host is the
        better choice.
        """
        return self._answering.is_silent(self._clock.now_s())

    def answer_timeout_s(self, num_objects: int) -> float:
        """Return how long to wait for a quick order about ``num_objects`` objects if other hosts
        could do it, seconds.
        """
        return self._answering.answer_timeout_s(num_objects)

    def doubt(self) -> None:
        """Note that the host did not answer, or that bytes did not reach it. It counts as silent
        until it answers a later order.
        """
        if self._caller is not None and self._answering.doubt(self._clock.now_s()):
            logger.warning("event=host_silent host=%s", self.host)
            self.spawn(self._probe())

    async def _probe(self) -> None:
        while self._answering.is_doubted:
            try:
                await self.order("wipe", WipeExtents, Ack, offsets=[])
            except TandemError as error:
                logger.debug("event=probe_failed host=%s reason=%s", self.host, error)
                await asyncio.sleep(RETRY_S)
