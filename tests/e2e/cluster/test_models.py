"""Goal: three models behind one address, with memory for two, answer everything.

Method: a real server whose three models are the demo model with unlike KV, so that each has an
answer of its own to nothing but its name; 200 requests of all three at once.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

START_S, WAIT_S = 120.0, 240.0
FILE = """
memory: 300MiB
models:
  one: {path: demo, memory: 120MiB, settings: {engine: {block_size: 16, kv_cache_gib: 0.05}}}
  two: {path: demo, memory: 120MiB, settings: {engine: {block_size: 32, kv_cache_gib: 0.05}}}
  three: {path: demo, memory: 120MiB, settings: {engine: {block_size: 64, kv_cache_gib: 0.05}}}
"""


@contextlib.contextmanager
def serve(file):
    """Run ``tandem serve --hub.file``; give a client of it."""
    command = [sys.executable, "-m", "tandem", "serve", "--hub.file", str(file), "--port", "0"]
    command += ["--json", "--server.admin-api-key", "chief"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    text = ""
    try:
        for line in process.stdout:
            text += line
            with contextlib.suppress(json.JSONDecodeError):
                url = json.loads(text)["url"]
                timer.cancel()
                break
        else:
            raise AssertionError(f"the server did not start: {text}")
        with httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client:
            yield client
    finally:
        timer.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@pytest.mark.slow
def test_200_requests_of_three_models_with_memory_for_two(tmp_path):
    file = tmp_path / "models.yaml"
    file.write_text(FILE)
    names = ["one", "two", "three"]
    with serve(file) as client:
        most_awake, over = 0, threading.Event()

        def watch():
            nonlocal most_awake
            while not over.wait(0.2):
                listed = client.get("/models").json()["models"]
                holding = [m for m in listed if m["state"] in ("waking", "awake", "draining")]
                most_awake = max(most_awake, len(holding))

        def ask(number):
            name = names[number // 25 % 3]
            body = {"model": name, "prompt": f"def f{number % 7}(", "max_tokens": 8, "seed": 1}
            reply = client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            assert reply.json()["model"] == name
            return number % 7, reply.json()["choices"][0]["text"]

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(ask, range(200)))
        finally:
            over.set()
            watcher.join(WAIT_S)
        assert most_awake == 2
        # One checkpoint: an answer depends on the prompt alone, whichever of the three gave it.
        assert len(set(answers)) == 7
        admin = {"Authorization": "Bearer chief"}
        for action, state in (("sleep", "asleep"), ("wake", "awake"), ("evict", "evicted")):
            body = {"action": action, "model": "one"}
            reply = client.post("/models", json=body, headers=admin)
            assert reply.status_code == 200, reply.text
            assert {m["name"]: m["state"] for m in reply.json()["models"]}["one"] == state
        assert ask(0) == answers[0]
