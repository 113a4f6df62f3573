"""Goal: loads that once were slow are tried again, and go on if the store has become fast."""

from types import SimpleNamespace

from tandem.engine.tiers.config import TierConfig
from tandem.engine.tiers.planner import CostTierPlanner

REQUEST = SimpleNamespace(num_stored_blocks=8)
KEYS = [bytes([number]) for number in range(8)]


def make_planner():
    """Make a planner that computes 8 blocks in 0.1 s and has loaded them in 20 s."""
    planner = CostTierPlanner(TierConfig(), block_size=16, block_bytes=1000)
    planner.note_step(1280, 1280, 1.0)
    planner.note_load(8000, 20.0)
    return planner


def list_tries(planner, load_s, count=1200):
    """Ask once a second; return the seconds at which something is loaded, each in ``load_s``."""
    tries = []
    for now_s in range(count):
        if planner.choose_load(REQUEST, KEYS, 0, float(now_s)).num_blocks:
            tries.append(now_s)
            planner.note_load(8000, load_s)
    return tries


def test_a_store_that_was_slow_once_is_tried_again():
    tries = list_tries(make_planner(), 0.01)
    # 20 s are 0.1 s after 7.6 halvings.
    assert tries[0] == 459
    assert tries[1:] == list(range(460, 1200)), "loads go on"


def test_a_store_that_stays_slow_is_tried_seldom():
    tries = list_tries(make_planner(), 20.0)
    assert tries == [459, 919]


def test_a_load_that_never_ends_is_not_tried_with_each_request():
    planner = make_planner()
    tries = [s for s in range(1200) if planner.choose_load(REQUEST, KEYS, 0, float(s)).num_blocks]
    assert tries == [459, 918]
