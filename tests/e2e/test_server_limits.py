"""Full queues, dying instances, draining, keys: servers of their own."""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import threading

import httpx
import pytest

LONG = {"model": "demo", "prompt": "def f(x):\n", "max_tokens": 200, "ignore_eos": True}


def stream_to_end(
    url: str, body: dict, headers: dict[str, str] | None = None
) -> tuple[int, list[dict], httpx.Headers]:
    """Post a streaming request; return status, events and headers."""
    with (
        httpx.Client(
            base_url=url,
            headers=headers,
            timeout=120,
            trust_env=False,
            verify=False,  # Plain HTTP; to load certificates takes a hundred clients seconds.
        ) as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
    ):
        if response.status_code != 200:
            response.read()
            return response.status_code, [response.json()], response.headers
        events = [
            json.loads(line.removeprefix("data: "))
            for line in response.iter_lines()
            if line.startswith("data: ") and line != "data: [DONE]"
        ]
        return 200, events, response.headers


def test_16_streams_4_queued_the_rest_refused_then_sigterm_drains(serve_demo):
    limits = ["--engine.max-running", "16", "--engine.max-queue", "4"]
    with serve_demo(*limits, "--server.drain-timeout-s", "30") as server:
        with concurrent.futures.ThreadPoolExecutor(40) as pool:
            # Long enough that the first ones still run when the last one comes.
            body = {**LONG, "max_tokens": 400}
            jobs = [pool.submit(stream_to_end, server.url, body) for _ in range(40)]
            results = [job.result() for job in jobs]
        statuses = [status for status, _, _ in results]
        assert set(statuses) == {200, 503}
        # A stream that ends early makes room for another: at least 20 get through.
        assert statuses.count(200) >= 20
        assert statuses.count(503) >= 1
        for status, events, headers in results:
            if status == 503:
                assert int(headers["Retry-After"]) >= 1
                assert events[0]["error"]["message"]
            else:
                assert events[-1]["choices"][0]["finish_reason"] == "length"
        server.wait_until(server.is_idle)
        check_that_sigterm_drains(server)


def check_that_sigterm_drains(server):
    """New requests are refused, the running one ends, the status is 0, no process is left."""
    instance = server.instance_pid()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        # Long enough to be seen running, also by who is slow to look.
        job = pool.submit(stream_to_end, server.url, {**LONG, "max_tokens": 800})
        server.wait_until(lambda: server.stats()["num_running"] == 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(
            lambda: server.client.post("/v1/completions", json=LONG).status_code == 503
        )
        status, events, _ = job.result(timeout=60)
    assert status == 200
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(timeout=30) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(instance, 0)


def test_streams_outlive_a_killed_instance(serve_demo):
    """The only instance dies in mid-stream: clients get all their tokens, once, from the next.

    So does one that asks while no instance runs.
    """
    seeded = {**LONG, "max_tokens": 400, "seed": 3}
    with serve_demo() as server:
        pid = server.instance_pid()
        seen = threading.Semaphore(0)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:

            def run() -> tuple[int, list[dict]]:
                body = {**seeded, "stream": True}
                events = []
                with (
                    httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
                    client.stream("POST", "/v1/completions", json=body) as response,
                ):
                    for line in response.iter_lines():
                        if line.startswith("data: {"):
                            events.append(json.loads(line.removeprefix("data: ")))
                            if len(events) == 1:
                                seen.release()
                return response.status_code, events

            jobs = [pool.submit(run) for _ in range(4)]
            for _ in jobs:
                assert seen.acquire(timeout=30)
            os.kill(pid, signal.SIGKILL)
            server.wait_until(lambda: server.client.get("/ready").status_code == 503)
            ready = server.client.get("/ready").json()
            late = server.client.post("/v1/completions", json={**seeded, "max_tokens": 4})
            assert late.status_code == 200, late.text
            results = [job.result(timeout=120) for job in jobs]
        texts = set()
        for status, events in results:
            assert status == 200
            assert events[-1]["choices"][0]["finish_reason"] == "length", events[-1]
            texts.add("".join(event["choices"][0]["text"] for event in events))
        whole = server.client.post("/v1/completions", json=seeded).json()
        assert texts == {whole["choices"][0]["text"]}
        assert "[" not in ready["detail"], ready
        server.wait_until(lambda: server.client.get("/health").status_code == 200, 90)
        assert server.instance_pid() != pid
        answer = server.client.post("/v1/completions", json={**LONG, "max_tokens": 4})
        assert answer.status_code == 200
        server.wait_until(lambda: any("event=instance_back restarts=1" in x for x in server.log))


@pytest.mark.slow
def test_who_asks_while_no_instance_comes_back_is_told_to_retry(serve_demo):
    """Both instances are killed and start more slowly than requests may wait: 503, no hang."""
    flags = ["--prefill", "1", "--decode", "1", "--cluster.recovery-s", "0.3"]
    with serve_demo(*flags) as server:
        old = {each["pid"] for each in server.client.get("/server_info").json()["instances"]}
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        server.wait_until(lambda: server.client.get("/ready").status_code == 503)
        for path, body in (
            ("/v1/completions", LONG),
            ("/v1/completions", {**LONG, "stream": True}),
            ("/generate", {"text": "def f(x):"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ):
            answer = server.client.post(path, json=body)
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["Retry-After"]) >= 1
        server.wait_until(lambda: server.client.get("/health").status_code == 200, 90)
        body = {**LONG, "max_tokens": 4}
        assert server.client.post("/v1/completions", json=body).status_code == 200


def test_api_key_guards_all_but_health_then_a_second_interrupt_ends_what_runs(serve_demo):
    """Then Ctrl-C twice: the stream ends at once, the process with status 0 and clean logs."""
    key = {"TANDEM_SERVER__API_KEY": "s3cret"}
    with serve_demo("--server.drain-timeout-s", "600", env=key) as server:
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/v1/models").status_code == 401
        headers = {"Authorization": "Bearer s3cret"}
        assert server.client.get("/v1/models", headers=headers).status_code == 200
        wrong = {"Authorization": "Bearer s3cres"}
        assert server.client.get("/v1/models", headers=wrong).status_code == 401
        command = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
        assert "s3cret" not in command.stdout

        server.client.headers.update(headers)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            job = pool.submit(stream_to_end, server.url, {**LONG, "max_tokens": 2000}, headers)
            server.wait_until(lambda: server.stats()["num_running"] == 1)
            server.process.send_signal(signal.SIGINT)
            server.wait_until(
                lambda: server.client.post("/v1/completions", json=LONG).status_code == 503
            )
            server.process.send_signal(signal.SIGINT)
            job.result(timeout=60)
        assert server.process.wait(timeout=60) == 0
        log = server.log
    text = "".join(log)
    assert "event=stop_forced" in text
    assert "Traceback" not in text
    assert "leaked" not in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["demo", "--host", "0.0.0.0"], ["api_key"]),
        # An instance refuses it.
        pytest.param(
            ["demo", "--engine.num-kv-blocks", "2", "--max-model-len", "2048"],
            ["blocks"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_server_that_cannot_start_says_why(flags, words):
    """As a process; `tests/cli` gives wrong inputs to the command itself."""
    result = subprocess.run(
        [sys.executable, "-m", "tandem", "serve", "--port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert result.returncode != 0
    for word in words:
        assert word in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
