"""Memory that no transport reaches (a device's), moved through bounded host buffers.

``StagedPath`` cuts a range into chunks and keeps several under way: while one is on the wire, the
next is copied between the device and its host buffer. It owns its buffers and nothing of the
device; the copies run on the calling thread, the wire on the engine's.
"""

import collections
import time
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from tandem.core.errors import ConfigError, ConflictError, DeadlineError
from tandem.transfer.batch import Batch, Op, Transfer
from tandem.transfer.engine import TransferEngine
from tandem.transfer.segment import Segment

__all__ = ["DeviceMemory", "StagedPath"]

DEFAULT_CHUNK_BYTES = 2 * 2**20
DEFAULT_NUM_CHUNKS = 4
"""One being filled, one being emptied, and two for the jitter of either."""


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
