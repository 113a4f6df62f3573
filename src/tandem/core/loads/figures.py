"""The figures of a load test (throughput, latencies, goodput), computed from its records. Pure."""

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from tandem.core.loads.records import Distribution, LoadReport, RequestRecord

__all__ = ["Objectives", "describe", "find_percentile", "summarise"]


class Objectives(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a request's latencies in milliseconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    tbt: float | None = None
    """Limit of the mean of the longest tenth of the times between tokens."""
    e2el: float | None = None

    @property
    def is_set(self) -> bool:
        """True if any latency has a limit."""
        return any(limit is not None for limit in (self.ttft, self.tpot, self.tbt, self.e2el))

    def are_kept(self, record: RequestRecord) -> bool:
        """Return True if a request succeeded and kept every limit."""
        figures = (
            (self.ttft, record.ttft_s),
            (self.tpot, record.tpot_s),
            (self.e2el, record.latency_s),
        )
        is_in_time = not record.error and all(
            limit is None or 1000 * value <= limit for limit, value in figures
        )
        # Check the time between tokens last: it is the expensive check, because it sorts all token
        # times of the answer.
        return is_in_time and (self.tbt is None or 1000 * record.tbt_s <= self.tbt)


def find_percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile (``share`` from 0 to 1) of sorted values, interpolated as in numpy."""
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def describe(values_s: Sequence[float]) -> Distribution | None:
    """Return the distribution of times in seconds; None if there are none."""
    if not values_s:
        return None
    ordered = sorted(1000 * value for value in values_s)
    mean = math.fsum(ordered) / len(ordered)
    spread = math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)
    return Distribution(
        mean=mean,
        median=find_percentile(ordered, 50),
        std=math.sqrt(spread),
        p90=find_percentile(ordered, 90),
        p95=find_percentile(ordered, 95),
        p99=find_percentile(ordered, 99),
        max=ordered[-1],
    )


def summarise(
    records: Sequence[RequestRecord],
    *,
    backend: str,
    dataset_name: str,
    request_rate: float | None = None,
    max_concurrency: int | None = None,
    objectives: Objectives | None = None,
) -> LoadReport:
    """Return the figures of a run.

    Args:
        records: records of all requests, failed ones included.
        backend: name of the server's endpoint that was tested.
        dataset_name: name of the workload.
        request_rate: requested rate, requests a second.
        max_concurrency: requested limit of concurrent requests.
        objectives: limits that a request must keep to count in goodput.
    """
    good = [record for record in records if not record.error]
    begin = min((record.sent_s for record in records), default=0.0)
    end = max((record.done_s for record in records), default=0.0)
    duration = max(end - begin, 1e-9)
    inputs = sum(record.input_length for record in good)
    outputs = sum(record.output_tokens for record in good)
    kept = None
    if objectives is not None and objectives.is_set:
        kept = sum(objectives.are_kept(record) for record in records)
    return LoadReport(
        backend=backend,
        dataset_name=dataset_name,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        duration=duration,
        completed=len(good),
        failed=len(records) - len(good),
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        total_cached_tokens=sum(record.cached_tokens for record in good),
        request_throughput=len(good) / duration,
        input_throughput=inputs / duration,
        output_throughput=outputs / duration,
        total_throughput=(inputs + outputs) / duration,
        peak_output_throughput=_find_peak(good, begin),
        max_concurrent_requests=_find_most_at_once(good),
        concurrency=math.fsum(record.latency_s for record in good) / duration,
        e2e_latency_ms=describe([record.latency_s for record in good]),
        ttft_ms=describe([record.ttft_s for record in good]),
        tpot_ms=describe([record.tpot_s for record in good if record.output_tokens > 1]),
        itl_ms=describe([gap for record in good for gap in record.gaps_s]),
        goodput=None if kept is None else kept / duration,
        attained=None if kept is None else kept / max(len(records), 1),
        errors=dict(Counter(record.error.partition("\n")[0] for record in records if record.error)),
    )


def _find_peak(records: Sequence[RequestRecord], begin: float) -> float:
    """Return the largest number of output tokens in one second of a run. The tokens of an answer
    count as spread equally over its events.
    """
    weights: dict[int, float] = {}
    for record in records:
        if not record.event_times_s:
            continue
        share = record.output_tokens / len(record.event_times_s)
        counts = Counter([int(time - begin) for time in record.event_times_s])
        for second, count in counts.items():
            weights[second] = weights.get(second, 0.0) + count * share
    return max(weights.values(), default=0.0)


def _find_most_at_once(records: Sequence[RequestRecord]) -> int:
    """Return the largest number of requests that were in progress at one time."""
    # At equal times, count ends before starts, so that back-to-back requests do not overlap.
    moments = sorted(
        [(record.sent_s, 1) for record in records] + [(record.done_s, -1) for record in records]
    )
    running = most = 0
    for _, change in moments:
        running += change
        most = max(most, running)
    return most
