"""Goal: a simulated cluster is the product, with models of time and transport alone.

Method: the parts of an instance and of a request are asserted to be the product's own classes.
Times of single requests are computed by hand from the step model and the links; loads of many, on
one instance and on pairs, must end with their lengths, leave nothing behind, and hit what the
prefix index holds without time.
"""

import pytest
from sim_scenarios import ONE, PAIR, draw_rows, make

from tandem.conductor.conductor import Conductor
from tandem.conductor.policies.table import make_policy
from tandem.core.errors import CapacityError, ConfigError
from tandem.core.loads.traces import TraceRow
from tandem.engine.cluster.request_states import RequestStates
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.sim.cluster.requests import repeat_rows, scale_rows
from tandem.sim.cluster.run import build_cluster, make_setups, run_scenario
from tandem.sim.cluster.scenario import change_scenario, parse_scenario
from tandem.sim.replay.hits import IndexCache, count_hits


def build(scenario):
    """Return a cluster and its instances, without a load."""
    cluster = build_cluster(scenario)
    return cluster, cluster.instances, cluster.placing


def test_the_parts_are_the_products_own(monkeypatch):
    cluster, instances, placing = build(make(PAIR))
    for instance in instances.values():
        assert type(instance.scheduler) is Scheduler
        assert type(instance.pool) is BlockPool
        assert type(instance.index) is PrefixIndex
    assert type(placing.conductor) is Conductor
    assert type(placing.conductor.policy) is type(make_policy("prefix"))
    made = []
    real = RequestStates.__init__

    def note(self, *arguments):
        made.append(type(self))
        real(self, *arguments)

    monkeypatch.setattr(RequestStates, "__init__", note)
    cluster.run(draw_rows(3))
    assert made == [RequestStates] * 3


def test_one_request_on_one_instance_by_hand():
    outcome = run_scenario(make(ONE), [TraceRow(5000.0, 3000, 4, [1, 2, 3, 4, 5, 6])])
    (record,) = outcome.records
    # Two chunks of 2048 and 952 tokens, then three decodes.
    first_s = 5.0 + 0.01 + 0.2048 + 0.01 + 0.0952
    assert record.event_times_s == pytest.approx([first_s + 0.01 * i for i in range(4)])
    assert record.ttft_s == pytest.approx(0.32)
    assert record.done_s == record.event_times_s[-1]
    assert (record.output_tokens, record.cached_tokens, record.error) == (4, 0, "")
    assert outcome.report.prefill_s == pytest.approx(0.32)


@pytest.mark.parametrize("layerwise", ["false", "true"])
def test_one_request_over_a_pair_by_hand(layerwise):
    scenario = make(PAIR, layerwise=layerwise)
    outcome = run_scenario(scenario, [TraceRow(0.0, 2048, 3, [1, 2, 3, 4])])
    (record,) = outcome.records
    first_s = 0.01 + 0.2048
    # 2 MB at 100 MB/s: all of it after the step, or beside it and its one layer after it.
    moved_s = 0.02048
    begin_s = first_s + moved_s
    assert record.event_times_s == pytest.approx([first_s, begin_s + 0.01, begin_s + 0.02])
    (decision,) = outcome.decisions
    assert decision.kind == "pair"
    assert (decision.prefill[0], decision.decode[0]) == ("p", "d")
    assert outcome.report.fallbacks == {}


@pytest.mark.parametrize("text", [ONE, PAIR], ids=["one", "pair"])
def test_a_load_ends_with_its_lengths_and_leaves_nothing(text):
    rows = draw_rows(70, gap_ms=60)
    cluster, instances, _ = build(make(text, 2**17))
    cluster.run(rows)
    for row, record in zip(rows, cluster.records, strict=True):
        assert record.error == ""
        assert record.output_tokens == row.output_length == len(record.event_times_s)
        assert record.event_times_s == sorted(record.event_times_s)
        assert record.event_times_s[0] > record.sent_s
    for instance in instances.values():
        instance.scheduler.check()
        assert instance.scheduler.get_stats().num_used_blocks == 0
        assert instance.num_live == 0
        assert not instance.readers
    assert sum(record.cached_tokens for record in cluster.records) > 0
    again, _, _ = build(make(text, 2**17))
    again.run(rows)
    assert again.decisions == cluster.decisions
    assert again.records == cluster.records


@pytest.mark.parametrize("num_blocks", [40, 100])
def test_hits_of_one_instance_are_those_without_time(num_blocks):
    # Far apart, and with prompts whose last block is full and new, as its last token is computed.
    rows = [
        TraceRow(row.timestamp * 100, 512 * len(row.hash_ids), 1, row.hash_ids)
        for row in draw_rows(120)
        if len(row.hash_ids) < 30
    ]
    outcome = run_scenario(make(ONE, 512 * num_blocks), rows)
    expected = count_hits(rows, IndexCache(num_blocks))
    assert sum(r.cached_tokens for r in outcome.records) == 512 * expected.num_hits


def test_admission_refuses_what_would_be_late():
    # Ten times what one instance computes; each prompt takes 0.2 s alone.
    rows = [TraceRow(20.0 * i, 2048, 2, [4 * i + j for j in range(4)]) for i in range(60)]
    slo = {"slo.ttft": 1000}
    late = run_scenario(change_scenario(make(ONE), slo), rows).report
    kept = run_scenario(change_scenario(make(ONE), slo | {"admission": "early"}), rows)
    assert late.failed == 0
    assert late.attained is not None
    assert kept.report.attained is not None
    assert late.attained < kept.report.attained < 1.0
    assert set(kept.report.errors) == {"overloaded: ttft"}
    accepted = [record for record in kept.records if not record.error]
    in_time = sum(record.ttft_s <= 1.0 for record in accepted)
    assert in_time / len(accepted) > 2 * late.attained


def test_a_full_queue_refuses():
    text = ONE.replace("max_queue: 10000", "max_queue: 0").replace(
        "max_running: 64", "max_running: 1"
    )
    outcome = run_scenario(make(text), [TraceRow(0.0, 600, 5, [i, i + 50]) for i in range(3)])
    errors = [record.error.partition(":")[0] for record in outcome.records]
    assert errors == ["", "capacity", "capacity"]
    assert (outcome.report.completed, outcome.report.failed) == (1, 2)


def test_traces_repeated_and_scaled():
    rows = draw_rows(5)
    twice = list(repeat_rows(rows, 2))
    assert [r.input_length for r in twice[5:]] == [r.input_length for r in rows]
    assert not {h for r in twice[:5] for h in r.hash_ids} & {
        h for r in twice[5:] for h in r.hash_ids
    }
    times = [r.timestamp for r in twice]
    assert times == sorted(times)
    assert [r.timestamp for r in scale_rows(rows, 2.0)] == [r.timestamp / 2 for r in rows]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("instances: []", "instances"),
        ("instances: [{hardware: 8xa800}]", "hardware and model"),
        ("instances: [{hardware: 8xa800, model: llama3-70b, colour: red}]", "colour"),
        ("instances: [{hardware: 8xa800, model: llama3-70b, accelerators: 9}]", "has 8"),
        ("instances: [{role: prefill, hardware: 8xa800, model: llama3-70b}]", "go together"),
        ("a: [", "not YAML"),
    ],
)
def test_scenarios_that_cannot_be_are_named(text, match):
    with pytest.raises(ConfigError, match=match):
        make_setups(parse_scenario(text, "test"))


def test_a_model_that_does_not_fit_is_refused():
    text = "instances: [{hardware: 8xa800, model: llama3-70b, accelerators: 1}]"
    with pytest.raises(CapacityError, match="does not fit"):
        make_setups(parse_scenario(text, "test"))


def test_loads_are_told_whenever_they_have_changed():
    """An instance whose load is not told again has the load that was told."""
    cluster, instances, placing = build(make(PAIR, tokens=512 * 60))
    real, num_checked = placing.decide, 0
    told = {}

    def decide(*arguments, **options):
        nonlocal num_checked
        for name, instance in instances.items():
            if not instance.is_load_new:
                num_checked += 1
                assert instance.measure_load() == told[name]
        decision = real(*arguments, **options)
        told.update({name: instance.measure_load() for name, instance in instances.items()})
        return decision

    placing.decide = decide
    cluster.run(draw_rows(40, gap_ms=100))
    assert num_checked > 20


def test_a_late_refusal_comes_after_the_prefill():
    rows = [TraceRow(0.0, 1000, 4, [1, 2]), TraceRow(1.0, 1000, 4, [3, 4])]
    late = change_scenario(make(PAIR), {"admission": "late", "slo.tpot": 1.0})
    outcome = run_scenario(late, rows)
    assert {record.error for record in outcome.records} == {"overloaded: tpot, after the prefill"}
    assert outcome.report.prefill_s > 0.2
    # Each of the two idle decode instances takes one in any case.
    times_ms = (0.0, 3000.0, 6000.0)
    rows = [TraceRow(ms, 1000, 4000, [2 * i, 2 * i + 1]) for i, ms in enumerate(times_ms)]
    early = run_scenario(change_scenario(late, {"admission": "early"}), rows)
    assert [record.error for record in early.records] == ["", "", "overloaded: tpot"]
    assert early.report.prefill_s < 0.3
    kept = run_scenario(change_scenario(late, {"slo.tpot": 1000.0}), rows)
    assert not any(record.error for record in kept.records)
