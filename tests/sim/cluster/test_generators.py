"""Goal: generated traces have the statistics that were asked for, and are traces.

Method: means, rates and hit ratios over some thousand requests, beside the published ones for the
loads that stand for traces that are not at hand; each hash must always follow the same one.
"""

import statistics

import pytest

from tandem.core.errors import NotFoundError
from tandem.sim.cluster.generators import Generator, find_generator, generate_rows
from tandem.sim.replay.hits import PlainLru, count_hits

PUBLISHED = {"toolagent": (23608, 8596, 182, 0.59), "synthetic": (3993, 15325, 149, 0.64)}


@pytest.mark.parametrize("name", [pytest.param("toolagent", marks=pytest.mark.slow), "synthetic"])
def test_known_loads_have_the_published_statistics(name):
    count, inputs, outputs, hits = PUBLISHED[name]
    spec = find_generator(name)
    rows = list(generate_rows(spec))
    assert len(rows) == count
    assert statistics.mean(row.input_length for row in rows) == pytest.approx(inputs, rel=0.1)
    assert statistics.mean(row.output_length for row in rows) == pytest.approx(outputs, rel=0.1)
    assert count_hits(rows, PlainLru(None)).ratio == pytest.approx(hits, abs=0.03)
    assert count / (rows[-1].timestamp / 1e3) == pytest.approx(spec.rate, rel=0.2)


def test_rows_are_a_trace():
    spec = Generator(
        requests=800, rate=5.0, turns=4, think_s=10, shared_prefixes=5, shared_tokens=1500, seed=3
    )
    rows = list(generate_rows(spec))
    assert rows == list(generate_rows(spec))
    times = [row.timestamp for row in rows]
    assert times == sorted(times)
    before: dict[int, int] = {}
    for row in rows:
        assert len(row.hash_ids) == -(-row.input_length // 512)
        for parent, hash_id in zip([-1, *row.hash_ids], row.hash_ids, strict=False):
            assert before.setdefault(hash_id, parent) == parent
    assert len({row.hash_ids[0] for row in rows}) < 200


def test_bursts_and_single_turns():
    rows = list(generate_rows(Generator(requests=300, rate=3.0, burst_s=3.0)))
    assert {row.timestamp % 3000 for row in rows} == {0}
    assert len({hash_id for row in rows for hash_id in row.hash_ids}) == sum(
        len(row.hash_ids) for row in rows
    )
    with pytest.raises(NotFoundError, match="toolagent"):
        find_generator("none")
