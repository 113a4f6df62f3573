"""Registered memory of this process, and the description of a peer's registered memory."""

from typing import Any, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from tandem._native import HostMemory, SharedArray
from tandem.core.errors import UnsupportedError

__all__ = ["Buffer", "RemoteBuffer"]


class RemoteBuffer(msgspec.Struct, frozen=True, kw_only=True):
    """A buffer that a peer's segment offers."""

    name: str
    offset: int
    """Address at which the buffer begins in the peer's segment (its registered memory as one
    address range). It is never reused for another buffer.
    """
    length: int
    location: str
    can_read: bool
    can_write: bool
    is_shared: bool
    """True if processes of the same user on the same host can map the memory."""


class Registry(Protocol):
    """The part of ``TransferEngine`` that buffers use."""

    @property
    def is_closed(self) -> bool:
        """True if the engine is closed and nothing is registered."""
        ...

    def unregister(self, buffer: "Buffer") -> None:
        """End the registration of a buffer."""
        ...


class Buffer:
    """Memory of this process that transfers may read and write; made by an engine.

    The memory stays alive while the buffer is registered, even if the caller drops it. A context
    manager: leaving it unregisters the buffer, unless it is unregistered already.
    """

    def __init__(
        self,
        engine: Registry,
        memory: HostMemory | SharedArray,
        offset: int,
        *,
        name: str,
        location: str,
    ) -> None:
        self.offset = offset
        """Address at which the buffer begins in this process's segment (its registered memory as
        one address range); peers need it to read or write the buffer.
        """
        self.length = memory.size_bytes
        self.name = name
        self.location = location
        self._engine = engine
        self._memory: HostMemory | SharedArray | None = memory
        self._is_registered = True

    def __repr__(self) -> str:
        return f"Buffer(name={self.name!r}, offset={self.offset}, length={self.length})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_registered and not self._engine.is_closed:
            self._engine.unregister(self)

    def _release(self) -> None:
        """Drop the reference to the object that the caller registered. Allocated memory stays alive
        with its views.
        """
        self._is_registered = False
        if isinstance(self._memory, HostMemory):
            self._memory = None

    @property
    def is_registered(self) -> bool:
        """True if transfers may still use the buffer."""
        return self._is_registered and not self._engine.is_closed

    @property
    def reserved_bytes(self) -> int:
        """Bytes from the start that may be touched: all, unless ``allocate`` was given
        ``reserved_bytes``.
        """
        memory = self._memory
        return memory.reserved_bytes if isinstance(memory, SharedArray) else self.length

    def reserve(self, end_bytes: int) -> None:
        """Reserve the first ``end_bytes`` of allocated memory. Reserved memory is never given back.

        Raises: UnsupportedError (registered memory); ConfigError (beyond the end); CapacityError
            (the machine has too little memory).
        """
        self._require_allocated().reserve(end_bytes)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes of allocated memory, writable, without a copy. The array may outlive buffer and
        engine.

        Raises: UnsupportedError for registered memory: use the object that was registered.
        """
        return self._require_allocated().array()

    def _require_allocated(self) -> SharedArray:
        if not isinstance(self._memory, SharedArray):
            raise UnsupportedError(
                "transfer.array", "only allocate() makes arrays: use the registered object"
            )
        return self._memory


def wrap_memory(memory: Any) -> HostMemory:
    """Return the bytes of an array, tensor or buffer, without a copy.

    Raises: UnsupportedError (not host memory); ShapeError (not contiguous).
    """
    try:
        return HostMemory(memory)
    except UnsupportedError:
        # DLPack has no name for some item types (bool, records); take such buffers as bytes.
        try:
            view = memoryview(memory)
        except TypeError:
            view = None
        if view is None or not view.c_contiguous or view.nbytes == 0:
            raise
        return HostMemory(view.cast("B"))
