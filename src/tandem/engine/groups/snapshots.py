"""Which states of a sequence are kept: where they are taken, and which is given up first. Pure.

A prefix of a model with states is taken up only where a state was kept. A snapshot is worth the
tokens that it saves beyond the next shorter one that is kept, by byte. Counting and eviction are
here; copies, slots and clocks are the caller's.
"""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Snapshot", "SnapshotTable", "choose_snapshots"]


def choose_snapshots(start: int, end: int, marks: Iterable[int], every: int) -> list[int]:
    """Return the tokens at which a computation from ``start`` to ``end`` keeps a state, ascending.

    A chunk of a prefill must end at each of them; how it is cut changes no bit of the result.

    Args:
        start: tokens whose state is there already.
        end: tokens known; a state is kept there in any case.
        marks: where a later prompt may branch off: the end of the last message, an image's end,
            where another prompt went on differently.
        every: also at multiples of this; 0 is never.
    """
    if end <= start:
        return []
    chosen = {mark for mark in marks if start < mark <= end} | {end}
    if every:
        chosen.update(range(start - start % every + every, end + 1, every))
    return sorted(chosen)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state of all state groups at one token of one chain."""

    key: bytes
    """Of the tokens before it: equal keys are equal tokens."""
    position: int
    parent: bytes | None
    """The next shorter snapshot of the same chain when it was taken."""


class SnapshotTable:
    """The snapshots that are kept, within a number of slots.

    A shorter snapshot that is given up leaves its place to its own parent, so what the longer ones
    save grows. Of equal worth, the one unused for longest goes first.

    Args:
        num_slots: snapshots that fit.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._kept: dict[bytes, Snapshot] = {}
        """Least recently used first."""
        self._pinned: dict[bytes, int] = {}
        self.num_saved_tokens = 0
        """Tokens that hits have spared."""
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def add(self, snapshot: Snapshot) -> list[Snapshot] | None:
        """Keep a snapshot; return what had to go for it, or None if nothing may go."""
        if snapshot.key in self._kept:
            self._touch(snapshot.key)
            return []
        gone: list[Snapshot] = []
        while len(self._kept) >= self.num_slots:
            victim = self._choose_victim()
            if victim is None:
                return None
            self._drop(victim)
            self.num_evicted += 1
            gone.append(victim)
        self._kept[snapshot.key] = snapshot
        return gone

    def use(self, key: bytes) -> Snapshot:
        """Take a prefix up at a snapshot that is kept; pins it until ``release``."""
        snapshot = self._kept[key]
        self._touch(key)
        self._pinned[key] = self._pinned.get(key, 0) + 1
        self.num_saved_tokens += snapshot.position
        return snapshot

    def release(self, key: bytes) -> None:
        """End ``use``: the state has been copied to a slot of the sequence's own."""
        self._pinned[key] -= 1
        if not self._pinned[key]:
            del self._pinned[key]

    def count_worth(self, key: bytes) -> int:
        """Return the tokens that a snapshot saves beyond the next shorter one that is kept."""
        snapshot = self._kept[key]
        parent = self._find_parent(snapshot)
        return snapshot.position - (parent.position if parent is not None else 0)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert len(self._kept) <= self.num_slots, f"{len(self._kept)} of {self.num_slots} slots"
        assert set(self._pinned) <= set(self._kept), "a pinned snapshot is gone"
        for snapshot in self._kept.values():
            parent = self._find_parent(snapshot)
            assert parent is None or parent.position < snapshot.position, snapshot

    def _find_parent(self, snapshot: Snapshot) -> Snapshot | None:
        return None if snapshot.parent is None else self._kept.get(snapshot.parent)

    def _touch(self, key: bytes) -> None:
        self._kept[key] = self._kept.pop(key)

    def _choose_victim(self) -> Snapshot | None:
        free = (s for s in self._kept.values() if s.key not in self._pinned)
        return min(free, key=lambda s: self.count_worth(s.key), default=None)

    def _drop(self, victim: Snapshot) -> None:
        del self._kept[victim.key]
        for key, snapshot in self._kept.items():
            if snapshot.parent == victim.key:
                self._kept[key] = Snapshot(snapshot.key, snapshot.position, victim.parent)
