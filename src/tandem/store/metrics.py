"""Counters of a store, and its Prometheus page.

``METRICS`` is the table in ``docs/reference/metrics_store.md``; a test compares the two.
Counting is plain Python and needs nothing; only ``list_families`` needs ``prometheus_client``.
"""

from bisect import bisect_left
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple

from tandem.rpc import RpcCounters
from tandem.store.messages import StoreStatus

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["METRICS", "LatencyHistogram", "MetricSpec", "StoreCounters", "list_families"]

BUCKETS_S = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


class MetricSpec(NamedTuple):
    """A row of the table."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


class LatencyHistogram:
    """Counts of durations by bucket."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


@dataclass(slots=True)
class StoreCounters:
    """Counters of a master; counters only grow."""

    hits: int = 0
    misses: int = 0
    objects_created: int = 0
    objects_removed: int = 0
    objects_evicted: int = 0
    objects_demoted: int = 0
    objects_promoted: int = 0
    forced_evictions: int = 0
    puts_waited: int = 0
    puts_expired: int = 0
    fences: int = 0
    replicas_corrupt: int = 0
    replicas_copied: int = 0
    replicas_dropped: int = 0
    hosts_lost: int = 0
    terms: int = 0
    latencies: dict[str, LatencyHistogram] = field(default_factory=dict[str, LatencyHistogram])
    """By method; from when a request was decoded to its answer."""

    def observe(self, method: str, seconds: float) -> None:
        """Count a call of ``method`` that took so long."""
        self.latencies.setdefault(method, LatencyHistogram()).observe(seconds)


_COUNTER_HELP = {
    "hits": "Keys that the master was asked for and found.",
    "misses": "Keys looked up and not found.",
    "objects_created": "Objects that became visible.",
    "objects_removed": "Objects removed by a call.",
    "objects_evicted": "Objects evicted, from all tiers.",
    "objects_demoted": "Objects evicted from memory that a disk keeps.",
    "objects_promoted": "Objects read from a disk into memory.",
    "forced_evictions": "Evictions for a put that found no space.",
    "puts_waited": "Times a put waited for space.",
    "puts_expired": "Unfinished puts that ran out of time.",
    "fences": "Clients shut out of a host.",
    "replicas_corrupt": "Replicas dropped for a wrong checksum.",
    "replicas_copied": "Replicas made by repair or drain.",
    "replicas_dropped": "Replicas beyond those wanted, dropped for their space.",
    "hosts_lost": "Hosts that went away.",
    "terms": "Terms that this master has begun.",
}

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("tandem:store_epoch", "gauge", (), "Epoch of the master; 0 while another leads."),
    MetricSpec("tandem:store_is_leader", "gauge", (), "1 while this master may serve."),
    MetricSpec("tandem:store_is_recovering", "gauge", (), "1 while hosts may still bring objects."),
    MetricSpec("tandem:store_objects", "gauge", (), "Objects in the directory."),
    MetricSpec("tandem:store_value_bytes", "gauge", (), "Bytes of their values, each once."),
    MetricSpec("tandem:store_unreadable_objects", "gauge", (), "Objects whose hosts are all lost."),
    MetricSpec(
        "tandem:store_under_replicated_objects", "gauge", (), "Objects with too few replicas."
    ),
    MetricSpec("tandem:store_unfinished_puts", "gauge", (), "Puts begun and not ended."),
    MetricSpec("tandem:store_host_up", "gauge", ("host",), "1 while the host is connected."),
    MetricSpec("tandem:store_host_capacity_bytes", "gauge", ("host",), "Usable segment."),
    MetricSpec("tandem:store_host_used_bytes", "gauge", ("host",), "Segment that is not free."),
    MetricSpec(
        "tandem:store_host_quarantined_bytes",
        "gauge",
        ("host",),
        "Space of unfinished puts whose writer is not yet proven gone.",
    ),
    MetricSpec(
        "tandem:store_disk_degraded",
        "gauge",
        ("host",),
        "1 while the SSD tier takes nothing: full, failing or given up.",
    ),
    MetricSpec("tandem:store_disk_capacity_bytes", "gauge", ("host",), "Files it may fill."),
    MetricSpec("tandem:store_disk_used_bytes", "gauge", ("host",), "Files it has."),
    MetricSpec("tandem:store_disk_live_bytes", "gauge", ("host",), "Records that can be read."),
    MetricSpec("tandem:store_disk_objects", "gauge", ("host",), "Objects on the disk."),
    MetricSpec("tandem:store_disk_queued", "gauge", ("host",), "Objects waiting to be written."),
    MetricSpec(
        "tandem:store_disk_events_total",
        "counter",
        ("host", "event"),
        "Since the host started: objects and bytes written and loaded, skipped, evicted; errors.",
    ),
    MetricSpec(
        "tandem:store_disk_write_seconds",
        "histogram",
        ("host",),
        "Time of a round of writes behind, its sync included.",
    ),
    MetricSpec(
        "tandem:store_disk_load_seconds",
        "histogram",
        ("host",),
        "Time to read an object from the disk into memory and check it.",
    ),
    *(
        MetricSpec(f"tandem:store_{name}_total", "counter", (), text)
        for name, text in _COUNTER_HELP.items()
    ),
    MetricSpec(
        "tandem:store_call_seconds",
        "histogram",
        ("method",),
        "Time a call spent in the master, waiting for hosts included.",
    ),
    MetricSpec(
        "tandem:store_channel_events_total",
        "counter",
        ("event",),
        "On the master's control channel: calls begun, failed, expired; peers joined and lost; "
        "frames and handshakes refused.",
    ),
)


def list_families(
    status: StoreStatus, counters: StoreCounters, channel: RpcCounters, *, is_leader: bool
) -> "list[Metric]":
    """Return what ``prometheus_client`` makes a page of."""
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    values = _collect_values(status, counters)
    values["tandem:store_is_leader"] = [([], float(is_leader))]
    values["tandem:store_channel_events_total"] = [
        ([each.name], float(getattr(channel, each.name))) for each in fields(channel)
    ]
    histograms = _collect_histograms(status, counters)
    families: list[Metric] = []
    for spec in METRICS:
        if spec.kind == "histogram":
            family = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
            for labels, counts, sum_s in histograms[spec.name]:
                family.add_metric(labels, _cumulate(counts), sum_s)
            families.append(family)
            continue
        make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        plain = make(spec.name, spec.help, labels=spec.labels)
        for labels, value in values[spec.name]:
            plain.add_metric(labels, value)
        families.append(plain)
    return families


def _collect_histograms(
    status: StoreStatus, counters: StoreCounters
) -> dict[str, list[tuple[list[str], list[int], float]]]:
    disks = [(host.name, host.disk) for host in status.hosts if host.disk is not None]
    return {
        "tandem:store_call_seconds": [
            ([method], histogram.counts, histogram.sum_s)
            for method, histogram in sorted(counters.latencies.items())
        ],
        "tandem:store_disk_write_seconds": [
            ([name], disk.write_counts, disk.write_sum_s) for name, disk in disks
        ],
        "tandem:store_disk_load_seconds": [
            ([name], disk.load_counts, disk.load_sum_s) for name, disk in disks
        ],
    }


def _cumulate(counts: list[int]) -> list[tuple[str, float]]:
    total = 0
    rows: list[tuple[str, float]] = []
    for bound, count in zip((*BUCKETS_S, float("inf")), counts, strict=True):
        total += count
        rows.append(("+Inf" if bound == float("inf") else repr(bound), total))
    return rows


def _collect_values(
    status: StoreStatus, counters: StoreCounters
) -> dict[str, list[tuple[list[str], float]]]:
    values: dict[str, list[tuple[list[str], float]]] = {
        "tandem:store_epoch": [([], status.epoch)],
        "tandem:store_is_recovering": [([], float(status.is_recovering))],
        "tandem:store_objects": [([], status.num_objects)],
        "tandem:store_value_bytes": [([], status.total_bytes)],
        "tandem:store_unreadable_objects": [([], status.num_unreadable)],
        "tandem:store_under_replicated_objects": [([], status.num_under_replicated)],
        "tandem:store_unfinished_puts": [([], status.num_unfinished)],
    }
    for field_ in fields(counters):
        if field_.name != "latencies":
            value = getattr(counters, field_.name)
            values[f"tandem:store_{field_.name}_total"] = [([], value)]
    hosts = status.hosts
    values["tandem:store_host_up"] = [([h.name], float(h.stage != "lost")) for h in hosts]
    values["tandem:store_host_capacity_bytes"] = [([h.name], h.capacity_bytes) for h in hosts]
    values["tandem:store_host_used_bytes"] = [([h.name], h.used_bytes) for h in hosts]
    values["tandem:store_host_quarantined_bytes"] = [([h.name], h.quarantined_bytes) for h in hosts]
    disks = [(host.name, host.disk) for host in hosts if host.disk is not None]
    for field_name in ("capacity_bytes", "used_bytes", "live_bytes"):
        values[f"tandem:store_disk_{field_name}"] = [
            ([name], getattr(disk, field_name)) for name, disk in disks
        ]
    values["tandem:store_disk_degraded"] = [([n], float(d.state != "active")) for n, d in disks]
    values["tandem:store_disk_objects"] = [([n], d.num_objects) for n, d in disks]
    values["tandem:store_disk_queued"] = [([n], d.num_queued) for n, d in disks]
    values["tandem:store_disk_events_total"] = [
        ([name, event], count)
        for name, disk in disks
        for event, count in sorted(disk.counts.items())
    ]
    return values
