"""Goal: the paper's tables are made of their files: every scenario can be, every quotient is right.

Method: a stand-in for runs answers with figures that are known by scenario, and counts how often
it is asked; the table of the long prompt is simulated.
"""

from pathlib import Path

import msgspec
import pytest

from tandem.core.errors import NotFoundError
from tandem.sim.cluster.run import make_setups
from tandem.sim.study.paper import (
    NAMES,
    Outcome,
    PaperRow,
    PaperTable,
    Runs,
    list_tables,
    read_fits,
    render_page,
)


def answer(asked):
    """Return what serves scenarios: TTFT by policy, goodput by rate, prefill by cache."""

    def serve(key, scenario):
        asked.append(key)
        make_setups(scenario)
        engine = scenario.instances[0].engine
        ttft = {"random": 20.0, "load": 6.0, "prefix": 4.0, "mooncake": 3.0}[scenario.policy]
        scale = scenario.load.rate_scale
        good = 5.0 - abs(scale - 2.0)
        return Outcome(
            key=key,
            completed=1,
            failed=0,
            ttft_s=ttft,
            hit_ratio=0.4 if scenario.store and scenario.store.scope == "global" else 0.2,
            prefill_s=100.0 if engine.prefix_cache else 150.0,
            goodput=scenario.instances[0].count,
            effective={"100": good, "200": good, "300": good},
            last_ttft_ratio=0.2,
        )

    return serve


def test_every_table_can_be_made_and_each_run_once(tmp_path):
    asked = []
    path = tmp_path / "runs.jsonl"
    trace = tmp_path / "trace"
    row = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]}\n'
    trace.write_text(2 * row)
    runs = Runs(trace, 10, path, serve=answer(asked))
    results = {name: runs.measure(table) for name, table in list_tables().items()}
    assert list(results) == list(NAMES)
    assert len(asked) == len(set(asked))
    scheduling = results["scheduling"]
    assert [row.ours for row in scheduling] == [20.0, 6.0, 4.0, 3.0]
    assert all(row.is_right for row in scheduling)
    assert results["cache"][0].ours == pytest.approx(2.0)
    assert results["prefill_time"][0].ours == pytest.approx(1.5)
    # The best rate of both is 2.0.
    assert [row.ours for row in results["capacity"]] == [1.0, 1.0, 1.0]
    assert not any(row.is_right for row in results["capacity"])
    # The second prompt is the first again.
    assert results["capacity_hits"][0].ours == pytest.approx(0.5)
    page = render_page(results, 10, ["cache"])
    assert page.count("| fitted |") == 1
    assert "| random | 19.65 | 20 | fitted | right |" in page
    assert page.count("*Whole.*") == 1
    assert "**wrong**" in page
    asked.clear()
    again = Runs(Path("elsewhere/trace"), 10, path, serve=answer(asked))
    assert again.measure(list_tables(["scheduling"])["scheduling"]) == scheduling
    assert asked == []
    with pytest.raises(NotFoundError, match="capacity"):
        list_tables(["none"])


def test_the_fitted_row_is_run_at_each_value_that_is_tried():
    asked = []
    serve = answer(asked)

    def serve_slower(key, scenario):
        outcome = serve(key, scenario)
        share = scenario.instances[0].gpu_compute
        return msgspec.structs.replace(outcome, ttft_s=outcome.ttft_s / share)

    fit = read_fits()[0]
    found = Runs(Path("trace"), 10, serve=serve_slower).fit(fit)
    assert found == [(value, pytest.approx(20.0 / value)) for value in fit.tried]
    assert len(asked) == len(fit.tried)


def test_an_order_that_is_not_the_papers_is_wrong():
    rows = [
        PaperRow(name="a", system="mooncake", set={"policy": "random"}, published=1.0),
        PaperRow(name="b", system="mooncake", published=2.0),
    ]
    table = PaperTable(title="t", source="s", figure="ttft_s", unit="s", what="w", rows=rows)
    results = Runs(Path("trace"), 10, serve=answer([])).measure(table)
    assert [row.is_right for row in results] == [False, False]
    assert [row.off for row in results] == pytest.approx([19.0, 0.5])


def test_generated_loads_of_a_whole_table_are_as_short_as_all():
    limits, serve = {}, answer([])

    def note(key, scenario):
        limits.setdefault(scenario.load.generator, set()).add(scenario.load.limit)
        return serve(key, scenario)

    Runs(Path("trace"), 10, serve=note).measure(list_tables(["cache"])["cache"], 0)
    assert limits == {None: {0}, "toolagent": {10}, "synthetic": {10}}


def test_a_long_prompt_that_is_cached():
    table = list_tables(["long_prompt"])["long_prompt"]
    (row,) = Runs(Path("trace"), 0).measure(table)
    assert 0.05 < row.ours < 0.25
