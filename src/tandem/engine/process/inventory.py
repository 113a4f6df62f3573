"""The blocks that an instance tells its servers that it holds.

An index reports each change as it happens; a server is told the sum of the changes now and then. A
server that comes later is first told of all there is. Keys go out by their heads: eight bytes are
enough to choose an instance by, and a wrong one costs a miss.

Threads: the engine reports under its lock, any thread takes changes.
"""

import threading
from collections.abc import Hashable, Iterable
from typing import Literal

from tandem.core.wire import BlockChanges
from tandem.engine.groups.snapshots import Snapshot
from tandem.engine.scheduling.prefix_index import PrefixNode

__all__ = ["BlockInventory", "cut_key"]

MAX_CHANGES = 1 << 14
"""Told at once: a message stays below some 150 KB."""


def cut_key(key: bytes) -> int:
    """Return the head of a block's key; see ``BlockChanges``."""
    return int.from_bytes(key[:8], "little")


class BlockInventory:
    """An ``IndexObserver`` that sums changes up for each reader.

    Args:
        write: when blocks go to the store, as ``TierConfig.write``; off without one. A block that
            is being put there counts as there, until a lookup does not find it.
    """

    def __init__(self, write: Literal["write_through", "on_evict", "off"] = "off") -> None:
        self._write = write
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self._changes: dict[Hashable, dict[int, bool]] = {}
        """By reader: the last state of each block that has changed since it was told."""
        self._resets: set[Hashable] = set()
        """Readers who must forget what they were told."""
        self._in_store: dict[Hashable, dict[int, bool]] = {}
        """The same for blocks of the store, as far as this instance put or sought them."""

    def open(self, reader: Hashable) -> None:
        """Begin to keep changes for a reader; it is told of all there is first."""
        with self._lock:
            if reader not in self._changes:
                self._changes[reader] = dict.fromkeys(self._held, True)
                self._in_store[reader] = {}

    def close(self, reader: Hashable) -> None:
        """Forget a reader."""
        with self._lock:
            self._changes.pop(reader, None)
            self._in_store.pop(reader, None)
            self._resets.discard(reader)

    def take(self, reader: Hashable) -> BlockChanges | None:
        """Return changes that a reader has not been told; None if there is none."""
        with self._lock:
            changes, in_store = self._changes.get(reader), self._in_store.get(reader)
            is_reset = reader in self._resets
            if changes is None or in_store is None or not (changes or in_store or is_reset):
                return None
            self._resets.discard(reader)
            told = [changes.popitem() for _ in range(min(len(changes), MAX_CHANGES))]
            told_of_store = [in_store.popitem() for _ in range(min(len(in_store), MAX_CHANGES))]
        return BlockChanges(
            [key for key, is_held in told if is_held],
            [key for key, is_held in told if not is_held],
            [key for key, is_held in told_of_store if is_held],
            [key for key, is_held in told_of_store if not is_held],
            is_reset,
        )

    def note_in_store(self, keys: Iterable[bytes], *, is_there: bool) -> None:
        """Record that the store has blocks, or lacks them."""
        heads = [cut_key(key) for key in keys]
        with self._lock:
            for in_store in self._in_store.values():
                for head in heads:
                    in_store.pop(head, None)
                    in_store[head] = is_there

    # What the index reports.

    def note_stored(self, node: PrefixNode) -> None:
        """See ``IndexObserver``."""
        assert node.key is not None, "a partial block has no key"
        self._note(cut_key(node.key), is_held=True)
        if self._write == "write_through":
            self.note_in_store([node.key], is_there=True)

    def note_removed(self, key: bytes) -> None:
        """See ``IndexObserver``."""
        self._note(cut_key(key), is_held=False)
        if self._write == "on_evict":
            self.note_in_store([key], is_there=True)

    def note_cleared(self) -> None:
        """See ``IndexObserver``."""
        with self._lock:
            self._held.clear()
            for reader, changes in self._changes.items():
                changes.clear()
                self._resets.add(reader)

    def note_state_kept(self, snapshot: Snapshot) -> None:
        """Do nothing: where a prefix is taken up is the instance's own matter."""

    def note_state_removed(self, snapshot: Snapshot) -> None:
        """Do nothing, as above."""

    def _note(self, key: int, *, is_held: bool) -> None:
        with self._lock:
            if is_held:
                self._held.add(key)
            else:
                self._held.discard(key)
            for changes in self._changes.values():
                # The latest change is told first: it is the likeliest to be asked for.
                changes.pop(key, None)
                changes[key] = is_held
