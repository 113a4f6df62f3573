"""The ledger of a host's segment: the use of each range of bytes. Pure: time is an argument.

The allocator knows only free and taken. The ledger knows why a range is taken, and frees it when
the last reason has ended. ``TRANSITIONS`` lists all allowed changes of use.
"""

import heapq
from collections.abc import Collection, Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from tandem.core.errors import InternalError

__all__ = ["TRANSITIONS", "Allocator", "Extent", "ExtentEvent", "Space", "SpaceLedger"]

GUARD_MS = 100
"""Milliseconds until a range that is being copied from is checked again."""


class Extent(NamedTuple):
    """A range of bytes in a segment (a host's memory for objects)."""

    offset: int
    length: int


class Space(Enum):
    """The use of a range in a host's segment."""

    FREE = auto()
    HELD = auto()
    """Reserved for an object that is being written or copied."""
    SEALED = auto()
    """The range of an object in the directory. The ledger does not list it."""
    WIPING = auto()
    """The range of a removed object, or of one that may have been sealed, until its header is
    wiped.
    """
    LEASED = auto()
    """The header is wiped, but a reader with a lease may still rely on the bytes."""
    QUARANTINED = auto()
    """The writer has failed, and is not proven gone yet."""


class ExtentEvent(Enum):
    """An event that changes the use of a range in a host's segment; see ``Space``."""

    TAKE = auto()
    GIVE_BACK = auto()
    """The range is freed: it has no writer and nothing was sealed."""
    SEAL = auto()
    """The range's object enters the directory."""
    DROP = auto()
    """The range's object leaves the directory, or will never enter it."""
    LEASE = auto()
    """The header is wiped while readers have leases."""
    WIPE = auto()
    """The header is wiped and no reader has a lease."""
    END_LEASE = auto()
    FENCE = auto()
    """The range's writer is fenced off."""
    PROVE = auto()
    """The range's writer is proven gone."""


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
    """An allocator of a segment: the part of the native ``SegmentAllocator`` that the ledger
    uses.
    """

    @property
    def used_bytes(self) -> int:
        """Bytes of the segment that are taken."""
        ...

    def allocate(self, lengths: Sequence[int], /) -> list[int] | None:
        """Take ranges of these lengths, all or none. Return their offsets; None without space for
        all.
        """
        ...

    def grow(self, capacity_bytes: int, /) -> None:
        """Raise the capacity: more of the segment is usable."""
        ...

    def release_many(self, offsets: Sequence[int], lengths: Sequence[int], /) -> None:
        """Free ranges that were taken."""
        ...


class SpaceLedger:
    """The uses of the ranges of one segment (a host's memory), in one session with its host.

    Nothing can be reserved before ``open``, which needs the host's inventory. Objects of the
    inventory that are not wanted can be dropped before that.
    """

    def __init__(self) -> None:
        self.allocator: Allocator | None = None
        self._extents: dict[Space, dict[int, int]] = {space: {} for space in _LISTED}
        """Length of each range, by use and offset."""
        self._bytes: dict[Space, int] = dict.fromkeys(_LISTED, 0)
        self._leases: list[tuple[int, int]] = []
        """Heap of leased ranges: (until_ms, offset)."""

    def count_bytes(self, *spaces: Space) -> int:
        """Return the bytes of all ranges with one of these uses, except SEALED, which is not
        listed.
        """
        return sum(self._bytes[space] for space in spaces)

    @property
    def dropped_bytes(self) -> int:
        """Bytes of dropped objects: freed once wiped and without readers' leases."""
        return self.count_bytes(Space.WIPING, Space.LEASED)

    def list_extents(self, *spaces: Space) -> list[Extent]:
        """Return the ranges with one of these uses, except SEALED, which is not listed."""
        return [Extent(*item) for space in spaces for item in self._extents[space].items()]

    def is_in(self, offset: int, *spaces: Space) -> bool:
        """Return True if the range that begins at ``offset`` has one of these uses, except
        SEALED.
        """
        return any(offset in self._extents[space] for space in spaces)

    def open(self, allocator: Allocator, carried: Iterable[Extent]) -> None:
        """Begin to give out space of the host's segment, after its inventory (list of objects) has
        come.

        Args:
            allocator: has all ranges of the inventory taken; borrowed.
            carried: ranges of an earlier session that are being wiped, or that readers have leases
                on. Other ranges of that session are free.
        """
        self.allocator = allocator
        kept = {extent.offset for extent in carried}
        for space in (Space.WIPING, Space.LEASED):
            extents = self._extents[space]
            for offset in [offset for offset in extents if offset not in kept]:
                self._bytes[space] -= extents.pop(offset)

    def take(self, lengths: Sequence[int]) -> list[int] | None:
        """Reserve ranges, all or none. Return their offsets; None without space, or before
        ``open``.
        """
        offsets = None if self.allocator is None else self.allocator.allocate(lengths)
        if offsets is not None:
            self._enter(TRANSITIONS[Space.FREE, ExtentEvent.TAKE], offsets, lengths)
        return offsets

    def move(self, event: ExtentEvent, offsets: Sequence[int]) -> None:
        """Change the use of listed ranges by an event: see ``ExtentEvent`` and ``TRANSITIONS``.

        Raises: InternalError if the event is not allowed for one of them; nothing has changed then.
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
        """Note that the objects in these ranges have left the directory, or will never enter it, so
        that their headers must be wiped.

        Raises: InternalError if one of the ranges was dropped already; nothing has changed then.
        """
        if any(not self._extents[space].keys().isdisjoint(offsets) for space in _DROPPED):
            raise InternalError("store.space", f"DROP of {len(offsets)} ranges, some dropped")
        held = self._extents[Space.HELD].keys() & set(offsets)
        self.move(ExtentEvent.DROP, sorted(held))
        sealed = [extent for extent in zip(offsets, lengths, strict=True) if extent[0] not in held]
        if sealed:
            self._enter(TRANSITIONS[Space.SEALED, ExtentEvent.DROP], *zip(*sealed, strict=True))

    def lease(self, offset: int, until_ms: int) -> None:
        """Note that a header is wiped while readers may rely on the bytes until ``until_ms``."""
        self.move(ExtentEvent.LEASE, [offset])
        heapq.heappush(self._leases, (until_ms, offset))

    def end_leases(self, now_ms: int, guarded: Collection[int]) -> list[int]:
        """Free the ranges whose leases have ended, except those at the offsets ``guarded``, from
        which another host is copying. Return the freed offsets.
        """
        freed: list[int] = []
        while self._leases and self._leases[0][0] <= now_ms:
            _, offset = heapq.heappop(self._leases)
            if not self.is_in(offset, Space.LEASED):
                continue  # ``open`` has freed it.
            if offset in guarded:
                heapq.heappush(self._leases, (now_ms + GUARD_MS, offset))
                continue
            self.move(ExtentEvent.END_LEASE, [offset])
            freed.append(offset)
        return freed

    def grow(self, capacity_bytes: int) -> None:
        """Note that more of the segment is usable; without effect before ``open``."""
        if self.allocator is not None:
            self.allocator.grow(capacity_bytes)

    def close(self) -> None:
        """Note that the session with the host has ended. Only ranges with readers' leases stay
        listed.
        """
        self.allocator = None
        for space in (Space.HELD, Space.WIPING, Space.QUARANTINED):
            self._extents[space].clear()
            self._bytes[space] = 0

    def _enter(self, space: Space, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        self._extents[space].update(zip(offsets, lengths, strict=True))
        self._bytes[space] += sum(lengths)
