"""The sequence of a master's orders to a host in one session. The host executes them by number."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tandem.core.errors import PeerLostError
from tandem.store.messages import Order
from tandem.store.sessions import Caller

__all__ = ["OrderLine"]

T = TypeVar("T")


class OrderLine:
    """Numbers and sends a master's orders in one session with a host.

    Args:
        caller: the session, in which calls begin in the order in which they are made.
        session: number of the session.
        epoch: returns the master's epoch, read at each order.
    """

    def __init__(self, caller: Caller, session: int, epoch: Callable[[], int]) -> None:
        self.caller = caller
        self._session = session
        self._epoch = epoch
        self._next_number = 0
        self._is_over = False

    def end(self) -> None:
        """Note that the session with the host has ended: no order is sent any more."""
        self._is_over = True

    def send(
        self, method: str, kind: type[Order], response: type[T], *, timeout_s: float, **fields: Any
    ) -> Awaitable[T]:
        """Send an order to the host, and return an awaitable of the answer. The order is sent when
        this returns.

        Raises: PeerLostError if the session is over; DeadlineError (the order was executed once or
            not at all); the errors of the host.
        """
        if self._is_over:
            raise PeerLostError("store.order", "the session with the host is over")
        number, epoch = self._next_number, self._epoch()
        request = kind(epoch=epoch, session=self._session, number=number, **fields)
        self._next_number += 1
        return self.caller.begin(method, request, response, timeout_s=timeout_s)
