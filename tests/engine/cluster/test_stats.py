"""Goal: sums over instances only grow, whichever of them restarts or does not answer."""

from tandem.core.instance_status import InstanceStats, Statistics, list_stats, sum_stats
from tandem.core.wire import InstanceStage
from tandem.engine.cluster.stats import StatsHistory

READY = InstanceStage.READY
BY_LABEL = {spec.field for spec in list_stats() if spec.label}


def fill(number: int) -> dict:
    """Return values of all statistics, each of its own."""
    values = {spec.field: number + n for n, spec in enumerate(list_stats())}
    return {f: {"a": value} if f in BY_LABEL else value for f, value in values.items()}


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


def test_every_counter_outlives_a_restart_and_no_gauge_does():
    history = StatsHistory()
    history.note(0, InstanceStats(stage=READY, **fill(100)))
    after = history.note(1, InstanceStats(stage=READY))
    for n, spec in enumerate(list_stats()):
        kept = getattr(after, spec.field)
        if spec.kind == "counter":
            assert kept == ({"a": 100 + n} if spec.label else 100 + n), spec.field
        else:
            assert not kept, spec.field


def test_every_number_is_summed():
    total = sum_stats(READY, [Statistics(**fill(number)) for number in (1, 10, 100)])
    assert {spec.field: getattr(total, spec.field) for spec in list_stats()} == {
        spec.field: {"a": 111 + 3 * n} if spec.label else 111 + 3 * n
        for n, spec in enumerate(list_stats())
    }


def test_labels_are_added_one_by_one_and_no_part_is_changed():
    parts = [Statistics(load_failures={"late": 1}), Statistics(load_failures={"late": 2, "bad": 4})]
    total = sum_stats(READY, parts)
    assert total.load_failures == {"late": 3, "bad": 4}
    total.load_failures["late"] = 9
    assert parts[0].load_failures == {"late": 1}
    assert sum_stats(READY, []) == InstanceStats(stage=READY)


def test_the_declarations_agree():
    """A counter's name says so, and no two have one name."""
    specs = list_stats()
    assert [spec.field for spec in specs] == list(Statistics.__struct_fields__)
    assert len({spec.metric for spec in specs}) == len(specs)
    for spec in specs:
        assert spec.metric.endswith("_total") == (spec.kind == "counter"), spec
        assert (spec.unit in ("bytes", "seconds")) == any(
            spec.metric.endswith(f"_{unit}_total") for unit in ("bytes", "seconds")
        ), spec
        assert spec.help.endswith("."), spec
