"""Memory of a store client: registered buffers, ranges of them, and the copying of small values
into one buffer.
"""

import contextlib
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tandem._native import BytesPool, HostMemory, view_new_bytes
from tandem.core.errors import ShapeError, UnsupportedError
from tandem.store.interfaces import ClientPort

__all__ = [
    "Part",
    "Result",
    "ResultPool",
    "ScratchPool",
    "Staging",
    "StoreBuffer",
    "as_bytes",
    "as_views",
    "list_parts",
    "measure_parts",
]

MIN_SCRATCH_BYTES = 64 * 1024
MAX_SCRATCH_BYTES = 8 * 2**20
"""Largest scratch buffer that a client keeps for reuse, bytes."""
STAGED_BYTES = 256 * 1024
"""Values up to this size are copied, which costs less than registering each. Larger ones are
registered in place.
"""


class StoreBuffer:
    """Registered memory of a client. Gets and puts move bytes between it and the store without a
    copy.
    """

    def __init__(
        self, handle: Any, array: npt.NDArray[np.uint8], owner: object | None = None
    ) -> None:
        self.handle = handle
        self.owner = owner
        """An object that identifies the client with which the buffer is registered; None after
        ``unregister``.
        """
        self.array = array
        """The bytes, as a view of the memory that was registered."""

    @property
    def nbytes(self) -> int:
        """Length of the buffer in bytes."""
        return self.array.size


class ScratchPool:
    """Registered scratch memory into which values are read before they are verified and copied to
    their destination.

    One buffer is kept and lent again, since touching new pages causes page faults.
    """

    def __init__(self, port: ClientPort) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._kept: StoreBuffer | None = None
        self._is_closed = False

    @contextlib.contextmanager
    def lend(self, size_bytes: int) -> Generator[StoreBuffer]:
        """Lend memory of at least ``size_bytes``, with undefined contents."""
        buffer = self._take()
        if buffer is None or buffer.nbytes < size_bytes:
            self._drop(buffer)
            array = np.empty(max(size_bytes, MIN_SCRATCH_BYTES), dtype=np.uint8)
            buffer = StoreBuffer(self._port.register(array), array)
        try:
            yield buffer
        except BaseException:
            # The transfer failed or was cancelled. Unregister the buffer, which waits for transfers
            # that may still write into it.
            self._drop(buffer)
            raise
        else:
            with self._lock:
                if (
                    self._kept is None
                    and buffer.nbytes <= MAX_SCRATCH_BYTES
                    and not self._is_closed
                ):
                    self._kept, buffer = buffer, None
            self._drop(buffer)

    def close(self) -> None:
        """Free the buffer that is kept."""
        self._is_closed = True
        self._drop(self._take())

    def _take(self) -> StoreBuffer | None:
        with self._lock:
            buffer, self._kept = self._kept, None
            return buffer

    def _drop(self, buffer: StoreBuffer | None) -> None:
        if buffer is not None:
            self._port.unregister(buffer.handle)


class ResultPool:
    """Memory for large values that are returned as ``bytes``: transfers fill it in place, and it is
    reused.

    The pool remembers returned values up to ``limit_bytes``, and reuses their memory once nobody
    else refers to them: touching new memory costs more than all the rest of a get.
    """

    def __init__(self, port: ClientPort, limit_bytes: int) -> None:
        self._port = port
        self._pool = BytesPool(limit_bytes)

    @contextlib.contextmanager
    def lend(self, sizes: Sequence[int]) -> "Generator[list[Result]]":
        """Lend a registered ``bytes`` object of each size, which transfers may fill inside the
        context.
        """
        values = self._pool.take(sizes)
        results: list[Result] = []
        # The exit stack unregisters each buffer, which waits for running transfers. A failure of
        # one does not stop the others.
        with contextlib.ExitStack() as registered:
            for value in values:
                array = view_new_bytes(value)
                handle = self._port.register(array)
                registered.callback(self._port.unregister, handle)
                results.append(Result(value, StoreBuffer(handle, array)))
            yield results
        self._pool.keep(values)

    def close(self) -> None:
        """Forget the remembered values, so that their memory is freed when nobody else refers to
        them.
        """
        self._pool.clear()


class Result(NamedTuple):
    """A ``bytes`` value that is being filled, and the registered buffer over its memory."""

    value: bytes
    buffer: StoreBuffer


class Part(NamedTuple):
    """A range of a registered buffer. An object may consist of several."""

    buffer: StoreBuffer
    offset: int = 0
    length: int = -1
    """Length in bytes; -1 for the rest of the buffer."""

    @property
    def nbytes(self) -> int:
        """Length of the range in bytes.

        Raises: ShapeError if the range leaves the buffer.
        """
        whole = self.buffer.array.size
        length = whole - self.offset if self.length < 0 else self.length
        if not 0 <= self.offset <= self.offset + length <= whole:
            raise ShapeError(
                "store.part",
                f"range [{self.offset}, {self.offset + length}) of a buffer of {whole} bytes",
            )
        return length

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        """The bytes of the range. Raises: as ``nbytes``."""
        return self.buffer.array[self.offset : self.offset + self.nbytes]


def measure_parts(parts: Sequence[Part]) -> list[int]:
    """Return the length in bytes of each range of registered memory. Raises: as ``Part.nbytes``."""
    if not parts:
        return []
    one = parts[0].buffer
    whole = one.array.size
    return [
        length
        if buffer is one and length >= 0 and 0 <= offset <= whole - length
        else Part(buffer, offset, length).nbytes
        for buffer, offset, length in parts
    ]


class Staging:
    """Copies small values one behind the other into memory that is registered once. Large values
    are registered in place.
    """

    def __init__(self, port: ClientPort, lent: list[StoreBuffer]) -> None:
        self._port = port
        self._lent = lent
        self._staged: list[tuple[list[Part], list[npt.NDArray[np.uint8]], int, int]] = []
        self._length = 0

    def add(self, views: "list[npt.NDArray[np.uint8]]") -> list[Part]:
        """Return the parts (ranges of registered memory) of a value that is given as byte arrays.
        The list is empty for a small value until ``copy`` fills it in.
        """
        size = sum(view.size for view in views)
        parts: list[Part] = []
        if size > STAGED_BYTES:
            for view in views:
                if view.size:
                    buffer = StoreBuffer(self._port.register(view), view)
                    self._lent.append(buffer)
                    parts.append(Part(buffer))
        elif size:
            self._staged.append((parts, views, self._length, size))
            self._length += size
        return parts

    def copy(self) -> Iterator[None]:
        """Register memory for all small values. Copy one value there, and fill in its parts, each
        time the iterator is advanced.
        """
        if not self._staged:
            return
        array = np.empty(self._length, dtype=np.uint8)
        buffer = StoreBuffer(self._port.register(array), array)
        self._lent.append(buffer)
        for parts, views, at, size in self._staged:
            np.concatenate(views, out=array[at : at + size])
            parts.append(Part(buffer, at, size))
            yield


def as_bytes(memory: Any) -> npt.NDArray[np.uint8]:
    """View contiguous memory as bytes, without a copy.

    Raises: ShapeError if it is not contiguous, or provides neither a buffer nor DLPack.
    """
    try:
        if isinstance(memory, np.ndarray):
            if not memory.flags.c_contiguous:
                raise ShapeError("store.memory", "a strided array: pass a contiguous one")
            array = cast("npt.NDArray[Any]", memory)
            return array.reshape(-1).view(np.uint8)
        try:
            return np.frombuffer(memory, dtype=np.uint8)
        except TypeError:
            # Use DLPack like the transfer engine does: numpy has neither bfloat16 nor float8.
            return HostMemory(memory).array()
    except (TypeError, ValueError, AttributeError, BufferError, UnsupportedError) as error:
        raise ShapeError(
            "store.memory",
            f"{type(cast('object', memory)).__name__} gives no contiguous host memory: {error}",
        ) from None


def as_views(value: Any) -> "list[npt.NDArray[np.uint8]]":
    """View a value, or each item of a list of values, as bytes."""
    if isinstance(value, list | tuple):
        parts = cast("Sequence[Any]", value)
        return [as_bytes(part) for part in parts]
    return [as_bytes(value)]


def list_parts(parts: Part | Sequence[Part]) -> list[Part]:
    """Return one part (range of a registered buffer) or several as a list."""
    return [parts] if isinstance(parts, Part) else list(parts)
