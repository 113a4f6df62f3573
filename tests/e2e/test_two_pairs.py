"""Two prefill and two decode instances, whatever the number of cores; one of each pair dies.

Goal: a request goes on at the other pair, with the tokens that one instance gives. Method: the
demo model on one server of four instances beside one of a single instance.
"""

import os
import signal

import pytest
from test_disaggregated_serve import (
    GREEDY,
    LONG,
    RECOVERY_S,
    Streamed,
    ask,
    fallbacks,
    find,
    list_instances,
    stopped,
)

ROLES = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}


def is_whole(live):
    found = list_instances(live)
    can_read = [each["sources"] for each in found if each["role"] == "decode"]
    is_ready = all(each["stage"]["stage"] == "ready" for each in found)
    return is_ready and can_read == 2 * [["prefill-0", "prefill-1"]]


def list_legs(live, request_id):
    """Names of the instances that worked on a request and still know it."""
    timeline = live.client.get(f"/requests/{request_id}/timeline").json()
    return {leg["instance"] for leg in timeline["choices"][0]["instances"]}


@pytest.mark.slow
def test_another_pair_goes_on_when_a_peer_dies(server, serve_demo):
    """A decode instance dies in mid-decode, then a prefill instance in mid-prefill."""
    truths = [ask(server, body)["choices"][0]["text"] for body in (LONG, GREEDY)]
    flags = ["--prefill", "2", "--decode", "2", "--engine.block-size", "16"]
    with serve_demo(*flags) as live:
        assert {each["name"]: each["role"] for each in list_instances(live)} == ROLES
        live.wait_until(lambda: is_whole(live), RECOVERY_S)
        decode, prefill = sorted(list_legs(live, ask(live, LONG)["id"]))
        stream = Streamed(live, LONG)
        stream.wait_for(10)
        os.kill(find(live, decode)["pid"], signal.SIGKILL)
        assert stream.join() == truths[0]
        assert {"decode-0", "decode-1"} - {decode} <= list_legs(live, stream.id)
        assert fallbacks(live) == {"decode_peer_lost": 1}

        ask(live, {}, "/flush_cache")
        with stopped(find(live, prefill)["pid"]):
            stream = Streamed(live, GREEDY)
            live.wait_until(lambda: live.stats()["num_loading"] == 1, RECOVERY_S)
            os.kill(find(live, prefill)["pid"], signal.SIGKILL)
            assert stream.join() == truths[1]
        assert {"prefill-0", "prefill-1"} - {prefill} <= list_legs(live, stream.id)
        assert fallbacks(live) == {"decode_peer_lost": 1, "prefill_peer_lost": 1}
        live.wait_until(lambda: is_whole(live), RECOVERY_S)
        live.wait_until(lambda: live.is_idle() and not live.stats()["num_held"], RECOVERY_S)
