"""The metrics page says what happened, and the documentation says what the page says."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

import tandem
from tandem.core.instance_status import list_stats
from tandem.server.telemetry.metrics import METRICS

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"


def scrape(live) -> dict[tuple, float]:
    page = live.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }


def test_the_reference_lists_every_metric_and_no_other():
    rows = [line for line in REFERENCE.read_text().splitlines() if line.startswith("| `")]
    listed = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    expected = [
        [f"`{m.name}`", m.kind, m.unit or "none", ", ".join(m.labels) or "none", m.help]
        for m in METRICS
    ]
    assert listed == expected


def test_every_metric_of_the_table_is_on_the_page(serve_text):
    live = serve_text()
    # A label without a value has no sample.
    live.engine.more_stats = {spec.field: {"timeout": 1} for spec in list_stats() if spec.label}
    live.engine.fallbacks = {"prefill_peer_lost": 1}
    live.engine.margins = {"ttft": 1.0, "tpot": 1.2}
    body, slo = {"prompt": "a", "max_tokens": 3}, {"x-slo-ttft-ms": "60000"}
    assert live.post("/v1/completions", body, headers=slo).status_code == 200
    names = {key[0] for key in scrape(live)}
    for metric in METRICS:
        suffix = "_bucket" if metric.kind == "histogram" else ""
        assert metric.name + suffix in names, metric.name


def test_every_declared_statistic_is_shown_with_its_help(serve_text):
    """Each has a value of its own, so that none is taken for another."""
    live = serve_text()
    told = {"num_running", "num_blocks", "num_used_blocks", "prompt_tokens", "generated_tokens"}
    values = {s.field: 1000 + n for n, s in enumerate(list_stats()) if s.field not in told}
    by_label = {s.field: s.label for s in list_stats() if s.label}
    live.engine.more_stats = {
        field: {"some": value} if field in by_label else value for field, value in values.items()
    }
    found, info = scrape(live), live.get("/server_info").json()["stats"]
    page = live.get("/metrics").text.splitlines()
    for spec in list_stats():
        name = f"tandem:{spec.metric}"
        assert f"# HELP {name} {spec.help}" in page
        assert f"# TYPE {name} {spec.kind}" in page
        if spec.field in told:
            continue
        labels = [("model_name", "tiny")]
        labels += [(spec.label, "some")] if spec.label else []
        shown = info[spec.field]["some"] if spec.label else info[spec.field]
        assert found[name, *sorted(labels)] == shown == values[spec.field]


def test_the_page_tells_of_the_process_and_the_build(serve_text):
    found = scrape(serve_text())
    names = {key[0]: value for key, value in found.items()}
    assert names["process_resident_memory_bytes"] > 0
    assert names["process_open_fds"] > 0
    build = next(key for key in found if key[0] == "tandem:build_info")
    assert ("version", tandem.__version__) in build


def test_hits_are_told_by_tier_and_failures_by_reason(serve_text):
    live = serve_text()
    live.engine.more_stats = {
        "prefix_hit_tokens": 100,
        "store_hit_tokens": 64,
        "loaded_bytes": 4096,
        "num_lookup_timeouts": 3,
        "load_failures": {"not_found": 2, "corruption": 1},
        "store_failures": {"queue_full": 5},
    }
    found = scrape(live)
    model = ("model_name", "tiny")
    for source, tokens in (("device", 36), ("store", 64)):
        assert found["tandem:cached_tokens_total", ("cache_source", source), model] == tokens
    assert found["tandem:external_prefix_cache_hits_total", model] == 64
    assert found["tandem:kv_load_bytes_total", model] == 4096
    assert found["tandem:kv_lookup_timeouts_total", model] == 3
    failed = "tandem:kv_load_failed_blocks_total"
    assert found[failed, model, ("reason", "not_found")] == 2
    assert found[failed, model, ("reason", "corruption")] == 1
    assert found["tandem:kv_store_failed_blocks_total", model, ("reason", "queue_full")] == 5


def test_a_request_is_counted_once(serve_text):
    live = serve_text()
    model = ("model_name", "tiny")
    reply = live.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 4, "n": 2})
    assert reply.status_code == 200
    live.post("/v1/completions", {"prompt": "a", "max_tokens": "x"})
    live.get("/nowhere")
    found = scrape(live)
    assert found["tandem:prompt_tokens_total", model] == 4
    assert found["tandem:generation_tokens_total", model] == 8
    assert found["tandem:request_success_total", ("finished_reason", "length"), model] == 2
    assert found["tandem:time_to_first_token_seconds_count", model] == 2
    assert found["tandem:inter_token_latency_seconds_count", model] == 6
    assert found["tandem:e2e_request_latency_seconds_count", model] == 2
    assert found["tandem:request_generation_tokens_sum", model] == 8
    assert found["tandem:engine_up", model] == 1
    routes = ("tandem:http_requests_total", ("route", "/v1/completions"))
    assert found[*routes, ("status", "200")] == 1
    assert found[*routes, ("status", "400")] == 1
    assert found["tandem:http_requests_total", ("route", "other"), ("status", "404")] == 1


def test_failures_are_counted_by_reason(serve_text, tokenizer):
    live = serve_text()
    model = ("model_name", "tiny")
    live.engine.die_after = 1
    assert live.post("/v1/completions", {"prompt": "a"}).status_code == 503
    live.engine.die_after = None
    live.engine.answer = tokenizer.encode("the cat sat on the mat")
    assert live.post("/v1/completions", {"prompt": "a", "stop": "cat"}).status_code == 200
    found = scrape(live)
    assert found["tandem:request_success_total", ("finished_reason", "error"), model] == 1
    assert found["tandem:request_success_total", ("finished_reason", "stop"), model] == 1


def test_the_page_outlives_the_engine(serve_text):
    live = serve_text()
    live.engine.info = None
    found = scrape(live)
    assert found["tandem:engine_up", ("model_name", "tiny")] == 0


def test_metrics_can_be_switched_off(serve_text):
    assert serve_text(metrics=False).get("/metrics").status_code == 404
