"""The blocks that an instance tells its servers that it holds.

An index reports each change as it happens; a server is told the sum of the changes now and then. A
server that comes later is first told of all there is. Keys go out by their heads: eight bytes are
enough to choose an instance by, and a wrong one costs a miss.

Threads: the engine reports under its lock, any thread takes changes.
"""

import threading
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Literal

from tandem.core.wire import BlockChanges
from tandem.engine.groups.snapshots import Snapshot
from tandem.engine.scheduling.prefix_index import PrefixNode

__all__ = ["BlockInventory", "cut_key"]

MAX_CHANGES = 1 << 14
"""Largest number of key changes in one message, which stays below some 150 KB."""
NO_CHANGES = BlockChanges()


def cut_key(key: bytes) -> int:
    """Return the head of a block's key; see ``BlockChanges``."""
    return int.from_bytes(key[:8], "little")


class _Keys:
    """A set of keys, with the changes that each reader has not been told.

    Args:
        is_remembered: True: a new reader is told of all keys; False: of changes alone.
    """

    def __init__(self, *, is_remembered: bool = True) -> None:
        self._is_remembered = is_remembered
        self._held: set[int] = set()
        self._changes: dict[Hashable, dict[int, bool]] = {}
        """For each reader: the last state of each changed key."""

    def open(self, reader: Hashable) -> None:
        """Start recording changes for a reader."""
        if reader not in self._changes:
            self._changes[reader] = dict.fromkeys(self._held, True)

    def close(self, reader: Hashable) -> None:
        """Forget a reader."""
        self._changes.pop(reader, None)

    def note(self, key: int, *, is_held: bool) -> None:
        """Record that a key is now held, or not."""
        if self._is_remembered:
            (self._held.add if is_held else self._held.discard)(key)
        for changes in self._changes.values():
            # Move the latest change to the end: it is reported first, because it is the most likely
            # to be looked up.
            changes.pop(key, None)
            changes[key] = is_held

    def clear(self) -> None:
        """Forget all keys; the caller tells readers to reset."""
        self._held.clear()
        for changes in self._changes.values():
            changes.clear()

    def take(self, reader: Hashable) -> tuple[list[int], list[int]]:
        """Return the keys added and the keys removed since the last call, at most
        ``MAX_CHANGES``.
        """
        changes = self._changes.get(reader, {})
        told = [changes.popitem() for _ in range(min(len(changes), MAX_CHANGES))]
        return [key for key, is_held in told if is_held], [key for key, held in told if not held]


class BlockInventory:
    """An ``IndexObserver`` that sums changes up for each reader.

    Args:
        write: when blocks go to the store, as ``TierConfig.write``; off without one. A block that
            is being put there counts as there, until a lookup does not find it.
    """

    def __init__(self, write: Literal["write_through", "on_evict", "off"] = "off") -> None:
        self._write = write
        self._lock = threading.Lock()
        self._blocks = _Keys()
        self._group = _Keys()
        """Blocks with a cached window, or with a cached state behind them; see ``BlockChanges``."""
        self._in_store = _Keys(is_remembered=False)
        """Blocks in the store, as far as this instance has stored them or looked them up."""
        self._readers: set[Hashable] = set()
        self._resets: set[Hashable] = set()
        """Readers that must forget everything they were told before."""
        self._num_states: Counter[int] = Counter()
        """Number of states behind each block: several may share a block and differ after it."""

    def open(self, reader: Hashable) -> None:
        """Start recording changes for a reader, beginning with everything that is held."""
        with self._lock:
            self._readers.add(reader)
            for keys in (self._blocks, self._group, self._in_store):
                keys.open(reader)

    def close(self, reader: Hashable) -> None:
        """Forget a reader."""
        with self._lock:
            self._readers.discard(reader)
            self._resets.discard(reader)
            for keys in (self._blocks, self._group, self._in_store):
                keys.close(reader)

    def take(self, reader: Hashable) -> BlockChanges | None:
        """Return the changes that a reader has not been told; None if there are none."""
        with self._lock:
            if reader not in self._readers:
                return None
            is_reset = reader in self._resets
            self._resets.discard(reader)
            changes = BlockChanges(
                *self._blocks.take(reader),
                *self._in_store.take(reader),
                is_reset,
                *self._group.take(reader),
            )
        return None if changes == NO_CHANGES else changes

    def note_in_store(self, keys: Iterable[bytes], *, is_there: bool) -> None:
        """Record that the store has blocks, or lacks them."""
        with self._lock:
            for key in keys:
                self._in_store.note(cut_key(key), is_held=is_there)

    # These methods are called by the prefix index.

    def note_stored(self, node: PrefixNode) -> None:
        """Record that a block is now findable in the index."""
        assert node.key is not None, "a partial block has no key"
        with self._lock:
            self._blocks.note(cut_key(node.key), is_held=True)
        if self._write == "write_through":
            self.note_in_store([node.key], is_there=True)

    def note_removed(self, key: bytes) -> None:
        """Record that a block is no longer findable in the index."""
        with self._lock:
            self._blocks.note(cut_key(key), is_held=False)
        if self._write == "on_evict":
            self.note_in_store([key], is_there=True)

    def note_cleared(self) -> None:
        """Record that no block is findable any more."""
        with self._lock:
            self._blocks.clear()
            self._group.clear()
            self._num_states.clear()
            self._resets |= self._readers

    def note_state_kept(self, snapshot: Snapshot) -> None:
        """Record that a state behind a block is now findable."""
        key = cut_key(snapshot.parent_key)
        with self._lock:
            self._num_states[key] += 1
            self._group.note(key, is_held=True)

    def note_state_removed(self, snapshot: Snapshot) -> None:
        """Record that a state cannot be found any more; another may follow the same block."""
        key = cut_key(snapshot.parent_key)
        with self._lock:
            self._num_states[key] -= 1
            if self._num_states[key] <= 0:
                del self._num_states[key]
                self._group.note(key, is_held=False)

    def note_window_kept(self, node: PrefixNode) -> None:
        """Record a block whose KV of the layers with a window can be found."""
        assert node.key is not None, "a partial block has no key"
        with self._lock:
            self._group.note(cut_key(node.key), is_held=True)

    def note_window_removed(self, key: bytes) -> None:
        """Record that a block's KV of the window layers is no longer findable."""
        with self._lock:
            self._group.note(cut_key(key), is_held=False)
