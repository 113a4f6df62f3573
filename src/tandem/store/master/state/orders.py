"""Orders of a master to a host, in one session: numbered, and executed in that order."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tandem.core.errors import PeerLostError
from tandem.store.messages import Order
from tandem.store.sessions import Caller

__all__ = ["OrderLine"]

T = TypeVar("T")


class OrderLine:
    """Numbers and sends the orders of one session.

    Args:
        caller: the session, in which calls begin in the order in which they are made.
        session: its number.
        epoch: of the master, read at each order.
    """

    def __init__(self, caller: Caller, session: int, epoch: Callable[[], int]) -> None:
        self.caller = caller
        self._session = session
        self._epoch = epoch
        self._next_number = 0
        self._is_over = False

    def end(self) -> None:
        """Note that the session is over: nothing is sent any more."""
        self._is_over = True

    def send(
        self, method: str, kind: type[Order], response: type[T], *, timeout_s: float, **fields: Any
    ) -> Awaitable[T]:
        """Have the host do something: it has been told when this returns, its answer is awaited.

        Raises: PeerLostError if the session is over; DeadlineError: done once or not at all; what
            the host says.
        """
        if self._is_over:
            raise PeerLostError("store.order", "the session with the host is over")
        number, epoch = self._next_number, self._epoch()
        request = kind(epoch=epoch, session=self._session, number=number, **fields)
        self._next_number += 1
        return self.caller.begin(method, request, response, timeout_s=timeout_s)
