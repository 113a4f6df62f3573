"""Orders of a master to a host, in one session: executed in the order of their numbers."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from tandem.core.errors import DeadlineError, PeerLostError
from tandem.store.messages import Order
from tandem.store.sessions import Caller

__all__ = ["OrderLine", "OrderWay"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


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
        """A faster way, once there is one."""
        self._session = session
        self._epoch = epoch
        self._next_number = 0
        self._way: OrderWay | Caller = caller
        self._num_under_way = 0
        self._all_back = asyncio.Event()
        self._sending = asyncio.Lock()
        self._is_over = False

    def end(self) -> None:
        """The session is over: nothing is sent any more."""
        self._is_over = True

    async def send(
        self, method: str, kind: type[Order], response: type[T], *, timeout_s: float, **fields: Any
    ) -> T:
        """Have the host do something.

        Raises: PeerLostError if the session is over; DeadlineError: done once or not at all; what
            the host says.
        """
        async with self._sending:
            self._check()
            number = self._next_number
            request = kind(epoch=self._epoch(), session=self._session, number=number, **fields)
            fast = self.fast
            way = self.caller if fast is None or not fast.takes(request) else fast
            if way is not self._way and self._num_under_way:
                # What goes by two ways at once can arrive in any order.
                self._all_back.clear()
                await self._all_back.wait()
                self._check()
            self._way = way
            self._next_number += 1
            self._num_under_way += 1
        try:
            return await way.call(method, request, response, timeout_s=timeout_s)
        except PeerLostError as error:
            if way is self.caller or self.caller.is_lost:
                raise
            logger.info("event=fast_orders_off reason=%s", error)
            self.fast = None
            raise DeadlineError("store.order", f"its answer was lost: {error.what}") from None
        finally:
            self._num_under_way -= 1
            if not self._num_under_way:
                self._all_back.set()

    def _check(self) -> None:
        if self._is_over:
            raise PeerLostError("store.order", "the session with the host is over")
