"""Goal: blocks go through the store as a server's do, by its own directory, policies and planner.

Method: a prefix that one instance computed is loaded by another, in a time computed by hand; the
same with segments of their own finds nothing; a small segment evicts by the store's watermark.
"""

import pytest
from sim_scenarios import COSTS, ENGINE, draw_rows

from tandem.core.loads.traces import TraceRow
from tandem.engine.tiers.planner import CostTierPlanner
from tandem.sim.cluster.instance import SimInstance
from tandem.sim.cluster.run import build_cluster, run_scenario
from tandem.sim.cluster.scenario import parse_scenario
from tandem.store.master.state.index import Directory

TEXT = f"""
instances: [{{count: 2, calibration: {COSTS}, kv_tokens: 65536, kv_bytes_per_token: 1000,
  engine: {ENGINE}}}]
links: {{gbps: 0.8, efficiency: 1.0, latency_us: 0}}
policy: load
store: {{tokens: TOKENS, scope: SCOPE}}
"""
IDS = [1, 2, 3, 4, 5]


def make(scope="global", tokens=2**20):
    return parse_scenario(TEXT.replace("SCOPE", scope).replace("TOKENS", str(tokens)), "test")


def test_the_parts_are_the_products_own():
    cluster = build_cluster(make())
    assert cluster.store is not None
    assert type(cluster.store.directory) is Directory
    assert {type(each.tiers) for each in cluster.instances.values()} == {CostTierPlanner}


@pytest.mark.parametrize("scope", ["global", "local"])
def test_a_prefix_comes_from_the_other_machine(scope):
    # The first keeps its instance busy with its answer, so that the second goes to the other one.
    rows = [TraceRow(0.0, 2500, 2000, IDS), TraceRow(4000.0, 2500, 1, [*IDS[:4], 9])]
    outcome = run_scenario(make(scope), rows)
    assert len({each.decode for each in outcome.decisions}) == 2
    second = outcome.records[1]
    if scope == "local":
        assert second.cached_tokens == 0
        assert second.ttft_s == pytest.approx(2 * 0.01 + 0.25)
    else:
        assert second.cached_tokens == 2048
        # 2.048 MB at 100 MB/s, then 452 tokens.
        assert second.ttft_s == pytest.approx(0.02048 + 0.01 + 0.0452)
        assert outcome.report.store_hit_ratio == pytest.approx(2048 / 5000)


def test_the_conductor_and_instances_are_told_what_a_server_tells(monkeypatch):
    """Loads from the store at the speed that was measured; cached tokens are no queue, but what is
    to be computed after a load is.
    """
    expected, add, begin = [], SimInstance.add, SimInstance._begin_loads

    def note(instance, message, *arguments):
        expected.append(message.expected_len)
        add(instance, message, *arguments)
        queued.append(instance.measure_load().queued_tokens)

    def note_loads(instance, plan):
        begin(instance, plan)
        loading.append(instance.measure_load().queued_tokens)

    queued, loading = [], []
    monkeypatch.setattr(SimInstance, "add", note)
    monkeypatch.setattr(SimInstance, "_begin_loads", note_loads)
    cluster = build_cluster(make())
    rows = [
        TraceRow(0.0, 2500, 2000, IDS),
        TraceRow(4000.0, 2500, 1, [*IDS[:4], 9]),
        TraceRow(5000.0, 2500, 1, [*IDS[:4], 10]),
    ]
    cluster.run(rows)
    assert expected == [0, 2048, 2048]
    assert queued == [2500, 452, 452]
    assert loading == [452]
    fleet = cluster.placing.conductor.fleet
    row = fleet.find(cluster.decisions[1].decode)
    # 100 MB/s, of 1,000 bytes a token.
    assert fleet.load_tokens_per_s[row] == pytest.approx(100_000)
    # Depth 0 is what a server tells of a model without windows and states.
    assert fleet.group_depths == frozenset()
    states = [each.scheduler._state for each in cluster.instances.values()]
    assert {(each.windows, each.states) for each in states} == {(None, None)}


def test_a_full_segment_evicts():
    cluster = build_cluster(make(tokens=20 * 512))
    cluster.run(draw_rows(40))
    store = cluster.store
    assert store is not None
    assert store.num_evicted > 0
    held = {each: len(store.directory.copies.rows_on_host(each)) for each in (0, 1)}
    assert all(0 < count <= 20 for count in held.values())
    for instance in cluster.instances.values():
        instance.scheduler.check()
        assert instance.scheduler.get_stats().num_used_blocks == 0
    assert all(record.error == "" for record in cluster.records)
