"""Goal: roles change, instances are renewed, come and go under load, and no request fails.

Method: real processes of the demo model; every answer is, bit by bit, that of before the changes.
"""

import threading

import pytest

BODY = {"model": "demo", "max_tokens": 24, "ignore_eos": True, "logprobs": 2, "temperature": 1.0}
PROMPTS = [f"def merge_{n}(left, right):\n    # Merge two sorted lists into one.\n" * 4
           for n in range(4)]  # fmt: skip
ADMIN = {"Authorization": "Bearer chief"}
WAIT_S = 240.0


@pytest.fixture(scope="module")
def pair(serve_demo_module):
    flags = ["--server.admin-api-key", "chief", "--engine.block-size", "16"]
    with serve_demo_module("--prefill", "1", "--decode", "1", *flags) as live:
        yield live


def ask(server, number):
    body = {**BODY, "prompt": PROMPTS[number % len(PROMPTS)], "seed": number}
    response = server.client.post("/v1/completions", json=body, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def change(server, **body):
    reply = server.client.post("/instances", json=body, headers=ADMIN, timeout=WAIT_S)
    assert reply.status_code == 200, reply.text
    return {each["name"]: each["role"] for each in reply.json()["instances"]}


class Load:
    """Asks on two threads until told to stop; the answers that differ are in ``wrong``."""

    def __init__(self, server, truth):
        self._server, self._truth = server, truth
        self.wrong, self.num_asked = [], 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(2)]

    def _run(self, number):
        while not self._stop.is_set():
            try:
                if ask(self._server, number) != self._truth[number]:
                    self.wrong.append(f"request {number} differs")
            except Exception as error:
                self.wrong.append(repr(error))
            self.num_asked += 1
            number = (number + 2) % len(self._truth)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)


@pytest.mark.slow
def test_ten_switches_a_rolling_restart_and_instances_that_come_and_go(pair):
    truth = [ask(pair, number) for number in range(8)]
    with Load(pair, truth) as load:
        for turn in range(5):
            first, second = ("decode", "prefill") if turn % 2 == 0 else ("prefill", "decode")
            change(pair, action="role", instance="prefill-0", role=first)
            roles = change(pair, action="role", instance="decode-0", role=second)
            assert roles == {"prefill-0": first, "decode-0": second}
            asked = load.num_asked
            pair.wait_until(lambda asked=asked: load.num_asked >= asked + 3, WAIT_S)
        change(pair, action="restart", patience_s=60)
        assert "decode-x1" in change(pair, action="add", role="decode")
        change(pair, action="drain", instance="prefill-0")
        asked = load.num_asked
        pair.wait_until(lambda: load.num_asked >= asked + 3, WAIT_S)
        change(pair, action="undrain", instance="prefill-0")
        roles = change(pair, action="remove", instance="decode-0", patience_s=60)
        assert set(roles) == {"prefill-0", "decode-x1"}
        asked = load.num_asked
        pair.wait_until(lambda: load.num_asked >= asked + 3, WAIT_S)
    assert load.wrong == []
    assert load.num_asked > 20
