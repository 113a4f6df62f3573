"""Memory that no transport reaches (a device's), moved through bounded host buffers.

``StagedPath`` cuts a range into chunks and keeps several under way: while one is on the wire, the
next is copied between the device and its host buffer. It owns its buffers and nothing of the
device; the copies run on the calling thread, the wire on the engine's.

Memory of a peer's device is offered by its ``DeviceServer`` and reached through a ``RemoteDevice``,
chunk by chunk in calls: what is under way is bounded on both sides, and a chunk is applied once or
not at all.
"""

import collections
import logging
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from tandem.core.errors import (
    ConfigError,
    ConflictError,
    DeadlineError,
    InternalError,
    PermissionDeniedError,
    TandemError,
)
from tandem.transfer.batch import Batch, Op, Transfer
from tandem.transfer.calls import MAX_CALL_BYTES, Call
from tandem.transfer.engine import TransferEngine
from tandem.transfer.segment import Segment

__all__ = ["DeviceMemory", "DeviceServer", "RemoteDevice", "StagedPath"]

logger = logging.getLogger(__name__)

DEFAULT_CHUNK_BYTES = 2 * 2**20
DEFAULT_NUM_CHUNKS = 4
"""One being filled, one being emptied, and two for the jitter of either."""
REQUEST = struct.Struct("<8sBQQ")
"""Of a call: magic, op, offset, length; then a WRITE's bytes. A READ's are the answer."""
MAGIC = b"tndstage"
REMOTE_CHUNK_BYTES = MAX_CALL_BYTES - REQUEST.size


class DeviceMemory(Protocol):
    """Memory that is reached only by copies between it and host memory."""

    @property
    def length(self) -> int:
        """Bytes."""
        ...

    def read(self, offset: int, target: npt.NDArray[np.uint8]) -> None:
        """Copy from the device into ``target``; returns when the bytes are there."""
        ...

    def write(self, offset: int, source: npt.NDArray[np.uint8]) -> None:
        """Copy ``source`` to the device; returns when ``source`` may change."""
        ...


class StagedPath:
    """A way between device memory and segments. A context manager; one ``move`` at a time.

    Args:
        engine: by which the host buffers travel; may have any transport.
        chunk_bytes: of a host buffer.
        num_chunks: host buffers; the most that is under way.

    Raises: ConfigError; CapacityError (no memory).
    """

    def __init__(
        self,
        engine: TransferEngine,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        num_chunks: int = DEFAULT_NUM_CHUNKS,
    ) -> None:
        if chunk_bytes < 1 or num_chunks < 1:
            raise ConfigError(
                "transfer.stage", f"{num_chunks} chunks of {chunk_bytes} bytes: give 1 or more each"
            )
        self._engine = engine
        self._chunk_bytes = chunk_bytes
        self._buffer = engine.allocate(chunk_bytes * num_chunks, remote=False)
        chunks = self._buffer.array.reshape(num_chunks, chunk_bytes)
        self._chunks = [chunks[i] for i in range(num_chunks)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the host buffers back. May be repeated."""
        if self._buffer.is_registered:
            self._engine.unregister(self._buffer)

    def move(
        self,
        op: Op,
        device: DeviceMemory,
        device_offset: int,
        segment: Segment,
        offset: int,
        length: int,
        *,
        deadline_s: float | None = None,
    ) -> None:
        """Move a range between the device and a segment; blocks.

        When it has returned or raised, no byte of the device changes any more through it. A WRITE
        that failed has left any part of its range in the segment.

        Args:
            op: READ into the device, WRITE from it.
            device: of whose memory.
            device_offset: where in it.
            segment: of the engine.
            offset: where in the segment's address space.
            length: bytes; 0 moves nothing.
            deadline_s: from now; None = that of the engine's configuration.

        Raises: ConfigError (beyond the device); as ``Batch.wait``; what the device raises.
        """
        if min(device_offset, length) < 0 or device_offset + length > device.length:
            raise ConfigError(
                "transfer.stage",
                f"offset {device_offset}, {length} bytes: the device has {device.length}",
                field="device_offset",
            )
        if not self._buffer.is_registered:
            raise ConflictError("transfer.stage", "the path is closed")
        if deadline_s is None:
            deadline_s = self._engine.config.deadline_ms / 1e3
        end_s = time.monotonic() + deadline_s
        under_way: collections.deque[tuple[Batch, int, int, int]] = collections.deque()
        try:
            for begin in range(0, length, self._chunk_bytes):
                size = min(self._chunk_bytes, length - begin)
                slot = (begin // self._chunk_bytes) % len(self._chunks)
                if len(under_way) == len(self._chunks):
                    self._end_oldest(op, device, device_offset, under_way)
                if op == Op.WRITE:
                    device.read(device_offset + begin, self._chunks[slot][:size])
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineError("transfer.stage", "the transfer did not end in time")
                transfer = Transfer(
                    op,
                    self._buffer,
                    segment,
                    offset + begin,
                    size,
                    local_offset=slot * self._chunk_bytes,
                )
                batch = self._engine.submit([transfer], deadline_s=left_s)
                under_way.append((batch, slot, begin, size))
            while under_way:
                self._end_oldest(op, device, device_offset, under_way)
        finally:
            # After an error: the host buffers are ours again before anybody uses them.
            for batch, *_ in under_way:
                batch.cancel()

    def _end_oldest(
        self,
        op: Op,
        device: DeviceMemory,
        device_offset: int,
        under_way: "collections.deque[tuple[Batch, int, int, int]]",
    ) -> None:
        batch, slot, begin, size = under_way[0]
        batch.wait()
        under_way.popleft()
        if op == Op.READ:
            device.write(device_offset + begin, self._chunks[slot][:size])


class DeviceServer:
    """Lets peers read and write a device's memory. A handler of calls, or a part of one.

    Give it to ``TransferEngine.serve_calls`` as it is, or let your own handler pass on the calls
    that ``is_for_device`` says are its. The copies run on the thread of the handler.

    Args:
        device: whose memory.
        is_writable: whether peers may write it.
    """

    def __init__(self, device: DeviceMemory, *, is_writable: bool = True) -> None:
        self._device = device
        self._is_writable = is_writable

    @staticmethod
    def is_for_device(call: Call) -> bool:
        """Whether a call is one of a ``RemoteDevice``."""
        return call.payload.startswith(MAGIC)

    def __call__(self, calls: Sequence[Call]) -> list[bytes | TandemError | None]:
        """Answer calls; what one of them does wrong is its own error."""
        return [self._answer_safely(call.payload) for call in calls]

    def _answer_safely(self, payload: bytes) -> bytes | TandemError:
        try:
            return self._answer(payload)
        except TandemError as error:
            return error
        except Exception as error:
            logger.exception("a device failed in a peer's call")
            return InternalError("transfer.stage", f"the device raised {error!r:.200}")

    def _answer(self, payload: bytes) -> bytes | TandemError:
        if len(payload) < REQUEST.size or not payload.startswith(MAGIC):
            return ConfigError("transfer.stage", "not a request for device memory")
        _, op, offset, length = REQUEST.unpack_from(payload)
        if offset + length > self._device.length or length > REMOTE_CHUNK_BYTES:
            return ConfigError(
                "transfer.stage",
                f"offset {offset}, {length} bytes: the device has {self._device.length}, a call "
                f"takes {REMOTE_CHUNK_BYTES}",
                field="offset",
            )
        if op == Op.READ and len(payload) == REQUEST.size:
            chunk = np.empty(length, np.uint8)
            self._device.read(offset, chunk)
            return chunk.tobytes()
        if op != Op.WRITE or len(payload) != REQUEST.size + length:
            return ConfigError("transfer.stage", f"a malformed request, op {op}")
        if not self._is_writable:
            return PermissionDeniedError("transfer.stage", "the device is offered for reading")
        self._device.write(offset, np.frombuffer(payload, np.uint8, length, REQUEST.size))
        return b""


class RemoteDevice:
    """A peer's device, as ``DeviceMemory``: a ``StagedPath`` of its own host takes it too.

    A context manager. Thread-safe.

    Args:
        engine: that opened the segment.
        segment: of the process whose ``DeviceServer`` serves.
        length: bytes of the device.
        chunk_bytes: of a call.
        num_chunks: calls under way at most.
        deadline_s: of each call; None = that of the engine's configuration.

    Raises: ConfigError (no bytes, chunks beyond a call).
    """

    def __init__(
        self,
        engine: TransferEngine,
        segment: Segment,
        length: int,
        *,
        chunk_bytes: int = REMOTE_CHUNK_BYTES,
        num_chunks: int = DEFAULT_NUM_CHUNKS,
        deadline_s: float | None = None,
    ) -> None:
        if not 1 <= chunk_bytes <= REMOTE_CHUNK_BYTES or num_chunks < 1 or length < 0:
            raise ConfigError(
                "transfer.stage",
                f"{num_chunks} chunks of {chunk_bytes} bytes: at most {REMOTE_CHUNK_BYTES} each",
                field="chunk_bytes",
            )
        self.length = length
        self._engine = engine
        self._segment = segment
        self._chunk_bytes = chunk_bytes
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(num_chunks, "tandem-stage")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what is under way and end. May be repeated."""
        self._threads.shutdown(cancel_futures=True)

    def read(self, offset: int, target: npt.NDArray[np.uint8]) -> None:
        """Copy from the far device into ``target``; returns when the bytes are there.

        Raises: as ``TransferEngine.call``, and what the device raises as InternalError; ``target``
            is not touched afterwards.
        """

        def fetch(begin: int, size: int) -> None:
            got = self._call(Op.READ, offset + begin, size, b"")
            target[begin : begin + size] = np.frombuffer(got, np.uint8, size)

        self._run(fetch, len(target))

    def write(self, offset: int, source: npt.NDArray[np.uint8]) -> None:
        """Copy ``source`` to the far device; returns when it is there.

        Raises: as ``read``; any part of the range may have been written then.
        """

        def send(begin: int, size: int) -> None:
            self._call(Op.WRITE, offset + begin, size, source[begin : begin + size].tobytes())

        self._run(send, len(source))

    def _call(self, op: Op, offset: int, size: int, payload: bytes) -> bytes:
        request = REQUEST.pack(MAGIC, op, offset, size) + payload
        return self._engine.call(self._segment, request, deadline_s=self._deadline_s)

    def _run(self, work: Callable[[int, int], None], length: int) -> None:
        chunks: list[Future[None]] = [
            self._threads.submit(work, begin, min(self._chunk_bytes, length - begin))
            for begin in range(0, length, self._chunk_bytes)
        ]
        try:
            for chunk in chunks:
                chunk.result()
        finally:
            # After an error: nothing of it runs any more when the caller learns of it.
            for chunk in chunks:
                chunk.cancel()
            for chunk in chunks:
                if not chunk.cancelled():
                    chunk.exception()
