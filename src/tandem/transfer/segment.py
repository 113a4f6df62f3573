"""Segments: the registered memory of a process, as another process (or itself) reaches it."""

from typing import Protocol, Self

from tandem._native import RailStatus, SegmentDescription, TransferCore
from tandem.core.errors import NotFoundError
from tandem.transfer.buffer import RemoteBuffer

__all__ = ["FileSegment", "Segment"]


class SegmentOwner(Protocol):
    """The part of ``TransferEngine`` that segments use."""

    core: TransferCore

    @property
    def is_closed(self) -> bool:
        """True if the engine is closed, and all segments with it."""
        ...

    def has_segment(self, segment: "Segment") -> bool:
        """Return True if the segment was opened by this engine and not closed."""
        ...

    def describe(self, segment_id: int, deadline_s: float | None = None) -> SegmentDescription:
        """Ask a segment for its name and buffers."""
        ...

    def close_segment(self, segment: "Segment") -> None:
        """Close a segment of this engine."""
        ...


class Segment:
    """An opened segment. Made by ``TransferEngine.open``; a context manager that closes it.

    It stands for one run of one process (an epoch): when that process ends or restarts, transfers
    fail with ``PeerLostError`` and the segment must be opened again.
    """

    def __init__(self, engine: SegmentOwner, segment_id: int, address: str) -> None:
        self.address = address
        self._engine = engine
        self._id = segment_id
        self._buffers: dict[str, RemoteBuffer] = {}
        self.name = ""
        self.refresh()

    def __repr__(self) -> str:
        return f"Segment(name={self.name!r}, address={self.address!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._engine.is_closed and self._engine.has_segment(self):
            self.close()

    def refresh(self, deadline_s: float | None = None) -> None:
        """Ask the peer which buffers it offers now.

        Raises: PeerLostError (the connection is lost); DeadlineError (no answer in time).
        """
        seen: SegmentDescription = self._engine.describe(self._id, deadline_s)
        self.name = seen.name
        self._buffers = {
            info.name or f"@{info.offset}": RemoteBuffer(
                name=info.name,
                offset=info.offset,
                length=info.length,
                location=info.location,
                can_read=info.can_read,
                can_write=info.can_write,
                is_shared=info.is_shared,
            )
            for info in seen.buffers
        }

    @property
    def buffers(self) -> dict[str, RemoteBuffer]:
        """The buffers that the peer offered at the last query, by name (``@offset`` without
        one).
        """
        if self._id == 0:
            self.refresh()  # Asking this process itself costs nothing.
        return dict(self._buffers)

    def buffer(self, name: str) -> RemoteBuffer:
        """Return a buffer by its name. Asks the peer again if the name is unknown.

        Raises: NotFoundError (the peer offers no buffer of this name); PeerLostError and
            DeadlineError as ``refresh``.
        """
        if name not in self._buffers:
            self.refresh()
        try:
            return self._buffers[name]
        except KeyError:
            raise NotFoundError(
                "transfer.find", f"{self!r} offers no buffer {name!r}", field="name"
            ) from None

    @property
    def rails(self) -> list[RailStatus]:
        """The rails to this segment (paths between a local and a remote NIC address) and their
        current state; none for the engine's own segment.
        """
        return self._engine.core.rails(self._id) if self._id else []

    @property
    def refusals(self) -> dict[str, str]:
        """Transports that were tried for this segment and cannot be used, with the reason."""
        return self._engine.core.refusals(self._id) if self._id else {}

    @property
    def id(self) -> int:
        """Number of the segment in its engine; 0 for the engine's own segment."""
        return self._id

    def close(self) -> None:
        """Disconnect from the peer. Its running batches end with CancelledError.

        Raises: NotFoundError if closed before; ConflictError if the engine is closed.
        """
        self._engine.close_segment(self)


class FileSegment(Segment):
    """A file as a segment; made by ``TransferEngine.open_file``.

    A WRITE ends when the kernel has the bytes; ``sync`` returns when the disk has them.
    """

    @property
    def length(self) -> int:
        """Length of the file in bytes when it was opened."""
        return self._engine.core.file_info(self._id).length

    @property
    def is_direct(self) -> bool:
        """True if aligned transfers bypass the page cache. If False, ``refusals`` has the
        reason.
        """
        return self._engine.core.file_info(self._id).is_direct

    @property
    def refusals(self) -> dict[str, str]:
        """Features that are not used for this file, with the reason: ``direct``, ``io_uring``."""
        direct = self._engine.core.file_info(self._id).direct_refusal
        ring = self._engine.core.file_backend[1]
        return {name: why for name, why in (("direct", direct), ("io_uring", ring)) if why}

    @property
    def rails(self) -> list[RailStatus]:
        """Empty, since no NIC paths (rails) lead to a file."""
        return []

    def sync(self) -> None:
        """Wait until all written bytes are on the disk. Blocks, without the GIL.

        Raises: CapacityError (disk full), InternalError (the disk failed).
        """
        self._engine.core.sync_file(self._id)
