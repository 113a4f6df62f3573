"""Results of requests that change something: each is carried out once, however often it comes.

A client numbers them and says below which number it waits for no answer any more. A copy of a
request that is under way, or whose answer may still be wanted, is given that answer; a copy of any
other is late and refused: its effect may have been undone since.
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
"""Clients whose requests are told apart from late copies; the one heard of longest ago goes."""
MAX_REMEMBERED = 16_384
"""Requests of one client that it may still ask for; the oldest goes."""


class _Client:
    """Results that one client may still ask for, by number."""

    def __init__(self) -> None:
        self.settled_below = 0
        self.work: dict[int, asyncio.Future[Any]] = {}

    def settle(self, below: int) -> None:
        """Drop results that it will not ask for again."""
        if below > self.settled_below:
            self.settled_below = below
            for number in [number for number in self.work if number < below]:
                del self.work[number]


class Results:
    """The answers to the numbered requests of a master's clients.

    Args:
        tasks: of the master.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._clients: OrderedDict[str, _Client] = OrderedDict()

    def has(self, client: str, number: int) -> bool:
        """Return True if a client's request of this number has come and may still be asked for."""
        known = self._clients.get(client)
        return known is not None and number in known.work

    async def change(
        self, caller: Caller, request: Change, begin: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Do as ``run``, with the numbers that the request bears."""
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
        """Carry a request out, or wait for its first copy. To be awaited by a task that no caller's
        going ends (``rpc.Kept``); the end of the master does.

        Args:
            caller: the client of the request.
            number: of the request; 0 if it has none.
            settled_below: see above.
            begin: carries it out.
            can_be_late: else a late copy is told apart by ``begin``.

        Raises: ConflictError for a late copy; what carrying it out raises.
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
            first.exception()  # There may be no copy to see it.
            raise
        first.set_result(result)
        return result
