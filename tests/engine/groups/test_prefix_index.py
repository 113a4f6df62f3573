"""Goal: what the index finds, keeps and gives up. Method: readable examples over blocks of four."""

import hashlib

import pytest

from tandem.core.spec import make_root_key
from tandem.engine.groups.chain import hash_block, pack_tokens
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex

SIZE = 4


class Shelf:
    """An index and the few lines around it that a request would have."""

    def __init__(self, num_blocks=16, block_size=SIZE):
        self.size = block_size
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(self.pool, block_size, b"weights")

    def allocate(self):
        if self.pool.num_free == 0:
            self.index.evict(1)
        return self.pool.allocate()

    def evict(self, num_blocks):
        """Evict, and return how many blocks that freed."""
        num_free = self.pool.num_free
        self.index.evict(num_blocks)
        return self.pool.num_free - num_free

    def compute(self, token_ids, salt=""):
        """Allocate, fill and index blocks as a request would; return them, still referenced."""
        root_key = self.index.make_root_key(salt)
        keys = []
        self.index.extend_keys(root_key, keys, token_ids)
        node = self.index.get_root(root_key)
        blocks = []
        for i, key in enumerate(keys):
            tokens = token_ids[i * self.size : (i + 1) * self.size]
            node = self.index.insert(node, key, tokens, self.allocate())
            blocks.append(node.block_id)
        tail = token_ids[len(keys) * self.size :]
        if tail:
            blocks.append(self.allocate())
            self.index.insert_tail(node, tail, blocks[-1])
        self.index.check()
        return blocks

    def put(self, token_ids, salt=""):
        """Like ``compute``, and let go at once: the blocks are cached."""
        blocks = self.compute(token_ids, salt)
        self.index.release(blocks)
        self.index.check()
        return blocks

    def find(self, token_ids, salt="", max_tokens=None):
        root_key = self.index.make_root_key(salt)
        keys = []
        self.index.extend_keys(root_key, keys, token_ids)
        limit = len(token_ids) if max_tokens is None else max_tokens
        return self.index.match(root_key, keys, token_ids, limit)


def tokens_of(text):
    return [ord(letter) for letter in text]


def test_keys_are_a_sha256_chain_over_little_endian_int32():
    root = make_root_key(b"weights", "salt")
    first = hash_block(root, pack_tokens([1, 2]))
    assert first == hashlib.sha256(root + bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest()
    keys = []
    index = PrefixIndex(BlockPool(1), 2, b"weights")
    index.extend_keys(root, keys, [1, 2, 3, 4, 5])
    assert keys == [first, hash_block(first, pack_tokens([3, 4]))]
    index.extend_keys(root, keys, [5, 6])
    assert keys[2:] == [hash_block(keys[1], pack_tokens([5, 6]))]


def test_root_depends_on_identity_and_salt_without_ambiguity():
    pairs = [(b"ab", "c"), (b"a", "bc"), (b"abc", ""), (b"", "abc")]
    assert len({make_root_key(*pair) for pair in pairs}) == 4
    index = PrefixIndex(BlockPool(1), 2, b"ab")
    assert index.make_root_key("c") == make_root_key(b"ab", "c")


def test_two_prompts_share_four_of_five_tokens():
    """The example of the talk: a hit counts to the token, though no block is full."""
    shelf = Shelf(num_blocks=4, block_size=64)
    (block,) = shelf.put([1, 2, 3, 4, 5])
    found = shelf.find([1, 2, 3, 4, 6], max_tokens=4)
    assert found.nodes == []
    assert (found.source.block_id, found.num_source_tokens) == (block, 4)


def test_full_blocks_are_shared_and_the_rest_is_copied():
    shelf = Shelf()
    blocks = shelf.put(tokens_of("abcdefghijk"))
    found = shelf.find(tokens_of("abcdefghiXYZ"))
    assert [node.block_id for node in found.nodes] == blocks[:2]
    assert (found.source.block_id, found.num_source_tokens) == (blocks[2], 1)
    assert found.num_tokens == 9
    assert found.without_copy().num_tokens == 8


def test_part_of_a_full_block_is_copied():
    shelf = Shelf()
    blocks = shelf.put(tokens_of("abcdefgh"))
    found = shelf.find(tokens_of("abcdefXX"))
    assert (found.source.block_id, found.num_source_tokens) == (blocks[1], 2)


def test_limit_turns_the_last_full_block_into_a_copy():
    """A prompt that is cached as a whole still computes its last token."""
    shelf = Shelf()
    shelf.put(tokens_of("abcdefgh"))
    found = shelf.find(tokens_of("abcdefgh"), max_tokens=7)
    assert (len(found.nodes), found.num_source_tokens, found.num_tokens) == (1, 3, 7)


def test_best_of_many_siblings_is_found():
    shelf = Shelf(40)
    for letters in ("aa", "aba", "abbz", "abc", "b", "zzz"):
        shelf.put(tokens_of(letters))
    assert shelf.find(tokens_of("abby")).num_tokens == 3
    assert shelf.find(tokens_of("zzzz")).num_tokens == 3
    assert shelf.find(tokens_of("acac")).num_tokens == 1
    assert shelf.find(tokens_of("c")).num_tokens == 0


def test_byte_order_of_tokens_does_not_split_a_token():
    """Tokens that share their low byte share nothing."""
    shelf = Shelf()
    shelf.put([0x0101, 5])
    assert shelf.find([0x0201, 5]).num_tokens == 0
    assert shelf.find([0x0101, 0x0105]).num_tokens == 1


def test_salts_do_not_share():
    shelf = Shelf()
    shelf.put(tokens_of("abcdefgh"), salt="alice")
    assert shelf.find(tokens_of("abcdefgh"), salt="bob").num_tokens == 0
    assert shelf.find(tokens_of("abcdefgh")).num_tokens == 0
    assert shelf.find(tokens_of("abcdefgh"), salt="alice").num_tokens == 8


def test_duplicate_moves_the_reference_to_the_block_that_came_first():
    shelf = Shelf()
    first = shelf.compute(tokens_of("abcd"))
    second = shelf.compute(tokens_of("abcdefgh"))
    assert second[0] == first[0]
    assert shelf.pool.get_num_refs(first[0]) == 2
    assert shelf.pool.num_used == 2
    shelf.index.release(first)
    shelf.index.release(second)
    assert shelf.pool.num_used == 0
    shelf.index.check()


def test_tail_that_grows_replaces_itself():
    shelf = Shelf()
    index = shelf.index
    root = index.get_root(index.make_root_key(""))
    block = shelf.pool.allocate()
    index.insert_tail(root, [1, 2], block)
    index.insert_tail(root, [1, 2, 3], block)
    index.check()
    assert shelf.find([1, 2, 3, 4]).num_tokens == 3
    index.insert(root, hash_block(root.key, pack_tokens([1, 2, 3, 4])), [1, 2, 3, 4], block)
    index.check()
    assert [node.block_id for node in shelf.find([1, 2, 3, 4]).nodes] == [block]


def test_tail_that_is_known_already_is_not_kept_twice():
    shelf = Shelf()
    shelf.put(tokens_of("abcd"))
    shelf.put(tokens_of("abc"))
    assert shelf.pool.num_cached == 1
    assert shelf.pool.num_free == 15


def test_continued_tail_is_given_up_at_once():
    shelf = Shelf()
    shelf.put(tokens_of("ab"))
    shelf.put(tokens_of("abc"))
    assert shelf.pool.num_cached == 1
    shelf.put(tokens_of("abcd"))
    assert shelf.pool.num_cached == 1
    assert shelf.find(tokens_of("abcd")).num_tokens == 4


def test_continued_tail_that_is_being_read_stays():
    shelf = Shelf()
    reading = shelf.compute(tokens_of("ab"))
    shelf.put(tokens_of("abcd"))
    assert shelf.pool.num_used == 1
    shelf.index.release(reading)
    shelf.index.check()


def test_least_recently_used_leaf_goes_first_and_parents_follow():
    shelf = Shelf(4)
    old = shelf.put(tokens_of("abcdefgh"))
    young = shelf.put(tokens_of("ijkl"))
    assert shelf.evict(1) == 1
    assert shelf.find(tokens_of("abcdefgh")).num_tokens == 4, "the leaf went, its parent stays"
    assert shelf.evict(1) == 1
    assert shelf.find(tokens_of("abcdefgh")).num_tokens == 0
    assert shelf.find(tokens_of("ijkl")).nodes[0].block_id == young[0]
    assert shelf.evict(5) == 1, "no more than there is"
    assert shelf.pool.num_free == 4
    assert set(old).isdisjoint(young)


def test_evicting_tells_key_and_block_of_full_blocks():
    shelf = Shelf(4)
    blocks = shelf.put(tokens_of("abcdefghi"))
    keys = []
    shelf.index.extend_keys(shelf.index.make_root_key(""), keys, tokens_of("abcdefgh"))
    evicted = shelf.index.evict(3)
    named = [(b.key, b.block.number) for b in evicted]
    assert named == [(keys[1], blocks[1]), (keys[0], blocks[0])]
    assert [shelf.pool.get_generation(b.block.number) for b in evicted] == [
        b.generation for b in evicted
    ]
    assert shelf.pool.num_free == 4, "the tail has no key and is evicted all the same"
    while shelf.pool.num_free:
        shelf.pool.allocate()
    for block in evicted:
        assert shelf.pool.get_generation(block.block.number) == block.generation + 1


def test_use_makes_a_path_young():
    shelf = Shelf()
    shelf.put(tokens_of("abcd"))
    shelf.put(tokens_of("efgh"))
    found = shelf.find(tokens_of("abcd"))
    shelf.index.release(shelf.index.acquire(found))
    shelf.index.evict(1)
    assert shelf.find(tokens_of("abcd")).num_tokens == 4
    assert shelf.find(tokens_of("efgh")).num_tokens == 0


def test_referenced_blocks_are_never_evicted():
    shelf = Shelf()
    shelf.put(tokens_of("abcdefghij"))
    found = shelf.find(tokens_of("abcdefghij"))
    shared = shelf.index.acquire(found)
    assert shelf.evict(16) == 0, "two shared blocks and the source of the copy"
    shelf.index.release((found.source.block_id,))
    assert shelf.evict(16) == 1
    shelf.index.release(shared)
    assert shelf.evict(16) == 2


def test_count_evictable_is_what_acquire_takes():
    shelf = Shelf()
    shelf.put(tokens_of("abcdefghij"))
    holder = shelf.index.acquire(shelf.find(tokens_of("abcd")))
    found = shelf.find(tokens_of("abcdefghij"))
    before = shelf.pool.num_cached
    expected = shelf.index.count_evictable(found)
    shelf.index.acquire(found)
    assert before - shelf.pool.num_cached == expected == 2
    assert len(holder) == 1


def test_clear_frees_what_is_cached_and_forgets_what_is_used():
    shelf = Shelf()
    shelf.put(tokens_of("abcdefgh"))
    used = shelf.compute(tokens_of("ijklmnop"))
    assert shelf.index.clear() == 2
    shelf.index.check()
    assert shelf.find(tokens_of("ijklmnop")).num_tokens == 0
    assert shelf.pool.num_used == 2
    shelf.index.release(used)
    assert shelf.pool.num_free == 16


def test_nothing_is_linked_below_what_was_forgotten():
    shelf = Shelf()
    index = shelf.index
    root = index.get_root(index.make_root_key(""))
    index.clear()
    assert not root.is_linked
    with pytest.raises(AssertionError, match="forgotten"):
        index.insert(root, b"key", [1, 2, 3, 4], shelf.pool.allocate())
    assert index.get_root(index.make_root_key("")) is not root


def test_roots_of_idle_salts_are_not_kept():
    shelf = Shelf()
    for i in range(50):
        shelf.put([1, 2, 3, 4], salt=f"user {i}")
    assert len(shelf.index._roots) == 16, "as many as there are blocks"
    shelf.index.evict(16)
    assert len(shelf.index._roots) == 0
