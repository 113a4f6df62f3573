"""The ``PeerPort`` over the transfer engine.

Used on one event loop; connecting blocks another thread.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from tandem.core.errors import TandemError
from tandem.engine.disaggregation.ports import PoolKind, PoolRange, RemotePool
from tandem.transfer import Buffer, Op, Segment, TransferEngine

__all__ = ["OpenedPool", "TransferPort"]


class OpenedPool:
    """The buffers of another process's segment; a ``RemotePool``.

    Args:
        transfer: transfer engine that opened the segment.
        segment: handle of the segment; owned.
        buffers: names of its buffers by kind; those of the KV blocks must be among them.

    Raises: NotFoundError (the process offers no buffer of a name in ``buffers``); PeerLostError
        (the connection is lost); DeadlineError (no answer in time).
    """

    def __init__(
        self, transfer: TransferEngine, segment: Segment, buffers: Mapping[PoolKind, str]
    ) -> None:
        found = {kind: segment.buffer(name) for kind, name in buffers.items()}
        self.starts = {kind: buffer.offset for kind, buffer in found.items()}
        offered = found["kv"]
        self.segment = segment
        self.name = segment.name
        self.epoch = transfer.core.segment_epoch(segment.id)
        self.length = offered.length
        self.can_read = offered.can_read

    def close(self) -> None:
        """Close the segment (the other process's registered memory) and the connection to it."""
        with contextlib.suppress(TandemError):  # The transfer engine may have been closed already.
            self.segment.close()


class TransferPort:
    """The port that reads other processes' pools into this instance's registered memory.

    Args:
        transfer: transfer engine; not owned.
        pools: this instance's pools by kind, registered with ``transfer``.
    """

    def __init__(self, transfer: TransferEngine, pools: Mapping[PoolKind, Buffer]) -> None:
        self._transfer = transfer
        self._pools = pools

    async def open(
        self, address: str, buffers: Mapping[PoolKind, str], *, deadline_s: float
    ) -> OpenedPool:
        """Connect to an instance on another thread and open its buffers."""
        opening = asyncio.get_running_loop().run_in_executor(
            None, self._connect, address, buffers, deadline_s
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise

    async def call(self, pool: RemotePool, payload: bytes, *, deadline_s: float) -> bytes:
        """Send a question to the instance that owns a pool; return its answer."""
        assert isinstance(pool, OpenedPool), pool
        return await self._transfer.call_async(pool.segment, payload, deadline_s=deadline_s)

    async def read(
        self, pool: RemotePool, ranges: Sequence[PoolRange], *, deadline_s: float
    ) -> None:
        """Read byte ranges of another process's pools into ours through the transfer engine."""
        assert isinstance(pool, OpenedPool), pool
        await self._transfer.submit_ranges(
            Op.READ,
            pool.segment,
            [
                (
                    self._pools[each.kind],
                    each.local,
                    pool.starts[each.kind] + each.remote,
                    each.length,
                )
                for each in ranges
            ],
            deadline_s=deadline_s,
        )

    def _connect(
        self, address: str, buffers: Mapping[PoolKind, str], deadline_s: float
    ) -> OpenedPool:
        segment = self._transfer.open(address, deadline_s=deadline_s)
        try:
            return OpenedPool(self._transfer, segment, buffers)
        except TandemError:
            segment.close()
            raise


def _close_unwanted(opening: "asyncio.Future[OpenedPool]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
