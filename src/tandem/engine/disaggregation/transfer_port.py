"""The ``PeerPort`` over the transfer engine.

Awaited on one event loop; connecting waits on another thread.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from tandem.core.errors import TandemError
from tandem.engine.disaggregation.ports import PoolRange, RemotePool
from tandem.transfer import Buffer, Op, Segment, TransferEngine

__all__ = ["OpenedPool", "TransferPort"]


class OpenedPool:
    """A buffer of another process's segment; a ``RemotePool``.

    Args:
        transfer: that opened it.
        segment: owned.
        buffer: name of the buffer.
        states: the same of the states'; empty for none.

    Raises: NotFoundError; PeerLostError; DeadlineError.
    """

    def __init__(
        self, transfer: TransferEngine, segment: Segment, buffer: str, states: str = ""
    ) -> None:
        self.state_start = segment.buffer(states).offset if states else 0
        offered = segment.buffer(buffer)
        self.segment = segment
        self.name = segment.name
        self.epoch = transfer.core.segment_epoch(segment.id)
        self.start = offered.offset
        self.length = offered.length
        self.can_read = offered.can_read

    def close(self) -> None:
        """See ``RemotePool.close``."""
        with contextlib.suppress(TandemError):  # Its engine may be closed.
            self.segment.close()


class TransferPort:
    """Reads other processes' blocks into a registered pool.

    Args:
        transfer: borrowed.
        pool: all blocks of this instance, registered with ``transfer``.
        states: its slots of states, too; None: the model has no state.
    """

    def __init__(
        self, transfer: TransferEngine, pool: Buffer, states: Buffer | None = None
    ) -> None:
        self._transfer = transfer
        self._states = states
        self._pool = pool

    async def open(
        self, address: str, buffer: str, states: str = "", *, deadline_s: float
    ) -> OpenedPool:
        """See ``PeerPort.open``."""
        opening = asyncio.get_running_loop().run_in_executor(
            None, self._connect, address, buffer, states, deadline_s
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise

    async def call(self, pool: RemotePool, payload: bytes, *, deadline_s: float) -> bytes:
        """See ``PeerPort.call``."""
        assert isinstance(pool, OpenedPool), pool
        return await self._transfer.call_async(pool.segment, payload, deadline_s=deadline_s)

    async def read(
        self, pool: RemotePool, ranges: Sequence[PoolRange], *, deadline_s: float
    ) -> None:
        """See ``PeerPort.read``."""
        assert isinstance(pool, OpenedPool), pool
        starts = (pool.start, pool.state_start)
        await self._transfer.submit_ranges(
            Op.READ,
            pool.segment,
            [
                (
                    self._find_pool(each),
                    each.local,
                    starts[each.is_state] + each.remote,
                    each.length,
                )
                for each in ranges
            ],
            deadline_s=deadline_s,
        )

    def _find_pool(self, part: PoolRange) -> Buffer:
        pool = self._states if part.is_state else self._pool
        assert pool is not None, "a state of a model without one"
        return pool

    def _connect(self, address: str, buffer: str, states: str, deadline_s: float) -> OpenedPool:
        segment = self._transfer.open(address, deadline_s=deadline_s)
        try:
            return OpenedPool(self._transfer, segment, buffer, states)
        except TandemError:
            segment.close()
            raise


def _close_unwanted(opening: "asyncio.Future[OpenedPool]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
