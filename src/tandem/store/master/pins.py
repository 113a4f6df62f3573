"""Pins of objects, in the directory and in the headers, so that a later master finds them."""

import logging

from tandem.core.errors import TandemError
from tandem.rpc import Kept
from tandem.store.master.allocation import check_pin
from tandem.store.master.state.index import NO_ROW
from tandem.store.master.state.results import Results
from tandem.store.master.state.state import StoreState
from tandem.store.messages import Ack, KeyBytes, PinObjects, RepinExtents
from tandem.store.sessions import Caller

__all__ = ["Pins"]

logger = logging.getLogger(__name__)


class Pins:
    """The handler of one master for clients' pin requests."""

    def __init__(self, state: StoreState, results: Results) -> None:
        self._state = state
        self._results = results

    def pin(self, caller: Caller, request: PinObjects) -> Kept:
        """Replace the pins of objects. The answer has one byte for each key: 1 if it exists."""
        return Kept(self._results.change(caller, request, lambda: self._pin_all(request)))

    async def _pin_all(self, request: PinObjects) -> KeyBytes:
        check_pin(request.soft_ms)
        # Wait until all hosts have sent their inventories (lists of objects): a host that reports
        # later would add the object without this pin.
        await self._state.awaited.recover()
        flags = bytearray(len(request.keys))
        until_ms = self._state.now_ms() + request.soft_ms if request.soft_ms > 0 else 0
        orders: dict[int, list[int]] = {}
        for i, key in enumerate(request.keys):
            row = self._state.directory.find(key)
            if row == NO_ROW:
                continue
            flags[i] = 1
            self._state.directory.set_pins(row, hard=request.hard, soft_until_ms=until_ms)
            for host, offset in self._state.readable_copies(row):
                orders.setdefault(host, []).append(offset)
        for host, offsets in sorted(orders.items()):
            try:
                await self._state.hosts[host].line.order(
                    "repin",
                    RepinExtents,
                    Ack,
                    offsets=offsets,
                    hard=request.hard,
                    soft_pin_ms=max(0, request.soft_ms),
                )
            except TandemError as error:
                # The pin is set in this master although the host did not write it; only a restarted
                # master would not know of it.
                logger.warning("event=pin_unwritten host=%s reason=%s", host, error)
        return KeyBytes(bytes(flags))
