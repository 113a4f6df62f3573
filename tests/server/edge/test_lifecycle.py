"""SIGTERM ends the server without ending anybody's answer.

Method: a request in mid-stream while the server drains; and a real process that gets the signal.
"""

import asyncio
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from fake_engine import FakeEngine, make_info
from serving import WAIT_S, wait_until
from vocabularies import make_byte_level_tokenizer

from quick import rest_slow
from tandem.core.instance_status import StoreStatus
from tandem.server.app import build_app
from tandem.server.config import ServerConfig
from tandem.server.run import run_server

BODY = {"prompt": "hello", "max_tokens": 30, "stream": True}


def test_running_requests_finish_and_new_ones_are_refused(serve_text):
    live = serve_text(drain_timeout_s=WAIT_S)
    live.engine.pause_at = 2  # Until all is asked, however long that takes here.
    with requests.post(
        f"{live.url}/v1/completions", json=BODY, stream=True, timeout=WAIT_S
    ) as reply:
        lines = reply.iter_lines()
        next(lines)
        live.stop()
        wait_until(lambda: live.app.state.context.lifecycle.is_draining)
        refused = live.post("/v1/completions", BODY)
        assert refused.status_code == 503
        assert refused.headers["Retry-After"]
        assert refused.json()["error"]["code"] == "draining"
        ready = live.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        assert live.get("/health").status_code == 503
        assert live.get("/live").status_code == 200
        assert live.get("/metrics").status_code == 200
        live.engine.pause_at = None
        rest = [line for line in lines if line]
    assert rest[-1] == b"data: [DONE]"
    assert len(rest) == 30
    live.join()


def test_the_next_test_of_a_shared_server_finds_it_as_it_was(serve_text):
    """Though the last one's client has left a request that runs."""
    live = serve_text()
    info = live.engine.info
    live.engine.pause_at = 1
    live.engine.info = make_info(info.vocab_size, max_model_len=1 << 20)
    with requests.post(
        f"{live.url}/v1/completions", json=BODY, stream=True, timeout=WAIT_S
    ) as reply:
        assert reply.status_code == 200
        assert live.engine.num_held == 1
    live.renew()
    assert live.engine == FakeEngine(info=info)
    assert live.app.state.context.lifecycle.num_in_flight == 0


def test_what_does_not_finish_in_time_is_told_so(serve_text):
    live = serve_text(drain_timeout_s=0.1)
    live.engine.step_s = 30.0
    with requests.post(
        f"{live.url}/v1/completions", json=BODY, stream=True, timeout=WAIT_S
    ) as reply:
        wait_until(lambda: live.engine.num_held == 1)
        live.stop()
        events = [line for line in reply.iter_lines() if line]
    assert json.loads(events[0][6:])["choices"][0]["finish_reason"] == "abort"
    assert events[-1] == b"data: [DONE]"
    live.join()
    assert live.engine.num_held == 0


def test_a_second_signal_does_not_wait(serve_text):
    live = serve_text(drain_timeout_s=600.0)
    live.engine.step_s = 600.0
    with requests.post(f"{live.url}/v1/completions", json=BODY, stream=True, timeout=WAIT_S):
        wait_until(lambda: live.engine.num_held == 1)
        live.stop()
        wait_until(lambda: live.app.state.context.lifecycle.is_draining)
        live.stop()
        live.join()


SCRIPT = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from fake_engine import FakeEngine, make_info
from vocabularies import make_byte_level_tokenizer
from tandem.core.instance_status import StoreStatus
from tandem.server.app import build_app
from tandem.server.config import ServerConfig
from tandem.server.run import run_server

tokenizer = make_byte_level_tokenizer()
engine = FakeEngine(info=make_info(tokenizer.vocab_size), step_s=0.05)
config = ServerConfig(port=0, drain_timeout_s=20)
app = build_app(config, engine, tokenizer, "tiny")
asyncio.run(run_server(config, app, lambda running: print(running.url, flush=True)))
print("held", engine.num_held, flush=True)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signalled_process_answers_and_exits_with_0(number):
    folder = str(Path(__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(folder=folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            url = process.stdout.readline().strip()
            with requests.post(
                f"{url}/v1/completions", json=BODY, stream=True, timeout=WAIT_S
            ) as reply:
                lines = reply.iter_lines()
                next(lines)
                process.send_signal(number)
                assert [line for line in lines if line][-1] == b"data: [DONE]"
            assert process.wait(WAIT_S) == 0
            assert process.stdout.read() == "held 0\n"
        finally:
            process.kill()


@pytest.mark.parametrize("turns", rest_slow([0, 2, 8, 200], [0, 1, 2, 4, 8, 16, 200]))
def test_cancelled_at_any_turn_of_its_start_it_ends_without_a_traceback(turns, caplog):
    """As Ctrl-C does it before the server takes the signals: the lifespan is ended, not left."""
    tokenizer = make_byte_level_tokenizer()
    config = ServerConfig(port=0)
    app = build_app(config, FakeEngine(info=make_info(tokenizer.vocab_size)), tokenizer, "tiny")

    async def cancel() -> None:
        serving = asyncio.create_task(run_server(config, app))
        for _ in range(turns):
            await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(serving, WAIT_S)

    with caplog.at_level(logging.ERROR):
        asyncio.run(cancel())
    assert not caplog.records


def test_it_stops_at_once_when_nothing_runs(serve_text):
    live = serve_text(drain_timeout_s=600.0)
    live.stop()
    live.join()  # Which waits for much less than it may drain.


def test_server_info_tells_of_the_store(serve_text):
    status = StoreStatus(
        stage="restarting", detail="it is silent", num_restarts=2, capacity_bytes=8, used_bytes=3
    )
    live = serve_text(read_store=lambda: status)
    told = live.get("/server_info").json()["store"]
    assert told.items() >= {"stage": "restarting", "detail": "it is silent", "pid": None}.items()
    assert (told["num_restarts"], told["capacity_bytes"], told["used_bytes"]) == (2, 8, 3)


def test_an_unknown_path_is_told_what_there_is(serve_text):
    reply = serve_text(api_key=("k",)).get("/v2/chat", headers={"Authorization": "Bearer k"})
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert error["code"] == "not_found"
    assert error["message"] == "there is no endpoint /v2/chat: GET /openapi.json lists all"
