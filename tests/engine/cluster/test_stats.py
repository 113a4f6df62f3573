"""Goal: sums over instances only grow, whichever of them restarts or does not answer."""

from tandem.core.wire import InstanceStage, InstanceStats
from tandem.engine.cluster.stats import GAUGES, StatsHistory, sum_stats

READY = InstanceStage.READY


def test_a_restart_keeps_what_was_counted_and_drops_what_was_held():
    history = StatsHistory()
    first = InstanceStats(stage=READY, num_steps=5, num_running=3, load_failures={"late": 2})
    assert history.note(0, first) == first
    gone = history.recall()
    assert (gone.num_steps, gone.num_running, gone.load_failures) == (5, 0, {"late": 2})
    second = InstanceStats(stage=READY, num_steps=1, num_running=1, load_failures={"bad": 1})
    after = history.note(1, second)
    assert (after.num_steps, after.num_running) == (6, 1)
    assert after.load_failures == {"late": 2, "bad": 1}
    third = history.note(2, InstanceStats(stage=READY))
    assert (third.num_steps, third.num_running) == (6, 0)


def test_every_number_is_summed():
    names = [name for name in InstanceStats.__struct_fields__ if name != "stage"]
    assert set(names) >= GAUGES
    defaults = InstanceStats(stage=READY)
    by_reason = {name for name in names if isinstance(getattr(defaults, name), dict)}
    ones = {n: {"a": 1} if n in by_reason else 1 for n in names}
    total = sum_stats(READY, [InstanceStats(stage=READY, **ones)] * 3)
    assert {n: getattr(total, n) for n in names} == {
        n: {"a": 3} if n in by_reason else 3 for n in names
    }
