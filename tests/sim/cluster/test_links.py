"""Goal: transfers share links max-min fairly, and take the time that follows from it.

Method: small cases by hand; random ones by the definition itself: every transfer has a link that is
full and on which nobody is faster, and no link carries more than it can.
"""

import random

import pytest

from tandem.sim.cluster.events import Events
from tandem.sim.cluster.links import Link, Links, Transfer, share_fairly


def run(transfers, latency_s=0.0):
    """Start (when, links, bytes); return when each ended."""
    events = Events()
    links, ends = Links(events, latency_s), {}
    for number, (when_s, used, size) in enumerate(transfers):
        events.call_at(
            when_s,
            links.start,
            used,
            size,
            lambda number=number: ends.__setitem__(number, events.now_s),
        )
    events.run()
    return [ends[number] for number in range(len(transfers))]


def test_two_share_a_link_until_one_has_ended():
    link = Link("a", 10.0)
    assert run([(0.0, (link,), 10.0), (0.0, (link,), 30.0)]) == pytest.approx([2.0, 4.0])
    assert link.moved_bytes == 40.0
    # The second comes when half of the first is there.
    assert run([(0.0, (link,), 10.0), (0.5, (link,), 10.0)]) == pytest.approx([1.5, 2.0])


def test_who_is_held_up_elsewhere_leaves_room():
    wide, narrow = Link("wide", 10.0), Link("narrow", 2.0)
    ends = run([(0.0, (wide, narrow), 4.0), (0.0, (wide,), 16.0)])
    assert ends == pytest.approx([2.0, 2.0])


def test_latency_and_transfers_over_nothing():
    link = Link("a", 10.0)
    assert run([(1.0, (link,), 10.0), (0.0, (), 5.0)], 0.5) == pytest.approx([2.5, 0.5])


@pytest.mark.parametrize("seed", range(12))
def test_rates_are_max_min_fair(seed):
    chance = random.Random(seed)
    links = [Link(str(i), chance.choice([1.0, 2.0, 5.0, 9.0])) for i in range(6)]
    for _ in range(12):
        used = tuple(chance.sample(links, chance.randint(1, 3)))
        transfer = Transfer(used, 1.0, lambda: None)
        for link in used:
            link.transfers[transfer] = None
    rates = share_fairly(links)
    sums = {id(link): sum(rates[each] for each in link.transfers) for link in links}
    for link in links:
        assert sums[id(link)] <= link.bytes_per_s + 1e-9
    for transfer, rate in rates.items():
        assert any(
            sums[id(link)] >= link.bytes_per_s - 1e-9
            and rate >= max(rates[each] for each in link.transfers) - 1e-9
            for link in transfer.links
        )
    # A change asks only for what is connected with it.
    some = share_fairly(links[:1])
    assert some == pytest.approx({transfer: rates[transfer] for transfer in some})
