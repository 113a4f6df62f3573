"""Where replicas and reads go, and how much is evicted: by example."""

from collections import Counter

import pytest

from tandem.store.master.policies import (
    HostView,
    Strategy,
    count_bytes_to_evict,
    order_hosts,
    rank_replicas,
)

HOSTS = [
    HostView(0, "a", "m1", free_bytes=10, capacity_bytes=100, load_bytes=5),
    HostView(1, "b", "m1", free_bytes=30, capacity_bytes=100, load_bytes=1),
    HostView(2, "c", "m2", free_bytes=20, capacity_bytes=100, load_bytes=0),
]


def draw_first(limit: int) -> int:
    return 0


def test_most_free_first():
    assert order_hosts(HOSTS, strategy=Strategy.MOST_FREE, draw=draw_first) == [1, 2, 0]


def test_preferred_then_same_machine_then_the_strategy():
    options = {"strategy": Strategy.MOST_FREE, "draw": draw_first}
    assert order_hosts(HOSTS, preferred=["c", "a"], **options) == [2, 0, 1]
    assert order_hosts(HOSTS, machine="m1", **options) == [1, 0, 2]
    assert order_hosts(HOSTS, preferred=["c"], machine="m1", **options) == [2, 1, 0]
    assert order_hosts(HOSTS, preferred=["gone"], **options) == [1, 2, 0]


def test_random_is_fair_and_made_of_what_is_drawn():
    import random

    rng = random.Random(0)
    firsts = Counter(
        order_hosts(HOSTS, strategy=Strategy.RANDOM, draw=rng.randrange)[0] for _ in range(3000)
    )
    assert all(900 < firsts[host] < 1100 for host in range(3))
    same = [order_hosts(HOSTS, strategy=Strategy.RANDOM, draw=draw_first) for _ in range(2)]
    assert same[0] == same[1]
    assert sorted(same[0]) == [0, 1, 2]


def test_reads_go_to_the_same_machine_then_to_the_least_loaded():
    assert rank_replicas(HOSTS, "m1") == [1, 0, 2]
    assert rank_replicas(HOSTS, "m2") == [2, 1, 0]
    assert rank_replicas(HOSTS, "") == [2, 1, 0]


@pytest.mark.parametrize(("used", "expected"), [(0, 0), (950, 0), (951, 51), (1000, 100)])
def test_eviction_begins_above_the_watermark_and_goes_a_step_below(used, expected):
    assert count_bytes_to_evict(used, 1000, high_watermark=0.95, step=0.05) == expected
