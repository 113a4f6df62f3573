"""The prefix index: a tree that records which tokens' KV each block holds, and which cached block
to evict next.

A radix tree whose nodes are blocks. A node stands below the node of the preceding block; a full
block may have children, a *partial* one (the tail of a request) is a leaf. Full nodes are also in
one table by key, the SHA-256 chain that the lower tiers use as well; a key vouches for all tokens
before it, so "how many leading blocks are cached" is a binary search. Siblings are kept sorted by
their tokens' bytes, where the longest common prefix with a query is that of a neighbour: a hit
counts to the token at the cost of a bisection.

Invariants (``check``): whoever references a node's block references its parent's, so every cached
(unreferenced) subtree is evictable as a whole; the LRU order lists a node only after its cached
children, so its front is always a leaf, and evicting is O(1) and never takes a referenced block.

Pure and single-threaded. Lower tiers are asked with the same keys from where ``match`` ends
(``tandem.engine.scheduling.loads``). A node carries what other groups of layers keep of its tokens
(``window_block_id``).
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakValueDictionary

from tandem.core.spec import make_root_key
from tandem.core.timeline import MissReason
from tandem.engine.groups.chain import TOKEN_BYTES, hash_block, pack_tokens
from tandem.engine.groups.group import Group, GroupBlock
from tandem.engine.groups.snapshots import Snapshot
from tandem.engine.scheduling.blocks import BlockPool, KeyedBlock

__all__ = [
    "IndexObserver",
    "PrefixIndex",
    "PrefixMatch",
    "PrefixNode",
]

MAX_FORGOTTEN = 65_536
"""Number of evicted blocks whose keys are remembered, to explain a miss; about 10 MiB."""


class PrefixNode:
    """A cached block in the tree of prefixes, or a root (``block_id`` -1, no tokens). Only the
    index changes it.
    """

    __slots__ = (
        "__weakref__",
        "adapter",
        "block_id",
        "children",
        "is_linked",
        "key",
        "parent",
        "sorted_tokens",
        "tokens",
        "window_block_id",
    )

    def __init__(
        self,
        parent: "PrefixNode | None",
        key: bytes | None,
        tokens: bytes,
        block_id: int,
        adapter: str = "",
    ) -> None:
        self.parent = parent
        self.adapter = adapter if parent is None else parent.adapter
        """Digest of the LoRA adapter that computed the KV; empty for the model without adapter."""
        self.key = key
        """Digest of a full block or a root; None for a partial block."""
        self.tokens = tokens
        self.block_id = block_id
        self.window_block_id = -1
        """Id of the window block with the KV of the same tokens in the sliding-window layers, -1
        without one; only ``WindowReuse`` changes it.
        """
        self.is_linked = True
        """False once the index has dropped the node; no child is added to such a node."""
        self.children: dict[bytes, PrefixNode] = {}
        self.sorted_tokens: list[bytes] = []
        """The keys of ``children``, sorted."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest part of a prompt that the prefix index holds, with the blocks that have its
    KV.
    """

    nodes: list[PrefixNode]
    """Nodes of the matched full blocks from the start of the prompt, which a request can share
    without copying.
    """
    num_tokens: int
    """Number of matched tokens, including those to be copied."""
    source: PrefixNode | None = None
    """A block of which only the first ``num_source_tokens`` tokens match, after ``nodes``; these
    are copied into a block of the request.
    """
    num_source_tokens: int = 0
    snapshot: Snapshot | None = None
    """Snapshot of the state after ``num_tokens`` tokens; None for a model without states."""
    num_kv_tokens: int = 0
    """Number of matched tokens counting only the layers that attend to all tokens. It exceeds
    ``num_tokens`` if the state or the window at its end is not cached.
    """

    def without_copy(self) -> "PrefixMatch":
        """Return this match without the block that matches only in part, so that no block need be
        copied.
        """
        return replace(
            self,
            num_tokens=self.num_tokens - self.num_source_tokens,
            source=None,
            num_source_tokens=0,
        )

    def cut(
        self, position: int, block_size: int, snapshot: Snapshot | None = None
    ) -> "PrefixMatch":
        """Return the part of this match up to token ``position``, with the snapshot (saved
        recurrent state) taken there.
        """
        depth, num_copied = divmod(position, block_size)
        source = None
        if num_copied:
            source = self.nodes[depth] if depth < len(self.nodes) else self.source
        return PrefixMatch(
            self.nodes[:depth], position, source, num_copied, snapshot, self.num_tokens
        )


class IndexObserver(Protocol):
    """An observer that is told which full blocks, recurrent states and sliding windows are cached
    and which no longer.

    Its methods are called under the engine's lock, so they return at once.
    """

    def note_stored(self, node: "PrefixNode") -> None:
        """Note that a full block can be found from now on; ``node.parent`` is the block before
        it.
        """
        ...

    def note_removed(self, key: bytes) -> None:
        """Note that the full block with this key cannot be found any more."""
        ...

    def note_cleared(self) -> None:
        """Note that all blocks were removed from the prefix index."""
        ...

    def note_state_kept(self, snapshot: Snapshot) -> None:
        """Note that a snapshot (a saved recurrent state) can be found from now on; the full blocks
        before it already can.
        """
        ...

    def note_state_removed(self, snapshot: Snapshot) -> None:
        """Note that a snapshot (a saved recurrent state) cannot be found any more."""
        ...

    def note_window_kept(self, node: "PrefixNode") -> None:
        """Note that a full block's KV of the sliding-window layers can be found from now on."""
        ...

    def note_window_removed(self, key: bytes) -> None:
        """Note that a block's KV of the sliding-window layers was removed; the block itself may be
        gone already.
        """
        ...


class PrefixIndex:
    """The index (a tree) of cached prefixes, which also chooses the blocks to evict.

    Args:
        pool: shared with the scheduler. Requests' blocks must be released by ``release`` here, not
            by the pool, so that the index learns which blocks became evictable.
        block_size: tokens per block.
        identity: ``KvIdentity.digest`` of the KV in the blocks.
    """

    def __init__(self, pool: BlockPool, block_size: int, identity: bytes = b"") -> None:
        self.observers: list[IndexObserver] = []
        self.on_unlinked: Callable[[PrefixNode], None] | None = None
        """Callback for every node that is removed, including partial ones."""
        self._pool = pool
        self._block_size = block_size
        self._identities = {"": identity}
        # Weak references: a root is freed when it has no children and no request refers to it.
        self._roots: WeakValueDictionary[bytes, PrefixNode] = WeakValueDictionary()
        self._by_key: dict[bytes, PrefixNode] = {}
        self._by_block: dict[int, PrefixNode] = {}
        self._lru: OrderedDict[PrefixNode, None] = OrderedDict()
        self._forgotten: dict[bytes, MissReason] = {}

    def add_identity(self, adapter: str, identity: bytes) -> None:
        """Set the digest of the KV identity (what the KV's values depend on) of an adapter's KV;
        ``adapter`` is the adapter's digest.
        """
        self._identities[adapter] = identity

    def make_root_key(self, salt: str, adapter: str = "") -> bytes:
        """Return the key that all chains of block keys with this salt and adapter begin with."""
        return make_root_key(self._identities[adapter], salt)

    def extend_keys(self, root_key: bytes, keys: list[bytes], token_ids: Sequence[int]) -> None:
        """Append the keys of the full blocks of ``token_ids``, which follow the blocks of ``keys``.

        Cost: one SHA-256 of ``block_size * 4 + 32`` bytes a block.
        """
        size = self._block_size
        parent = keys[-1] if keys else root_key
        for start in range(0, len(token_ids) - size + 1, size):
            parent = hash_block(parent, pack_tokens(token_ids[start : start + size]))
            keys.append(parent)

    def get_root(self, root_key: bytes, adapter: str = "") -> PrefixNode:
        """Return the root node for a root key, making it if needed. The caller must keep a
        reference, or the node is freed.
        """
        root = self._roots.get(root_key)
        if root is None:
            root = PrefixNode(None, root_key, b"", -1, adapter)
            self._roots[root_key] = root
        return root

    def count_cached_blocks(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain of keys are in the index. O(log(len(keys)))."""
        by_key = self._by_key
        return bisect_left(keys, True, key=lambda key: key not in by_key)

    def find_node(self, key: bytes) -> PrefixNode | None:
        """Return the node of the full block with this key; None if it is not in the index."""
        return self._by_key.get(key)

    def match(
        self, root_key: bytes, keys: Sequence[bytes], token_ids: Sequence[int], max_tokens: int
    ) -> PrefixMatch:
        """Find the longest cached prefix, to the token. Changes nothing.

        Args:
            root_key: the first key of the chain, from ``make_root_key``.
            keys: keys of all full blocks among the first ``max_tokens`` tokens; more are ignored.
            token_ids: the tokens themselves.
            max_tokens: largest number of tokens to match.
        """
        size = self._block_size
        depth = self.count_cached_blocks(keys[: max_tokens // size])
        nodes = [self._by_key[key] for key in keys[:depth]]
        parent = nodes[-1] if nodes else self._roots.get(root_key)
        start = depth * size
        if parent is not None and parent.children:
            query = pack_tokens(token_ids[start : min(start + size, max_tokens)])
            source, num_tokens = _find_longest(parent, query)
            if source is not None:
                return PrefixMatch(nodes, start + num_tokens, source, num_tokens)
        return PrefixMatch(nodes, start)

    def match_blocks(self, keys: Sequence[bytes]) -> PrefixMatch:
        """Return the match that consists of the blocks with these keys. The caller ensures that all
        are in the index.
        """
        return PrefixMatch([self._by_key[key] for key in keys], len(keys) * self._block_size)

    def explain_end(
        self, root_key: bytes, match: PrefixMatch, next_key: bytes | None
    ) -> MissReason:
        """Return why a match is shorter than its query: evicted, never stored, or other tokens.

        Args:
            root_key: the root key of the query.
            match: the result of ``match``, including the block it would copy from.
            next_key: key of the first full block that is not in the index; None if the query ends
                inside that block.
        """
        if next_key is not None and next_key in self._forgotten:
            return self._forgotten[next_key]
        source = match.source
        if source is not None:
            is_whole = match.num_source_tokens * TOKEN_BYTES == len(source.tokens)
            return MissReason.NOT_STORED if is_whole else MissReason.DIFFERS
        parent = match.nodes[-1] if match.nodes else self._roots.get(root_key)
        has_others = parent is not None and parent.children
        return MissReason.DIFFERS if has_others else MissReason.NOT_STORED

    def has_prefix(self, parent_key: bytes, tail: bytes) -> bool:
        """Return True if the KV of a chain of full blocks and of the tokens in ``tail`` is cached.

        Args:
            parent_key: key of the chain's last full block, or the root key.
            tail: the tokens after that block, packed; fewer than a block has.
        """
        parent = self._by_key.get(parent_key) or self._roots.get(parent_key)
        if parent is None or not tail:
            return parent is not None
        siblings = parent.sorted_tokens
        position = bisect_left(siblings, tail)
        return position < len(siblings) and siblings[position].startswith(tail)

    def count_evictable(self, match: PrefixMatch) -> int:
        """Return how many blocks of a match are unreferenced now, so that they can be evicted until
        ``acquire`` references them.
        """
        pool = self._pool
        count = 0
        if match.source is not None and pool.get_num_refs(match.source.block_id) == 0:
            count += 1
        # If a node is referenced, so are all nodes between it and the root; the first referenced
        # node from the end therefore ends the search.
        for node in reversed(match.nodes):
            if pool.get_num_refs(node.block_id) > 0:
                break
            count += 1
        return count

    def acquire(self, match: PrefixMatch) -> tuple[int, ...]:
        """Take a reference to all blocks of a match, including the copy source; return the shared
        block ids.

        The caller owns one reference to each and ends it with ``release``.
        """
        for node in match.nodes:
            self._retain(node)
        if match.source is not None:
            self._retain(match.source)
        return tuple([node.block_id for node in match.nodes])

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block of a path of the tree, given from the root towards the
        leaf.

        Blocks in the index become the most recently used; the others are free.
        """
        release = self._pool.release
        # Release from the leaf to the root: blocks released first are evicted first, and children
        # must be evicted before their parents.
        for block_id in reversed(block_ids):
            if release(block_id):
                self._lru[self._by_block[block_id]] = None

    def insert(
        self, parent: PrefixNode, key: bytes, token_ids: Sequence[int], block_id: int
    ) -> PrefixNode:
        """Add a block that is full and whose KV is computed, so that requests can match it.

        Args:
            parent: node of the preceding block, which the caller references, or the root. It must
                still be in the tree (``is_linked``).
            key: ``hash_block`` of the parent's key and the tokens.
            token_ids: its ``block_size`` tokens.
            block_id: a block that the caller references.

        Returns: the node of ``key``. If the index already has another block with this content, it
            is that block's node: the caller's reference has moved from ``block_id`` to
            ``node.block_id``, and the caller must put the latter into its block table.
        """
        assert parent.is_linked, f"insert of block {block_id} below a forgotten one"
        own = self._by_block.get(block_id)
        if own is not None:
            self._unlink(own)
        existing = self._by_key.get(key)
        if existing is not None:
            self._retain(existing)
            self.release((block_id,))
            return existing
        node = self._link(parent, key, pack_tokens(token_ids), block_id)
        self._by_key[key] = node
        for observer in self.observers:
            observer.note_stored(node)
        return node

    def insert_tail(
        self, parent: PrefixNode, token_ids: Sequence[int], block_id: int
    ) -> PrefixNode | None:
        """Add the tokens of a block that is not full yet, so that requests can match them.

        May be called again as the block grows. Args as for ``insert``. Does nothing if another
        block with the same parent begins with these tokens.

        Returns: the block's node; None if another block has the tokens.
        """
        assert parent.is_linked, f"insert of block {block_id} below a forgotten one"
        own = self._by_block.get(block_id)
        if own is not None:
            self._unlink(own)
        tokens = pack_tokens(token_ids)
        siblings = parent.sorted_tokens
        position = bisect_left(siblings, tokens)
        if position < len(siblings) and siblings[position].startswith(tokens):
            return None
        return self._link(parent, None, tokens, block_id)

    def describe(self, node: PrefixNode) -> KeyedBlock:
        """Return a full node's key, block id and generation, in the form reported to lower
        tiers.
        """
        assert node.key is not None, f"block {node.block_id} is partial"
        block = GroupBlock(Group.FULL, node.block_id)
        return KeyedBlock(node.key, block, self._pool.get_generation(node.block_id))

    def evict(self, num_blocks: int) -> list[KeyedBlock]:
        """Free up to ``num_blocks`` cached blocks, least recently used first.

        Returns: the full blocks among them; their content is intact until they are allocated again.
            Partial blocks are not listed: they have no key, so no lower tier keeps them.
        """
        evicted: list[KeyedBlock] = []
        count = 0
        while count < num_blocks and self._lru:
            node, _ = self._lru.popitem(last=False)
            assert not node.children, f"block {node.block_id} is evicted before its children"
            if node.key is not None:
                evicted.append(self.describe(node))
                self._remember(node.key, MissReason.EVICTED)
            self._unlink(node)
            count += 1
        return evicted

    def clear(self) -> int:
        """Drop all nodes; return how many blocks became free at once.

        Referenced blocks become free when they are released. A request that is running builds on
        dropped nodes, so what it computes from now on cannot be matched by others.
        """
        num_free = self._pool.num_free
        for key in self._by_key:
            self._remember(key, MissReason.FLUSHED)
        for node in self._by_block.values():
            if self.on_unlinked is not None:
                self.on_unlinked(node)
            node.is_linked = False
            node.parent = None
            node.children = {}
            self._pool.drop_hold(node.block_id)
        for root in self._roots.values():
            root.is_linked = False
            root.children = {}
        self._roots.clear()
        self._by_key.clear()
        self._by_block.clear()
        self._lru.clear()
        for observer in self.observers:
            observer.note_cleared()
        return self._pool.num_free - num_free

    def forget(self, block_ids: Iterable[int]) -> int:
        """Forget blocks whose content is lost, and all that build on them.

        Referenced blocks stay with their holders, as with ``clear``.

        Returns: how many blocks were forgotten.
        """
        count = 0
        for block_id in block_ids:
            top = self._by_block.get(block_id)
            nodes = [] if top is None else [top]
            for node in nodes:  # Grows: parents come before their children.
                nodes += node.children.values()
            for node in reversed(nodes):
                if node.key is not None:
                    self._remember(node.key, MissReason.LOST)
                self._lru.pop(node, None)
                self._unlink(node)
            count += len(nodes)
        return count

    def check(self) -> None:
        """Assert the invariants of the tree and of the LRU order. O(blocks), for tests."""
        pool = self._pool
        assert len(self._lru) == pool.num_cached, (
            f"{len(self._lru)} nodes in the LRU order, {pool.num_cached} cached blocks"
        )
        ages = {node: age for age, node in enumerate(self._lru)}
        for block_id, node in self._by_block.items():
            parent = node.parent
            num_refs = pool.get_num_refs(block_id)
            assert node.block_id == block_id, f"node of {node.block_id} filed under {block_id}"
            assert node.is_linked, f"forgotten node of block {block_id} is in the tree"
            assert parent is not None, f"node of block {block_id} has no parent"
            assert parent.is_linked, f"parent of block {block_id} is forgotten"
            assert parent.children.get(node.tokens) is node, f"block {block_id} is no child"
            assert (node in ages) == (num_refs == 0), f"block {block_id}: {num_refs} references"
            assert node.sorted_tokens == sorted(node.children), f"children of {block_id} unsorted"
            assert node.key is not None or not node.children, f"partial {block_id} has children"
            if node.key is not None:
                assert self._by_key.get(node.key) is node, f"key of block {block_id} is lost"
            if num_refs > 0 and parent.block_id >= 0:
                parent_refs = pool.get_num_refs(parent.block_id)
                assert parent_refs > 0, f"{block_id} is referenced, parent {parent.block_id} not"
            elif num_refs == 0 and parent in ages:
                assert ages[node] < ages[parent], f"{block_id} would outlive {parent.block_id}"
        num_full = sum(node.key is not None for node in self._by_block.values())
        assert num_full == len(self._by_key), f"{num_full} full nodes, {len(self._by_key)} keys"

    def _remember(self, key: bytes, reason: MissReason) -> None:
        # Remove and re-insert the key, so that the dictionary stays ordered from oldest to latest.
        self._forgotten.pop(key, None)
        if len(self._forgotten) >= MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
        self._forgotten[key] = reason

    def _retain(self, node: PrefixNode) -> None:
        if self._pool.retain(node.block_id):
            del self._lru[node]

    def _link(
        self, parent: PrefixNode, key: bytes | None, tokens: bytes, block_id: int
    ) -> PrefixNode:
        siblings = parent.sorted_tokens
        position = bisect_left(siblings, tokens)
        if position > 0 and tokens.startswith(siblings[position - 1]):
            # The new block contains all tokens of the shorter partial block beside it, so it serves
            # every lookup that the shorter one would. Drop the shorter one; if a request still
            # references it, LRU eviction drops it later.
            shorter = parent.children[siblings[position - 1]]
            if shorter in self._lru:
                del self._lru[shorter]
                self._unlink(shorter)
                position -= 1
        node = PrefixNode(parent, key, tokens, block_id)
        siblings.insert(position, tokens)
        parent.children[tokens] = node
        self._by_block[block_id] = node
        self._pool.hold(block_id)
        return node

    def _unlink(self, node: PrefixNode) -> None:
        """Remove a node from the tree, and its block from the cache. The caller ensures that the
        node has no children and is not in the LRU order.
        """
        parent = node.parent
        assert parent is not None, f"block {node.block_id} is not linked"
        del parent.children[node.tokens]
        del parent.sorted_tokens[bisect_left(parent.sorted_tokens, node.tokens)]
        if node.key is not None:
            del self._by_key[node.key]
            for observer in self.observers:
                observer.note_removed(node.key)
        del self._by_block[node.block_id]
        if self.on_unlinked is not None:
            self.on_unlinked(node)
        node.is_linked = False
        node.parent = None
        self._pool.drop_hold(node.block_id)


def _find_longest(parent: PrefixNode, query: bytes) -> tuple[PrefixNode | None, int]:
    """Return the child node that shares the most leading tokens with ``query``, and their number;
    (None, 0) if none shares any.
    """
    siblings = parent.sorted_tokens
    position = bisect_left(siblings, query)
    best: bytes | None = None
    best_len = 0
    for candidate in siblings[max(position - 1, 0) : position + 1]:
        shared_len = _count_shared_tokens(candidate, query)
        if shared_len > best_len:
            best, best_len = candidate, shared_len
    return (None if best is None else parent.children[best]), best_len


def _count_shared_tokens(a: bytes, b: bytes) -> int:
    length = min(len(a), len(b))
    # Read as little-endian numbers, the lowest bit that differs lies in the first byte that
    # differs.
    difference = int.from_bytes(a[:length], "little") ^ int.from_bytes(b[:length], "little")
    if difference == 0:
        return length // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)
