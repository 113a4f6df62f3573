"""Goal: whatever happens to children of a server under load, answers are right or end in an error.

Method: a server with a prefill instance, a decode instance and a store; clients ask for answers
that are known; meanwhile a child is killed or stopped every few seconds, also one that is starting,
as long as another serves. A wrong token, a client that waits for ever, a block, process or
descriptor that is left: each fails the test.
"""

import collections
import contextlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from process_tree import GONE, list_tree, measure_usage

from tandem.engine.process.instance import PROCESS_NAME

NUM_CLIENTS = 6
PAUSE_S = (2.0, 8.0)
"""Between two faults."""
STOP_S = (0.5, 12.0)
"""A stopped process goes on after that, or has been replaced."""
LEASE_S = 4.0
REQUEST_TIMEOUT_S = 240.0
RECOVERY_S = 120.0
"""To be whole again: the lease, 5 s, and a start of Python on a busy machine."""
CODE = "def split(path, size):\n    # Return the parts of a file, each of at most size bytes.\n"
BODIES = [
    {
        "model": "demo",
        "prompt": CODE * (3 + 3 * (i % 3)) + f"# {i // 2}\n",
        "max_tokens": 12 + 30 * (i % 4),
        "temperature": float(i % 2),
        "seed": i,
        "ignore_eos": True,
    }
    for i in range(8)
]


class Client:
    """Asks until told to stop; counts what it gets."""

    def __init__(self, url, truth, until, seed):
        self.ends = collections.Counter()
        self.texts = collections.Counter()
        """Of errors, with their codes."""
        self.wrong = []
        self._chance = random.Random(seed)
        self._args = (url, truth, until)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        url, truth, until = self._args
        with httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
            while not until.is_set():
                index = self._chance.randrange(len(BODIES))
                try:
                    end, text = self._ask(client, BODIES[index])
                except httpx.TimeoutException:
                    end, text = "timeout", None
                self.ends[end] += 1
                if end == "length" and text != truth[index]:
                    self.wrong.append((index, text))
                if end != "length":
                    until.wait(0.5)  # As Retry-After says.

    def _ask(self, client, body):
        if self._chance.random() < 0.5:
            response = client.post("/v1/completions", json=body)
            if response.status_code != 200:
                return self._note_error(response.json()["error"]), None
            choice = response.json()["choices"][0]
            return choice["finish_reason"], choice["text"]
        text, end = "", "silence"
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            if response.status_code != 200:
                response.read()
                return self._note_error(response.json()["error"]), None
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return self._note_error(event["error"]), None
                    choice = event["choices"][0]
                    text += choice["text"]
                    end = choice["finish_reason"] or end
        return end, text

    def _note_error(self, error):
        self.texts[f"{error['code']}: {error['message']}"] += 1
        return f"error {error['code']}"


def list_children(server):
    """Children that may be harmed, by what they are."""
    found = []
    for pid, command in list_tree(server.process.pid).items():
        with contextlib.suppress(*GONE):
            if Path(f"/proc/{pid}/comm").read_text().strip() == PROCESS_NAME:
                found.append((pid, "instance"))
            elif "tandem.store.process" in command:
                found.append((pid, "store"))
    return found


def is_whole(server):
    info = server.client.get("/server_info").json()
    is_ready = [each["stage"]["stage"] for each in info["instances"]] == ["ready", "ready"]
    return is_ready and info["instances"][1]["sources"] == ["prefill-0"]


def holds_nothing(server):
    return server.is_idle() and not server.stats()["num_held"]


def is_up(server):
    with contextlib.suppress(httpx.HTTPError):
        return server.client.get("/health").status_code == 200
    return False


def do_harm(server, chance, until):
    """Kill or stop a child; return what was done."""
    children = list_children(server)
    if not children:
        return None
    pid, name = chance.choice(children)
    is_kill = chance.random() < 0.5
    with contextlib.suppress(ProcessLookupError):
        if is_kill:
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            until.wait(chance.uniform(*STOP_S))
            os.kill(pid, signal.SIGCONT)
    return f"{'kill' if is_kill else 'stop'} {name}"


@pytest.mark.parametrize(
    "minutes",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(20, marks=pytest.mark.long),
    ],
)
def test_answers_are_right_or_errors_while_children_die_and_hang(serve_demo, minutes):
    chance = random.Random(minutes)
    flags = ["--rpc.lease-ms", str(int(LEASE_S * 1e3)), "--rpc.heartbeat-interval-ms", "500"]
    pair = ["--prefill", "1", "--decode", "1", "--store.memory", "256MiB"]
    with serve_demo(*pair, *flags, "--engine.block-size", "16") as server:
        truth = []
        for body in BODIES:
            answer = server.client.post("/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
            truth.append(answer.json()["choices"][0]["text"])
        server.wait_until(lambda: holds_nothing(server), RECOVERY_S)
        before = measure_usage(server.process.pid)
        until, harm = threading.Event(), collections.Counter()
        clients = [Client(server.url, truth, until, seed) for seed in range(NUM_CLIENTS)]
        end_s = time.monotonic() + 60 * minutes
        while time.monotonic() < end_s:
            until.wait(chance.uniform(*PAUSE_S))
            if not is_up(server):
                continue  # Where a start takes longer than the pauses, there would be only starts.
            harm[do_harm(server, chance, until)] += 1
        until.set()
        for client in clients:
            client.thread.join(2 * REQUEST_TIMEOUT_S)
            assert not client.thread.is_alive(), "a request does not end"
        ends = sum((client.ends for client in clients), collections.Counter())
        texts = sum((client.texts for client in clients), collections.Counter())
        print(f"\n{minutes} min: harm {dict(harm)}, ends {dict(ends)}")
        print(f"errors {dict(texts)}", flush=True)
        assert not [wrong for client in clients for wrong in client.wrong]
        assert set(ends) <= {"length", "error peer_lost", "error capacity", "error deadline"}, ends
        assert ends["length"] > 0
        server.wait_until(lambda: is_whole(server), RECOVERY_S)
        server.wait_until(lambda: holds_nothing(server), RECOVERY_S)
        for body, text in zip(BODIES, truth, strict=True):
            answer = server.client.post("/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
            assert answer.json()["choices"][0]["text"] == text
        after = measure_usage(server.process.pid)
        print(f"before {before}\nafter  {after}")
        assert after.num_processes == before.num_processes
        # Connections of the clients that have left may still be closing.
        assert after.num_descriptors <= before.num_descriptors + 2 * NUM_CLIENTS + 8
        assert after.num_segments <= before.num_segments + 4


def list_shared_memory(pids):
    """Files that carry the id of one of these processes; other servers may run meanwhile."""
    paths = [str(path) for path in Path("/dev/shm").rglob("*") if path.is_file()]
    return [path for path in paths if any(str(pid) in path for pid in pids)]


@pytest.mark.slow
def test_a_killed_server_leaves_no_process_and_no_memory(serve_demo):
    """Children end when their standard input does; what has no name goes with them."""
    with serve_demo("--prefill", "1", "--decode", "1", "--store.memory", "64MiB") as server:
        body = {**BODIES[3], "max_tokens": 400}
        client = threading.Thread(target=ask_and_ignore, args=(server.url, body))
        client.start()
        server.wait_until(lambda: server.stats()["num_running"] > 0, RECOVERY_S)
        children = [pid for pid, _ in list_children(server)]
        assert len(children) == 3
        assert list_shared_memory([server.process.pid, *children]), "the store's segment"
        os.kill(server.process.pid, signal.SIGKILL)
        client.join(REQUEST_TIMEOUT_S)
        end_s = time.monotonic() + RECOVERY_S
        while any(is_running(pid) for pid in children):
            assert time.monotonic() < end_s, "a child outlives its server"
            time.sleep(0.1)
    assert list_shared_memory([server.process.pid, *children]) == []


def ask_and_ignore(url, body):
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
