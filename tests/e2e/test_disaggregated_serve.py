"""Goal: prefill and decode apart give what one instance gives, whichever of them dies or hangs.

Method: real processes of the demo model, ``--prefill 1 --decode 1`` beside one unified instance,
whose answers are the truth, bit by bit. Each failure is made to happen in the state that it is
about; afterwards the pair must be whole again and hold nothing.
"""

import contextlib
import json
import os
import signal
import threading

import httpx
import pytest

from tandem.conductor.journal import replay_journal

PROMPT = "def merge(left, right):\n    # Merge two sorted lists of numbers into a third one.\n" * 6
BODY = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}
GREEDY = {**BODY, "temperature": 0.0, "logprobs": 3}
SEEDED = {**BODY, "temperature": 1.0, "seed": 11, "logprobs": 3}
LONG = {**BODY, "max_tokens": 200, "temperature": 1.0, "seed": 5}
RECOVERY_S = 90.0


@pytest.fixture(scope="module")
def pair(serve_demo_module, tmp_path_factory):
    """The pair; of all that becomes of it, its conductor's journal tells every decision again."""
    journal = tmp_path_factory.mktemp("pair") / "journal"
    # A short lease, so that a stopped process is found soon.
    flags = ["--rpc.lease-ms", "4000", "--rpc.heartbeat-interval-ms", "500"]
    flags += ["--cluster.journal", str(journal)]
    with serve_demo_module(
        "--prefill", "1", "--decode", "1", "--engine.block-size", "16", *flags
    ) as live:
        yield live
    replayed = list(replay_journal(journal.read_bytes().splitlines(keepends=True)))
    assert replayed
    assert [each.now for each in replayed] == [each.then for each in replayed]


@pytest.fixture
def whole(pair):
    """The pair; before and afterwards it is whole and holds nothing."""
    wait_until_whole(pair)
    yield pair
    wait_until_whole(pair)


def wait_until_whole(server):
    server.wait_until(lambda: is_whole(server), RECOVERY_S)
    server.wait_until(lambda: server.is_idle() and not server.stats()["num_held"], RECOVERY_S)


def find(server, name):
    return next(each for each in list_instances(server) if each["name"] == name)


def list_instances(server):
    return server.client.get("/server_info").json()["instances"]


def is_whole(server):
    stages = [each["stage"]["stage"] for each in list_instances(server)]
    return stages == ["ready", "ready"] and find(server, "decode-0")["sources"] == ["prefill-0"]


def ask(server, body, path="/v1/completions"):
    response = server.client.post(path, json=body, timeout=RECOVERY_S)
    assert response.status_code == 200, response.text
    return response.json()


def fallbacks(server):
    """Fallbacks by reason."""
    found = {}
    for line in server.client.get("/metrics").text.splitlines():
        if line.startswith("tandem:request_fallbacks_total{"):
            reason = line.split('reason="')[1].split('"')[0]
            found[reason] = float(line.rsplit(" ", 1)[1])
    return found


class Streamed:
    """A streaming request on a thread of its own."""

    def __init__(self, server, body):
        self.id, self.text, self.finish_reason, self.error = "", "", None, None
        self._seen = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(server.url, body))
        self._thread.start()

    def _run(self, url, body):
        with (
            httpx.Client(base_url=url, timeout=RECOVERY_S, trust_env=False) as client,
            client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
        ):
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.error = event["error"]
                    break
                choice, self.id = event["choices"][0], event["id"]
                self.text += choice["text"]
                self.finish_reason = choice["finish_reason"] or self.finish_reason
                self._seen.release()

    def wait_for(self, num_events):
        for _ in range(num_events):
            assert self._seen.acquire(timeout=RECOVERY_S), self.error

    def join(self):
        self._thread.join(2 * RECOVERY_S)
        assert not self._thread.is_alive()
        assert self.error is None
        return self.text


@contextlib.contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("body", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_and_logprobs_are_those_of_one_instance(server, whole, body):
    """The first token, its logprobs and the sampler's state come from the prefill instance."""
    ask(whole, {}, "/flush_cache")
    before, fallen = whole.stats(), fallbacks(whole)
    ours = [ask(whole, body), ask(whole, body)]
    truth = ask(server, body)
    assert [answer["choices"] for answer in ours] == 2 * [truth["choices"]]
    assert ours[0]["usage"]["completion_tokens"] == 24
    after = whole.stats()
    assert after["peer_read_blocks"] > before["peer_read_blocks"]
    assert after["prompt_tokens"] - before["prompt_tokens"] == 2 * truth["usage"]["prompt_tokens"]
    # A rail is counted by the bytes that crossed it, announcements and tags included.
    assert sum(after["rail_bytes"].values()) >= after["peer_read_bytes"] > 0
    filled = [each["num_cached_blocks"] for each in list_instances(whole)]
    assert sum(filled) == after["num_cached_blocks"] > 0
    assert fallbacks(whole) == fallen


def test_all_kinds_of_requests_and_ends_are_those_of_one_instance(server, whole):
    """Requests that need no decode instance, that score the prompt, that end by a stop."""
    fallen = fallbacks(whole)
    first = ask(server, GREEDY)["choices"][0]["text"]
    bodies = [
        {**GREEDY, "max_tokens": 1},
        {**GREEDY, "max_tokens": 2},
        {**SEEDED, "echo": True},
        {**GREEDY, "stop": [first[8:12]]},
        {**SEEDED, "n": 3},
        {**SEEDED, "repetition_penalty": 1.3, "min_tokens": 5, "ignore_eos": False},
    ]
    for body in bodies:
        assert ask(whole, body)["choices"] == ask(server, body)["choices"], body
    assert fallbacks(whole) == fallen


def test_flush_reaches_every_instance_and_a_client_that_leaves_frees_both(whole):
    ask(whole, GREEDY)
    assert whole.stats()["num_cached_blocks"]
    assert ask(whole, {}, "/flush_cache")["success"]
    assert whole.stats()["num_cached_blocks"] == 0
    with whole.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        next(response.iter_lines())
    whole.wait_until(whole.is_idle, RECOVERY_S)


def test_a_timeline_has_both_legs(whole):
    """Prefill and decode of one request, with the load between them."""
    ask(whole, {}, "/flush_cache")
    answer = ask(whole, GREEDY)
    timeline = whole.client.get(f"/requests/{answer['id']}/timeline").json()
    legs = timeline["choices"][0]["instances"]
    assert {leg["instance"]: leg["role"] for leg in legs} == {
        "prefill-0": "prefill",
        "decode-0": "decode",
    }
    decode = next(leg for leg in legs if leg["role"] == "decode")
    assert [load["source"] for load in decode["loads"]] == ["prefill-0"]
    assert decode["loads"][0]["loaded_blocks"] > 0
    assert decode["computed_tokens"] == 0, "all of the prompt's KV was read"


@pytest.mark.slow
def test_a_prefill_killed_in_mid_request(server, whole):
    """It is stopped before it gets the request, so it dies while decode waits for its blocks.

    `make test` kills the decode instance, below, and fails the prefill's in
    ``tests/engine/tiers/test_bitwise.py``.
    """
    truth = ask(server, GREEDY)["choices"][0]["text"]
    ask(whole, {}, "/flush_cache")
    pid = find(whole, "prefill-0")["pid"]
    with stopped(pid):
        stream = Streamed(whole, GREEDY)
        whole.wait_until(lambda: whole.stats()["num_loading"] == 1, RECOVERY_S)
        os.kill(pid, signal.SIGKILL)
        assert stream.join() == truth
    assert fallbacks(whole)["prefill_peer_lost"] >= 1


@pytest.mark.slow
def test_a_prefill_stopped_in_mid_request(server, whole):
    """Found by the lease of the control channel; the request goes on elsewhere."""
    truth = ask(server, SEEDED)["choices"][0]["text"]
    with stopped(find(whole, "prefill-0")["pid"]):
        assert Streamed(whole, SEEDED).join() == truth


@pytest.mark.slow
def test_a_decode_stopped_in_mid_decode(server, whole):
    truth = ask(server, LONG)["choices"][0]["text"]
    stream = Streamed(whole, LONG)
    stream.wait_for(20)
    with stopped(find(whole, "decode-0")["pid"]):
        assert stream.join() == truth


def test_a_decode_killed_in_mid_decode(server, pair):
    """The prefill instance goes on alone. The next test waits for the other."""
    wait_until_whole(pair)
    truth = ask(server, LONG)["choices"][0]["text"]
    before = fallbacks(pair).get("decode_peer_lost", 0)
    stream = Streamed(pair, LONG)
    stream.wait_for(20)
    os.kill(find(pair, "decode-0")["pid"], signal.SIGKILL)
    assert stream.join() == truth
    assert fallbacks(pair)["decode_peer_lost"] > before
