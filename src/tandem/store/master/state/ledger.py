"""The ledger of the use of each range of a host's segment. Pure: time is an argument.

Only the allocator tells free from taken; the ledger knows the use of each range, and hands a range
back when the last reason to keep it has gone. The table below is all that may happen to a range.
"""

import heapq
from collections.abc import Collection, Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from tandem.core.errors import InternalError

__all__ = ["TRANSITIONS", "Allocator", "Extent", "ExtentEvent", "Space", "SpaceLedger"]

GUARD_MS = 100
"""Milliseconds until a guarded range is looked at again."""


class Extent(NamedTuple):
    """A range of a segment."""

    offset: int
    length: int


class Space(Enum):
    """The use of a range."""

    FREE = auto()
    HELD = auto()
    """Taken for an object that is being written, or copied."""
    SEALED = auto()
    """A range of an object that the directory shows. These are the directory's: not listed here."""
    WIPING = auto()
    """An object was there, or may have been; its header must go first."""
    LEASED = auto()
    """Wiped, but a reader may still rely on the bytes."""
    QUARANTINED = auto()
    """Its writer has failed, and is not yet proven gone."""


class ExtentEvent(Enum):
    """An event in the life of a range."""

    TAKE = auto()
    GIVE_BACK = auto()
    """It has no writer, and nothing was sealed."""
    SEAL = auto()
    """Its object is shown."""
    DROP = auto()
    """Its object is shown no more, or never will be."""
    LEASE = auto()
    """Wiped while readers may rely on it."""
    WIPE = auto()
    """Wiped, and without readers."""
    END_LEASE = auto()
    FENCE = auto()
    """Its writer is shut out."""
    PROVE = auto()
    """Its writer is gone."""


TRANSITIONS: dict[tuple[Space, ExtentEvent], Space] = {
    (Space.FREE, ExtentEvent.TAKE): Space.HELD,
    (Space.HELD, ExtentEvent.GIVE_BACK): Space.FREE,
    (Space.HELD, ExtentEvent.SEAL): Space.SEALED,
    (Space.HELD, ExtentEvent.DROP): Space.WIPING,
    (Space.HELD, ExtentEvent.FENCE): Space.QUARANTINED,
    (Space.SEALED, ExtentEvent.DROP): Space.WIPING,
    (Space.WIPING, ExtentEvent.LEASE): Space.LEASED,
    (Space.WIPING, ExtentEvent.WIPE): Space.FREE,
    (Space.LEASED, ExtentEvent.END_LEASE): Space.FREE,
    (Space.QUARANTINED, ExtentEvent.PROVE): Space.FREE,
}

_DROPPED: tuple[Space, ...] = (Space.WIPING, Space.LEASED, Space.QUARANTINED)
_LISTED: tuple[Space, ...] = (Space.HELD, *_DROPPED)


class Allocator(Protocol):
    """Knows free from taken: the part of the native ``SegmentAllocator`` that is used here."""

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken."""
        ...

    def allocate(self, lengths: Sequence[int], /) -> list[int] | None:
        """Take ranges, all or none; returns their offsets."""
        ...

    def grow(self, capacity_bytes: int, /) -> None:
        """More is usable."""
        ...

    def release_many(self, offsets: Sequence[int], lengths: Sequence[int], /) -> None:
        """Hand ranges back."""
        ...


class SpaceLedger:
    """The ranges of one segment, in one session with its host.

    Until the host has told what it has (``open``), nothing can be taken; what it tells of and is
    not wanted can be dropped, though, and is freed in vain.
    """

    def __init__(self) -> None:
        self.allocator: Allocator | None = None
        self._extents: dict[Space, dict[int, int]] = {space: {} for space in _LISTED}
        """Lengths by offset."""
        self._bytes: dict[Space, int] = dict.fromkeys(_LISTED, 0)
        self._leases: list[tuple[int, int]] = []
        """Heap of (until_ms, offset)."""

    def count_bytes(self, space: Space) -> int:
        """Return the bytes of all ranges in a state; not of FREE. REQUIRES: it is open."""
        if space is not Space.SEALED:
            return self._bytes[space]
        assert self.allocator is not None
        listed = sum(self._bytes.values())
        return self.allocator.used_bytes - listed

    def list_extents(self, *spaces: Space) -> list[Extent]:
        """Return the ranges in some of the states; SEALED is not listed."""
        return [Extent(*item) for space in spaces for item in self._extents[space].items()]

    def is_in(self, offset: int, *spaces: Space) -> bool:
        """Return True if the range that begins there is in one of the states, SEALED not being
        one.
        """
        return any(offset in self._extents[space] for space in spaces)

    def open(self, allocator: Allocator, carried: Iterable[Extent]) -> None:
        """Begin to give out space.

        Args:
            allocator: in which all that is there is taken; borrowed.
            carried: what of it readers of an earlier session may still rely on, or is being wiped.
                Other space carried over is freed.
        """
        self.allocator = allocator
        kept = {extent.offset for extent in carried}
        for space in (Space.WIPING, Space.LEASED):
            extents = self._extents[space]
            for offset in [offset for offset in extents if offset not in kept]:
                self._bytes[space] -= extents.pop(offset)

    def take(self, lengths: Sequence[int]) -> list[int] | None:
        """Take ranges, all or none; returns their offsets, None also before ``open``."""
        offsets = None if self.allocator is None else self.allocator.allocate(lengths)
        if offsets is not None:
            self._enter(TRANSITIONS[Space.FREE, ExtentEvent.TAKE], offsets, lengths)
        return offsets

    def move(self, event: ExtentEvent, offsets: Sequence[int]) -> None:
        """Change the state of listed ranges by an event: see ``ExtentEvent`` and ``TRANSITIONS``.

        Raises: InternalError if that cannot happen to one of them; none has changed then.
        """
        if not offsets:
            return
        space = next((s for s in _LISTED if offsets[0] in self._extents[s]), Space.SEALED)
        extents = self._extents.get(space, {})
        target = TRANSITIONS.get((space, event))
        if target is None or not all(map(extents.__contains__, offsets)):
            raise InternalError(
                "store.space", f"{event.name} of {len(offsets)} ranges, the first {space.name}"
            )
        lengths = [*map(extents.pop, offsets)]
        self._bytes[space] -= sum(lengths)
        if target is Space.FREE:
            if self.allocator is not None:
                self.allocator.release_many(offsets, lengths)
        elif target is not Space.SEALED:
            self._enter(target, offsets, lengths)

    def drop(self, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Note that objects are shown no more, or never will be: their headers are to be wiped.

        Raises: InternalError if one was dropped there already; none has changed then.
        """
        if any(not self._extents[space].keys().isdisjoint(offsets) for space in _DROPPED):
            raise InternalError("store.space", f"DROP of {len(offsets)} ranges, some dropped")
        held = self._extents[Space.HELD].keys() & set(offsets)
        self.move(ExtentEvent.DROP, sorted(held))
        sealed = [extent for extent in zip(offsets, lengths, strict=True) if extent[0] not in held]
        if sealed:
            self._enter(TRANSITIONS[Space.SEALED, ExtentEvent.DROP], *zip(*sealed, strict=True))

    def lease(self, offset: int, until_ms: int) -> None:
        """Note that a header is gone, while readers may rely on the bytes."""
        self.move(ExtentEvent.LEASE, [offset])
        heapq.heappush(self._leases, (until_ms, offset))

    def end_leases(self, now_ms: int, guarded: Collection[int]) -> list[int]:
        """Free space without reader leases or copies in progress; returns the offsets."""
        freed: list[int] = []
        while self._leases and self._leases[0][0] <= now_ms:
            _, offset = heapq.heappop(self._leases)
            if not self.is_in(offset, Space.LEASED):
                continue  # Forgotten by ``open``.
            if offset in guarded:
                heapq.heappush(self._leases, (now_ms + GUARD_MS, offset))
                continue
            self.move(ExtentEvent.END_LEASE, [offset])
            freed.append(offset)
        return freed

    def grow(self, capacity_bytes: int) -> None:
        """More of the segment is usable; before ``open`` that changes nothing."""
        if self.allocator is not None:
            self.allocator.grow(capacity_bytes)

    def close(self) -> None:
        """Note that the session is over: only the leases of readers outlive it."""
        self.allocator = None
        for space in (Space.HELD, Space.WIPING, Space.QUARANTINED):
            self._extents[space].clear()
            self._bytes[space] = 0

    def _enter(self, space: Space, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        self._extents[space].update(zip(offsets, lengths, strict=True))
        self._bytes[space] += sum(lengths)
