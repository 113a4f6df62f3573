"""Puts of small values in one call: they travel with the request, and hosts write them.

Nobody writes to a segment from outside here, so there is no grant, nothing to fence and nothing to
expire: the order to a host carries the bytes, and orders that come late are refused.
"""

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from tandem.core.errors import ConfigError
from tandem.store.messages import CommitStatus, KeyBytes, PutInline
from tandem.store.sessions import Caller, check_present

if TYPE_CHECKING:
    from tandem.store.master import StoreMaster

__all__ = ["InlinePuts"]

MAX_CLIENTS = 65_536
"""Clients whose requests are told apart from late copies; the one heard of longest ago goes."""


class _Requests:
    """Of one client: those that it may still ask for, by their first put id."""

    def __init__(self) -> None:
        self.settled_below = 0
        self.tasks: dict[int, asyncio.Future[bytes]] = {}

    def settle(self, below: int) -> None:
        """Forget what the client will not ask for again."""
        if below > self.settled_below:
            self.settled_below = below
            for put_id in [put_id for put_id in self.tasks if put_id < below]:
                del self.tasks[put_id]


class InlinePuts:
    """The inline puts of one master."""

    def __init__(self, master: "StoreMaster") -> None:
        self._master = master
        self._clients: OrderedDict[str, _Requests] = OrderedDict()

    async def put(self, caller: Caller, request: PutInline) -> KeyBytes:
        """Put a batch; one ``CommitStatus`` each. Raises: CapacityError, ConfigError."""
        check_present(caller)
        lengths = self._master.puts.check_batch(request)
        if len(request.checksums) != len(request.keys) or sum(request.sizes) != len(request.blob):
            raise ConfigError("store.put", "checksums or values do not fit the keys")
        client = caller.instance_id
        requests = self._clients.setdefault(client, _Requests())
        self._clients.move_to_end(client)
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        requests.settle(request.settled_below)
        if request.first_put_id < requests.settled_below:
            # A late copy: the client has its answer, and what came of it may be gone by now.
            return KeyBytes(bytes([CommitStatus.EXPIRED]) * len(request.keys))
        task = requests.tasks.get(request.first_put_id)
        if task is None:
            task = self._master.spawn(self._put(client, request, lengths))
            requests.tasks[request.first_put_id] = task
        return KeyBytes(await asyncio.shield(task))

    async def _put(self, client: str, request: PutInline, lengths: list[int]) -> bytes:
        statuses = bytearray([CommitStatus.EXISTS]) * len(request.keys)
        taken = self._master.puts.find_taken(request)
        wanted = [i for i, is_taken in enumerate(taken) if not is_taken]
        if wanted:
            batch = await self._master.puts.take_space(client, request, wanted, lengths)
            for i, status in zip(
                wanted, await self._master.commits.seal_values(batch, request), strict=True
            ):
                statuses[i] = status
        return bytes(statuses)
