"""Prometheus metrics: one table of them, and one registry per application.

Names are vLLM's or else SGLang's, which dashboards know, under our prefix. The engine's counters
are read when the page is scraped; latencies are measured here, where clients see them. ``METRICS``
is the source of ``docs/reference/metrics.md``, and a test compares the two.
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from tandem.core.instance_status import InstanceStats, InstanceStatus, StatSpec, list_stats
from tandem.core.wire import NO_SLO, InstanceStage, Slo

__all__ = ["METRICS", "MetricSpec", "RequestTimer", "ServerMetrics", "merge_pages"]

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)


class MetricSpec(NamedTuple):
    """A row of the table of metrics: name, kind and meaning of one metric."""

    name: str
    kind: str
    labels: tuple[str, ...]
    unit: str
    """Unit; empty: a number without unit."""
    help: str
    buckets: tuple[float, ...] = ()


PREFIX = "tandem:"
_MODEL = ("model_name",)
_INSTANCE = ("model_name", "engine", "role")
"""Labels of metrics of one instance. Prometheus itself uses the label ``instance`` for the address
that it scrapes."""


def _show_stat(stat: StatSpec) -> MetricSpec:
    labels = (*_MODEL, stat.label) if stat.label else _MODEL
    return MetricSpec(f"{PREFIX}{stat.metric}", stat.kind, labels, stat.unit, stat.help)


_STATS = {f"{PREFIX}{stat.metric}": stat.field for stat in list_stats()}
METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "tandem:engine_up",
        "gauge",
        _MODEL,
        "",
        "1 while an instance is ready.",
    ),
    MetricSpec(
        "tandem:engine_instance_up",
        "gauge",
        _INSTANCE,
        "",
        "1 while this instance is ready; its role is unified, prefill or decode.",
    ),
    MetricSpec(
        "tandem:engine_instance_restarts_total",
        "counter",
        _INSTANCE,
        "processes",
        "Processes of this instance that were started after the first.",
    ),
    MetricSpec(
        "tandem:conductor_step_error_ratio",
        "gauge",
        _INSTANCE,
        "",
        "Mean relative error of the predicted times of this instance's steps.",
    ),
    MetricSpec(
        "tandem:admission_margin_ratio",
        "gauge",
        ("model_name", "time"),
        "",
        "Factor on predicted times (ttft, tpot) that cluster.admission has learnt to add.",
    ),
    MetricSpec(
        "tandem:request_fallbacks_total",
        "counter",
        ("model_name", "reason"),
        "requests",
        "Requests that went on elsewhere after a failure, by reason.",
    ),
    *map(_show_stat, list_stats()),
    MetricSpec(
        "tandem:kv_cache_usage_perc",
        "gauge",
        _MODEL,
        "",
        "Share of KV blocks that live requests own, 0 to 1.",
    ),
    MetricSpec(
        "tandem:cached_tokens_total",
        "counter",
        ("model_name", "cache_source"),
        "tokens",
        "Prompt tokens found in the prefix cache, by where they were: device or store.",
    ),
    MetricSpec(
        "tandem:request_success_total",
        "counter",
        ("model_name", "finished_reason"),
        "requests",
        "Generations that ended, by reason: stop, length, abort, deadline, error.",
    ),
    MetricSpec(
        "tandem:slo_requests_total",
        "counter",
        ("model_name", "outcome"),
        "requests",
        "Generations with objectives: met, or which was missed (missed_ttft, missed_tpot), failed, "
        "or rejected by cluster.admission.",
    ),
    MetricSpec(
        "tandem:time_to_first_token_seconds",
        "histogram",
        _MODEL,
        "seconds",
        "Arrival of a request to its first token.",
        _LATENCY_S,
    ),
    MetricSpec(
        "tandem:inter_token_latency_seconds",
        "histogram",
        _MODEL,
        "seconds",
        "Time between the outputs of a request.",
        _TOKEN_S,
    ),
    MetricSpec(
        "tandem:e2e_request_latency_seconds",
        "histogram",
        _MODEL,
        "seconds",
        "Arrival of a request to its end.",
        _LATENCY_S,
    ),
    MetricSpec(
        "tandem:request_queue_time_seconds",
        "histogram",
        _MODEL,
        "seconds",
        "Acceptance of a request to its first step.",
        _LATENCY_S,
    ),
    MetricSpec(
        "tandem:request_prefill_time_seconds",
        "histogram",
        _MODEL,
        "seconds",
        "First step of a request to its first token.",
        _LATENCY_S,
    ),
    MetricSpec(
        "tandem:request_decode_time_seconds",
        "histogram",
        _MODEL,
        "seconds",
        "First token of a request to its end.",
        _LATENCY_S,
    ),
    MetricSpec(
        "tandem:request_prompt_tokens",
        "histogram",
        _MODEL,
        "tokens",
        "Prompt length of a request.",
        _TOKENS,
    ),
    MetricSpec(
        "tandem:request_generation_tokens",
        "histogram",
        _MODEL,
        "tokens",
        "Tokens generated by a request.",
        _TOKENS,
    ),
    MetricSpec(
        "tandem:http_requests_total",
        "counter",
        ("route", "status"),
        "requests",
        "HTTP requests answered.",
    ),
    MetricSpec(
        "tandem:http_requests_in_flight",
        "gauge",
        (),
        "requests",
        "HTTP requests being handled.",
    ),
    MetricSpec(
        "tandem:build_info",
        "gauge",
        ("version", "python"),
        "",
        "Always 1; the labels say what runs.",
    ),
)


_INSTANCE_VALUES: dict[str, Callable[[InstanceStatus], float]] = {
    "tandem:engine_instance_up": lambda each: float(each.stage.stage is InstanceStage.READY),
    "tandem:engine_instance_restarts_total": lambda each: each.num_restarts,
    "tandem:conductor_step_error_ratio": lambda each: each.step_error,
}


class ServerMetrics:
    """The metrics of one application.

    Args:
        model_name: label of this model's series.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._stats: InstanceStats | None = None
        self._instances: Sequence[InstanceStatus] = ()
        self._fallbacks: Mapping[str, int] = {}
        self._margins: Mapping[str, float] = {}
        self.num_in_flight = 0
        """Number of HTTP requests being handled; only the admission gate writes it."""
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
        self._slo = self._counter(specs["slo_requests_total"])
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
        # The label is bound once: looking it up for each token would cost more than the
        # observation.
        return family.labels(self._model_name)

    def _counter(self, spec: MetricSpec) -> Counter:
        return Counter(spec.name, spec.help, spec.labels, registry=self.registry)

    def count_finished(self, reason: str) -> None:
        """Count a generation that has ended, by its finish reason."""
        self._finished.labels(self._model_name, reason).inc()

    def count_slo(self, outcome: str) -> None:
        """Count a generation with latency objectives under its outcome: met, failed, or which
        objective was missed.
        """
        self._slo.labels(self._model_name, outcome).inc()

    def count_http(self, route: str, status: int) -> None:
        """Count an HTTP answer; ``route`` is a route's pattern, so that there are few series."""
        self._http.labels(route, str(status)).inc()

    def render(
        self,
        stats: InstanceStats | None,
        instances: Sequence[InstanceStatus] = (),
        fallbacks: Mapping[str, int] | None = None,
        margins: Mapping[str, float] | None = None,
    ) -> bytes:
        """Return the metrics in Prometheus' text format.

        Args:
            stats: statistics summed over the instances; None while all are down.
            instances: all instances.
            fallbacks: number of requests that moved to another instance, by reason.
            margins: admission's margins on predictions, by kind of time.
        """
        self._stats, self._instances = stats, instances
        self._fallbacks = {} if fallbacks is None else fallbacks
        self._margins = {} if margins is None else margins
        return generate_latest(self.registry)

    def collect_engine(self) -> Iterator[Metric]:
        """Yield the metrics whose values are read from the engine."""
        values: dict[str, float | Mapping[str, float]] = {
            "tandem:http_requests_in_flight": self.num_in_flight,
            "tandem:request_fallbacks_total": self._fallbacks,
            "tandem:admission_margin_ratio": self._margins,
        }
        stats = self._stats
        is_up = stats is not None and stats.stage == InstanceStage.READY
        values["tandem:engine_up"] = float(is_up)
        if stats is not None:
            values |= {name: getattr(stats, field) for name, field in _STATS.items()}
            values["tandem:cached_tokens_total"] = _split_hits(stats)
            used = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
            values["tandem:kv_cache_usage_perc"] = used
        for spec in METRICS:
            if spec.name in values or spec.labels == _INSTANCE:
                yield self._make_family(spec, values.get(spec.name, 0.0))

    def _make_family(self, spec: MetricSpec, value: float | Mapping[str, float]) -> Metric:
        make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        family = make(spec.name, spec.help, labels=spec.labels)
        if spec.labels == _INSTANCE:
            for each in self._instances:
                amount = _INSTANCE_VALUES[spec.name](each)
                family.add_metric([self._model_name, each.name, each.role], amount)
        elif isinstance(value, Mapping):
            for label, amount in value.items():
                family.add_metric([self._model_name, label], amount)
        else:
            family.add_metric([self._model_name][: len(spec.labels)], value)
        return family


def _split_hits(stats: InstanceStats) -> dict[str, int]:
    """Return the number of prompt tokens that were reused, by the cache that had them (device,
    store, ...).
    """
    return {
        "device": stats.prefix_hit_tokens - stats.store_hit_tokens,
        "store": stats.store_hit_tokens,
    }


def merge_pages(pages: Sequence[bytes]) -> bytes:
    """Return the metrics pages of several models as one, without duplicate lines."""
    if len(pages) == 1:
        return pages[0]
    families: dict[bytes, dict[bytes, bytes]] = {}
    for page in pages:
        lines: dict[bytes, bytes] = {}
        for line in page.splitlines():
            if line.startswith(b"# HELP "):
                lines = families.setdefault(line.split(b" ", 3)[2], {})
            # A line is a duplicate if its series (name and labels, without the value) was seen; of
            # a comment line the whole text counts.
            series = line if line.startswith(b"#") else line.rpartition(b" ")[0]
            lines.setdefault(series, line)
    found = [line for lines in families.values() for line in lines.values()]
    return b"\n".join(found) + b"\n"


class _EngineCollector(Collector):
    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect_engine()


class RequestTimer:
    """The timer of one generation's latencies, from when its HTTP request was read."""

    __slots__ = (
        "_arrived_s",
        "_clock",
        "_first_s",
        "_last_s",
        "_metrics",
        "_slo",
        "end_s",
        "num_tokens",
        "reason",
    )

    def __init__(
        self, metrics: ServerMetrics, clock: Clock, arrived_s: float, slo: Slo = NO_SLO
    ) -> None:
        self._slo = slo
        self._metrics = metrics
        self._clock = clock
        self._arrived_s = arrived_s
        self._first_s: float | None = None
        self._last_s: float | None = None
        self.end_s: float | None = None
        """Seconds from the request's arrival to its end; None while it runs."""
        self.reason: str | None = None
        self.num_tokens = 0
        """Number of tokens generated for the request, set when it ends."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request's arrival."""
        return self._clock.now_s() - self._arrived_s

    @property
    def first_token_s(self) -> float | None:
        """Seconds from arrival to the first token; None before it."""
        return None if self._first_s is None else self._first_s - self._arrived_s

    def see_output(self, queue_s: float | None) -> None:
        """Record that tokens have arrived; ``queue_s`` is the engine's queue time, with the first
        tokens.
        """
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
        """Record that the generation has ended."""
        self.end_s, self.reason, self.num_tokens = self.elapsed_s, reason, num_tokens
        self._metrics.e2e_latency.observe(self.end_s)
        if self._first_s is not None:
            self._metrics.decode_time.observe(self._clock.now_s() - self._first_s)
        self._metrics.prompt_tokens.observe(prompt_len)
        self._metrics.generation_tokens.observe(num_tokens)
        self._metrics.count_finished(reason)
        outcome = self._judge(reason, num_tokens)
        if outcome is not None:
            self._metrics.count_slo(outcome)

    def _judge(self, reason: str, num_tokens: int) -> str | None:
        """Return whether a generation met its latency objectives, or which one it missed; None if
        it had none, or if no client waited.
        """
        slo, first_s = self._slo, self.first_token_s
        if (slo.ttft_s is None and slo.tpot_s is None) or reason == "abort":
            return None
        if first_s is None or self.end_s is None or reason not in ("stop", "length", "tool_calls"):
            return "failed"
        if slo.ttft_s is not None and first_s > slo.ttft_s:
            return "missed_ttft"
        tpot_s = (self.end_s - first_s) / max(num_tokens - 1, 1)
        return "missed_tpot" if slo.tpot_s is not None and tpot_s > slo.tpot_s else "met"
