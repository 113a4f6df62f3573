"""Results of requests that change something: each request is executed once, however often it
arrives.

A client numbers its requests, and reports the number below which it waits for no answer. A repeated
request whose answer may still be wanted gets the first one's answer. Any other repeated request is
late and refused, because its effect may have been undone since.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tandem.core.errors import ConflictError
from tandem.store.messages import Change
from tandem.store.sessions import Caller
from tandem.store.tasks import Tasks

__all__ = ["Results"]

T = TypeVar("T")

MAX_CLIENTS = 65_536
"""Limit of clients whose repeated requests are recognised. The client that was silent longest is
forgotten first.
"""
MAX_REMEMBERED = 16_384
"""Limit of remembered requests of one client. The oldest is forgotten first."""


class _Client:
    """The results that one client may still ask for, by request number."""

    def __init__(self) -> None:
        self.settled_below = 0
        self.work: dict[int, asyncio.Future[Any]] = {}

    def settle(self, below: int) -> None:
        """Forget the results of requests with numbers below ``below``, which the client will not
        ask for again.
        """
        if below > self.settled_below:
            self.settled_below = below
            for number in [number for number in self.work if number < below]:
                del self.work[number]


class Results:
    """The answers to the numbered requests of a master's clients.

    Args:
        tasks: the master's tasks.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._clients: OrderedDict[str, _Client] = OrderedDict()

    def has(self, client: str, number: int) -> bool:
        """Return True if this request of the client has arrived, and its answer may still be
        wanted.
        """
        known = self._clients.get(client)
        return known is not None and number in known.work

    async def change(
        self, caller: Caller, request: Change, begin: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Execute a request once, like ``run``, with the numbers in the request."""
        return await self.run(caller, request.number, request.settled_below, begin)

    async def run(
        self,
        caller: Caller,
        number: int,
        settled_below: int,
        begin: Callable[[], Coroutine[Any, Any, T]],
        *,
        can_be_late: bool = True,
    ) -> T:
        """Execute a request once, or wait for the answer of its first copy. Await this in a task
        that the client's disconnection does not cancel (``rpc.Kept``); the master's end cancels it.

        Args:
            caller: the client of the request.
            number: number of the request; 0 if it has none.
            settled_below: number below which the client waits for no answer.
            begin: executes the request.
            can_be_late: False if ``begin`` itself recognises a late copy.

        Raises: ConflictError for a late copy; the errors of ``begin``.
        """
        if number == 0:
            return await self._tasks.keep(begin())
        name = caller.instance_id
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client()
        self._clients.move_to_end(name)
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        client.settle(settled_below)
        if can_be_late and number < client.settled_below:
            raise ConflictError("store.call", f"request {number} comes after its answer")
        first = client.work.get(number)
        if first is not None:
            return await asyncio.shield(first)
        first = client.work[number] = asyncio.get_running_loop().create_future()
        if len(client.work) > MAX_REMEMBERED:
            del client.work[next(iter(client.work))]
        try:
            result = await self._tasks.keep(begin())
        except asyncio.CancelledError:
            first.cancel()
            raise
        except Exception as error:
            first.set_exception(error)
            first.exception()  # Mark it as retrieved: there may be no copy that awaits it.
            raise
        first.set_result(result)
        return result
