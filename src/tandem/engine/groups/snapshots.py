"""A table of snapshots of recurrent states: where they are, and which is evicted first. Pure.

A prefix of a model with states can be reused only up to a snapshot. The worth of a snapshot is the
number of tokens that it saves beyond the next shorter snapshot of its chain. Worth ages
(GreedyDual): every eviction raises a level, which is added to the worth of snapshots that are made
or used later. So a snapshot that is not used is evicted in the end, however long it is.

A snapshot is filed under the key of the last full block before it (or the root), with the tokens
after that block, so a request finds it by the block keys that it has anyway. A snapshot at the end
of a full block has that block's key as its own. Copies and memory are the caller's.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tandem.engine.groups.chain import hash_block, pack_tokens

__all__ = ["Snapshot", "SnapshotTable", "choose_snapshots"]


def choose_snapshots(
    start: int, end: int, marks: Iterable[int], every: int, min_gain: int = 1
) -> list[int]:
    """Return the positions at which a prefill from ``start`` to ``end`` saves snapshots, ascending.

    A chunk of the prefill must end at each of them; how a prefill is cut changes no bit of its
    result.

    Args:
        start: number of tokens whose state exists already.
        end: number of known tokens; a snapshot is saved there too.
        marks: positions from which a later prompt may diverge, such as the end of the last message.
        every: save also at multiples of this number of tokens; 0: not.
        min_gain: least distance between snapshots, in tokens.
    """
    chosen: list[int] = []
    # Choose marks (positions from which a later prompt may diverge) first: a regular snapshot near
    # a mark would save little beyond the mark's own.
    regular = range(start - start % every + every, end + 1, every) if every else ()
    for position in [*sorted(set(marks)), end, *regular]:
        is_new = start + min_gain <= position <= end
        if is_new and all(abs(position - other) >= min_gain for other in chosen):
            chosen.append(position)
    return sorted(chosen)


@dataclass(slots=True, eq=False)
class Snapshot:
    """The saved state of all recurrent layers after a certain token of a chain (a sequence of
    tokens from its start on).
    """

    parent_key: bytes
    """Key of the last full KV block before the snapshot, or the root's key if there is none."""
    tail: bytes
    """The tokens between that block and the snapshot, packed as bytes; fewer than a block has."""
    position: int
    slot: int
    shorter: "Snapshot | None" = None
    """The longest shorter snapshot of the same tokens, as the table had it when this one was taken.
    """
    level: int = 0
    """Age level of the table when the snapshot was made or last used. The table raises its level
    with each eviction, so a snapshot that is unused for long falls behind.
    """
    num_pins: int = 0
    is_kept: bool = True

    @property
    def key(self) -> bytes:
        """Key of all tokens before the snapshot: equal keys mean equal tokens."""
        return hash_block(self.parent_key, self.tail) if self.tail else self.parent_key


class SnapshotTable:
    """The table of all snapshots (saved recurrent states), which also chooses the one to evict.

    Args:
        block_size: tokens per block of the chains.
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
        """Return the longest snapshot (saved recurrent state) of a prefix of at most ``max_tokens``
        tokens, or None; changes nothing.

        Args:
            root_key: the first key of the chain.
            keys: keys of all full blocks among the first ``max_tokens`` tokens; more are ignored.
            token_ids: the tokens themselves.
            max_tokens: largest number of tokens.
            at_blocks: if True, consider only snapshots at the end of a block.
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
        """Add a snapshot. The caller ensures that there is none of the same tokens (see
        ``find_equal``).
        """
        assert self.find_equal(snapshot.parent_key, snapshot.tail) is None, "a second snapshot"
        self._filed.setdefault(snapshot.parent_key, []).append(snapshot)
        snapshot.level = self._level
        self._kept[snapshot] = None

    def find_equal(self, parent_key: bytes, tail: bytes) -> Snapshot | None:
        """Return the snapshot of exactly these tokens (those up to the block ``parent_key`` and
        ``tail``), or None.
        """
        return next((s for s in self._filed.get(parent_key, ()) if s.tail == tail), None)

    def touch(self, snapshot: Snapshot) -> None:
        """Make a snapshot the most recently used, and give it the table's present age level."""
        snapshot.level = self._level
        del self._kept[snapshot]
        self._kept[snapshot] = None

    def count_worth(self, snapshot: Snapshot) -> int:
        """Return how many tokens less a request computes if it goes on from this snapshot and not
        from the next shorter one of the same chain in the table.
        """
        while snapshot.shorter is not None and not snapshot.shorter.is_kept:
            snapshot.shorter = snapshot.shorter.shorter
        return snapshot.position - (snapshot.shorter.position if snapshot.shorter else 0)

    def choose_victim(
        self, is_reachable: Callable[[Snapshot], bool], worth: int | None = None
    ) -> Snapshot | None:
        """Return the snapshot to evict next, never a pinned one; None if none may be evicted.

        An unusable snapshot comes first, then the one of least value: its worth (tokens that it
        saves) plus its age level.

        Args:
            is_reachable: returns False for a snapshot that is unusable, because blocks before it
                are gone.
            worth: tokens saved by the new snapshot that needs the place; a usable snapshot is
                returned only if its value is less than the new one's. None: any may be.
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
        """Remove a snapshot from the table; its state slot now belongs to the caller."""
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
