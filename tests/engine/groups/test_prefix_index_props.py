"""Goal: the index agrees with a naive model of what it holds, whatever is put, held and evicted.

Method: a Hypothesis machine over a tiny vocabulary. The model is a list of the token paths that
must be found, kept by walking; the index must give the longest match to the token, never evict a
referenced block, and return every block at the end.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex

SIZE = 3
NUM_BLOCKS = 12
token_lists = st.lists(st.integers(0, 1), max_size=11)
salts = st.sampled_from(["", "x"])


class PrefixIndexMachine(RuleBasedStateMachine):
    """Paths are computed, held for a while, let go, looked up, evicted and flushed."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.index = PrefixIndex(self.pool, SIZE, b"f")
        self.held = []
        self.kv = {}  # Block id to what each of its slots depends on: salt and all tokens so far.

    def paths(self):
        """All (salt, tokens) that the index holds, read from the blocks, not from its keys."""
        for block_id, node in self.index._by_block.items():
            num_tokens = len(node.tokens) // 4
            yield self.kv[block_id][num_tokens - 1]

    def best(self, salt, tokens):
        longest = 0
        for path_salt, path in self.paths():
            shared = 0
            while shared < min(len(path), len(tokens)) and path[shared] == tokens[shared]:
                shared += 1
            longest = max(longest, shared if path_salt == salt else 0)
        return longest

    def match(self, salt, tokens, limit):
        root_key = self.index.make_root_key(salt)
        keys = []
        self.index.extend_keys(root_key, keys, tokens)
        return root_key, keys, self.index.match(root_key, keys, tokens, limit)

    @rule(salt=salts, tokens=token_lists, is_reusing=st.booleans())
    def compute(self, salt, tokens, is_reusing):
        """Start a request: reuse what is there (or not: a concurrent duplicate), index the rest."""
        root_key, keys, found = self.match(salt, tokens, len(tokens) if is_reusing else 0)
        needed = -(-len(tokens) // SIZE) - len(found.nodes)
        available = self.pool.num_free + self.pool.num_cached - self.index.count_evictable(found)
        if needed > available:
            return
        table = list(self.index.acquire(found))
        self.index.evict(needed - self.pool.num_free)
        node = found.nodes[-1] if found.nodes else self.index.get_root(root_key)
        for i in range(len(table), len(keys)):
            block_id = self.fill(salt, tokens, i)
            chunk = tokens[i * SIZE : (i + 1) * SIZE]
            node = self.index.insert(node, keys[i], chunk, block_id)
            table.append(node.block_id)
        tail = tokens[len(keys) * SIZE :]
        if tail:
            block_id = self.fill(salt, tokens, len(keys))
            self.index.insert_tail(node, tail, block_id)
            table.append(block_id)
        if found.source is not None:
            self.index.release((found.source.block_id,))
        self.held.append((salt, tokens, table))

    def fill(self, salt, tokens, position):
        block_id = self.pool.allocate()
        ends = range(position * SIZE + 1, min((position + 1) * SIZE, len(tokens)) + 1)
        self.kv[block_id] = [(salt, tuple(tokens[:end])) for end in ends]
        return block_id

    @rule(choice=st.integers(0, 20))
    def let_go(self, choice):
        if self.held:
            self.index.release(self.held.pop(choice % len(self.held))[2])

    @rule(salt=salts, tokens=token_lists, cut=st.integers(0, 2))
    def look_up(self, salt, tokens, cut):
        limit = max(len(tokens) - cut, 0)
        _, _, found = self.match(salt, tokens, limit)
        assert found.num_tokens == self.best(salt, tokens[:limit])
        for i, node in enumerate(found.nodes):
            assert self.kv[node.block_id][-1] == (salt, tuple(tokens[: (i + 1) * SIZE]))
        if found.source is not None:
            content = self.kv[found.source.block_id][found.num_source_tokens - 1]
            assert content == (salt, tuple(tokens[: found.num_tokens]))

    @rule(num_blocks=st.integers(1, 4))
    def evict(self, num_blocks):
        num_cached, num_free = self.pool.num_cached, self.pool.num_free
        nodes = {n.block_id: n.key for n in self.index._by_block.values()}
        evicted = self.index.evict(num_blocks)
        assert self.pool.num_free - num_free == min(num_blocks, num_cached)
        gone = nodes.keys() - self.index._by_block.keys()
        assert {(b.key, b.block.number) for b in evicted} == {
            (nodes[block_id], block_id) for block_id in gone if nodes[block_id] is not None
        }

    @rule()
    def clear(self):
        self.index.clear()
        assert self.pool.num_cached == 0
        assert list(self.paths()) == []

    @invariant()
    def is_sound(self):
        self.pool.check()
        self.index.check()
        for salt, tokens, table in self.held:
            for i, block_id in enumerate(table):
                assert self.pool.get_num_refs(block_id) > 0
                end = min((i + 1) * SIZE, len(tokens))
                assert self.kv[block_id][(end - 1) % SIZE] == (salt, tuple(tokens[:end]))

    def teardown(self):
        for _, _, table in self.held:
            self.index.release(table)
        self.index.evict(NUM_BLOCKS)
        assert self.pool.num_free == NUM_BLOCKS
        assert len(self.index._roots) == 0


TestPrefixIndexMachine = PrefixIndexMachine.TestCase
TestPrefixIndexMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
