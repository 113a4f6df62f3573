"""The conductor's live benchmark: slices have whole conversations; all cases run at toy size."""

import msgspec
import pytest

from tandem.bench.conductor_live import count_ideal_hits, make_live_cases, slice_conversations
from tandem.bench.harness import run_cases
from tandem.core.loads.traces import TraceRow


def draw_trace(count):
    """Return conversations of three turns, mixed; hash 0 is what all requests begin with.

    Ids are numbered by first appearance. A long prompt before each conversation makes the second id
    of the conversation a multiple of 800, by which slices choose.
    """
    rows = []
    talks = [[0] for _ in range(count // 3)]
    num_ids = 1
    for number in range(count):
        talk = talks[number % len(talks)]
        if len(talk) == 1:
            last = -(-num_ids // 800) * 800
            others = range(num_ids, last)
            rows.append(TraceRow(number * 500.0, 512 * (1 + len(others)), 16, [0, *others]))
            num_ids = last
        talk += [num_ids, num_ids + 1]
        num_ids += 2
        rows.append(TraceRow(number * 500.0, 512 * len(talk), 16, list(talk)))
    return rows


def test_a_slice_has_every_turn_of_its_conversations():
    rows = draw_trace(30)
    kept = slice_conversations(rows, 1600)
    assert {row.hash_ids[1] for row in kept} == {1600, 3200, 4800, 6400, 8000}
    assert len(kept) == 15
    assert [row.timestamp for row in kept] == sorted(row.timestamp for row in kept)
    alone = TraceRow(0.0, 100, 1, [0])
    assert slice_conversations([alone], 1600) == [alone]


def test_a_cache_without_bounds_has_what_was_asked_before():
    rows = [TraceRow(0.0, 1024, 1, [0, 1]), TraceRow(1.0, 1536, 1, [0, 1, 2]),
            TraceRow(2.0, 1000, 1, [0, 3])]  # fmt: skip
    assert count_ideal_hits(rows) == (1024 + 512) / (1024 + 1536 + 1000)


@pytest.mark.slow
def test_cases_at_toy_size(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in draw_trace(18)))
    cases = make_live_cases(trace, quick=True)
    records = list(run_cases("conductor", cases, budget_s=0.1, rounds=1))
    assert [record.check for record in records] == ["ok"] * 9
    assert all(record.ours is not None for record in records)
    by_metric = {record.case.split("metric=")[1].split()[0]: record for record in records}
    assert 0 < by_metric["hits"].ours < 1
    assert by_metric["attainment"].ours <= 1
    assert by_metric["goodput"].baseline > 0
