"""Hit ratios of a trace without time: each request ends before the next arrives.

Two caches: ``PlainLru``, for which the ratios of a published trace are stated, and ``IndexCache``,
the product's prefix index over its block pool. Both count the leading blocks of a request that are
in the cache; a block after a missing one is no hit. The last hash of a prompt may stand for fewer
tokens than the others; it counts as a block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from tandem.core.errors import CapacityError
from tandem.core.loads.traces import TraceRow
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex

__all__ = ["BlockCache", "HitCount", "IndexCache", "PlainLru", "count_hits", "count_unique"]


class HitCount(msgspec.Struct, frozen=True, kw_only=True):
    """The hits of a replayed trace."""

    num_requests: int
    num_blocks: int
    """Number of blocks of all requests."""
    num_hits: int
    mean_ratio: float
    """Mean of the requests' hit ratios, in which short prompts count as much as long ones."""

    @property
    def ratio(self) -> float:
        """Share of all blocks that were hits."""
        return self.num_hits / max(self.num_blocks, 1)


class BlockCache(Protocol):
    """A cache of blocks that serves one request after the other."""

    def serve(self, hash_ids: Sequence[int]) -> int:
        """Return how many leading blocks are in the cache, then add all blocks of the request."""
        ...


class PlainLru:
    """A cache that evicts the least recently used block; a request uses its blocks from first to
    last.

    Args:
       num_blocks: capacity in blocks; None for no limit.
    """

    def __init__(self, num_blocks: int | None) -> None:
        self._num_blocks = num_blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def serve(self, hash_ids: Sequence[int]) -> int:
        """Return how many leading blocks of a request are in the cache, then add all of its
        blocks.
        """
        held = self._held
        num_hits = 0
        for hash_id in hash_ids:
            if hash_id not in held:
                break
            num_hits += 1
        for hash_id in hash_ids:
            held[hash_id] = None
            held.move_to_end(hash_id)
            if self._num_blocks is not None and len(held) > self._num_blocks:
                held.popitem(last=False)
        return num_hits


class IndexCache:
    """The prefix index of an instance; each hash id is a token, and a block has one token.

    Args:
       num_blocks: blocks of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex(self._pool, 1)
        self._root_key = self._index.make_root_key("")

    def serve(self, hash_ids: Sequence[int]) -> int:
        """Return how many leading blocks of a request are in the cache, then add all of its blocks.

        Raises: CapacityError (the pool has fewer blocks than the request).
        """
        pool, index = self._pool, self._index
        if len(hash_ids) > pool.num_blocks:
            what = f"a request has {len(hash_ids)} blocks, the cache {pool.num_blocks}"
            raise CapacityError("sim.count_hits", what)
        keys: list[bytes] = []
        index.extend_keys(self._root_key, keys, hash_ids)
        match = index.match(self._root_key, keys, hash_ids, len(hash_ids))
        num_hits = len(match.nodes)
        node = match.nodes[-1] if match.nodes else index.get_root(self._root_key)
        held = list(index.acquire(match))
        index.evict(max(len(hash_ids) - num_hits - pool.num_free, 0))
        for position in range(num_hits, len(hash_ids)):
            block_id = pool.allocate()
            held.append(block_id)
            node = index.insert(node, keys[position], hash_ids[position : position + 1], block_id)
        index.release(held)
        return num_hits

    def check(self) -> None:
        """Assert the invariants of index and pool. O(blocks), for tests."""
        self._pool.check()
        self._index.check()


def count_hits(rows: Iterable[TraceRow], cache: BlockCache) -> HitCount:
    """Replay a trace against a cache; return its hits."""
    num_requests = num_blocks = num_hits = 0
    ratios = 0.0
    for row in rows:
        hits = cache.serve(row.hash_ids)
        num_requests += 1
        num_blocks += len(row.hash_ids)
        num_hits += hits
        ratios += hits / len(row.hash_ids)
    return HitCount(
        num_requests=num_requests,
        num_blocks=num_blocks,
        num_hits=num_hits,
        mean_ratio=ratios / max(num_requests, 1),
    )


def count_unique(rows: Iterable[TraceRow]) -> int:
    """Return the number of distinct blocks in a trace; an index of that size never evicts."""
    return len({hash_id for row in rows for hash_id in row.hash_ids})
