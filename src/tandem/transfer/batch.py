"""Transfers that are submitted together, and the wait for their end."""

import asyncio
import os
from collections.abc import Generator, Sequence
from enum import IntEnum
from typing import Any, Protocol

import msgspec

from tandem._native import CoreBatch, PreparedTransfers
from tandem.transfer.buffer import Buffer
from tandem.transfer.segment import Segment

__all__ = ["Batch", "Op", "PreparedBatch", "Transfer", "TransferStatus"]


class Op(IntEnum):
    """The direction of a transfer, seen from this process."""

    READ = 0
    """Copy from the peer's segment (registered memory) into the local buffer."""
    WRITE = 1
    """Copy from the local buffer into the peer's segment (registered memory). It ends when the peer
    has the bytes.
    """


class Transfer:
    """One range of bytes to move.

    Args:
        op: direction.
        local: a buffer registered with the submitting engine.
        segment: an opened segment of that engine, or its ``local_segment``.
        offset: address in the segment: ``RemoteBuffer.offset`` plus a distance.
        length: bytes; 0 is allowed and moves nothing.
        local_offset: offset in the local buffer.
    """

    __slots__ = ("length", "local", "local_offset", "offset", "op", "segment")

    def __init__(
        self,
        op: Op,
        local: Buffer,
        segment: Segment,
        offset: int,
        length: int,
        *,
        local_offset: int = 0,
    ) -> None:
        self.op = op
        self.local = local
        self.segment = segment
        self.offset = offset
        self.length = length
        self.local_offset = local_offset


Range = tuple[Buffer, int, int, int]
"""One range to move: (buffer registered with the submitting engine, offset in that buffer, address
in the segment, bytes).
"""


class TransferStatus(msgspec.Struct, frozen=True):
    """The progress of one transfer of a batch."""

    bytes_done: int
    length: int

    @property
    def is_done(self) -> bool:
        """True if all bytes of the transfer have arrived."""
        return self.bytes_done == self.length


class Submitter(Protocol):
    """The part of ``TransferEngine`` that batches use."""

    def submit_prepared(self, prepared: PreparedTransfers, deadline_s: float | None) -> CoreBatch:
        """Start to move ranges that were checked and prepared before, and return the native
        batch.
        """
        ...


class PreparedBatch:
    """Transfers that are submitted repeatedly; made by ``TransferEngine.prepare``.

    Preparing checks each transfer once; a submission then costs a fraction of a microsecond for
    each transfer. A submission fails if a buffer or segment was unregistered or closed since.
    """

    def __init__(
        self, engine: Submitter, prepared: PreparedTransfers, lengths: Sequence[int]
    ) -> None:
        self._engine = engine
        self._prepared = prepared
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def submit(self, *, deadline_s: float | None = None) -> "Batch":
        """Start to move all ranges; returns without waiting.

        Args:
            deadline_s: seconds from now; None for ``deadline_ms`` of the configuration.

        Raises: as ``TransferEngine.submit``.
        """
        core = self._engine.submit_prepared(self._prepared, deadline_s)
        return Batch(self._engine, core, self._lengths)


class Batch:
    """A submitted batch. It ends once: with success, or with the first error.

    After ``wait``, ``cancel`` or an ``await`` has returned or raised, no byte of a local buffer is
    touched any more. The segment's bytes after a failed WRITE are undefined, but the WRITE
    overwrites nothing that this process submits later, by any engine.
    """

    def __init__(self, engine: Submitter, core: CoreBatch, lengths: Sequence[int]) -> None:
        self._engine = engine
        self._core = core
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def is_finished(self) -> bool:
        """True if the batch has ended, with success or an error."""
        return self._core.is_finished

    def status(self, index: int) -> TransferStatus:
        """Return the progress of transfer ``index``.

        Raises: NotFoundError (the batch has no such transfer).
        """
        done = self._core.bytes_done(index)
        return TransferStatus(done, self._lengths[index])

    def wait(self, deadline_s: float | None = None) -> None:
        """Wait for the end, blocking, without the GIL.

        Args:
            deadline_s: seconds from now; None for the batch's own deadline. The batch ends when it
                passes.

        Raises: DeadlineError if the deadline passes first; PeerLostError if the peer is lost;
            CancelledError if the batch was cancelled or the engine closed; NotFoundError,
            PermissionDeniedError or ConfigError if the peer refused a range; UnsupportedError if no
            allowed transport reaches it; ConflictError in a forked child.
        """
        self._core.wait(deadline_s)

    def cancel(self) -> None:
        """End the batch with CancelledError, unless it has ended. Takes microseconds."""
        self._core.cancel()

    def __await__(self) -> Generator[Any, None, None]:
        """Wait without blocking the event loop; raises as ``wait``. Cancelling the await cancels
        the batch.
        """
        return self._wait_async().__await__()

    async def _wait_async(self) -> None:
        if not self._core.is_finished:
            loop = asyncio.get_running_loop()
            ended: asyncio.Future[None] = loop.create_future()
            # Duplicate the descriptor for each waiter, so that several may await the same batch.
            descriptor = os.dup(self._core.completion_fd())
            loop.add_reader(descriptor, lambda: ended.done() or ended.set_result(None))
            try:
                await ended
            except BaseException:
                self._core.cancel()
                raise
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        self._core.wait(0)
