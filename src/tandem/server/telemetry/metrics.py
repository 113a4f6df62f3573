"""Prometheus metrics: one table, one registry per application.

Names are vLLM's or, where it has none, SGLang's, which dashboards know, under our prefix. The
engine's counters are read when the page is scraped; latencies are observed here, where clients see
them. ``METRICS`` is the source of ``docs/reference/metrics.md``, and a test compares the two.
"""

import platform
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import tandem
from tandem.core.clock import Clock
from tandem.core.instance_status import InstanceStatus
from tandem.core.wire import InstanceStage, InstanceStats

__all__ = ["METRICS", "MetricSpec", "RequestTimer", "ServerMetrics"]

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)


class MetricSpec(NamedTuple):
    """A row of the table.

    ``stat`` is the field of ``InstanceStats`` that a metric shows; empty for those observed here.
    A field that is a dictionary has its keys as values of the last label.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    stat: str = ""
    buckets: tuple[float, ...] = ()


_MODEL = ("model_name",)
_INSTANCE = ("model_name", "engine", "role")
"""Prometheus itself uses the label ``instance`` for the address that it scrapes."""
METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("tandem:engine_up", "gauge", _MODEL, "1 while an instance is ready."),
    MetricSpec(
        "tandem:engine_instance_up",
        "gauge",
        _INSTANCE,
        "1 while this instance is ready; its role is unified, prefill or decode.",
    ),
    MetricSpec(
        "tandem:engine_instance_restarts_total",
        "counter",
        _INSTANCE,
        "Processes of this instance that were started after the first.",
    ),
    MetricSpec(
        "tandem:request_fallbacks_total",
        "counter",
        ("model_name", "reason"),
        "Requests that went on elsewhere after a failure, by reason.",
    ),
    MetricSpec(
        "tandem:num_requests_running", "gauge", _MODEL, "Requests in the batch.", "num_running"
    ),
    MetricSpec(
        "tandem:num_requests_waiting", "gauge", _MODEL, "Requests in the queue.", "num_waiting"
    ),
    MetricSpec(
        "tandem:kv_cache_usage_perc",
        "gauge",
        _MODEL,
        "Share of KV blocks that live requests own, 0 to 1.",
    ),
    MetricSpec(
        "tandem:kv_cache_cached_blocks",
        "gauge",
        _MODEL,
        "KV blocks kept for reuse without an owner.",
        "num_cached_blocks",
    ),
    MetricSpec(
        "tandem:prompt_tokens_total", "counter", _MODEL, "Prompt tokens taken in.", "prompt_tokens"
    ),
    MetricSpec(
        "tandem:generation_tokens_total",
        "counter",
        _MODEL,
        "Tokens generated.",
        "generated_tokens",
    ),
    MetricSpec(
        "tandem:prefix_cache_queries_total",
        "counter",
        _MODEL,
        "Prompt tokens looked up in the prefix cache.",
        "prefix_query_tokens",
    ),
    MetricSpec(
        "tandem:prefix_cache_hits_total",
        "counter",
        _MODEL,
        "Prompt tokens found in the prefix cache; what a prefill instance hands over is not.",
        "prefix_hit_tokens",
    ),
    MetricSpec(
        "tandem:cached_tokens_total",
        "counter",
        ("model_name", "cache_source"),
        "Prompt tokens found in the prefix cache, by where they were: device or store.",
    ),
    MetricSpec(
        "tandem:external_prefix_cache_queries_total",
        "counter",
        _MODEL,
        "Prompt tokens that the store was asked about.",
        "lookup_tokens",
    ),
    MetricSpec(
        "tandem:external_prefix_cache_hits_total",
        "counter",
        _MODEL,
        "Prompt tokens that came from the store in time.",
        "store_hit_tokens",
    ),
    MetricSpec(
        "tandem:num_requests_loading",
        "gauge",
        _MODEL,
        "Requests that wait for KV from the store or another instance.",
        "num_loading",
    ),
    MetricSpec(
        "tandem:kv_lookups_total", "counter", _MODEL, "Lookups in the store.", "num_lookups"
    ),
    MetricSpec(
        "tandem:kv_lookup_timeouts_total",
        "counter",
        _MODEL,
        "Lookups that the store did not answer, or not in time.",
        "num_lookup_timeouts",
    ),
    MetricSpec(
        "tandem:prefetched_tokens_total",
        "counter",
        _MODEL,
        "Tokens whose KV was loaded from the store.",
        "loaded_tokens",
    ),
    MetricSpec(
        "tandem:kv_load_blocks_total",
        "counter",
        _MODEL,
        "KV blocks loaded from the store.",
        "loaded_blocks",
    ),
    MetricSpec(
        "tandem:kv_load_bytes_total",
        "counter",
        _MODEL,
        "Bytes loaded from the store.",
        "loaded_bytes",
    ),
    MetricSpec(
        "tandem:kv_load_seconds_total",
        "counter",
        _MODEL,
        "Time of loads, summed over loads that overlap.",
        "load_seconds",
    ),
    MetricSpec(
        "tandem:kv_load_failed_blocks_total",
        "counter",
        ("model_name", "reason"),
        "KV blocks that did not come from the store and were computed, by reason.",
        "load_failures",
    ),
    MetricSpec(
        "tandem:backuped_tokens_total",
        "counter",
        _MODEL,
        "Tokens whose KV was stored.",
        "stored_tokens",
    ),
    MetricSpec(
        "tandem:kv_store_blocks_total", "counter", _MODEL, "KV blocks stored.", "stored_blocks"
    ),
    MetricSpec("tandem:kv_store_bytes_total", "counter", _MODEL, "Bytes stored.", "stored_bytes"),
    MetricSpec(
        "tandem:kv_store_seconds_total", "counter", _MODEL, "Time of stores.", "store_seconds"
    ),
    MetricSpec(
        "tandem:kv_store_existing_blocks_total",
        "counter",
        _MODEL,
        "KV blocks not stored because the store had them.",
        "store_existing_blocks",
    ),
    MetricSpec(
        "tandem:kv_store_failed_blocks_total",
        "counter",
        ("model_name", "reason"),
        "KV blocks that were not stored, by reason.",
        "store_failures",
    ),
    MetricSpec(
        "tandem:kv_peer_read_blocks_total",
        "counter",
        _MODEL,
        "KV blocks taken from prefill instances.",
        "peer_read_blocks",
    ),
    MetricSpec(
        "tandem:kv_peer_read_bytes_total",
        "counter",
        _MODEL,
        "Bytes read from prefill instances.",
        "peer_read_bytes",
    ),
    MetricSpec(
        "tandem:kv_peer_read_hidden_seconds_total",
        "counter",
        _MODEL,
        "Time of reads from prefill instances that began while the prefill ran.",
        "peer_read_hidden_seconds",
    ),
    MetricSpec(
        "tandem:kv_peer_read_exposed_seconds_total",
        "counter",
        _MODEL,
        "Time of reads from prefill instances that began after the prefill.",
        "peer_read_exposed_seconds",
    ),
    MetricSpec(
        "tandem:kv_peer_read_failed_blocks_total",
        "counter",
        ("model_name", "reason"),
        "KV blocks that did not come from a prefill instance, by reason.",
        "peer_read_failures",
    ),
    MetricSpec(
        "tandem:evicted_tokens_total",
        "counter",
        _MODEL,
        "Tokens whose KV the device gave up for others.",
        "evicted_tokens",
    ),
    MetricSpec(
        "tandem:num_preemptions_total",
        "counter",
        _MODEL,
        "Requests put back for want of blocks.",
        "num_preemptions",
    ),
    MetricSpec(
        "tandem:engine_steps_total", "counter", _MODEL, "Steps of the instance.", "num_steps"
    ),
    MetricSpec(
        "tandem:engine_step_seconds_total",
        "counter",
        _MODEL,
        "Time spent in steps.",
        "step_seconds",
    ),
    MetricSpec(
        "tandem:request_success_total",
        "counter",
        ("model_name", "finished_reason"),
        "Generations that ended, by reason: stop, length, abort, deadline, error.",
    ),
    MetricSpec(
        "tandem:time_to_first_token_seconds",
        "histogram",
        _MODEL,
        "Arrival of a request to its first token.",
        buckets=_LATENCY_S,
    ),
    MetricSpec(
        "tandem:inter_token_latency_seconds",
        "histogram",
        _MODEL,
        "Time between the outputs of a request.",
        buckets=_TOKEN_S,
    ),
    MetricSpec(
        "tandem:e2e_request_latency_seconds",
        "histogram",
        _MODEL,
        "Arrival of a request to its end.",
        buckets=_LATENCY_S,
    ),
    MetricSpec(
        "tandem:request_queue_time_seconds",
        "histogram",
        _MODEL,
        "Acceptance of a request to its first step.",
        buckets=_LATENCY_S,
    ),
    MetricSpec(
        "tandem:request_prefill_time_seconds",
        "histogram",
        _MODEL,
        "First step of a request to its first token.",
        buckets=_LATENCY_S,
    ),
    MetricSpec(
        "tandem:request_decode_time_seconds",
        "histogram",
        _MODEL,
        "First token of a request to its end.",
        buckets=_LATENCY_S,
    ),
    MetricSpec(
        "tandem:request_prompt_tokens",
        "histogram",
        _MODEL,
        "Prompt length of a request.",
        buckets=_TOKENS,
    ),
    MetricSpec(
        "tandem:request_generation_tokens",
        "histogram",
        _MODEL,
        "Tokens generated by a request.",
        buckets=_TOKENS,
    ),
    MetricSpec(
        "tandem:http_requests_total",
        "counter",
        ("route", "status"),
        "HTTP requests answered.",
    ),
    MetricSpec("tandem:http_requests_in_flight", "gauge", (), "HTTP requests being handled."),
    MetricSpec(
        "tandem:build_info", "gauge", ("version", "python"), "Always 1; the labels say what runs."
    ),
)


class ServerMetrics:
    """The metrics of one application.

    Args:
        model_name: the label of this model's series.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._stats: InstanceStats | None = None
        self._instances: Sequence[InstanceStatus] = ()
        self._fallbacks: dict[str, int] = {}
        self.num_in_flight = 0
        """Maintained by the admission gate; the loop is the only writer."""
        specs = {spec.name.removeprefix("tandem:"): spec for spec in METRICS}
        self.time_to_first_token = self._histogram(specs["time_to_first_token_seconds"])
        self.inter_token_latency = self._histogram(specs["inter_token_latency_seconds"])
        self.e2e_latency = self._histogram(specs["e2e_request_latency_seconds"])
        self.queue_time = self._histogram(specs["request_queue_time_seconds"])
        self.prefill_time = self._histogram(specs["request_prefill_time_seconds"])
        self.decode_time = self._histogram(specs["request_decode_time_seconds"])
        self.prompt_tokens = self._histogram(specs["request_prompt_tokens"])
        self.generation_tokens = self._histogram(specs["request_generation_tokens"])
        self._finished = self._counter(specs["request_success_total"])
        self._http = self._counter(specs["http_requests_total"])
        self.registry.register(_EngineCollector(self))
        ProcessCollector(registry=self.registry)
        spec = specs["build_info"]
        build = Gauge(spec.name, spec.help, spec.labels, registry=self.registry)
        build.labels(tandem.__version__, platform.python_version()).set(1)

    def _histogram(self, spec: MetricSpec) -> Histogram:
        family = Histogram(
            spec.name, spec.help, spec.labels, buckets=spec.buckets, registry=self.registry
        )
        # Looking a label up for each token would cost more than the observation.
        return family.labels(self._model_name)

    def _counter(self, spec: MetricSpec) -> Counter:
        return Counter(spec.name, spec.help, spec.labels, registry=self.registry)

    def count_finished(self, reason: str) -> None:
        """Count a generation that ended."""
        self._finished.labels(self._model_name, reason).inc()

    def count_http(self, route: str, status: int) -> None:
        """Count an answer; ``route`` is a route's pattern, of which there are few."""
        self._http.labels(route, str(status)).inc()

    def render(
        self,
        stats: InstanceStats | None,
        instances: Sequence[InstanceStatus] = (),
        fallbacks: dict[str, int] | None = None,
    ) -> bytes:
        """Return the page.

        Args:
            stats: sums over the instances; None while all are down.
            instances: all of them.
            fallbacks: of requests, by reason.
        """
        self._stats, self._instances = stats, instances
        self._fallbacks = {} if fallbacks is None else fallbacks
        return generate_latest(self.registry)

    def collect_engine(self) -> Iterator[Metric]:
        """Yield the metrics that are read rather than observed."""
        values: dict[str, float | dict[str, int]] = {
            "tandem:http_requests_in_flight": self.num_in_flight,
            "tandem:request_fallbacks_total": self._fallbacks,
        }
        stats = self._stats
        is_up = stats is not None and stats.stage == InstanceStage.READY
        values["tandem:engine_up"] = float(is_up)
        if stats is not None:
            values |= {s.name: getattr(stats, s.stat) for s in METRICS if s.stat}
            values["tandem:cached_tokens_total"] = _split_hits(stats)
            used = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
            values["tandem:kv_cache_usage_perc"] = used
        for spec in METRICS:
            if spec.name in values or spec.labels == _INSTANCE:
                yield self._make_family(spec, values.get(spec.name, 0.0))

    def _make_family(self, spec: MetricSpec, value: float | dict[str, int]) -> Metric:
        make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        family = make(spec.name, spec.help, labels=spec.labels)
        if spec.labels == _INSTANCE:
            for each in self._instances:
                is_up = float(each.stage.stage is InstanceStage.READY)
                amount = is_up if spec.kind == "gauge" else each.num_restarts
                family.add_metric([self._model_name, each.name, each.role], amount)
        elif isinstance(value, dict):
            for label, amount in value.items():
                family.add_metric([self._model_name, label], amount)
        else:
            family.add_metric([self._model_name][: len(spec.labels)], value)
        return family


def _split_hits(stats: InstanceStats) -> dict[str, int]:
    """Prompt tokens found, by the tier that held them."""
    return {
        "device": stats.prefix_hit_tokens - stats.store_hit_tokens,
        "store": stats.store_hit_tokens,
    }


class _EngineCollector(Collector):
    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect_engine()


class RequestTimer:
    """Observes the latencies of one generation, from when its HTTP request was read."""

    __slots__ = (
        "_arrived_s",
        "_clock",
        "_first_s",
        "_last_s",
        "_metrics",
        "end_s",
        "num_tokens",
        "reason",
    )

    def __init__(self, metrics: ServerMetrics, clock: Clock, arrived_s: float) -> None:
        self._metrics = metrics
        self._clock = clock
        self._arrived_s = arrived_s
        self._first_s: float | None = None
        self._last_s: float | None = None
        self.end_s: float | None = None
        """Seconds from arrival to the end; None while it runs."""
        self.reason: str | None = None
        self.num_tokens = 0
        """Tokens generated, known at the end."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since arrival."""
        return self._clock.now_s() - self._arrived_s

    @property
    def first_token_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self._first_s is None else self._first_s - self._arrived_s

    def see_output(self, queue_s: float | None) -> None:
        """Note that tokens came; ``queue_s`` is the engine's word with the first of them."""
        now_s = self._clock.now_s()
        metrics = self._metrics
        if self._last_s is None:
            self._first_s = now_s
            since_arrival_s = now_s - self._arrived_s
            metrics.time_to_first_token.observe(since_arrival_s)
            if queue_s is not None:
                metrics.queue_time.observe(queue_s)
                metrics.prefill_time.observe(max(since_arrival_s - queue_s, 0.0))
        else:
            metrics.inter_token_latency.observe(now_s - self._last_s)
        self._last_s = now_s

    def see_end(self, reason: str, prompt_len: int, num_tokens: int) -> None:
        """Note that the generation ended."""
        self.end_s, self.reason, self.num_tokens = self.elapsed_s, reason, num_tokens
        self._metrics.e2e_latency.observe(self.end_s)
        if self._first_s is not None:
            self._metrics.decode_time.observe(self._clock.now_s() - self._first_s)
        self._metrics.prompt_tokens.observe(prompt_len)
        self._metrics.generation_tokens.observe(num_tokens)
        self._metrics.count_finished(reason)
