"""Changes of an instance's cached blocks, collected for the servers that are told of them.

The prefix index reports each change as it happens; each server is sent the accumulated changes now
and then. A new server is first sent all blocks. Keys are truncated to eight bytes: that suffices to
choose an instance, and a collision costs a cache miss at most.

Threads: the engine reports under its lock; any thread may take changes.
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
"""Largest number of key changes in one message, which is then below about 150 KB."""
NO_CHANGES = BlockChanges()


def cut_key(key: bytes) -> int:
    """Return a block's key truncated to eight bytes, as an integer; see ``BlockChanges``."""
    return int.from_bytes(key[:8], "little")


class _Keys:
    """A set of keys, and for each reader the changes that it was not told yet.

    Args:
        is_remembered: if True, a new reader is first told all keys; if False, only later changes.
    """

    def __init__(self, *, is_remembered: bool = True) -> None:
        self._is_remembered = is_remembered
        self._held: set[int] = set()
        self._changes: dict[Hashable, dict[int, bool]] = {}
        """For each reader (a connected server): the keys that changed since it was last told; True
        if the key is now in the set.
        """

    def open(self, reader: Hashable) -> None:
        """Begin to collect, for a reader (one connected server), the keys added and removed."""
        if reader not in self._changes:
            self._changes[reader] = dict.fromkeys(self._held, True)

    def close(self, reader: Hashable) -> None:
        """Drop a reader and the changes collected for it."""
        self._changes.pop(reader, None)

    def note(self, key: int, *, is_held: bool) -> None:
        """Record that a key has been added to the set (``is_held``), or removed from it."""
        if self._is_remembered:
            (self._held.add if is_held else self._held.discard)(key)
        for changes in self._changes.values():
            # Move the latest change to the end: it is reported first, because it is the most likely
            # to be looked up.
            changes.pop(key, None)
            changes[key] = is_held

    def clear(self) -> None:
        """Empty the set and the changes collected for readers. The caller tells the readers to
        forget all keys.
        """
        self._held.clear()
        for changes in self._changes.values():
            changes.clear()

    def take(self, reader: Hashable) -> tuple[list[int], list[int]]:
        """Return the keys added and the keys removed since the last call, latest first.

        At most ``MAX_CHANGES``; the others stay for the next call.
        """
        changes = self._changes.get(reader, {})
        told = [changes.popitem() for _ in range(min(len(changes), MAX_CHANGES))]
        return [key for key, is_held in told if is_held], [key for key, held in told if not held]


class BlockInventory:
    """An ``IndexObserver`` that collects changes for each reader.

    Args:
        write: policy by which blocks go to the store, as ``TierConfig.write``; ``off`` without a
            store. A block that is being stored counts as stored until a lookup does not find it.
    """

    def __init__(self, write: Literal["write_through", "on_evict", "off"] = "off") -> None:
        self._write = write
        self._lock = threading.Lock()
        self._blocks = _Keys()
        self._group = _Keys()
        """Keys of KV blocks at whose end the sliding-window KV or the recurrent state is cached, so
        that the prefix up to there can be reused.
        """
        self._in_store = _Keys(is_remembered=False)
        """Keys of KV blocks that are in the store, as far as this instance knows by storing them or
        looking them up.
        """
        self._readers: set[Hashable] = set()
        self._resets: set[Hashable] = set()
        """Readers (connected servers) that must be told to forget all keys they were told."""
        self._num_states: Counter[int] = Counter()
        """Number of snapshots (saved recurrent states) after each KV block; several may follow one
        block, after different further tokens.
        """

    def open(self, reader: Hashable) -> None:
        """Begin to collect changes for a reader (one connected server); the first changes are all
        present blocks.
        """
        with self._lock:
            self._readers.add(reader)
            for keys in (self._blocks, self._group, self._in_store):
                keys.open(reader)

    def close(self, reader: Hashable) -> None:
        """Drop a reader and the changes collected for it."""
        with self._lock:
            self._readers.discard(reader)
            self._resets.discard(reader)
            for keys in (self._blocks, self._group, self._in_store):
                keys.close(reader)

    def take(self, reader: Hashable) -> BlockChanges | None:
        """Return the changes of cached blocks that a reader was not told yet; None if there are
        none.
        """
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
        """Record that the store has the blocks with these keys or, if not ``is_there``, that it
        lacks them.
        """
        with self._lock:
            for key in keys:
                self._in_store.note(cut_key(key), is_held=is_there)

    # These methods are called by the prefix index.

    def note_stored(self, node: PrefixNode) -> None:
        """Record that a block can now be found in the prefix index."""
        assert node.key is not None, "a partial block has no key"
        with self._lock:
            self._blocks.note(cut_key(node.key), is_held=True)
        if self._write == "write_through":
            self.note_in_store([node.key], is_there=True)

    def note_removed(self, key: bytes) -> None:
        """Record that a block can no longer be found in the prefix index."""
        with self._lock:
            self._blocks.note(cut_key(key), is_held=False)
        if self._write == "on_evict":
            self.note_in_store([key], is_there=True)

    def note_cleared(self) -> None:
        """Record that the prefix index was emptied."""
        with self._lock:
            self._blocks.clear()
            self._group.clear()
            self._num_states.clear()
            self._resets |= self._readers

    def note_state_kept(self, snapshot: Snapshot) -> None:
        """Record that a snapshot (the recurrent state after a block) can now be found."""
        key = cut_key(snapshot.parent_key)
        with self._lock:
            self._num_states[key] += 1
            self._group.note(key, is_held=True)

    def note_state_removed(self, snapshot: Snapshot) -> None:
        """Record that a snapshot (saved recurrent state) was removed; others after the same block
        may remain.
        """
        key = cut_key(snapshot.parent_key)
        with self._lock:
            self._num_states[key] -= 1
            if self._num_states[key] <= 0:
                del self._num_states[key]
                self._group.note(key, is_held=False)

    def note_window_kept(self, node: PrefixNode) -> None:
        """Record that a block's KV of the sliding-window layers can now be found."""
        assert node.key is not None, "a partial block has no key"
        with self._lock:
            self._group.note(cut_key(node.key), is_held=True)

    def note_window_removed(self, key: bytes) -> None:
        """Record that a block's KV of the sliding-window layers can no longer be found."""
        with self._lock:
            self._group.note(cut_key(key), is_held=False)
