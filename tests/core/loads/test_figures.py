"""Goal: the figures of a load test are those of its records, by the definitions that others use.

Method: records with times that are known; every figure is checked against numpy or by hand. No
clock and no network.
"""

import asyncio

import msgspec
import numpy as np
import pytest

from tandem.bench.clients.report import render_report
from tandem.bench.clients.search import find_users
from tandem.core.loads.figures import Objectives, describe, summarise
from tandem.core.loads.records import LoadReport, RequestRecord


def make_record(index, sent, first, gap, tokens, **changes):
    """A request whose tokens come one an event, at equal times."""
    times = [sent + first + gap * i for i in range(tokens)]
    values = {
        "index": index,
        "input_length": 100,
        "output_length": tokens,
        "sent_s": sent,
        "event_times_s": times,
        "done_s": times[-1] + 0.001,
        "output_tokens": tokens,
    }
    return RequestRecord(**(values | changes))


RECORDS = [make_record(i, 0.1 * i, 0.2 + 0.01 * i, 0.02, 11) for i in range(50)]


def test_figures_are_those_of_the_times():
    report = summarise(RECORDS, backend="openai-completions", dataset_name="random")
    ttft = np.array([0.2 + 0.01 * i for i in range(50)]) * 1000
    assert report.ttft_ms.mean == pytest.approx(ttft.mean())
    assert report.ttft_ms.std == pytest.approx(ttft.std())
    assert report.ttft_ms.p99 == pytest.approx(np.percentile(ttft, 99))
    assert report.tpot_ms.median == pytest.approx(20)
    assert report.itl_ms.max == pytest.approx(20)
    duration = 4.9 + 0.69 + 0.2 + 0.001
    assert report.duration == pytest.approx(duration)
    assert report.total_output_tokens == 550
    assert report.output_throughput == pytest.approx(550 / duration)
    assert report.concurrency == pytest.approx(sum(r.latency_s for r in RECORDS) / duration)
    assert 1 < report.max_concurrent_requests <= 9
    assert msgspec.json.decode(msgspec.json.encode(report), type=LoadReport) == report


def test_counts_of_the_server_win_over_events():
    """Speculation and slow clients put several tokens into an event."""
    record = make_record(0, 0.0, 0.5, 0.1, 3, output_tokens=9)
    assert record.tpot_s == pytest.approx(0.2 / 8)
    report = summarise([record], backend="b", dataset_name="d")
    assert report.total_output_tokens == 9
    assert report.peak_output_throughput == pytest.approx(9)


def test_the_speed_of_a_user():
    assert make_record(0, 0.0, 0.5, 0.1, 11).tokens_per_s == pytest.approx(10 / 1.001)
    # Ten tokens in two events: whatever came late was held back, not slow.
    held = make_record(0, 0.0, 0.5, 0.1, 2, output_tokens=10)
    assert held.tokens_per_s == pytest.approx(10 / 0.601)
    assert RequestRecord(index=0, input_length=1, output_length=1).tokens_per_s == 0


def test_failed_requests_count_against_objectives_alone():
    bad = make_record(50, 0.0, 9.0, 0.5, 4, error="500: no")
    objectives = Objectives(ttft=400, tpot=25)
    report = summarise([*RECORDS, bad], backend="b", dataset_name="d", objectives=objectives)
    kept = sum(0.2 + 0.01 * i <= 0.4 + 1e-9 for i in range(50))
    assert (report.completed, report.failed, report.errors) == (50, 1, {"500: no": 1})
    assert report.attained == pytest.approx(kept / 51, abs=0.03)
    assert report.total_output_tokens == 550
    assert "Request goodput" in render_report(report)


def test_runs_without_an_answer_have_no_latencies():
    bad = RequestRecord(index=0, input_length=1, output_length=1, error="gone")
    report = summarise([bad], backend="b", dataset_name="d")
    assert (report.completed, report.ttft_ms, report.goodput) == (0, None, None)
    assert "1 x gone" in render_report(report)
    assert describe([]) is None


def test_the_text_has_the_labels_of_other_clients():
    text = render_report(summarise(RECORDS, backend="openai-chat", dataset_name="random"))
    for label in (
        "Serving Benchmark Result",
        "Successful requests:",
        "Benchmark duration (s):",
        "Total input tokens:",
        "Total generated tokens:",
        "Request throughput (req/s):",
        "Output token throughput (tok/s):",
        "Mean TTFT (ms):",
        "P99 TPOT (ms):",
        "Max ITL (ms):",
        "Median E2E Latency (ms):",
    ):
        assert label in text


@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 7, 8, 30, 99])
def test_the_search_finds_the_most_users(capacity):
    tried = []

    async def measure(users):
        tried.append(users)
        return 25.0 if users <= capacity else 15.0

    found = asyncio.run(find_users(measure, slo_tps=20, most=32))
    assert found.users == min(capacity, 32)
    assert found.is_limited == (capacity >= 32)
    assert found.tokens_per_s == (25.0 if capacity else 15.0)
    assert len(tried) == len(set(tried)) <= 11
