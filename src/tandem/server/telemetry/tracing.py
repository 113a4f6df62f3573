"""OpenTelemetry spans of requests: their timelines, sent to a collector.

Spans are written when a request has ended, from its ``RequestTimeline``, so that they cost nothing
while it runs. The SDK sends them from its own thread, and drops them if the collector does not
accept them. They carry no token of a prompt or an answer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from tandem.core.errors import ConfigError
from tandem.core.timeline import ChoiceTimeline, InstanceTimeline, RequestTimeline, describe_miss
from tandem.server.telemetry.timelines import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer
    from opentelemetry.util.types import AttributeValue

__all__ = ["RequestTracer", "make_tracer", "write_spans"]

CollectTimeline = Callable[[RequestRecord], Awaitable[RequestTimeline]]

_logger = logging.getLogger(__name__)

_MAX_PENDING = 256
"""Largest number of ended requests whose timelines are being collected; more get no spans."""
_CLOSE_TIMEOUT_S = 2.0
_EXPORT_TIMEOUT_S = 5.0
_SECOND_NS = 1_000_000_000


def make_tracer(
    endpoint: str | None, model: str, collect: CollectTimeline
) -> "RequestTracer | None":
    """Return a tracer that sends spans to an OTLP/HTTP endpoint; None if ``endpoint`` is None.

    Args:
        endpoint: address of the collector.
        model: reported name of the model.
        collect: returns the timeline of a request.

    Raises:
        ConfigError: the endpoint is not an HTTP address, or the packages are not installed.
    """
    if endpoint is None:
        return None
    field = "server.otlp_endpoint"
    if not endpoint.startswith(("http://", "https://")):
        what = f"{endpoint!r} is not an http address: take http://HOST:4318/v1/traces"
        raise ConfigError("server.tracing", what, field=field)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        what = f"{error.name} is not installed: pip install 'tandem-llm[otel]'"
        raise ConfigError("server.tracing", what, field=field) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "tandem"}))
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RequestTracer(provider, model, collect)


class RequestTracer:
    """The tracer, which collects timelines of ended requests and writes their spans.

    Used on the server's event loop only.

    Args:
        provider: tracer provider of the SDK; owned, shut down by ``close``.
        model: reported name of the model.
        collect: returns the timeline of a request.
    """

    def __init__(self, provider: "TracerProvider", model: str, collect: CollectTimeline) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tandem.server")
        self._model = model
        self._collect = collect
        self._pending: set[asyncio.Task[None]] = set()

    def trace(self, record: RequestRecord) -> None:
        """Start to collect and write the spans of a request that has ended."""
        if len(self._pending) >= _MAX_PENDING:
            _logger.debug("event=spans_dropped pending=%d", len(self._pending))
            return
        task = asyncio.get_running_loop().create_task(self._write(record))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _write(self, record: RequestRecord) -> None:
        told = await self._collect(record)
        write_spans(self._tracer, told, record.origin.traceparent, self._model)

    async def close(self) -> None:
        """Write and send the pending spans, within seconds."""
        if self._pending:
            await asyncio.wait(self._pending, timeout=_CLOSE_TIMEOUT_S)
        for task in self._pending:
            task.cancel()
        # ``shutdown`` blocks until the collector has taken the last spans, up to the exporter's own
        # time limit.
        with suppress(TimeoutError):
            async with asyncio.timeout(_EXPORT_TIMEOUT_S + 1):
                await asyncio.to_thread(self._provider.shutdown)


def write_spans(tracer: "Tracer", told: RequestTimeline, traceparent: str, model: str) -> None:
    """Write one request as a tree of spans, with the times of its timeline.

    ``POST {path}`` contains ``tokenize`` and, for each choice, ``generate``, which contains the
    phases at the instances: ``queue``, ``load_kv``, ``prefill``, ``decode``. Attributes are named
    by the semantic conventions for generative AI where these have a name; ours begin with
    ``tandem.``.
    """
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
    writer = _SpanWriter(tracer, int(told.arrived_at * _SECOND_NS))
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "chat" if "chat" in told.path else "text_completion",
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": model,
        "gen_ai.response.id": told.id,
        "gen_ai.response.finish_reasons": [each.finish_reason or "" for each in told.choices],
        "gen_ai.usage.input_tokens": sum(each.prompt_tokens for each in told.choices),
        "gen_ai.usage.output_tokens": sum(each.output_tokens for each in told.choices),
        "http.route": told.path,
        "tandem.request_id": told.request_id,
    }
    request = writer.write(f"POST {told.path}", 0.0, told.age_s, parent, attributes, is_root=True)
    writer.write("tokenize", 0.0, told.tokenized_s, request, {})
    for choice in told.choices:
        _write_choice(writer, choice, request, told.age_s)


def _write_choice(
    writer: "_SpanWriter", choice: ChoiceTimeline, parent: "Context", age_s: float
) -> None:
    end_s = age_s if choice.end_s is None else choice.end_s
    attributes: dict[str, AttributeValue] = {
        "tandem.choice": choice.index,
        "gen_ai.usage.input_tokens": choice.prompt_tokens,
        "gen_ai.usage.output_tokens": choice.output_tokens,
        "gen_ai.response.finish_reasons": [choice.finish_reason or ""],
    }
    if choice.first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = choice.first_token_s
    span = writer.write("generate", choice.submitted_s, end_s, parent, attributes)
    for instance in choice.instances:
        _write_instance(writer, instance, choice.submitted_s, span)


def _write_instance(
    writer: "_SpanWriter", told: InstanceTimeline, begin_s: float, parent: "Context"
) -> None:
    """Write the spans of a request's phases at one instance, whose times count from the request's
    arrival there.
    """
    common: dict[str, AttributeValue] = {
        "tandem.instance": told.instance,
        "tandem.role": told.role,
    }
    end_s = told.age_s if told.end_s is None else told.end_s
    admitted_s = end_s if told.admitted_s is None else told.admitted_s
    writer.write("queue", begin_s, begin_s + admitted_s, parent, common)
    for load in told.loads:
        attributes: dict[str, AttributeValue] = common | {
            "tandem.load.source": load.source,
            "tandem.load.blocks": load.loaded_blocks,
            "tandem.load.bytes": load.loaded_bytes,
            "tandem.load.missing_blocks": load.asked_blocks - load.loaded_blocks,
        }
        load_end_s = end_s if load.end_s is None else load.end_s
        writer.write("load_kv", begin_s + load.begin_s, begin_s + load_end_s, parent, attributes)
    if told.admitted_s is None:
        return
    prefill: dict[str, AttributeValue] = common | {
        "tandem.device_tokens": told.device_tokens,
        "tandem.loaded_tokens": told.loaded_tokens,
        "tandem.computed_tokens": told.computed_tokens,
        "tandem.steps": told.num_prefill_steps,
        "tandem.preemptions": told.num_preemptions,
    }
    if told.miss is not None:
        prefill["tandem.miss.reason"] = told.miss.reason.value
        prefill["tandem.miss.text"] = describe_miss(told.miss)
    first_s = end_s if told.first_token_s is None else told.first_token_s
    writer.write("prefill", begin_s + told.admitted_s, begin_s + first_s, parent, prefill)
    if told.num_decode_steps:
        decode: dict[str, AttributeValue] = common | {"tandem.steps": told.num_decode_steps}
        writer.write("decode", begin_s + first_s, begin_s + end_s, parent, decode)


class _SpanWriter:
    """A writer of spans whose times are given in seconds since a request's arrival."""

    def __init__(self, tracer: "Tracer", arrived_ns: int) -> None:
        self._tracer = tracer
        self._arrived_ns = arrived_ns

    def write(
        self,
        name: str,
        begin_s: float,
        end_s: float,
        parent: "Context",
        attributes: Mapping[str, "AttributeValue"],
        *,
        is_root: bool = False,
    ) -> "Context":
        """Write a span; return the context for its child spans."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        span = self._tracer.start_span(
            name,
            context=parent,
            kind=SpanKind.SERVER if is_root else SpanKind.INTERNAL,
            attributes=attributes,
            start_time=self._at_ns(begin_s),
        )
        # Begin and end may come from two clocks (the server's and the instance's): the end is at
        # least the beginning.
        span.end(end_time=self._at_ns(max(begin_s, end_s)))
        return set_span_in_context(span, parent)

    def _at_ns(self, seconds: float) -> int:
        return self._arrived_ns + int(seconds * _SECOND_NS)
