"""How long until a server is whole again after a child was killed or stopped, child by child.

Goal: it comes back by itself, whichever child it was and whatever happened to it. Method: each
child in turn, of a pair with a store and of one instance with a store; the seconds are printed, not
asserted. A stopped child stays stopped: the lease finds it. Whole means that all instances serve,
the pair reads from each other, and new blocks reach the store.
"""

import itertools
import os
import signal
import time

import pytest
from test_chaos import list_children

LEASE_S = 4.0
RECOVERY_S = 180.0
"""The bound of a wait; what is expected is the lease and 5 s."""
COUNT = itertools.count()
SIGNALS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}


def find_children(server):
    """Process ids by name: instances as the server calls them, and the store."""
    found = {
        each["name"]: each["pid"]
        for each in server.client.get("/server_info").json()["instances"]
        if each["pid"] is not None
    }
    for pid, name in list_children(server):
        if name == "store":
            found[name] = pid
    return found


def is_serving(server):
    instances = server.client.get("/server_info").json()["instances"]
    is_ready = all(each["stage"]["stage"] == "ready" for each in instances)
    sources = [each["sources"] for each in instances if each["role"] == "decode"]
    return is_ready and all(source == ["prefill-0"] for source in sources)


def stores_again(server):
    """Ask something new; whether the store has got more blocks than before."""
    before = server.stats()["stored_blocks"]
    prompt = f"# file {next(COUNT)}\n" + "def part(x):\n    return x + 1\n" * 8
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1}
    answer = server.client.post("/v1/completions", json=body, timeout=RECOVERY_S)
    assert answer.status_code == 200, answer.text
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        if server.stats()["stored_blocks"] > before:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--prefill", "1", "--decode", "1"], []], ids=["pair", "one"])
def test_it_is_whole_again_after_each_child_was_killed_or_stopped(serve_demo, flags):
    common = ["--store.memory", "64MiB", "--engine.block-size", "16"]
    lease = ["--rpc.lease-ms", str(int(LEASE_S * 1e3)), "--rpc.heartbeat-interval-ms", "500"]
    with serve_demo(*flags, *common, *lease) as server:
        server.wait_until(lambda: is_serving(server) and stores_again(server), RECOVERY_S)
        took_s = {}
        for name in find_children(server):
            for what, number in SIGNALS.items():
                pid = find_children(server)[name]
                begin_s = time.monotonic()
                os.kill(pid, number)
                server.wait_until(
                    lambda name=name, pid=pid: find_children(server).get(name, pid) != pid,
                    RECOVERY_S,
                )
                server.wait_until(lambda: is_serving(server), RECOVERY_S)
                server.wait_until(lambda: stores_again(server), RECOVERY_S)
                took_s[name, what] = time.monotonic() - begin_s
        load = os.getloadavg()[0]
        print(f"\nwhole again, lease {LEASE_S:.0f} s, load {load:.1f} on {os.cpu_count()} cores:")
        for (name, what), seconds in took_s.items():
            print(f"| {name} | {what} | {seconds:.1f} s |")
        server.wait_until(server.is_idle, RECOVERY_S)
