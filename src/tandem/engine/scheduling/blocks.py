"""The pool of KV blocks: the free list, and a count of references for each block.

A block is known here by its id alone, an index into the memory that the runner allocated; tokens
and prefixes are the prefix index's business. A block is in exactly one state:

- *free*: without references, not in the prefix index, in the free list;
- *used*: referenced by at least one request, pending copy or load; in the prefix index or not;
- *cached*: without references, but in the prefix index, which may evict it at any time.

A block gets memory when it is first allocated, and keeps it. Blocks are first allocated in
ascending order of id, so the blocks with memory are those with ids below some number. A free block
that has memory is allocated before one that has none.

Pure, except for calls of ``BlockMemory``. Only the scheduler's thread uses it.
"""

from typing import NamedTuple, Protocol

from tandem.core.errors import CapacityError, ConfigError
from tandem.engine.groups.group import GroupBlock

__all__ = [
    "BlockCopy",
    "BlockMemory",
    "BlockPool",
    "KeyedBlock",
]


class BlockCopy(NamedTuple):
    """A copy of a block's first ``num_tokens`` tokens, in all layers, before the step's forward
    pass.

    Both blocks are referenced until the step is completed. No block is both a source and a
    destination of copies of one step, so these may run in any order.
    """

    src_block_id: int
    dst_block_id: int
    num_tokens: int


class KeyedBlock(NamedTuple):
    """A cached full block, window block or state snapshot, as reported to lower tiers for copying.

    It is not referenced. Whoever copies it calls ``Scheduler.is_unchanged`` after the copy, and
    discards the copy if the block has been allocated anew meanwhile.
    """

    key: bytes
    """Key of the tokens up to the end of the block."""
    block: GroupBlock
    generation: int
    """Value of ``BlockPool.get_generation`` when the block was reported; a new value means new
    content.
    """


class BlockMemory(Protocol):
    """The memory behind a block pool.

    Addresses for all blocks exist from the start; ``reserve_blocks`` takes physical memory for them
    from the operating system, piece by piece, before they are first allocated.
    """

    def reserve_blocks(self, num_blocks: int) -> int:
        """Reserve memory for the blocks with ids below ``num_blocks``, or for as many as there is
        memory.

        Returns: number of blocks that have memory now; it may exceed ``num_blocks`` and never
            falls.
        """
        ...


class BlockPool:
    """The free list and reference counts of ``num_blocks`` blocks. All operations are O(1).

    Args:
        num_blocks: blocks that the runner has addresses for; ids ``0..num_blocks - 1``.
        memory: asked for memory before a block is first allocated; None: all blocks have memory.

    Raises: ConfigError (``num_blocks`` is less than 1).
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
        """Number of blocks that can be allocated without eviction."""
        return len(self._free) - (self._num_planned - self.num_blocks)

    @property
    def is_short(self) -> bool:
        """True while memory for more blocks is lacking: from a failed attempt to reserve some until
        ``retry`` succeeds.
        """
        return self.num_blocks < self._num_planned

    @property
    def num_cached(self) -> int:
        """Number of blocks that are in the prefix index and not referenced."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Number of blocks that a request, a pending copy or a load references."""
        return self._num_planned - len(self._free) - self._num_cached

    def get_num_refs(self, block_id: int) -> int:
        """Return a block's number of references: by requests, pending copies and loads, not by the
        index.
        """
        return self._num_refs[block_id]

    def get_generation(self, block_id: int) -> int:
        """Return how often a block was allocated.

        If two calls return the same number, no other request got the block between them.
        """
        return self._generations[block_id]

    def reserve(self, num_blocks: int) -> None:
        """Reserve memory so that ``num_blocks`` blocks (at most all free ones) can be allocated.

        If memory runs out, ``is_short`` becomes True, and ``num_blocks`` and ``num_free`` count
        only blocks that have memory. Does nothing during a shortage; ``retry`` ends it.
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
        """Try to end a memory shortage by reserving memory for one more block.

        If that succeeds, ``num_blocks`` counts all blocks again. Does nothing without a shortage.
        """
        if not self.is_short or self._memory is None:
            return
        num_reserved = self._memory.reserve_blocks(self.num_blocks + 1)
        if num_reserved > self.num_blocks:
            self._num_reserved, self.num_blocks = num_reserved, self._num_planned

    def allocate(self) -> int:
        """Take a block from the free list, with one reference; return its id.

        Raises: CapacityError (no block is free, or no memory). Cached blocks are not evicted; the
            caller does that.
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
        """Add a reference to a used or cached block; return True if it had none before."""
        num_refs = self._num_refs[block_id]
        was_cached = num_refs == 0
        if was_cached:
            assert self._is_held[block_id], f"retain of free block {block_id}"
            self._num_cached -= 1
        self._num_refs[block_id] = num_refs + 1
        return was_cached

    def release(self, block_id: int) -> bool:
        """Drop a reference; return True if the block is now cached: unreferenced, but in the index.

        The last reference of a block that is not in the index returns it to the free list.
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
        """Mark a block as being in the prefix index, so that it stays cached after its last
        reference. It must be referenced now.
        """
        assert self._num_refs[block_id] > 0, f"hold of unreferenced block {block_id}"
        assert not self._is_held[block_id], f"second hold of block {block_id}"
        self._is_held[block_id] = True

    def drop_hold(self, block_id: int) -> None:
        """Mark a block as no longer in the prefix index; if it has no references, it becomes
        free.
        """
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
