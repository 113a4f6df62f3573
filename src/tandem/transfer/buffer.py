"""Registered memory of this process, and what a peer's registered memory looks like from here."""

from typing import Any, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from tandem._native import HostMemory, SharedArray
from tandem.core.errors import UnsupportedError

__all__ = ["Buffer", "RemoteBuffer"]


class RemoteBuffer(msgspec.Struct, frozen=True, kw_only=True):
    """A buffer that a segment offers to us."""

    name: str
    offset: int
    """The place at which it begins in the segment's address space. Never given to another buffer
    again."""
    length: int
    location: str
    can_read: bool
    can_write: bool
    is_shared: bool
    """Its memory can be mapped by processes of the same user on its host."""


class Registry(Protocol):
    """Registrar of memory: a ``TransferEngine``."""

    @property
    def is_closed(self) -> bool:
        """True if nothing is registered any more."""
        ...

    def unregister(self, buffer: "Buffer") -> None:
        """Take memory back."""
        ...


class Buffer:
    """Memory of this process that transfers may touch; made by an engine, never directly.

    The memory stays alive while the buffer is registered, even if the caller drops it. A context
    manager: leaving it unregisters, unless that was done before.
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
        """The place at which it begins in our segment's address space; tell it to peers."""
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
        """Drop the reference to the caller's object; allocated memory stays with its views."""
        self._is_registered = False
        if isinstance(self._memory, HostMemory):
            self._memory = None

    @property
    def is_registered(self) -> bool:
        """True if transfers may still name it."""
        return self._is_registered and not self._engine.is_closed

    @property
    def reserved_bytes(self) -> int:
        """Bytes from the start that may be touched: all, unless ``allocate`` was told otherwise."""
        memory = self._memory
        return memory.reserved_bytes if isinstance(memory, SharedArray) else self.length

    def reserve(self, end_bytes: int) -> None:
        """Take the first ``end_bytes`` of allocated memory from the machine; nothing is given back.

        Raises: UnsupportedError (registered memory); ConfigError (beyond the end); CapacityError
            (the machine has not that much).
        """
        self._require_allocated().reserve(end_bytes)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes of allocated memory, writable, no copy; outlives the buffer and the engine.

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
    """Take the bytes of an array, tensor or buffer, without a copy.

    Raises: UnsupportedError (not host memory); ShapeError (not contiguous).
    """
    try:
        return HostMemory(memory)
    except UnsupportedError:
        # Buffers of items that DLPack cannot name (bool, records) are bytes all the same.
        try:
            view = memoryview(memory)
        except TypeError:
            view = None
        if view is None or not view.c_contiguous or view.nbytes == 0:
            raise
        return HostMemory(view.cast("B"))
