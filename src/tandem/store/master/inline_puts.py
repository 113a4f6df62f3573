"""Puts of small values in one call: they travel with the request, and hosts write them.

Nobody writes to a segment from outside here, so there is no grant, nothing to fence and nothing to
expire: the order to a host carries the bytes, and orders that come late are refused.
"""

from typing import TYPE_CHECKING

from tandem.core.errors import ConfigError
from tandem.store.messages import CommitStatus, KeyBytes, PutInline
from tandem.store.sessions import Caller, check_present

if TYPE_CHECKING:
    from tandem.store.master.master import StoreMaster

__all__ = ["InlinePuts"]


class InlinePuts:
    """The inline puts of one master."""

    def __init__(self, master: "StoreMaster") -> None:
        self._master = master

    async def put(self, caller: Caller, request: PutInline) -> KeyBytes:
        """Put a batch; one ``CommitStatus`` each. Raises: CapacityError, ConfigError."""
        check_present(caller)
        lengths = self._master.puts.check_batch(request)
        if len(request.checksums) != len(request.keys) or sum(request.sizes) != len(request.blob):
            raise ConfigError("store.put", "checksums or values do not fit the keys")
        client = caller.instance_id
        answer = await self._master.requests.run(
            caller,
            request.first_put_id,
            request.settled_below,
            lambda: self._put(client, request, lengths),
        )
        return KeyBytes(answer)

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
