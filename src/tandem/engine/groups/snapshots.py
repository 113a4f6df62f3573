"""The states that are kept of sequences: at which tokens, where, and which is given up first. Pure.

A prefix of a model with states is taken up only where a state was kept. A snapshot is worth the
tokens that it saves beyond the next shorter one of its chain. Worth is aged (GreedyDual): whatever
is given up raises the level from which a snapshot counts that is made or used later, so that what
nobody asks for goes in the end, however long it is.

A snapshot is filed under the key of the last full block before it (or the root), with the tokens
after that block. So it is found along the chain of keys that a request has anyway, and its own key
is that of a full block where it stands at the end of one. Copies and memory are the caller's.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tandem.engine.groups.chain import hash_block, pack_tokens

__all__ = ["Snapshot", "SnapshotTable", "choose_snapshots"]


def choose_snapshots(
    start: int, end: int, marks: Iterable[int], every: int, min_gain: int = 1
) -> list[int]:
    """Return the tokens at which a computation from ``start`` to ``end`` keeps a state, ascending.

    A chunk of a prefill must end at each of them; how it is cut changes no bit of the result.

    Args:
        start: tokens whose state is there already.
        end: tokens known; a state is kept there too.
        marks: where a later prompt may branch off: the end of the last message, where another
            prompt went on differently.
        every: also at multiples of this; 0 is never.
        min_gain: tokens that a state must save at least beyond the one before.
    """
    chosen: list[int] = []
    # Place marks first: a snapshot near a mark saves little beyond the mark's own.
    regular = range(start - start % every + every, end + 1, every) if every else ()
    for position in [*sorted(set(marks)), end, *regular]:
        is_new = start + min_gain <= position <= end
        if is_new and all(abs(position - other) >= min_gain for other in chosen):
            chosen.append(position)
    return sorted(chosen)


@dataclass(slots=True, eq=False)
class Snapshot:
    """A state of all layers that have one, at one token of one chain."""

    parent_key: bytes
    """Key of the last full block before the snapshot, or of the root."""
    tail: bytes
    """The tokens after that block, packed; fewer than a block."""
    position: int
    slot: int
    shorter: "Snapshot | None" = None
    """The next shorter one of the chain that was kept when this one was taken."""
    level: int = 0
    """Age level of the table when the snapshot was made or last used."""
    num_pins: int = 0
    is_kept: bool = True

    @property
    def key(self) -> bytes:
        """Key of the tokens before the snapshot: equal keys mean equal tokens."""
        return hash_block(self.parent_key, self.tail) if self.tail else self.parent_key


class SnapshotTable:
    """Table that finds snapshots and chooses which to evict.

    Args:
        block_size: tokens of a block of the chains.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._filed: dict[bytes, list[Snapshot]] = {}
        self._kept: dict[Snapshot, None] = {}
        """Snapshots in order of use, least recently used first."""
        self._level = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._kept)

    def find(
        self,
        root_key: bytes,
        keys: Sequence[bytes],
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        at_blocks: bool = False,
    ) -> Snapshot | None:
        """Return the longest snapshot of a prefix of at most ``max_tokens``; changes nothing.

        Args:
            root_key: where the chain starts.
            keys: of all full blocks among the first ``max_tokens``; more are ignored.
            token_ids: the tokens themselves.
            max_tokens: look no further.
            at_blocks: only where a block ends.
        """
        if not self._kept:
            return None
        size = self._block_size
        for depth in range(max_tokens // size, -1, -1):
            filed = self._filed.get(keys[depth - 1] if depth else root_key)
            if not filed:
                continue
            begin = depth * size
            query = pack_tokens(token_ids[begin : min(begin + size, max_tokens)])
            fitting = [s for s in filed if query.startswith(s.tail) and not (at_blocks and s.tail)]
            if fitting:
                return max(fitting, key=lambda s: s.position)
        return None

    def add(self, snapshot: Snapshot) -> None:
        """Keep a snapshot of tokens that have none; see ``find_equal``."""
        assert self.find_equal(snapshot.parent_key, snapshot.tail) is None, "a second snapshot"
        self._filed.setdefault(snapshot.parent_key, []).append(snapshot)
        snapshot.level = self._level
        self._kept[snapshot] = None

    def find_equal(self, parent_key: bytes, tail: bytes) -> Snapshot | None:
        """Return the snapshot of exactly these tokens."""
        return next((s for s in self._filed.get(parent_key, ()) if s.tail == tail), None)

    def touch(self, snapshot: Snapshot) -> None:
        """Note that a snapshot was used."""
        snapshot.level = self._level
        del self._kept[snapshot]
        self._kept[snapshot] = None

    def count_worth(self, snapshot: Snapshot) -> int:
        """Return the tokens that a snapshot saves beyond the next shorter one that is kept."""
        while snapshot.shorter is not None and not snapshot.shorter.is_kept:
            snapshot.shorter = snapshot.shorter.shorter
        return snapshot.position - (snapshot.shorter.position if snapshot.shorter else 0)

    def choose_victim(
        self, is_reachable: Callable[[Snapshot], bool], worth: int | None = None
    ) -> Snapshot | None:
        """Return the snapshot to evict first, never a pinned one; None if none may go.

        Args:
            is_reachable: False for a snapshot that cannot be used, as blocks before it are gone.
            worth: of a new snapshot that would take its place; None: something must go.
        """
        best, best_value = None, None if worth is None else self._level + worth
        for snapshot in self._kept:
            if snapshot.num_pins:
                continue
            if not is_reachable(snapshot):
                return snapshot
            value = snapshot.level + self.count_worth(snapshot)
            if best_value is None or value < best_value:
                best, best_value = snapshot, value
        return best

    def remove(self, snapshot: Snapshot, *, is_evicted: bool = False) -> None:
        """Forget a snapshot; its slot is the caller's again."""
        assert not snapshot.num_pins, f"a snapshot at {snapshot.position} is pinned"
        if is_evicted:
            self._level = max(self._level, snapshot.level + self.count_worth(snapshot))
        del self._kept[snapshot]
        filed = self._filed[snapshot.parent_key]
        filed.remove(snapshot)
        if not filed:
            del self._filed[snapshot.parent_key]
        snapshot.is_kept = False

    def check(self) -> None:
        """Assert the invariants; for tests."""
        filed = [s for own in self._filed.values() for s in own]
        assert len(filed) == len(self._kept), f"{len(filed)} filed of {len(self._kept)}"
        assert set(filed) == set(self._kept), "a snapshot is filed and not kept"
        assert len({s.key for s in filed}) == len(filed), "two snapshots of the same tokens"
        assert len({s.slot for s in filed}) == len(filed), "two snapshots in one slot"
        for snapshot in filed:
            assert snapshot.is_kept, f"a snapshot at {snapshot.position} was removed"
            assert self.count_worth(snapshot) > 0, f"{snapshot.position} saves nothing"
