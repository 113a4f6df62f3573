"""``tandem serve --store.memory``: KV outlives the instance and the store's own process."""

import os
import signal
from pathlib import Path

PROMPT = "def read_file(path):\n    return open(path).read()\n" * 12
SEGMENTS = Path(f"/dev/shm/tandem-{os.geteuid()}")
BLOCK = 64


def ask(server):
    """(text, cached tokens) of a greedy completion."""
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
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


def kill_instance(server):
    """Who asks next waits for the one that replaces it."""
    os.kill(server.instance_pid(), signal.SIGKILL)


def test_a_prefix_hits_after_the_store_and_the_instance_were_killed(serve_demo):
    with serve_demo("--store.memory", "128MiB", "--tiers.prefetch", "wait") as server:
        text, cached = ask(server)
        assert cached == 0
        stored = ask(server)[1] // BLOCK * BLOCK
        # Written behind the answers.
        server.wait_until(lambda: server.stats()["stored_blocks"] * BLOCK >= stored, 60)
        server.wait_until(lambda: read_fill(server)["num_objects"] * BLOCK >= stored, 60)
        told = read_fill(server)
        assert 0 < told["used_bytes"] < told["capacity_bytes"] <= 128 << 20
        store = find_store(server)
        os.kill(store, signal.SIGKILL)
        server.wait_until(lambda: find_store(server) not in (store, None), 60)
        kill_instance(server)
        again, cached = ask(server)
        assert again == text
        assert cached >= stored
        name = f"serve-{server.process.pid}"
    assert not [entry for entry in SEGMENTS.iterdir() if entry.name.startswith(name)]
