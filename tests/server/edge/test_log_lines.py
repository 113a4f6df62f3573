"""What the log says: a line for each request, a line of the load, and the ids that join them."""

import logging
import socket

import pytest
import requests
from fake_engine import make_info
from serving import WAIT_S, wait_until

from tandem.core.instance_status import InstanceStats
from tandem.core.logs import current_request_id
from tandem.core.wire import InstanceStage
from tandem.server.config import ACCESS_LOGGER
from tandem.server.telemetry.load_log import LoadReport


class Lines(logging.Handler):
    """Keeps what was logged, and the request's id at that moment."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[tuple[int, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.levelno, record.getMessage(), current_request_id.get()))

    def of(self, word: str) -> list[tuple[int, str, str]]:
        return [line for line in list(self.found) if word in line[1]]


@pytest.fixture
def lines():
    logger, access = logging.getLogger("tandem.server"), logging.getLogger(ACCESS_LOGGER)
    handler, level, access_level = Lines(), logger.level, access.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    # A `serve` in this process gave it a level of its own.
    access.setLevel(logging.NOTSET)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
    access.setLevel(access_level)


def test_an_id_comes_in_and_goes_out(serve_text, lines):
    live = serve_text()
    body = {"prompt": "a", "max_tokens": 1}
    for path, extra in (("/v1/completions", {}), ("/v1/completions", {"stream": True})):
        reply = live.post(path, body | extra, headers={"X-Request-Id": "trace-7/x"})
        assert reply.headers["x-request-id"] == "trace-7/x"
        assert "cmpl-trace-7/x" in reply.text
    reply = live.post("/generate", {"text": "a"}, headers={"x-request-id": "mine"})
    assert reply.json()["meta_info"]["id"] == "mine"
    reply = live.post(
        "/v1/completions", body | {"request_id": "own"}, headers={"x-request-id": "h"}
    )
    assert reply.json()["id"] == "own"
    assert reply.headers["x-request-id"] == "h"
    # The line is written when the reply has been sent: its reader may be earlier.
    wait_until(lambda: len(lines.of("event=request")) == 4)
    assert [line[2] for line in lines.of("event=request")] == ["trace-7/x"] * 2 + ["mine", "h"]


def test_without_an_id_one_is_made_for_refusals_too(serve_text):
    live = serve_text(api_key=("k",))
    seen = {live.get("/nowhere").headers["x-request-id"] for _ in range(3)}
    assert len(seen) == 3
    assert all(seen)
    for bad in ("a b", "x" * 201, "a\tb", "é".encode("latin-1"), ""):
        reply = live.get("/version", headers={"x-request-id": bad})
        assert reply.headers["x-request-id"] not in (bad, "")


def test_each_request_is_a_line(serve_text, lines):
    live = serve_text()
    live.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    live.post("/v1/completions", {"prompt": 7})
    live.get("/a%0Aevent=forged b?secret=1")
    live.get("/health")
    live.get("/metrics")
    wait_until(lambda: len(lines.of("event=request ")) == 5)
    found = lines.of("event=request ")
    words = [dict(word.split("=", 1) for word in line[1].split(" ")) for line in found]
    assert [(w["method"], w["path"], w["status"]) for w in words] == [
        ("POST", "/v1/completions", "200"),
        ("POST", "/v1/completions", "400"),
        ("GET", "/a%0Aevent%3Dforged%20b", "404"),
        ("GET", "/health", "200"),
        ("GET", "/metrics", "200"),
    ]
    assert all(w["client"].startswith("127.0.0.1:") and float(w["duration_s"]) >= 0 for w in words)
    assert [line[0] for line in found] == [logging.INFO] * 3 + [logging.DEBUG] * 2


@pytest.mark.parametrize("is_stream", [True, False])
def test_who_leaves_is_499(serve_text, lines, is_stream):
    live = serve_text()
    live.engine.step_s = 30.0
    body = b'{"prompt": "a", "stream": %s}' % (b"true" if is_stream else b"false")
    with socket.create_connection(("127.0.0.1", live.running.port), WAIT_S) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        wait_until(lambda: live.engine.num_held == 1)
    wait_until(lambda: lines.of("event=request "))
    assert "status=499" in lines.of("event=request ")[0][1]


def test_under_load_a_line_comes_every_so_often(serve_text, lines):
    live = serve_text(load_log_s=0.02)
    live.engine.step_s = 0.02
    body = {"prompt": "hello", "max_tokens": 10_000, "stream": True}
    live.engine.info = make_info(live.engine.info.vocab_size, max_model_len=1 << 20)
    assert lines.of("event=load") == []
    with requests.post(f"{live.url}/v1/completions", json=body, stream=True, timeout=WAIT_S):
        wait_until(lambda: len(lines.of("event=load running=1 waiting=0")) >= 3)
    assert all(line[0] == logging.INFO for line in lines.of("event=load"))


def stats(**fields) -> InstanceStats:
    return InstanceStats(stage=InstanceStage.READY, num_blocks=100, **fields)


def test_rates_are_over_the_time_since_the_last_line():
    report = LoadReport()
    assert report.describe(stats(prompt_tokens=100), 5.0) is None, "nothing to compare with"
    busy = stats(
        num_running=3,
        num_waiting=2,
        num_used_blocks=25,
        prompt_tokens=600,
        generated_tokens=50,
        prefix_query_tokens=400,
        prefix_hit_tokens=300,
    )
    assert report.describe(busy, 15.0) == (
        "event=load running=3 waiting=2 prompt_tokens_per_s=50.0 generated_tokens_per_s=5.0 "
        "kv_cache_usage=0.250 prefix_hit_rate=0.750"
    )
    idle = stats(prompt_tokens=600, generated_tokens=60, prefix_query_tokens=400)
    assert "generated_tokens_per_s=1.0" in report.describe(idle, 25.0)
    assert report.describe(idle, 35.0) is None, "no load, no line"


def test_another_instance_begins_anew():
    report = LoadReport()
    report.describe(stats(prompt_tokens=1000), 0.0)
    assert report.describe(None, 10.0) is None
    assert report.describe(stats(prompt_tokens=10, num_running=1), 20.0) is None
    assert "prompt_tokens_per_s=1.0" in report.describe(stats(prompt_tokens=20), 30.0)
    assert report.describe(stats(prompt_tokens=5, num_running=1), 40.0) is None, "a quick restart"
