"""What space is used for: only the transitions of the table happen, and no byte is lost by one.

The ledger is driven at random over the native allocator, beside a model that knows each range.
"""

import random

import numpy as np
import pytest

from tandem._native import SegmentAllocator
from tandem.core.errors import InternalError
from tandem.store.master.state.ledger import TRANSITIONS, Extent, ExtentEvent, Space, SpaceLedger

GRANULE = 512
CAPACITY = 64 * GRANULE
LISTED = [Space.HELD, Space.WIPING, Space.LEASED, Space.QUARANTINED]


class Model:
    """Each range with its state, and when its lease ends."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ledger = SpaceLedger()
        self.ranges: dict[int, tuple[Space, int]] = {}
        self.leases: dict[int, int] = {}
        self.now_ms = 0

    def open(self, taken: list[Extent]) -> None:
        """Begin with these sealed, and with what is leased from before."""
        carried = self.ledger.list_extents(Space.WIPING, Space.LEASED)
        allocator = SegmentAllocator(CAPACITY, granule_bytes=GRANULE)
        ranges = sorted([*taken, *carried])
        columns = np.array(ranges, dtype=np.uint64).reshape(-1, 2)
        allocator.rebuild(columns[:, 0].copy(), columns[:, 1].copy())
        self.ledger.open(allocator, carried)
        self.ranges |= {extent.offset: (Space.SEALED, extent.length) for extent in taken}

    def choose(self, *spaces: Space) -> int | None:
        found = [offset for offset, (space, _) in self.ranges.items() if space in spaces]
        return self.random.choice(found) if found else None

    def set(self, offset: int, event: ExtentEvent) -> None:
        """What the table says of one range."""
        space, length = self.ranges.pop(offset)
        target = TRANSITIONS[space, event]
        if target is not Space.FREE:
            self.ranges[offset] = target, length

    def step(self) -> None:
        kind = self.random.choice([*ExtentEvent, "time", "end"])
        ledger = self.ledger
        if kind is ExtentEvent.TAKE:
            lengths = [
                GRANULE * self.random.randint(1, 8) for _ in range(self.random.randint(1, 4))
            ]
            offsets = ledger.take(lengths)
            for offset, length in zip(offsets or (), lengths, strict=False):
                assert offset not in self.ranges
                self.ranges[offset] = Space.HELD, length
        elif kind in {ExtentEvent.GIVE_BACK, ExtentEvent.SEAL, ExtentEvent.FENCE}:
            if (offset := self.choose(Space.HELD)) is not None:
                ledger.move(kind, [offset])
                self.set(offset, kind)
        elif kind is ExtentEvent.PROVE:
            if (offset := self.choose(Space.QUARANTINED)) is not None:
                ledger.move(kind, [offset])
                self.set(offset, kind)
        elif kind is ExtentEvent.DROP:
            if (offset := self.choose(Space.HELD, Space.SEALED)) is not None:
                ledger.drop([offset], [self.ranges[offset][1]])
                self.set(offset, kind)
        elif kind in {ExtentEvent.WIPE, ExtentEvent.LEASE}:
            if (offset := self.choose(Space.WIPING)) is not None:
                until_ms = self.now_ms + (
                    self.random.randint(1, 50) if kind is ExtentEvent.LEASE else 0
                )
                if kind is ExtentEvent.WIPE:
                    ledger.move(kind, [offset])
                else:
                    ledger.lease(offset, until_ms)
                self.set(offset, kind)
                self.leases[offset] = until_ms
        elif kind == "time":
            self.now_ms += self.random.randint(1, 30)
            ended = [
                offset
                for offset, (space, _) in self.ranges.items()
                if space is Space.LEASED and self.leases[offset] <= self.now_ms
            ]
            guarded = {offset for offset in ended if self.random.random() < 0.2}
            freed = ledger.end_leases(self.now_ms, guarded)
            assert set(freed) <= set(ended) - guarded
            # Those that were guarded before are looked at again some time later.
            for offset in freed:
                self.set(offset, ExtentEvent.END_LEASE)
        elif self.random.random() < 0.1:
            self.end_session()

    def end_session(self) -> None:
        """Only leases outlive it; some of the objects are there again afterwards."""
        self.ledger.close()
        assert self.ledger.take([GRANULE]) is None
        sealed = [Extent(o, n) for o, (space, n) in self.ranges.items() if space is Space.SEALED]
        self.ranges = {o: item for o, item in self.ranges.items() if item[0] is Space.LEASED}
        self.open([extent for extent in sealed if self.random.random() < 0.7])

    def check(self) -> None:
        end = 0
        for offset, (_, length) in sorted(self.ranges.items()):
            assert offset >= end, "two ranges overlap"
            end = offset + length
        used = sum(length for _, length in self.ranges.values())
        allocator = self.ledger.allocator
        assert allocator is not None
        assert allocator.used_bytes == used
        for space in LISTED:
            expected = {o: n for o, (s, n) in self.ranges.items() if s is space}
            assert self.ledger.count_bytes(space) == sum(expected.values())
            assert dict(self.ledger.list_extents(space)) == expected
        sealed = sum(length for space, length in self.ranges.values() if space is Space.SEALED)
        assert used - self.ledger.count_bytes(*LISTED) == sealed


@pytest.mark.parametrize("seed", range(20))
def test_no_byte_is_lost_and_no_range_is_used_twice(seed):
    """Over random events and sessions, the states of all ranges add up to what is taken."""
    model = Model(seed)
    model.open([Extent(0, 3 * GRANULE), Extent(5 * GRANULE, GRANULE)])
    for _ in range(300):
        model.step()
        model.check()


def put_into(ledger: SpaceLedger, space: Space) -> int:
    """Bring a range into a state; returns its offset."""
    offsets = ledger.take([GRANULE])
    assert offsets is not None
    (offset,) = offsets
    if space is Space.QUARANTINED:
        ledger.move(ExtentEvent.FENCE, [offset])
    elif space is not Space.HELD:
        ledger.move(ExtentEvent.DROP, [offset])
        if space is Space.LEASED:
            ledger.lease(offset, 9)
    return offset


@pytest.mark.parametrize("space", LISTED)
@pytest.mark.parametrize("event", [event for event in ExtentEvent if event is not ExtentEvent.TAKE])
def test_what_is_not_in_the_table_does_not_happen(space, event):
    """It is refused, and changes nothing: not even the other range that it was asked of."""
    ledger = SpaceLedger()
    ledger.open(SegmentAllocator(CAPACITY, granule_bytes=GRANULE), [])
    offset, other = put_into(ledger, space), put_into(ledger, Space.HELD)
    if (space, event) in TRANSITIONS:
        ledger.move(event, [offset])
        assert not ledger.is_in(offset, space)
    else:
        with pytest.raises(InternalError):
            ledger.move(event, [offset])
        assert ledger.is_in(offset, space)
    if space is not Space.HELD:
        with pytest.raises(InternalError):
            ledger.move(event, [other, offset])
        assert ledger.is_in(other, Space.HELD)


def test_every_state_can_be_reached_and_ends():
    """From FREE each state can be come to, and from each FREE again: nothing leaks by design."""
    reached = {Space.FREE}
    for _ in Space:
        reached |= {target for (space, _), target in TRANSITIONS.items() if space in reached}
    freed = {Space.FREE}
    for _ in Space:
        freed |= {space for (space, _), target in TRANSITIONS.items() if target in freed}
    assert reached == freed == set(Space)


def test_a_guarded_range_is_not_freed():
    """Another host copies from it; it is free a little after that has ended."""
    ledger = SpaceLedger()
    ledger.open(SegmentAllocator(CAPACITY, granule_bytes=GRANULE), [])
    offset = put_into(ledger, Space.WIPING)
    ledger.lease(offset, 0)
    assert ledger.end_leases(20, {offset}) == []
    assert ledger.end_leases(1_000, ()) == [offset]
    assert ledger.count_bytes(Space.LEASED) == 0
