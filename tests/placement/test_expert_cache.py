"""Goal: cache policies hold what they promise, and the oracle hits as often as anything can.

Method: random steps, against a few lines that say the same in another way: a list ordered by last
use, sums of decayed uses, and a search over all that a cache of this size could have held.
"""

import itertools
import random

import pytest

from tandem.placement.expert_cache import (
    POLICIES,
    DecayingFrequencyCache,
    LruCache,
    OracleCache,
    SegmentedLruCache,
    StaticCache,
)
from tandem.placement.expert_replay import ORACLE, STATIC, replay_layers


def draw_steps(seed, num_steps=60, num_experts=8, most=3, favourites=3):
    """Steps with a few experts that come often, others by turns."""
    draw = random.Random(seed)
    steps = []
    for place in range(num_steps):
        near = [(place // 10 + i) % num_experts for i in range(favourites)]
        wanted = {draw.choice(near) if draw.random() < 0.7 else draw.randrange(num_experts)}
        for _ in range(draw.randrange(most)):
            wanted.add(draw.randrange(num_experts))
        steps.append(sorted(wanted))
    return steps


def make_all(capacity, steps, num_experts=8):
    counts = [sum(expert in chosen for chosen in steps) for expert in range(num_experts)]
    caches = {name: make(capacity) for name, make in POLICIES.items()}
    return caches | {STATIC: StaticCache(capacity, counts), ORACLE: OracleCache(capacity, steps)}


@pytest.mark.parametrize("capacity", [1, 2, 5, 8])
def test_what_steps_tell_is_what_is_held(capacity):
    steps = draw_steps(capacity)
    for name, cache in make_all(capacity, steps).items():
        held = set(cache.held)
        for chosen in steps:
            step = cache.step(chosen)
            assert step.hits == [e for e in chosen if e in held], name
            assert sorted(step.hits + step.misses) == chosen
            for load in step.loads:
                assert load.expert in step.misses and load.expert not in held
                if load.victim is not None:
                    assert len(held) == capacity
                    assert name == ORACLE or load.victim not in chosen
                    held.remove(load.victim)
                held.add(load.expert)
            assert held == set(cache.held), name
            assert all(cache.is_held(expert) for expert in held)
            assert len(held) <= capacity


def test_lru_holds_the_last_used():
    steps, cache, order = draw_steps(7), LruCache(4), []
    for chosen in steps:
        hits = set(cache.step(chosen).hits)
        # Hits are touched first; misses come in after them.
        order = [e for e in order if e not in chosen] + [e for e in chosen if e in hits]
        order += [e for e in chosen if e not in order]
        order = order[-4:] if len(order) > 4 else order
        assert set(cache.held) == set(order)


def test_segments_outlast_a_scan():
    lru, segmented = LruCache(5), SegmentedLruCache(5)
    for cache in (lru, segmented):
        for _ in range(3):
            cache.step([0, 1, 2])
        for expert in range(10, 20):
            cache.step([expert])
    assert not {0, 1, 2} & set(lru.held)
    assert {0, 1, 2} <= set(segmented.held)


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.05])
def test_decayed_sums_decide(decay):
    """0.05 also reaches the size at which sums are written in a new unit."""
    steps, cache = draw_steps(3, num_steps=200), DecayingFrequencyCache(3, decay)
    sums = dict.fromkeys(range(8), 0.0)
    for chosen in steps:
        before = set(cache.held)
        sums = {e: decay * s + (e in chosen) for e, s in sums.items()}
        step = cache.step(chosen)
        for load in step.loads:
            if load.victim is not None:
                assert sums[load.victim] < sums[load.expert] + 1e-9
        for missed in set(step.misses) - {load.expert for load in step.loads}:
            kept = before - set(chosen)
            assert not kept or min(sums[e] for e in kept & set(cache.held)) >= sums[missed] - 1e-9


def count_most_hits(steps, capacity, num_experts):
    """Return the most hits of any cache, by all sets that it could hold after each step."""
    best = {frozenset(): 0}
    for chosen in steps:
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            now = hits + len(held & set(chosen))
            seen = held | set(chosen)
            for size in range(min(capacity, len(seen)) + 1):
                for kept in itertools.combinations(sorted(seen), size):
                    key = frozenset(kept)
                    after[key] = max(after.get(key, -1), now)
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(4))
def test_no_cache_hits_more_than_the_oracle(seed):
    steps = draw_steps(seed, num_steps=14, num_experts=5, most=2)
    for capacity in (1, 2, 3):
        cache = OracleCache(capacity, steps)
        hits = sum(len(cache.step(chosen).hits) for chosen in steps)
        assert hits == count_most_hits(steps, capacity, 5)


def test_a_replay_counts_the_second_half():
    steady = [[0, 1]] * 10
    moved = [[0, 1]] * 5 + [[2, 3]] * 5
    told = []
    replays = replay_layers(
        [steady, moved],
        4,
        capacities=[2],
        note_progress=lambda done, total: told.append((done, total)),
    )
    by_name = {replay.policy: replay for replay in replays}
    assert by_name[STATIC].by_layer == [1.0, 0.0]
    assert by_name["lru"].by_layer == [1.0, 0.8]
    assert by_name[ORACLE].by_layer == [1.0, 0.8]
    assert by_name["lru"].hit_rate == pytest.approx(0.9)
    assert by_name["lru"].loads_per_step == pytest.approx(2 / 5)
    assert told[-1] == (5, 5)
    sizes = {replay.capacity for replay in replay_layers([steady], 128)}
    assert sizes == {8, 16, 32, 64, 96}
