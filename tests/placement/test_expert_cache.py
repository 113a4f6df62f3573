"""Goal: cache policies hold what they promise, and the oracle hits as often as anything can.

Method: random steps, against a few lines that say the same in another way: a list ordered by last
use, sums of decayed uses, and a search over all that a cache of this size could have held.
"""

import itertools
import random

import pytest

from tandem.placement.experts.cache import (
    EXPERT_POLICIES,
    FrequencyPolicy,
    LruPolicy,
    OraclePolicy,
    SegmentedLruPolicy,
    StaticPolicy,
)
from tandem.placement.experts.replay import ORACLE, STATIC, replay_layers
from tandem.placement.experts.tier import ExpertSizes, predict_token_seconds

ALL = 1 << 20


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


def make_all(num_slots, steps, num_experts=8):
    counts = [sum(expert in chosen for chosen in steps) for expert in range(num_experts)]
    policies = {name: make(num_slots) for name, make in EXPERT_POLICIES.items()}
    return policies | {
        STATIC: StaticPolicy(num_slots, counts),
        ORACLE: OraclePolicy(num_slots, steps),
    }


class Held:
    """The experts that a policy's insertions leave in the slots."""

    def __init__(self, policy, num_slots):
        self.policy, self.num_slots = policy, num_slots
        self.ids: set[int] = set()

    def touch(self, chosen, max_insertions=ALL):
        """Return the hits and the insertions of a step, which must be possible."""
        hits = [expert for expert in chosen if expert in self.ids]
        insertions = self.policy.touch(chosen, max_insertions)
        assert len(insertions) <= max_insertions
        self.obey(chosen, insertions)
        return hits, insertions

    def obey(self, chosen, insertions):
        for expert, evicted in insertions:
            assert expert in chosen and expert not in self.ids
            assert (evicted == -1) == (len(self.ids) < self.num_slots)
            self.ids -= {evicted}
            self.ids.add(expert)
        assert len(self.ids) <= self.num_slots


@pytest.mark.parametrize("num_slots", [1, 2, 5, 8])
def test_insertions_are_possible_and_spare_what_a_step_uses(num_slots):
    steps = draw_steps(num_slots)
    for name, policy in make_all(num_slots, steps).items():
        held = Held(policy, num_slots)
        for place, chosen in enumerate(steps):
            _, insertions = held.touch(chosen, place % 3 if name != ORACLE else ALL)
            if name != ORACLE:
                assert not {i.evicted for i in insertions} & set(chosen), name
            if place % 7 == 3 and held.ids and name != ORACLE:
                lost = min(held.ids)
                policy.forget(lost)
                held.ids.remove(lost)
            if place % 5 == 2 and name != ORACLE:
                guessed = [chosen[0] + 1 & 7, 6] if chosen[0] != 5 else [0, 7]
                held.obey(guessed, policy.guess(guessed, 1))


def test_lru_holds_the_last_used():
    steps, held, order = draw_steps(7), Held(LruPolicy(4), 4), []
    for chosen in steps:
        hits, _ = held.touch(chosen)
        # Hits are touched first; misses come in after them.
        order = [e for e in order if e not in chosen] + [e for e in chosen if e in hits]
        order += [e for e in chosen if e not in order]
        order = order[-4:]
        assert held.ids == set(order)


def test_segments_outlast_a_scan():
    lru, segmented = Held(LruPolicy(5), 5), Held(SegmentedLruPolicy(5), 5)
    for held in (lru, segmented):
        for _ in range(3):
            held.touch([0, 1, 2])
        for expert in range(10, 20):
            held.touch([expert])
    assert not {0, 1, 2} & lru.ids
    assert {0, 1, 2} <= segmented.ids


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.05])
def test_decayed_sums_decide(decay):
    """0.05 also reaches the size at which sums are written in a new unit."""
    steps, held = draw_steps(3, num_steps=200), Held(FrequencyPolicy(3, decay), 3)
    sums = dict.fromkeys(range(8), 0.0)
    for chosen in steps:
        sums = {e: decay * s + (e in chosen) for e, s in sums.items()}
        before = set(held.ids)
        _, insertions = held.touch(chosen)
        for expert, evicted in insertions:
            assert evicted == -1 or sums[evicted] < sums[expert] + 1e-9
        for missed in set(chosen) - held.ids:
            assert all(sums[e] >= sums[missed] - 1e-9 for e in before & held.ids - set(chosen))


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
        held = Held(OraclePolicy(capacity, steps), capacity)
        hits = sum(len(held.touch(chosen)[0]) for chosen in steps)
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


@pytest.mark.parametrize("top_k", [2, 8])
@pytest.mark.parametrize("hit_rate", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("read_seconds", [0.1, 0.5, 1.0, 2.0, 5.0])
def test_the_time_of_experts_on_disk_is_that_of_every_order_of_misses(
    top_k, hit_rate, read_seconds
):
    """The formula must not assume that reading and computing overlap wholly."""
    sizes = ExpertSizes(num_layers=3, num_experts=16, top_k=top_k, expert_bytes=1000)
    expected = 0.0
    for misses in itertools.product((False, True), repeat=top_k):
        chance, now, disk = 1.0, 0.0, 0.0
        for is_missed in misses:
            chance *= 1 - hit_rate if is_missed else hit_rate
            if is_missed:
                disk += read_seconds
                now = max(now, disk)
            now += 1.0
        expected += 3 * chance * now
    predicted = predict_token_seconds(
        sizes,
        4,
        compute_seconds=3.0 * top_k,
        read_rate=1000 / read_seconds,
        hit_rate=hit_rate,
    )
    assert 0.93 * expected <= predicted <= 1.0001 * expected
