"""The data path of hosts and clients over ``tandem.transfer``."""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from tandem.core.errors import ConfigError, DeadlineError, NotFoundError, PeerLostError, TandemError
from tandem.store.host import HostSegment
from tandem.store.interfaces import Piece
from tandem.store.messages import Endpoint
from tandem.transfer import Buffer, Op, Segment, TransferEngine

__all__ = ["FORMER_WRITERS", "TransferClientPort", "TransferHostPort"]

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 3.0
PROOF_TIMEOUT_S = 1.0
"""Seconds that one attempt waits for a writer to let go; the master asks again."""


FORMER_WRITERS = -1
"""Stands for all writers of the process that had this segment before: they may still map it."""


class _Peers:
    """Opened segments of other processes, by address; one that fails is opened anew."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._opened: dict[str, asyncio.Task[Segment]] = {}

    async def move(
        self, op: Op, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float
    ) -> None:
        """Move all pieces, or raise; no byte of local memory is touched afterwards."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        segment = await self._open(endpoint.address, min(timeout_s, OPEN_TIMEOUT_S))
        left_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
        try:
            await self._engine.submit_ranges(op, segment, pieces, deadline_s=left_s)
        except PeerLostError:
            self._drop(endpoint.address)
            raise

    async def _open(self, address: str, timeout_s: float) -> Segment:
        task = self._opened.get(address)
        if task is None:
            opening = asyncio.to_thread(self._engine.open, address, deadline_s=timeout_s)
            task = asyncio.get_running_loop().create_task(opening)
            task.add_done_callback(_retrieve)
            self._opened[address] = task
        try:
            # Another caller's attempt to open it may outlast our deadline.
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(task)
        except TandemError:
            if self._opened.get(address) is task:
                del self._opened[address]
            raise
        except TimeoutError:
            raise DeadlineError(
                "store.open", f"{address} was not opened within {timeout_s:.3g} s"
            ) from None

    def _drop(self, address: str) -> None:
        task = self._opened.pop(address, None)
        if task is not None and task.done() and task.exception() is None:
            try:
                task.result().close()
            except TandemError as error:
                logger.debug("event=segment_close_failed reason=%s", error)


class TransferClientPort:
    """A client's data path. Borrows the engine."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._peers = _Peers(engine)

    def register(self, memory: npt.NDArray[np.uint8]) -> Buffer:
        """See ``ClientPort``; no peer may touch it, only our own transfers."""
        return self._engine.register(memory, remote=False)

    def unregister(self, handle: Buffer) -> None:
        """See ``ClientPort``."""
        self._engine.unregister(handle)

    async def write(self, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float) -> None:
        """See ``ClientPort``."""
        await self._peers.move(Op.WRITE, endpoint, pieces, timeout_s)

    async def read(self, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float) -> None:
        """See ``ClientPort``."""
        await self._peers.move(Op.READ, endpoint, pieces, timeout_s)


class TransferHostPort:
    """A host's data path: its segment is registered once for readers and once for each writer.

    A registration has a range of the address space that is never given again, and taking one back
    returns when no peer can use it any more: that is the proof which a master asks for before
    it gives the space of an unfinished write to another writer. Borrows engine and segment.
    """

    def __init__(self, engine: TransferEngine, segment: HostSegment) -> None:
        self._engine = engine
        self._segment = segment
        self._peers = _Peers(engine)
        self._reader = self._register("read", "segment")
        self._writers: dict[int, Buffer] = {}
        self._numbers = itertools.count(1)

    @property
    def address(self) -> str:
        """See ``HostPort``."""
        return self._engine.address

    @property
    def read_base(self) -> int:
        """See ``HostPort``."""
        return self._reader.offset

    def open_writer(self) -> int:
        """See ``HostPort``."""
        name = f"writer-{next(self._numbers)}"
        writer = self._register("write", name)
        self._writers[writer.offset] = writer
        return writer.offset

    def _register(self, remote: Literal["read", "write"], name: str) -> Buffer:
        segment, register = self._segment, self._engine.register
        try:
            return register(
                segment.data,
                remote=remote,
                name=name,
                file=segment.descriptor,
                file_offset=segment.data_offset,
            )
        except ConfigError as error:  # The kernel does not list mappings.
            logger.warning("event=segment_not_shared reason=%s", error)
            return register(segment.data, remote=remote, name=name)

    def former_writers(self) -> set[int]:
        """See ``HostPort``."""
        return {FORMER_WRITERS}

    async def close_writer(self, base: int) -> bool:
        """See ``HostPort``."""
        if base == FORMER_WRITERS:
            return self._segment.has_no_writers()
        writer = self._writers.get(base)
        if writer is None:
            return True
        try:
            await asyncio.to_thread(self._engine.unregister, writer, deadline_s=PROOF_TIMEOUT_S)
        except DeadlineError:
            return False
        except NotFoundError:
            pass  # Another attempt, under way in another thread, was first.
        self._writers.pop(base, None)
        return True

    async def fetch(
        self, source: Endpoint, source_offset: int, offset: int, length: int, timeout_s: float
    ) -> None:
        """See ``HostPort``."""
        if length:
            piece = (self._reader, offset, source.read_base + source_offset, length)
            await self._peers.move(Op.READ, source, [piece], timeout_s)


def _retrieve(task: "asyncio.Task[Segment]") -> None:
    if not task.cancelled():
        task.exception()  # The exception is stored in the future, which may have no waiter.
