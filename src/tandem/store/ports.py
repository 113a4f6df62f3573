"""The data path of store hosts and store clients: one-sided reads and writes by
``tandem.transfer``.
"""

import asyncio
import itertools
import logging
import threading
import time
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
"""Seconds that one call of ``close_writer`` waits for proof that a writer cannot write any more.
The master repeats the call.
"""


FORMER_WRITERS = -1
"""A writer id that stands for all writers of the segment's earlier process. They may still map its
memory.
"""


class _Peers:
    """The segments (registered memory) of other processes, opened once for each address, and
    reopened after a lost connection.
    """

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._opened: dict[str, asyncio.Task[Segment]] = {}

    async def move(
        self, op: Op, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float
    ) -> None:
        """Read or write all pieces (pairs of a local and a remote range) at an endpoint, or raise.
        Local memory is not touched after the return in either case.
        """
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
            # The open may have been begun by another caller with a longer deadline, so this
            # caller's own deadline bounds its wait.
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
            _close(task.result())


class _BlockingPeers:
    """The segments (registered memory) of other processes, for threads: reads and writes block the
    caller, and the coroutine never suspends.
    """

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._opened: dict[str, Segment] = {}

    async def move(
        self, op: Op, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float
    ) -> None:
        """Read or write all pieces, as ``_Peers.move`` does."""
        deadline_s = time.monotonic() + timeout_s
        segment = self._open(endpoint.address, min(timeout_s, OPEN_TIMEOUT_S))
        left_s = max(0.001, deadline_s - time.monotonic())
        try:
            self._engine.submit_ranges(op, segment, pieces, deadline_s=left_s).wait()
        except PeerLostError:
            with self._lock:
                lost = self._opened.pop(endpoint.address, None)
            if lost is not None:
                _close(lost)
            raise

    def _open(self, address: str, timeout_s: float) -> Segment:
        segment = self._opened.get(address)
        if segment is not None:
            return segment
        opened = self._engine.open(address, deadline_s=timeout_s)
        with self._lock:
            segment = self._opened.setdefault(address, opened)
        if segment is not opened:
            opened.close()
        return segment


class TransferClientPort:
    """The data path of a store client. The transfer engine is borrowed.

    Args:
        engine: moves the bytes.
        is_blocking: True for a port of ``make_blocking_client``, whose calls block the thread.
    """

    def __init__(self, engine: TransferEngine, *, is_blocking: bool = False) -> None:
        self._engine = engine
        self._peers = _BlockingPeers(engine) if is_blocking else _Peers(engine)

    def register(self, memory: npt.NDArray[np.uint8]) -> Buffer:
        """Register memory for this process's own transfers. Remote processes cannot reach it."""
        return self._engine.register(memory, remote=False)

    def unregister(self, handle: Buffer) -> None:
        """End the registration of memory."""
        self._engine.unregister(handle)

    async def write(self, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Write pieces of local memory into a host's segment, opened on the first use of its
        address.
        """
        await self._peers.move(Op.WRITE, endpoint, pieces, timeout_s)

    async def read(self, endpoint: Endpoint, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Read ranges of a host's segment into local memory."""
        await self._peers.move(Op.READ, endpoint, pieces, timeout_s)


class TransferHostPort:
    """The data path of a store host: its segment is registered once for all readers and once for
    each writer.

    Each registration has its own range of addresses, which is never reused. Unregistering a
    writer's range returns when no process can write by it any more: the proof that a master needs
    before it gives the space of an unfinished write to another writer. Engine and segment are
    borrowed.
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
        """The address of the transfer engine, for peers that connect."""
        return self._engine.address

    @property
    def read_base(self) -> int:
        """The address at which the segment's read-only registration begins."""
        return self._reader.offset

    def open_writer(self) -> int:
        """Register the segment for one more writer, and return the address where that range
        begins.
        """
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
        except ConfigError as error:  # This kernel cannot share the mapping.
            logger.warning("event=segment_not_shared reason=%s", error)
            return register(segment.data, remote=remote, name=name)

    def former_writers(self) -> set[int]:
        """Return the one write address that stands for all clients to which an earlier process of
        this segment gave the right to write.
        """
        return {FORMER_WRITERS}

    async def close_writer(self, base: int) -> bool:
        """Unregister the range of addresses of one writer (a client that may write). Return True if
        no byte can arrive by it any more.
        """
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
            pass  # A concurrent call has unregistered it.
        self._writers.pop(base, None)
        return True

    async def fetch(
        self, source: Endpoint, source_offset: int, offset: int, length: int, timeout_s: float
    ) -> None:
        """Read a range of another host's segment into this host's segment."""
        if length:
            piece = (self._reader, offset, source.read_base + source_offset, length)
            await self._peers.move(Op.READ, source, [piece], timeout_s)


def _close(segment: Segment) -> None:
    try:
        segment.close()
    except TandemError as error:  # The connection is gone already.
        logger.debug("event=segment_close_failed reason=%s", error)


def _retrieve(task: "asyncio.Task[Segment]") -> None:
    if not task.cancelled():
        task.exception()  # The exception is stored in the future, which may have no waiter.
