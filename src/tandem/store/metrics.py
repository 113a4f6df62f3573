"""Counters of a store, and their Prometheus metrics.

``METRICS`` is the table in ``docs/reference/metrics_store.md``; a test compares the two. Only
``list_families`` needs ``prometheus_client``.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from tandem.rpc import RpcCounters
from tandem.store.messages import DiskState, DiskStatus, HostStage, HostStatus, StoreStatus

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = [
    "METRICS",
    "Figures",
    "LatencyHistogram",
    "MetricSpec",
    "StoreCounters",
    "list_families",
]

BUCKETS_S = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


class Figures(NamedTuple):
    """The state of a master process from which its metrics page is made."""

    status: StoreStatus
    counters: "StoreCounters"
    channel: RpcCounters
    is_leader: bool


Values = Sequence[tuple[list[str], Any]]
"""Samples of a metric: (label values, number); a histogram has (counts, sum) in place of the
number.
"""


class MetricSpec(NamedTuple):
    """One row of the table of Prometheus metrics: name, kind, labels, help text, and how to read
    it.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    read: Callable[[Figures], Values]


class LatencyHistogram:
    """A histogram of durations: a count for each bucket of ``BUCKETS_S``, and the sum."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Add one duration to the histogram, seconds."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


def _count(text: str) -> int:
    """Return a dataclass field for a counter, with its help text for the metrics page."""
    return field(default=0, metadata={"help": text})


@dataclass(slots=True)
class StoreCounters:
    """Counts of a store master's events, such as evictions. They only grow."""

    hits: int = _count("Keys that the master was asked for and found.")
    misses: int = _count("Keys looked up and not found.")
    objects_created: int = _count("Objects that became visible.")
    objects_removed: int = _count("Objects removed by a call.")
    objects_evicted: int = _count("Objects evicted, from all tiers.")
    objects_demoted: int = _count("Objects evicted from memory that a disk keeps.")
    objects_promoted: int = _count("Objects read from a disk into memory.")
    forced_evictions: int = _count("Evictions for a put that found no space.")
    puts_waited: int = _count("Times a put waited for space.")
    puts_expired: int = _count("Unfinished puts that ran out of time.")
    fences: int = _count("Clients shut out of a host.")
    replicas_corrupt: int = _count("Replicas dropped for a wrong checksum.")
    replicas_copied: int = _count("Replicas made by repair or drain.")
    replicas_dropped: int = _count("Replicas beyond those wanted, dropped for their space.")
    hosts_lost: int = _count("Hosts that went away.")
    terms: int = _count("Terms that this master has begun.")
    latencies: dict[str, LatencyHistogram] = field(default_factory=dict[str, LatencyHistogram])
    """Durations of calls by method, from the decoded request to the answer."""

    def observe(self, method: str, seconds: float) -> None:
        """Count a call of ``method`` with its duration."""
        self.latencies.setdefault(method, LatencyHistogram()).observe(seconds)


def _of_store(name: str, text: str, read: Callable[[Figures], float]) -> MetricSpec:
    def list_values(page: Figures) -> Values:
        return [([], read(page))]

    return MetricSpec(f"tandem:store_{name}", "gauge", (), text, list_values)


def _of_hosts(name: str, text: str, read: Callable[[HostStatus], float]) -> MetricSpec:
    def list_values(page: Figures) -> Values:
        return [([host.name], read(host)) for host in page.status.hosts]

    return MetricSpec(f"tandem:store_host_{name}", "gauge", ("host",), text, list_values)


def _of_disks(
    name: str, text: str, read: Callable[[DiskStatus], Any], kind: str = "gauge"
) -> MetricSpec:
    def list_values(page: Figures) -> Values:
        hosts = page.status.hosts
        return [([host.name], read(host.disk)) for host in hosts if host.disk is not None]

    return MetricSpec(f"tandem:store_disk_{name}", kind, ("host",), text, list_values)


def _list_disk_events(page: Figures) -> Values:
    disks = [(host.name, host.disk.counts) for host in page.status.hosts if host.disk is not None]
    return [([name, event], each) for name, c in disks for event, each in sorted(c.items())]


def _of_counter(name: str, text: str) -> MetricSpec:
    def list_values(page: Figures) -> Values:
        return [([], getattr(page.counters, name))]

    return MetricSpec(f"tandem:store_{name}_total", "counter", (), text, list_values)


def _list_latencies(page: Figures) -> Values:
    latencies = sorted(page.counters.latencies.items())
    return [([method], (each.counts, each.sum_s)) for method, each in latencies]


def _list_channel_events(page: Figures) -> Values:
    return [([each.name], getattr(page.channel, each.name)) for each in fields(page.channel)]


METRICS: tuple[MetricSpec, ...] = (
    _of_store("epoch", "Epoch of the master; 0 while another leads.", lambda p: p.status.epoch),
    _of_store("is_leader", "1 while this master may serve.", lambda p: p.is_leader),
    _of_store(
        "is_recovering",
        "1 while hosts may still bring objects.",
        lambda p: p.status.is_recovering,
    ),
    _of_store("objects", "Objects in the directory.", lambda p: p.status.num_objects),
    _of_store("value_bytes", "Bytes of their values, each once.", lambda p: p.status.total_bytes),
    _of_store(
        "unreadable_objects",
        "Objects whose hosts are all lost.",
        lambda p: p.status.num_unreadable,
    ),
    _of_store(
        "under_replicated_objects",
        "Objects with too few replicas.",
        lambda p: p.status.num_under_replicated,
    ),
    _of_store("unfinished_puts", "Puts begun and not ended.", lambda p: p.status.num_unfinished),
    _of_hosts("up", "1 while the host is connected.", lambda h: h.stage != HostStage.LOST),
    _of_hosts("capacity_bytes", "Usable segment.", lambda h: h.capacity_bytes),
    _of_hosts("used_bytes", "Segment that is not free.", lambda h: h.used_bytes),
    _of_hosts(
        "quarantined_bytes",
        "Space of unfinished puts whose writer is not yet proven gone.",
        lambda h: h.quarantined_bytes,
    ),
    _of_disks(
        "degraded",
        "1 while the SSD tier takes nothing: full, failing or given up.",
        lambda d: d.state != DiskState.ACTIVE,
    ),
    _of_disks("capacity_bytes", "Files it may fill.", lambda d: d.capacity_bytes),
    _of_disks("used_bytes", "Files it has.", lambda d: d.used_bytes),
    _of_disks("live_bytes", "Records that can be read.", lambda d: d.live_bytes),
    _of_disks("objects", "Objects on the disk.", lambda d: d.num_objects),
    _of_disks("queued", "Objects waiting to be written.", lambda d: d.num_queued),
    MetricSpec(
        "tandem:store_disk_events_total",
        "counter",
        ("host", "event"),
        "Since the host started: objects and bytes written and loaded, skipped, evicted; errors.",
        _list_disk_events,
    ),
    _of_disks(
        "write_seconds",
        "Time of a round of writes behind, its sync included.",
        lambda d: (d.write_counts, d.write_sum_s),
        "histogram",
    ),
    _of_disks(
        "load_seconds",
        "Time to read an object from the disk into memory and check it.",
        lambda d: (d.load_counts, d.load_sum_s),
        "histogram",
    ),
    *(
        _of_counter(each.name, each.metadata["help"])
        for each in fields(StoreCounters)
        if each.metadata
    ),
    MetricSpec(
        "tandem:store_call_seconds",
        "histogram",
        ("method",),
        "Time a call spent in the master, waiting for hosts included.",
        _list_latencies,
    ),
    MetricSpec(
        "tandem:store_channel_events_total",
        "counter",
        ("event",),
        "On the master's control channel: calls begun, failed, expired; peers joined and lost; "
        "frames and handshakes refused.",
        _list_channel_events,
    ),
)


def list_families(figures: Figures) -> "list[Metric]":
    """Return the metric families from which ``prometheus_client`` renders the page."""
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    families: list[Metric] = []
    for spec in METRICS:
        if spec.kind == "histogram":
            family = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
            for labels, (counts, sum_s) in spec.read(figures):
                family.add_metric(labels, _cumulate(counts), sum_s)
            families.append(family)
            continue
        make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        plain = make(spec.name, spec.help, labels=spec.labels)
        for labels, value in spec.read(figures):
            plain.add_metric(labels, float(value))
        families.append(plain)
    return families


def _cumulate(counts: list[int]) -> list[tuple[str, float]]:
    total = 0
    rows: list[tuple[str, float]] = []
    for bound, count in zip((*BUCKETS_S, float("inf")), counts, strict=True):
        total += count
        rows.append(("+Inf" if bound == float("inf") else repr(bound), total))
    return rows
