"""Orders of a master to a host, in one session: executed in the order of their numbers."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from tandem.core.errors import DeadlineError, PeerLostError
from tandem.store.messages import Ack, Order, WipeExtents
from tandem.store.sessions import Caller

__all__ = ["OrderLine", "OrderWay"]

logger = logging.getLogger(__name__)
T = TypeVar("T")
AnyOrder = TypeVar("AnyOrder", bound=Order)


class OrderWay(Protocol):
    """A way to a host on which calls arrive in the order in which they were made."""

    def takes(self, request: object) -> bool:
        """Whether a request is small enough for it."""
        ...

    async def call(
        self, method: str, request: object, response_type: type[T], *, timeout_s: float
    ) -> T:
        """Call the host; it has the request before anything of a later call."""
        ...

    def close(self) -> None:
        """Let go of the host; what is under way fails."""
        ...


class OrderLine:
    """Numbers and sends the orders of one session.

    Args:
        caller: the session itself, a way that takes everything.
        session: its number.
        epoch: of the master, read at each order.
    """

    def __init__(self, caller: Caller, session: int, epoch: Callable[[], int]) -> None:
        self.caller = caller
        self.fast: OrderWay | None = None
        """A faster way, if there is one; see ``use``."""
        self._session = session
        self._epoch = epoch
        self._next_number = 0
        self._way: OrderWay | Caller = caller
        self._num_under_way = 0
        self._sending = asyncio.Lock()
        self._is_over = False

    def end(self) -> None:
        """The session is over: nothing is sent any more."""
        self._is_over = True
        self._leave_fast()

    def use(self, fast: OrderWay) -> None:
        """Send orders by a faster way from now on; it is ours to close."""
        if self._is_over:
            fast.close()
        else:
            self.fast = fast

    async def send(
        self, method: str, kind: type[Order], response: type[T], *, timeout_s: float, **fields: Any
    ) -> T:
        """Have the host do something.

        Raises: PeerLostError if the session is over; DeadlineError: done once or not at all; what
            the host says.
        """
        async with self._sending:
            self._check()
            request = self._make(kind, **fields)
            way = self._choose_way(request)
            if way is not self._way and self._num_under_way:
                # What goes by two ways at once can arrive in any order. Orders begin as they come,
                # so the answer to an empty one says that all before it have begun.
                barrier = self._make(WipeExtents, offsets=[])
                await self._call(self._way, "wipe", barrier, Ack, timeout_s)
                self._check()
                request = self._make(kind, **fields)
                way = self._choose_way(request)
            self._way = way
            self._num_under_way += 1
        try:
            return await self._call(way, method, request, response, timeout_s)
        finally:
            self._num_under_way -= 1

    def _choose_way(self, request: Order) -> "OrderWay | Caller":
        fast = self.fast
        return self.caller if fast is None or not fast.takes(request) else fast

    def _make(self, kind: type[AnyOrder], **fields: Any) -> AnyOrder:
        number = self._next_number
        request = kind(epoch=self._epoch(), session=self._session, number=number, **fields)
        self._next_number += 1
        return request

    async def _call(
        self,
        way: "OrderWay | Caller",
        method: str,
        request: Order,
        response: type[T],
        timeout_s: float,
    ) -> T:
        try:
            return await way.call(method, request, response, timeout_s=timeout_s)
        except PeerLostError as error:
            if way is self.caller or self.caller.is_lost:
                raise
            logger.info("event=fast_orders_off reason=%s", error)
            if self.fast is way:
                self._leave_fast()
            raise DeadlineError("store.order", f"its answer was lost: {error.what}") from None

    def _leave_fast(self) -> None:
        fast, self.fast = self.fast, None
        if fast is not None:
            fast.close()

    def _check(self) -> None:
        if self._is_over:
            raise PeerLostError("store.order", "the session with the host is over")
