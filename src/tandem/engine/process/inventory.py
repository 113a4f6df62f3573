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
"""Told at once: a message stays below some 150 KB."""
NO_CHANGES = BlockChanges()


def cut_key(key: bytes) -> int:
    """Return the head of a block's key; see ``BlockChanges``."""
    return int.from_bytes(key[:8], "little")


class _Keys:
    """Keys that come and go, and their changes since each reader was told.

    Args:
        is_remembered: True: a new reader is told of all keys; False: of changes alone.
    """

    def __init__(self, *, is_remembered: bool = True) -> None:
        self._is_remembered = is_remembered
        self._held: set[int] = set()
        self._changes: dict[Hashable, dict[int, bool]] = {}
        """By reader: the last state of each key that has changed."""

    def open(self, reader: Hashable) -> None:
        """Begin to keep changes for a reader."""
        if reader not in self._changes:
            self._changes[reader] = dict.fromkeys(self._held, True)

    def close(self, reader: Hashable) -> None:
        """Forget a reader."""
        self._changes.pop(reader, None)

    def note(self, key: int, *, is_held: bool) -> None:
        """Take in a key's state."""
        if self._is_remembered:
            (self._held.add if is_held else self._held.discard)(key)
        for changes in self._changes.values():
            # Move the latest change to the end: it is reported first, being the likeliest to be
            # looked up.
            changes.pop(key, None)
            changes[key] = is_held

    def clear(self) -> None:
        """Forget all keys; readers are told so by other means."""
        self._held.clear()
        for changes in self._changes.values():
            changes.clear()

    def take(self, reader: Hashable) -> tuple[list[int], list[int]]:
        """Return keys that came and keys that went, ``MAX_CHANGES`` at most."""
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
        """Blocks whose window is there, or behind which a state is; see ``BlockChanges``."""
        self._in_store = _Keys(is_remembered=False)
        """Blocks of the store, as far as this instance put or sought them."""
        self._readers: set[Hashable] = set()
        self._resets: set[Hashable] = set()
        """Readers who must forget what they were told."""
        self._num_states: Counter[int] = Counter()
        """States behind each block: several may begin with the same block and part after it."""

    def open(self, reader: Hashable) -> None:
        """Begin to keep changes for a reader; it is told of all there is first."""
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
        """Return changes that a reader has not been told; None if there is none."""
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

    # Reports from the prefix index.

    def note_stored(self, node: PrefixNode) -> None:
        """Record a block that can be found from now on."""
        assert node.key is not None, "a partial block has no key"
        with self._lock:
            self._blocks.note(cut_key(node.key), is_held=True)
        if self._write == "write_through":
            self.note_in_store([node.key], is_there=True)

    def note_removed(self, key: bytes) -> None:
        """Record that a block cannot be found any more."""
        with self._lock:
            self._blocks.note(cut_key(key), is_held=False)
        if self._write == "on_evict":
            self.note_in_store([key], is_there=True)

    def note_cleared(self) -> None:
        """Record that no block can be found any more."""
        with self._lock:
            self._blocks.clear()
            self._group.clear()
            self._num_states.clear()
            self._resets |= self._readers

    def note_state_kept(self, snapshot: Snapshot) -> None:
        """Record a state that can be found behind a block."""
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
        """Record that the same KV cannot be found any more."""
        with self._lock:
            self._group.note(cut_key(key), is_held=False)
