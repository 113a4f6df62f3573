"""The pool of KV blocks: references to blocks, and the free list.

Owns the free list and the reference counts; knows nothing of tokens, of prefixes or of memory
(a block id is an index into whatever the runner allocated). A block is in exactly one state:

- *free*: without references, not in the prefix index, in the free list;
- *used*: at least one request (or pending copy, or load) references it, held by the index or not;
- *cached*: without references, but in the index, which may evict it at any time.

Memory for blocks is reserved as they are first taken, in the order of their ids, and stays
reserved. So what has memory is a range from block 0 on, and free blocks that were taken before go
first.

Pure, but for the ``BlockMemory`` that it asks, and single-threaded: the scheduler's thread alone
touches it.
"""

from typing import NamedTuple, Protocol

from tandem.core.errors import CapacityError, ConfigError

__all__ = [
    "BlockCopy",
    "BlockMemory",
    "BlockPool",
    "KeyedBlock",
    "find_state_slot",
    "find_window_block",
    "is_full_block",
    "make_state_id",
    "make_window_id",
]

WINDOW_BASE = 1 << 30
"""First number by which transfers name window blocks; no pool has so many blocks."""


class BlockCopy(NamedTuple):
    """Copy the first ``num_tokens`` of a block, in all layers, before the step's forward pass.

    Both blocks are pinned until the step is completed. No destination of a step is a source of
    the same step, so the copies of a step may run in any order.
    """

    src_block_id: int
    dst_block_id: int
    num_tokens: int


def make_state_id(slot: int) -> int:
    """Return the number by which transfers name a state slot: negative, unlike any block id."""
    return -1 - slot


def find_state_slot(block_id: int) -> int | None:
    """Return the state slot that a transfer's number names; None if it names a block."""
    return -1 - block_id if block_id < 0 else None


def make_window_id(block_id: int) -> int:
    """Return the number by which transfers name a window block."""
    return WINDOW_BASE + block_id


def find_window_block(block_id: int) -> int | None:
    """Return the window block that a transfer's number names; None if it names something else."""
    return block_id - WINDOW_BASE if block_id >= WINDOW_BASE else None


def is_full_block(block_id: int) -> bool:
    """Return True if a transfer's number names a block of the layers that see all tokens."""
    return 0 <= block_id < WINDOW_BASE


class KeyedBlock(NamedTuple):
    """A full block of the prefix index, its window block, or a kept state, for a lower tier.

    Not pinned: a copier asks ``Scheduler.is_unchanged`` afterwards, and discards the copy
    if the block has been given to another request meanwhile.
    """

    key: bytes
    """Key of the tokens up to the end of the block."""
    block_id: int
    """Block id, or the number that ``make_state_id`` or ``make_window_id`` returned."""
    generation: int
    """``BlockPool.get_generation`` when the block was reported."""


class BlockMemory(Protocol):
    """The memory of the blocks, reserved as far as it is needed."""

    def reserve_blocks(self, num_blocks: int) -> int:
        """Reserve memory of the first ``num_blocks`` blocks, or as many as the machine has it for.

        Returns: how many have memory now, maybe more than asked for; never fewer than before.
        """
        ...


class BlockPool:
    """Free list and reference counts of ``num_blocks`` blocks, all O(1).

    Args:
        num_blocks: blocks that the runner has addresses for, ids ``0..num_blocks - 1``.
        memory: asked before a block is taken for the first time; None: all have memory.

    Raises: ConfigError (no block at all).
    """

    def __init__(self, num_blocks: int, memory: BlockMemory | None = None) -> None:
        if num_blocks < 1:
            raise ConfigError(
                "engine.create_pool",
                f"{num_blocks} KV blocks: give the cache memory for at least one",
                field="engine.num_kv_blocks",
            )
        self.num_blocks = num_blocks
        """Number of blocks that can be used; while memory is short, those with memory."""
        self._num_planned = num_blocks
        self._memory = memory
        self._num_reserved = num_blocks if memory is None else 0
        self._num_begun = 0
        # Use a stack, so that the block freed last is reused first, while it is still in the CPU's
        # caches. Blocks never used come last, in ascending order of id.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_refs = [0] * num_blocks
        self._is_held = [False] * num_blocks
        self._generations = [0] * num_blocks
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be taken at once."""
        return len(self._free) - (self._num_planned - self.num_blocks)

    @property
    def is_short(self) -> bool:
        """True if the machine lacked memory for blocks that were asked for."""
        return self.num_blocks < self._num_planned

    @property
    def num_cached(self) -> int:
        """Blocks in the index without references."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Blocks that a request, a pending copy or a load references."""
        return self._num_planned - len(self._free) - self._num_cached

    def get_num_refs(self, block_id: int) -> int:
        """Return references of requests, pending copies and loads; the index's hold is not one."""
        return self._num_refs[block_id]

    def get_generation(self, block_id: int) -> int:
        """Return the number of times that a block was allocated: equal before and after means same
        content.
        """
        return self._generations[block_id]

    def reserve(self, num_blocks: int) -> None:
        """Reserve memory so that ``num_blocks`` free blocks can be taken, or all that are free.

        If the machine lacks it, ``num_blocks`` and ``num_free`` count what there is from now on.
        """
        if self.is_short or self._memory is None:
            return
        num_taken_before = len(self._free) - (self._num_planned - self._num_begun)
        wanted = min(self._num_begun + num_blocks - num_taken_before, self._num_planned)
        if wanted <= self._num_reserved:
            return
        self._num_reserved = self._memory.reserve_blocks(wanted)
        if self._num_reserved < wanted:
            self.num_blocks = self._num_reserved

    def retry(self) -> None:
        """After a shortage, try to reserve memory for one more block; success ends the shortage."""
        if not self.is_short or self._memory is None:
            return
        num_reserved = self._memory.reserve_blocks(self.num_blocks + 1)
        if num_reserved > self.num_blocks:
            self._num_reserved, self.num_blocks = num_reserved, self._num_planned

    def allocate(self) -> int:
        """Take a free block with one reference.

        Raises: CapacityError (none free, or no memory; evicting cached ones is the caller's
            decision).
        """
        self.reserve(1)
        if self.num_free < 1:
            raise CapacityError(
                "blocks.allocate",
                f"0 of {self.num_blocks} blocks free, {self._num_cached} cached: evict first",
            )
        block_id = self._free.pop()
        self._num_begun = max(self._num_begun, block_id + 1)
        self._num_refs[block_id] = 1
        self._generations[block_id] += 1
        return block_id

    def retain(self, block_id: int) -> bool:
        """Add a reference to a used or cached block; True if it was only cached until now."""
        num_refs = self._num_refs[block_id]
        was_cached = num_refs == 0
        if was_cached:
            assert self._is_held[block_id], f"retain of free block {block_id}"
            self._num_cached -= 1
        self._num_refs[block_id] = num_refs + 1
        return was_cached

    def release(self, block_id: int) -> bool:
        """Drop a reference; True if that was the last one of a block the index holds.

        A block that the index does not hold goes to the free list with its last reference.
        """
        num_refs = self._num_refs[block_id] - 1
        assert num_refs >= 0, f"release of unreferenced block {block_id}"
        self._num_refs[block_id] = num_refs
        if num_refs > 0:
            return False
        if self._is_held[block_id]:
            self._num_cached += 1
            return True
        self._free.append(block_id)
        return False

    def hold(self, block_id: int) -> None:
        """Mark a used block as indexed, so that it stays cached after its last reference."""
        assert self._num_refs[block_id] > 0, f"hold of unreferenced block {block_id}"
        assert not self._is_held[block_id], f"second hold of block {block_id}"
        self._is_held[block_id] = True

    def drop_hold(self, block_id: int) -> None:
        """Mark a block as not indexed; a block without references becomes free at once."""
        assert self._is_held[block_id], f"drop_hold of block {block_id} that is not held"
        self._is_held[block_id] = False
        if self._num_refs[block_id] == 0:
            self._num_cached -= 1
            self._free.append(block_id)

    def check(self) -> None:
        """Assert that each block is in exactly one state. O(num_blocks), for tests."""
        assert self._num_begun <= self._num_reserved, (
            f"{self._num_begun} blocks taken, {self._num_reserved} have memory"
        )
        free = set(self._free)
        assert len(free) == len(self._free), f"a block is free twice: {sorted(self._free)}"
        cached = 0
        for block_id, num_refs in enumerate(self._num_refs):
            is_held = self._is_held[block_id]
            assert num_refs >= 0, f"block {block_id} has {num_refs} references"
            is_idle = num_refs == 0 and not is_held
            assert is_idle == (block_id in free), (
                f"block {block_id}: {num_refs} references, held={is_held}, "
                f"in free list={block_id in free}"
            )
            cached += num_refs == 0 and is_held
        assert cached == self._num_cached, f"{cached} cached blocks, counted {self._num_cached}"
