"""Goal: the pool's three states and their transitions. Method: examples, and a random walk."""

import random

import pytest

from tandem.core.errors import CapacityError, ConfigError
from tandem.engine.scheduling.blocks import BlockPool


def count(pool):
    return pool.num_free, pool.num_used, pool.num_cached


def test_allocate_gives_each_block_once_then_raises():
    pool = BlockPool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(CapacityError, match="0 of 3 blocks free"):
        pool.allocate()
    assert count(pool) == (0, 3, 0)
    pool.check()


def test_block_is_free_with_its_last_reference():
    pool = BlockPool(2)
    block_id = pool.allocate()
    assert not pool.retain(block_id)
    assert not pool.release(block_id)
    assert count(pool) == (1, 1, 0)
    assert not pool.release(block_id)
    assert count(pool) == (2, 0, 0)


def test_held_block_becomes_cached_and_can_be_taken_up_again():
    pool = BlockPool(2)
    block_id = pool.allocate()
    pool.hold(block_id)
    assert pool.release(block_id), "the last reference of a held block"
    assert count(pool) == (1, 0, 1)
    assert pool.retain(block_id), "it was only cached"
    assert count(pool) == (1, 1, 0)
    pool.release(block_id)
    pool.drop_hold(block_id)
    assert count(pool) == (2, 0, 0)
    pool.check()


def test_dropping_the_hold_of_a_used_block_does_not_free_it():
    pool = BlockPool(1)
    block_id = pool.allocate()
    pool.hold(block_id)
    pool.drop_hold(block_id)
    assert count(pool) == (0, 1, 0)
    assert not pool.release(block_id)
    assert count(pool) == (1, 0, 0)


def test_misuse_is_an_assertion_with_the_block():
    pool = BlockPool(1)
    for misuse in (pool.release, pool.retain, pool.hold, pool.drop_hold):
        with pytest.raises(AssertionError, match="block 0"):
            misuse(0)


def test_pool_without_blocks_is_refused():
    with pytest.raises(ConfigError) as error:
        BlockPool(0)
    assert error.value.field == "engine.num_kv_blocks"


def test_check_notices_a_lost_and_a_doubly_free_block():
    pool = BlockPool(2)
    lost = pool._free.pop()
    with pytest.raises(AssertionError, match=f"block {lost}"):
        pool.check()
    pool._free.append(1)
    with pytest.raises(AssertionError, match="free twice"):
        pool.check()


@pytest.mark.parametrize("seed", range(5))
def test_counts_follow_a_model_through_a_random_walk(seed):
    rng = random.Random(seed)
    pool = BlockPool(6)
    num_refs, held = dict.fromkeys(range(6), 0), set()
    for _ in range(400):
        block_id = rng.randrange(6)
        is_idle = num_refs[block_id] == 0 and block_id not in held
        match rng.randrange(5):
            case 0 if pool.num_free:
                num_refs[pool.allocate()] += 1
            case 1 if not is_idle:
                assert pool.retain(block_id) == (num_refs[block_id] == 0)
                num_refs[block_id] += 1
            case 2 if num_refs[block_id]:
                num_refs[block_id] -= 1
                is_last = num_refs[block_id] == 0
                assert pool.release(block_id) == (is_last and block_id in held)
            case 3 if num_refs[block_id] and block_id not in held:
                pool.hold(block_id)
                held.add(block_id)
            case 4 if block_id in held:
                pool.drop_hold(block_id)
                held.remove(block_id)
        pool.check()
        num_used = sum(n > 0 for n in num_refs.values())
        num_cached = sum(num_refs[b] == 0 for b in held)
        assert count(pool) == (6 - num_used - num_cached, num_used, num_cached)
