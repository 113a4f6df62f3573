"""Values that were given out: nobody's bytes change under him, whoever holds them and how.

Method: a pool alone, against a model that keeps copies; gets through a whole store, with holders of
every kind; and that memory is used again at all.
"""

import gc
import random

import numpy as np
import pytest

from tandem._native import BytesPool, view_new_bytes
from tandem.core.errors import NotFoundError
from tandem.store import StoreClient, StoreConfig
from tandem.store.client.destinations import RESULT_BYTES

SIZE = 300_000


def fill(pool: BytesPool, seed: int, sizes: list[int]) -> list[bytes]:
    values = pool.take(sizes)
    for i, value in enumerate(values):
        view_new_bytes(value)[:] = (seed + i) % 251
    pool.keep(values)
    return values


def test_dropped_memory_is_filled_again_and_its_hash_forgotten():
    pool = BytesPool(10 * SIZE)
    (first,) = fill(pool, 1, [SIZE])
    assert hash(first) == hash(bytes([1]) * SIZE)
    place = id(first)
    del first
    (second,) = fill(pool, 2, [SIZE])
    assert id(second) == place
    assert second == bytes([2]) * SIZE
    assert hash(second) == hash(bytes([2]) * SIZE)
    assert {second: 1}[bytes([2]) * SIZE] == 1


@pytest.mark.parametrize(
    "hold",
    [
        lambda value: value,
        lambda value: memoryview(value)[10:20],
        lambda value: np.frombuffer(value, np.uint8)[5:],
        lambda value: {value: "a key"},
        lambda value: [[value]],
    ],
)
def test_memory_that_anybody_can_see_is_left_alone(hold):
    pool = BytesPool(10 * SIZE)
    holder = hold(fill(pool, 1, [SIZE])[0])
    gc.collect()
    others = [fill(pool, 2, [SIZE])[0] for _ in range(3)]
    while isinstance(holder, list | dict):
        (holder,) = holder
    assert bytes(holder) == bytes([1]) * len(holder)
    assert all(other == bytes([2]) * SIZE for other in others)


def test_values_differ_from_each_other_and_stay_within_the_limit():
    """Random holders against copies of what they hold."""
    rng = random.Random(1)
    pool = BytesPool(2_000_000)
    held: dict[int, tuple[bytes, int]] = {}
    for step in range(600):
        sizes = [rng.choice((1000, 50_000, SIZE, 3_000_000)) for _ in range(rng.randrange(4))]
        new = enumerate(fill(pool, step, sizes))
        held |= {10 * step + i: (value, (step + i) % 251) for i, value in new}
        for key in rng.sample(list(held), len(held) // 2):
            del held[key]
        assert pool.kept_bytes <= 2_000_000
        for value, seed in held.values():
            assert value[0] == value[-1] == value[len(value) // 2] == seed
        value = b""
    pool.clear()
    assert pool.kept_bytes == 0
    with pytest.raises(MemoryError):
        pool.take([2**63])


def test_a_pool_of_nothing_keeps_nothing():
    pool = BytesPool(0)
    (first,) = fill(pool, 1, [SIZE])
    assert pool.kept_bytes == 0
    assert first == bytes([1]) * SIZE


@pytest.mark.parametrize("pool_bytes", [0, 2**22])
def test_values_got_stay_what_they_are(pool_bytes):
    config = StoreConfig(recovery_ms=0, result_pool_bytes=pool_bytes)
    sizes = (1, 4096, RESULT_BYTES - 1, RESULT_BYTES, RESULT_BYTES + 1, 3 * RESULT_BYTES + 5)
    rng = np.random.default_rng(3)
    with StoreClient.local(2**26, config) as client:
        values = {
            f"{size}/{i}": rng.integers(0, 256, size, np.uint8).tobytes()
            for size in sizes
            for i in range(3)
        }
        client.put_many(list(values), list(values.values()))
        chance = random.Random(5)
        held: list[tuple[str, bytes]] = []
        for _ in range(60):
            keys = chance.sample(list(values), chance.choice((1, 1, 5)))
            held += zip(keys, client.get_many([*keys, "missing"])[:-1], strict=True)
            held += [(keys[0], client.get(keys[0]))]
            for key, value in held:
                assert value == values[key]
            held = chance.sample(held, len(held) // 2)
        assert isinstance(client.get_many(["missing", keys[0]])[0], NotFoundError)
