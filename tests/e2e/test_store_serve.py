"""``tandem serve --store.memory``: KV outlives the instance and the store's own process."""

import os
import signal
from pathlib import Path

PROMPT = "def read_file(path):\n    return open(path).read()\n" * 12
SEGMENTS = Path("/dev/shm/tandem")


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
    (pid,) = [p for p, c in list_children(server.process.pid).items() if "store.process" in c]
    return pid


def restart_instance(server):
    pid = server.instance_pid()
    os.kill(pid, signal.SIGKILL)
    server.wait_until(lambda: server.instance_pid() != pid, 120)
    server.wait_until(lambda: server.client.get("/ready").status_code == 200, 120)


def test_a_prefix_hits_after_the_instance_and_after_the_store_were_killed(serve_demo):
    with serve_demo("--store.memory", "128MiB", "--tiers.prefetch", "wait") as server:
        text, cached = ask(server)
        assert cached == 0
        num_blocks = 4
        # A second request flushes the step that reported the last full block.
        server.wait_until(lambda: ask(server)[1] > 0)
        restart_instance(server)
        again, cached = ask(server)
        assert again == text
        assert cached >= num_blocks * 64
        store = find_store(server)
        os.kill(store, signal.SIGKILL)
        server.wait_until(lambda: find_store(server) != store, 60)
        restart_instance(server)
        again, cached = ask(server)
        assert again == text
        assert cached >= num_blocks * 64
        name = f"serve-{server.process.pid}"
    assert not [entry for entry in SEGMENTS.iterdir() if entry.name.startswith(name)]
