"""Goal: one file and one command are a cluster of processes, which ends as a whole.

Method: real processes of the demo model: a prefill and a decode launcher, two servers.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

START_S, WAIT_S = 240.0, 120.0
TEXT = """
name: tiny
model: demo
settings: {{engine: {{block_size: 16, kv_cache_gib: 0.05}}}}
groups:
  - {{name: prefill, role: prefill}}
  - {{name: decode, role: decode}}
servers: {{count: 2, port: {port}}}
store: {{hosts: 1, memory: 64Mi}}
drain_s: 5
"""


def is_alive(pid):
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


@pytest.mark.slow
def test_a_cluster_of_plain_processes(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = tmp_path / "cluster.yaml"
    file.write_text(TEXT.format(port=port))
    command = [sys.executable, "-m", "tandem", "cluster", "up", str(file), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    try:
        text = ""
        for line in process.stdout:
            text += line
            with contextlib.suppress(json.JSONDecodeError):
                told = json.loads(text)
                break
        else:
            raise AssertionError(f"it did not start: {text}")
        timer.cancel()
        assert set(told["pids"]) == {
            "store-master", "store-0", "prefill", "decode", "server-0", "server-1",
        }  # fmt: skip
        body = {
            "model": "demo",
            "prompt": "def merge(left, right):" * 4,
            "max_tokens": 8,
            "seed": 1,
        }
        texts = set()
        with httpx.Client(timeout=WAIT_S, trust_env=False) as client:
            for url in told["servers"]:
                reply = client.post(f"{url}/v1/completions", json=body)
                assert reply.status_code == 200, reply.text
                texts.add(reply.json()["choices"][0]["text"])
            listed = client.get(f"{told['servers'][1]}/server_info").json()["instances"]
            assert {each["role"] for each in listed} == {"prefill", "decode"}
            # A launcher that is killed is started again, and its instance with it.
            os.kill(told["pids"]["decode"], signal.SIGKILL)
            reply = client.post(f"{told['servers'][0]}/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            texts.add(reply.json()["choices"][0]["text"])
        assert len(texts) == 1
    finally:
        timer.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
    begin_s = time.monotonic()
    while any(map(is_alive, told["pids"].values())):
        assert time.monotonic() - begin_s < WAIT_S, "a process outlived its cluster"
        time.sleep(0.1)
