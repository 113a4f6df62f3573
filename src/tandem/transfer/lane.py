"""Lanes of ``tandem.rpc`` (channels for its calls beside the sockets), on the transfer engine:
requests travel as calls between engines.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from tandem.core.errors import TandemError
from tandem.rpc.lane import LaneRequest
from tandem.transfer.calls import MAX_CALL_BYTES, Call, PendingCall
from tandem.transfer.engine import TransferEngine
from tandem.transfer.segment import Segment

__all__ = ["EngineLanes"]


class EngineLanes:
    """The ``rpc.lane.Lanes`` (channels for RPC calls beside the sockets) of an engine, which is
    borrowed. Made on the event loop that uses them.
    """

    max_bytes = MAX_CALL_BYTES

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    @property
    def address(self) -> str:
        """The address of the transfer engine, at which other processes open their lanes (channels
        for RPC calls beside the sockets).
        """
        return self._engine.address

    def serve(self, handler: Callable[[list[LaneRequest]], None]) -> None:
        """Pass arriving calls to ``handler`` on the running event loop. The engine must have no
        other call handler.
        """

        def handle(calls: list[Call]) -> list[None]:
            handler([*calls])
            return [None] * len(calls)

        self._engine.serve_calls(handle, loop=asyncio.get_running_loop())

    async def open(self, address: str, timeout_s: float) -> "_EngineLane":
        """Connect to the engine at an address, and return the connection as a lane (a channel for
        RPC calls beside the socket). Raises: as ``TransferEngine.open``.
        """
        opening = asyncio.ensure_future(
            asyncio.to_thread(self._engine.open, address, deadline_s=timeout_s)
        )
        try:
            return _EngineLane(self._engine, await asyncio.shield(opening))
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise


class _EngineLane:
    """An ``rpc.lane.Lane`` (a channel for RPC calls beside the socket) to one peer of the transfer
    engine.
    """

    max_bytes = MAX_CALL_BYTES

    def __init__(self, engine: TransferEngine, segment: Segment) -> None:
        self._engine = engine
        self._segment = segment

    def begin(self, request: bytes) -> PendingCall:
        return self._engine.begin_call(self._segment, request)

    def begin_async(self, request: bytes, timeout_s: float) -> Awaitable[bytes]:
        begun = self._engine.begin_call_async(self._segment, request, deadline_s=timeout_s)
        return begun.wait()

    def close(self) -> None:
        with contextlib.suppress(TandemError):  # Gone already.
            self._segment.close()


def _close_unwanted(opening: "asyncio.Future[Segment]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        with contextlib.suppress(TandemError):
            opening.result().close()
