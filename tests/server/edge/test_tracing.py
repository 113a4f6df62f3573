"""OpenTelemetry spans: the tree of a request, its times and parents, sent over OTLP/HTTP."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tandem.core.errors import ConfigError
from tandem.core.timeline import (
    ChoiceTimeline,
    InstanceTimeline,
    KvLoadRecord,
    MissReason,
    PrefixMiss,
    RequestTimeline,
)
from tandem.server.telemetry.tracing import make_tracer, write_spans

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SECOND_NS = 1_000_000_000


def make_timeline():
    instance = InstanceTimeline(
        request_id="e-1",
        instance="decode-0",
        role="decode",
        state="finished",
        age_s=2.0,
        prompt_tokens=40,
        output_tokens=3,
        admitted_s=0.5,
        first_token_s=1.0,
        end_s=2.0,
        num_decode_steps=2,
        loads=[
            KvLoadRecord(source="store", begin_s=0.1, end_s=0.4, asked_blocks=3, loaded_blocks=2)
        ],
        miss=PrefixMiss(reason=MissReason.EVICTED, position=16),
    )
    choice = ChoiceTimeline(
        index=0,
        submitted_s=0.25,
        first_token_s=1.25,
        end_s=2.25,
        finish_reason="length",
        prompt_tokens=40,
        output_tokens=3,
        instances=[instance],
    )
    return RequestTimeline(
        id="cmpl-1",
        request_id="mine",
        path="/v1/completions",
        arrived_at=1_000.0,
        age_s=2.25,
        tokenized_s=0.2,
        is_ended=True,
        choices=[choice],
    )


def write(traceparent):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, memory = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    write_spans(provider.get_tracer("test"), make_timeline(), traceparent, "demo")
    provider.shutdown()
    return {span.name: span for span in memory.get_finished_spans()}


def test_spans_have_the_times_and_the_tree_of_the_timeline():
    pytest.importorskip("opentelemetry.sdk")
    spans = write(f"00-{TRACE}-{PARENT}-01")
    times = {
        name: ((span.start_time - 1_000 * SECOND_NS), (span.end_time - 1_000 * SECOND_NS))
        for name, span in spans.items()
    }
    assert {name: (a / SECOND_NS, b / SECOND_NS) for name, (a, b) in times.items()} == {
        "POST /v1/completions": (0.0, 2.25),
        "tokenize": (0.0, 0.2),
        "generate": (0.25, 2.25),
        "queue": (0.25, 0.75),
        "load_kv": (0.35, 0.65),
        "prefill": (0.75, 1.25),
        "decode": (1.25, 2.25),
    }
    root, generate = spans["POST /v1/completions"], spans["generate"]
    assert root.context.trace_id == int(TRACE, 16)
    assert root.parent.span_id == int(PARENT, 16)
    for name in ("tokenize", "generate"):
        assert spans[name].parent.span_id == root.context.span_id
    for name in ("queue", "load_kv", "prefill", "decode"):
        assert spans[name].parent.span_id == generate.context.span_id
        assert spans[name].attributes["tandem.instance"] == "decode-0"
    assert spans["load_kv"].attributes["tandem.load.missing_blocks"] == 1
    assert spans["prefill"].attributes["tandem.miss.reason"] == "evicted"
    assert root.attributes["gen_ai.usage.output_tokens"] == 3


@pytest.mark.parametrize("header", ["", "00-zz", f"00-{'0' * 32}-{PARENT}-01", "\x00" * 100])
def test_an_invalid_traceparent_begins_a_trace_of_its_own(header):
    pytest.importorskip("opentelemetry.sdk")
    root = write(header)["POST /v1/completions"]
    assert root.parent is None
    assert root.context.trace_id


@pytest.mark.parametrize("endpoint", ["", "localhost:4318", "file:///tmp/x"])
def test_an_endpoint_that_is_no_http_address_is_refused(endpoint):
    with pytest.raises(ConfigError, match="not an http address") as caught:
        make_tracer(endpoint, "demo", lambda record: None)
    assert caught.value.field == "server.otlp_endpoint"


class Collector:
    """Takes OTLP/HTTP and keeps the spans."""

    def __init__(self):
        self.spans = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
                outer.spans += [
                    span
                    for resource in request.resource_spans
                    for scope in resource.scope_spans
                    for span in scope.spans
                ]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.thread.join(60)
        self.server.server_close()


def test_a_served_request_reaches_the_collector_without_its_prompt(serve_text):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    collector = Collector()
    try:
        live = serve_text(otlp_endpoint=collector.url)
        reply = live.post(
            "/v1/completions",
            {"prompt": "a secret of mine", "max_tokens": 3},
            headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
        )
        assert reply.status_code == 200
        live.stop()  # Stopping the server sends what it has.
        live.join()
    finally:
        collector.close()
    names = [span.name for span in collector.spans]
    assert {"POST /v1/completions", "tokenize", "generate"} <= set(names)
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert "secret" not in str(collector.spans)
