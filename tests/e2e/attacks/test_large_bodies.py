"""Goal: requests of any size leave the server's event loop free, and other clients their turn.

Method: clients send the largest bodies there may be, one kind after the other; meanwhile another
client probes ``/health`` and asks for small chats. Answers are checked; the longest waits are
printed, since they depend on the machine.
"""

import contextlib
import http.client
import json
import threading
import time
from urllib.parse import urlsplit

import pytest

TIMEOUT_S = 300.0
NUM_CLIENTS = 6
QUIET_S = 3.0
MESSAGES = [{"role": ("user", "assistant")[i % 2], "content": "hi"} for i in range(59_999)]
SMALL = {"messages": MESSAGES[:1], "max_tokens": 1}
LONG_IDS = [i % 900 + 5 for i in range(480)]
KINDS = {
    "100,000 short prompts": ("/tokenize", {"prompt": ["def f(x):"] * 100_000}, 200),
    "chat of 60,000 messages": ("/v1/chat/completions", {"messages": MESSAGES}, 400),
    "tokenized chat of 60,000": ("/tokenize", {"messages": MESSAGES}, 200),
    "3,900,000 ids": ("/v1/completions", {"prompt": [7] * 3_900_000}, 400),
    "3,900,000 ids and a float": ("/v1/completions", {"prompt": [*[7] * 3_900_000, 7.0]}, 400),
    "2,000,000 empty lists": ("/v1/completions", {"prompt": [[]] * 2_000_000}, 400),
    "8 MB of text": ("/tokenize", {"prompt": "def f(x): return x\n" * 400_000}, 200),
    "3,900,000 ids to text": ("/detokenize", {"tokens": [7] * 3_900_000}, 200),
    "64 choices of 480 ids": (
        "/v1/completions",
        {"prompt": LONG_IDS, "n": 64, "max_tokens": 8, "logprobs": 20, "echo": True},
        200,
    ),
    "64 chats with likeliest tokens": (
        "/v1/chat/completions",
        {"messages": MESSAGES[:1], "n": 64, "max_tokens": 24, "logprobs": True,
         "top_logprobs": 20},
        200,
    ),
}  # fmt: skip

QUICK = ("100,000 short prompts", "chat of 60,000 messages", "2,000,000 empty lists")


class Client:
    """A connection that is kept; reads answers without looking into them."""

    def __init__(self, url, key):
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)

    def ask(self, path, body=None):
        """Return (status, body, seconds)."""
        begin_s = time.monotonic()
        self._connection.request("POST" if body else "GET", path, body, self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        return answer.status, content, time.monotonic() - begin_s

    def close(self):
        self._connection.close()


def attack(url, key, path, body, found):
    with contextlib.closing(Client(url, key)) as client:
        found.append(client.ask(path, body))


def observe(client, until, path, body=None):
    """Ask again and again; return how long each answer took."""
    waits = []
    while not until.is_set():
        status, content, wait_s = client.ask(path, body)
        assert status == 200, content
        waits.append(wait_s)
        until.wait(0.002)
    return sorted(waits)


class Watch:
    """Clients that ask for little, each on a thread of its own, until ``end``."""

    def __init__(self, url):
        self._until, self.waits, self._threads = threading.Event(), {}, []
        chat = json.dumps({"model": "demo", **SMALL}).encode()
        for name, path, body in (("health", "/health", None),
                                 ("chat", "/v1/chat/completions", chat)):  # fmt: skip
            thread = threading.Thread(target=self._run, args=(url, name, path, body), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, url, name, path, body):
        with contextlib.closing(Client(url, "good")) as client:
            self.waits[name] = observe(client, self._until, path, body)

    def end(self):
        self._until.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        assert self.waits.keys() == {"health", "chat"}
        return ", ".join(
            f"{name} n={len(waits)} median_ms={waits[len(waits) // 2] * 1e3:.1f} "
            f"longest_ms={waits[-1] * 1e3:.0f}"
            for name, waits in self.waits.items()
        )


@pytest.fixture(scope="module")
def guarded(serve_demo_module):
    """A server of several keys, so that clients on one address are told apart."""
    keys = [f"attacker-{i}" for i in range(NUM_CLIENTS)]
    flags = [f"--api-key={key}" for key in ("good", *keys)]
    with serve_demo_module(*flags, "--engine.max-model-len", "512") as server:
        watch = Watch(server.url)
        time.sleep(QUIET_S)
        print(f"\nquiet: {watch.end()}", flush=True)
        yield server, keys


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in QUICK else pytest.mark.long)
        for kind in KINDS
    ],
)
def test_large_bodies_leave_others_their_turn(guarded, kind):
    server, keys = guarded
    server.client.headers["Authorization"] = "Bearer good"
    pid = server.instance_pid()
    path, body, wanted = KINDS[kind]
    # Made before anybody watches, as that keeps this process busy.
    content = json.dumps({"model": "demo", **body}, separators=(",", ":")).encode()
    watch, found = Watch(server.url), []
    threads = [
        threading.Thread(target=attack, args=(server.url, key, path, content, found), daemon=True)
        for key in keys
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    told = watch.end()
    slowest_s = max((wait_s for _, _, wait_s in found), default=0.0)
    statuses = [status for status, _, _ in found]
    print(f"\n{kind}: {told}; they took up to {slowest_s:.1f} s: {statuses}", flush=True)
    assert len(found) == NUM_CLIENTS
    for status, answer, _ in found:
        assert status in (wanted, 503, 504), answer[:500]
    assert wanted in statuses
    server.wait_until(server.is_idle, 60)
    assert server.instance_pid() == pid, "the instance kept its lease"
