"""Prometheus metrics of a transfer engine: per transport, rail and peer.

The native engine counts; ``TransferCollector`` reads the counts when a page is scraped.
``TRANSFER_METRICS`` is the source of ``docs/reference/transfer_metrics.md``, and a test compares
the two. Needs ``prometheus_client`` (the ``serve`` extra).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tandem._native import RailState, RailStatus
from tandem.core.errors import NotFoundError
from tandem.transfer.engine import TransferEngine

__all__ = ["TRANSFER_METRICS", "TransferCollector", "TransferMetricSpec"]


class TransferMetricSpec(NamedTuple):
    """One row of the table of Prometheus metrics: name, kind, labels and help text."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


_RAIL = ("peer", "local", "remote")
_WAY = ("peer", "transport", "op")
TRANSFER_METRICS = tuple(
    TransferMetricSpec(f"tandem:transfer_{name}", kind, labels, text)
    for name, kind, labels, text in (
        ("batches_running", "gauge", (), "Batches submitted and not ended."),
        ("batches_total", "counter", ("outcome",), "Batches ended: done, or an error's code."),
        ("batch_seconds", "histogram", (), "Submission of a batch to its successful end."),
        ("bytes_total", "counter", _WAY, "Bytes moved; peer is empty within the process."),
        ("parts_total", "counter", _WAY, "Slices and chunks moved."),
        (
            "failovers_total",
            "counter",
            ("peer", "transport"),
            "Pieces that this transport failed to move and another took over.",
        ),
        (
            "records_refused_total",
            "counter",
            (),
            "Records of peers that were altered on the way; each ended its connection.",
        ),
        ("rail_lanes_healthy", "gauge", _RAIL, "Connections of a rail that may carry slices."),
        ("rail_bytes_total", "counter", _RAIL, "Bytes moved over a rail."),
        ("rail_resent_total", "counter", _RAIL, "Slices of a rail that were sent elsewhere."),
        ("rail_in_flight_bytes", "gauge", _RAIL, "Bytes that a rail has to move now."),
        ("rail_bandwidth_bytes_per_second", "gauge", _RAIL, "Speed of a rail as learnt."),
        ("rail_slice_seconds", "histogram", _RAIL, "A slice given to a rail to its answer."),
    )
)
BOUNDS_S = tuple(1e-6 * 4**k for k in range(14))
"""Upper bounds of the histogram's buckets in seconds. Each is also a bound of the native histogram,
whose buckets are a quarter of an octave wide, from a microsecond.
"""


class TransferCollector(Collector):
    """Collects one engine's metrics for a ``CollectorRegistry``; none once the engine is closed."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families with their current values."""
        if self._engine.is_closed:
            return
        families: dict[str, Any] = {
            spec.name.removeprefix("tandem:transfer_"): _family(spec) for spec in TRANSFER_METRICS
        }
        self._add_batches(families)
        rails: dict[tuple[str, str, str], list[RailStatus]] = defaultdict(list)
        counts: dict[tuple[str, ...], int] = defaultdict(int)
        core = self._engine.core
        for key, count in core.counters(None).items():
            counts["", *key] += count
        for segment_id, address in self._engine.peer_addresses.items():
            try:
                seen, statuses = core.counters(segment_id), core.rails(segment_id)
            except NotFoundError:
                continue  # Closed meanwhile.
            for key, count in seen.items():
                counts[address, *key] += count
            for rail in statuses:
                rails[address, _host(rail.local), rail.remote].append(rail)
        for (peer, transport, op, what), count in counts.items():
            labels = [peer, transport] if what == "failovers" else [peer, transport, op]
            families[f"{what}_total"].add_metric(labels, count)
        for labels, lanes in rails.items():
            _add_rail(families, labels, lanes)
        yield from families.values()

    def _add_batches(self, families: dict[str, Any]) -> None:
        counters = self._engine.core.batch_counters
        families["batches_running"].add_metric([], counters.num_running)
        families["records_refused_total"].add_metric([], self._engine.core.num_refused_records)
        families["batches_total"].add_metric(["done"], counters.num_done)
        for code, count in counters.num_failed.items():
            families["batches_total"].add_metric([code], count)
        buckets = _cumulate([counters.latency_buckets])
        families["batch_seconds"].add_metric([], buckets, counters.latency_sum_s)


def _family(spec: TransferMetricSpec) -> Metric:
    make = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }[spec.kind]
    return make(spec.name, spec.help, labels=spec.labels)


def _add_rail(
    families: dict[str, Any], labels: tuple[str, str, str], lanes: list[RailStatus]
) -> None:
    sums = {
        "rail_lanes_healthy": sum(lane.state == RailState.HEALTHY for lane in lanes),
        "rail_bytes_total": sum(lane.bytes_moved for lane in lanes),
        "rail_resent_total": sum(lane.num_resent for lane in lanes),
        "rail_in_flight_bytes": sum(lane.in_flight_bytes for lane in lanes),
        "rail_bandwidth_bytes_per_second": sum(lane.bandwidth_bytes_per_s for lane in lanes),
    }
    for name, value in sums.items():
        families[name].add_metric(labels, value)
    families["rail_slice_seconds"].add_metric(
        labels,
        _cumulate([lane.latency_buckets for lane in lanes]),
        sum(lane.latency_sum_s for lane in lanes),
    )


def _cumulate(histograms: Iterable[list[tuple[float, int]]]) -> list[tuple[str, int]]:
    """Add histograms of (bound, count) in Prometheus' form: counts at or below each bound."""
    pairs = [pair for histogram in histograms for pair in histogram]
    # Compare with a margin: a native bound is a power of two times 1e-6, rounded in another order.
    limits = [(f"{bound:g}", bound * 1.001) for bound in BOUNDS_S]
    buckets = [(text, sum(count for at, count in pairs if at <= limit)) for text, limit in limits]
    return [*buckets, ("+Inf", sum(count for _, count in pairs))]


def _host(address: str) -> str:
    """Return a local address without its port, which differs for every connection."""
    return address.rpartition(":")[0]
