"""Goal: hit ratios of a replayed trace are those of its caches' definitions.

Method: a small trace is counted by hand; random ones against a cache written as a list, in which
every touch is a removal and an append. The prefix index has to agree where nothing is evicted, and
to obey its own check after every request.
"""

import random

import pytest

from tandem.core.errors import CapacityError
from tandem.core.loads.traces import TraceRow
from tandem.sim.replay.hits import IndexCache, PlainLru, count_hits, count_unique


def row(*hash_ids):
    return TraceRow(0.0, 512 * len(hash_ids), 1, list(hash_ids))


class ListLru:
    def __init__(self, size):
        self.size, self.held = size, []

    def serve(self, hash_ids):
        hits = next((i for i, h in enumerate(hash_ids) if h not in self.held), len(hash_ids))
        for hash_id in hash_ids:
            self.held = [h for h in self.held if h != hash_id] + [hash_id]
            self.held = self.held[-self.size :]
        return hits


def draw_rows(seed, count=300):
    chance = random.Random(seed)
    chains, rows, fresh = [[0]], [], iter(range(1, 10_000))
    for _ in range(count):
        old = chance.choice(chains[-8:])
        cut = old[: chance.randint(1, len(old))]
        chains.append(cut + [next(fresh) for _ in range(chance.randint(0, 4))])
        rows.append(row(*chains[-1]))
    return rows


def test_hits_by_hand():
    rows = [row(0, 1, 2), row(0, 1, 3), row(4), row(0, 1, 2)]
    count = count_hits(rows, PlainLru(None))
    assert (count.num_blocks, count.num_hits, count_unique(rows)) == (10, 5, 5)
    assert count.ratio == 0.5
    assert count.mean_ratio == pytest.approx((0 + 2 / 3 + 0 + 1) / 4)
    # The head of the second request is the oldest of the four blocks that came last but one.
    assert count_hits(rows, PlainLru(3)).num_hits == 2
    assert count_hits([], PlainLru(3)).ratio == 0.0


@pytest.mark.parametrize("size", [12, 40])
def test_lru_is_that_of_a_list(size):
    rows = draw_rows(size)
    ours, lists = PlainLru(size), ListLru(size)
    assert [ours.serve(r.hash_ids) for r in rows] == [lists.serve(r.hash_ids) for r in rows]


def test_the_index_agrees_where_it_evicts_nothing():
    rows = draw_rows(1)
    index = IndexCache(count_unique(rows))
    whole = PlainLru(None)
    for r in rows:
        assert index.serve(r.hash_ids) == whole.serve(r.hash_ids)


def test_the_index_evicts_and_stays_whole():
    rows = draw_rows(2)
    size = max(len(r.hash_ids) for r in rows)
    index = IndexCache(size)
    hits = 0
    for r in rows:
        hits += index.serve(r.hash_ids)
        index.check()
    assert 0 < hits < count_hits(rows, PlainLru(None)).num_hits
    with pytest.raises(CapacityError, match="blocks, the cache"):
        index.serve(list(range(size + 1)))
