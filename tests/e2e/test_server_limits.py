"""A killed store and instance, full queues, draining, keys: a server, which one test ends."""

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from shared import Shared

LONG = {"model": "demo", "prompt": "def f(x):\n", "max_tokens": 200, "ignore_eos": True}
KEY = {"Authorization": "Bearer s3cret"}
PREFIX = "def read_file(path):\n    return open(path).read()\n" * 12
SEGMENTS = Path(f"/dev/shm/tandem-{os.geteuid()}")
BLOCK = 64


@contextlib.contextmanager
def serve_guarded(serve):
    flags = ["--engine.max-running", "16", "--engine.max-queue", "4"]
    flags += ["--server.drain-timeout-s", "600"]
    # What the store has is loaded, however long that takes here.
    flags += ["--store.memory", "128MiB", "--tiers.prefetch", "wait", "--tiers.decision", "load"]
    flags += ["--tiers.lookup-timeout-ms", "60000", "--tiers.load-deadline-ms", "60000"]
    with serve(*flags, env={"TANDEM_SERVER__API_KEY": "s3cret"}) as live:
        live.client.headers.update(KEY)
        yield live
    text = "".join(live.log)
    assert "Traceback" not in text
    assert "leaked" not in text
    name = f"serve-{live.process.pid}"
    assert not [entry for entry in SEGMENTS.iterdir() if entry.name.startswith(name)]


@pytest.fixture(scope="module")
def servers(serve_demo_module):
    with Shared(lambda: serve_guarded(serve_demo_module)) as shared:
        yield shared


@pytest.fixture
def guarded(servers):
    """A server behind a key, with room for few, and with a store; its client has the key."""
    live = servers.get()
    live.wait_until(live.is_idle)
    return live


def open_client(server) -> httpx.Client:
    return httpx.Client(
        base_url=server.url,
        headers=KEY,
        timeout=120,
        trust_env=False,
        verify=False,  # Plain HTTP; to load certificates takes a hundred clients seconds.
    )


def stream_to_end(server, body: dict, on_first=None) -> tuple[int, list[dict], httpx.Headers]:
    """Post a streaming request; return status, events and headers."""
    events = []
    with (
        open_client(server) as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
    ):
        if response.status_code != 200:
            response.read()
            return response.status_code, [response.json()], response.headers
        for line in response.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 1 and on_first is not None:
                    on_first()
    return 200, events, response.headers


def ask_for_prefix(server):
    """(text, cached tokens) of a greedy completion."""
    body = {"model": "demo", "prompt": PREFIX, "max_tokens": 8, "temperature": 0}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.json()["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def list_children(pid):
    """Command lines of child processes by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(stat[1]) == pid:
                    found[int(entry.name)] = (entry / "cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def find_store(server):
    pids = [p for p, c in list_children(server.process.pid).items() if "store.process" in c]
    return pids[0] if pids else None


def read_fill(server):
    return server.client.get("/server_info").json()["store"]


def test_a_prefix_outlives_the_killed_store_and_instance(servers):
    """What is in the store is found by the next store process, and by the next instance.

    First of those that share the server: nothing else is in its store.
    """
    server = servers.get_new()
    text, cached = ask_for_prefix(server)
    assert cached == 0
    stored = ask_for_prefix(server)[1] // BLOCK * BLOCK
    # Written behind the answers.
    server.wait_until(lambda: server.stats()["stored_blocks"] * BLOCK >= stored)
    server.wait_until(lambda: read_fill(server)["num_objects"] * BLOCK >= stored)
    told = read_fill(server)
    assert 0 < told["used_bytes"] < told["capacity_bytes"] <= 128 << 20
    store = find_store(server)
    os.kill(store, signal.SIGKILL)
    server.wait_until(lambda: find_store(server) not in (store, None))
    check_that_streams_outlive_a_killed_instance(server)
    again, cached = ask_for_prefix(server)
    assert again == text
    assert cached >= stored


def check_that_streams_outlive_a_killed_instance(server):
    """The only instance dies in mid-stream: clients get all their tokens, once, from the next.

    So does one that asks while no instance runs.
    """
    seeded = {**LONG, "max_tokens": 200, "seed": 3}
    pid = server.instance_pid()
    seen = threading.Semaphore(0)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(stream_to_end, server, seeded, seen.release) for _ in range(4)]
        for _ in jobs:
            assert seen.acquire(timeout=60)
        os.kill(pid, signal.SIGKILL)
        server.wait_until(lambda: server.client.get("/ready").status_code == 503)
        ready = server.client.get("/ready").json()
        late = server.client.post("/v1/completions", json={**seeded, "max_tokens": 4})
        assert late.status_code == 200, late.text
        results = [job.result(timeout=120) for job in jobs]
    texts = set()
    for status, events, _ in results:
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


def test_a_key_guards_all_but_health(guarded):
    with httpx.Client(base_url=guarded.url, timeout=60, trust_env=False) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers=KEY).status_code == 200
        wrong = {"Authorization": "Bearer s3cres"}
        assert client.get("/v1/models", headers=wrong).status_code == 401
    command = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert "s3cret" not in command.stdout


def hold(server, leave: threading.Event) -> int:
    """Ask for a very long stream and read it until ``leave`` is set; return the status."""
    body = {**LONG, "max_tokens": 1900, "stream": True}
    with (
        open_client(server) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        while not leave.is_set() and next(lines, None) is not None:
            pass
    return response.status_code


def test_16_streams_4_queued_the_rest_refused(guarded):
    leave = threading.Event()

    def is_full() -> bool:
        stats = guarded.stats()  # None while the instance is too busy to tell.
        return bool(stats) and (stats["num_running"], stats["num_waiting"]) == (16, 4)

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        try:
            held = [pool.submit(hold, guarded, leave) for _ in range(20)]
            guarded.wait_until(is_full)
            jobs = [pool.submit(stream_to_end, guarded, LONG) for _ in range(20)]
            results = [job.result() for job in jobs]
        finally:
            leave.set()
    for status, events, headers in results:
        assert status == 503
        assert int(headers["Retry-After"]) >= 1
        assert events[0]["error"]["message"]
    assert [job.result() for job in held] == [200] * 20
    guarded.wait_until(guarded.is_idle)


def test_ctrl_c_drains_and_a_second_one_ends_what_runs(servers):
    """Last of those that share the server, whose log is looked at after it: status 0, no process.

    That a process ends by itself when it is drained is in ``tests/server/edge/test_lifecycle.py``.
    """
    with servers.use_up() as server:
        check_that_ctrl_c_drains_and_a_second_one_ends_what_runs(server)


def check_that_ctrl_c_drains_and_a_second_one_ends_what_runs(server):
    server.wait_until(server.is_idle)
    instance = server.instance_pid()
    seen = threading.Semaphore(0)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        # Steps of twelve answers for thousands of tokens: far longer than all that is asked here.
        body = {**LONG, "max_tokens": 1900, "n": 12}
        long = pool.submit(stream_to_end, server, body, seen.release)
        assert seen.acquire(timeout=60)
        short = pool.submit(stream_to_end, server, {**LONG, "max_tokens": 200}, seen.release)
        assert seen.acquire(timeout=60)
        server.process.send_signal(signal.SIGINT)
        server.wait_until(
            lambda: server.client.post("/v1/completions", json=LONG).status_code == 503
        )
        status, events, _ = short.result(timeout=120)
        assert not long.done()
        assert (status, events[-1]["choices"][0]["finish_reason"]) == (200, "length")
        server.process.send_signal(signal.SIGINT)
        status, events, _ = long.result(timeout=60)
        assert (status, events[-1]["choices"][0]["finish_reason"]) == (200, "abort")
    assert server.process.wait(timeout=60) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(instance, 0)
    server.wait_until(lambda: any("event=stop_forced" in line for line in server.log))


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["demo", "--host", "0.0.0.0"], ["api_key"]),
        # An instance refuses it.
        (["demo", "--engine.num-kv-blocks", "2", "--max-model-len", "2048"], ["blocks"]),
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
