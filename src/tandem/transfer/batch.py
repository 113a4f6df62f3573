"""Transfers submitted together, and their end."""

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
    """The direction of the bytes, seen from this process."""

    READ = 0
    """From the segment into the local buffer."""
    WRITE = 1
    """From the local buffer into the segment; done when the peer has the bytes."""


class Transfer:
    """One range to move.

    Args:
        op: direction.
        local: a buffer registered with the submitting engine.
        segment: an opened segment of that engine, or its ``local_segment``.
        offset: where in the segment's address space: ``RemoteBuffer.offset`` plus a distance.
        length: bytes; 0 is allowed and moves nothing.
        local_offset: where in the local buffer.
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
"""One range of a segment and the local bytes that go with it: a buffer registered with the
submitting engine, where in it, where in the segment's address space, and how many bytes."""


class TransferStatus(msgspec.Struct, frozen=True):
    """The progress of one transfer of a batch."""

    bytes_done: int
    length: int

    @property
    def is_done(self) -> bool:
        """True if all its bytes have arrived."""
        return self.bytes_done == self.length


class Submitter(Protocol):
    """Carrier of batches: a ``TransferEngine``."""

    def submit_prepared(self, prepared: PreparedTransfers, deadline_s: float | None) -> CoreBatch:
        """Begin to move prepared ranges."""
        ...


class PreparedBatch:
    """Transfers that are submitted again and again; made by ``TransferEngine.prepare``.

    Preparing looks at each transfer once; a submission then costs a fraction of a microsecond a
    transfer. A buffer or segment that was unregistered or closed since fails the submission.
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
        """Begin to move all ranges; returns at once.

        Args:
            deadline_s: from now; None = ``deadline_ms`` of the configuration.

        Raises: as ``TransferEngine.submit``.
        """
        core = self._engine.submit_prepared(self._prepared, deadline_s)
        return Batch(self._engine, core, self._lengths)


class Batch:
    """A submitted batch. It ends once: with success, or with the first error.

    Once ``wait``, ``cancel`` or an ``await`` has returned or raised, no byte
    of a local buffer is touched any more. What a failed WRITE left in the segment is undefined, but
    nothing that this process submits later, to whatever engine, is overwritten by it.
    """

    def __init__(self, engine: Submitter, core: CoreBatch, lengths: Sequence[int]) -> None:
        self._engine = engine
        self._core = core
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def is_finished(self) -> bool:
        """True if it has ended, well or not."""
        return self._core.is_finished

    def status(self, index: int) -> TransferStatus:
        """Return how far transfer ``index`` is.

        Raises: NotFoundError.
        """
        done = self._core.bytes_done(index)
        return TransferStatus(done, self._lengths[index])

    def wait(self, deadline_s: float | None = None) -> None:
        """Wait for the end, blocking, without the GIL.

        Args:
            deadline_s: from now; None = the batch's own. When it passes the batch is ended.

        Raises: DeadlineError; PeerLostError; CancelledError; NotFoundError, PermissionDeniedError
            or ConfigError if the peer refused a range; UnsupportedError if no allowed transport
            reaches; ConflictError in a forked child.
        """
        self._core.wait(deadline_s)

    def cancel(self) -> None:
        """End it with CancelledError, unless it has ended. Takes microseconds."""
        self._core.cancel()

    def __await__(self) -> Generator[Any, None, None]:
        """Wait without blocking the loop; raises as ``wait``. A cancelled await cancels it."""
        return self._wait_async().__await__()

    async def _wait_async(self) -> None:
        if not self._core.is_finished:
            loop = asyncio.get_running_loop()
            ended: asyncio.Future[None] = loop.create_future()
            # A copy each, so that several may await the same batch.
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
