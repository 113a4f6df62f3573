"""Goal: the client sends what a load says, and its records are what the server did.

Method: a server that follows a script (tokens an event, usage, errors, broken streams) and keeps
what it was asked. What the client says is compared with the script; no test judges a time.
"""

import asyncio
import cProfile
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scripted_server import START_S, Script

from tandem.bench.clients.client import LoadClient, Target
from tandem.bench.clients.workloads import Conversation, Turn, make_multi_turn
from tandem.core.errors import PeerLostError


def run(script, load, *, most=None, **target):
    async def send():
        client = LoadClient(Target(base_url=script.url, **target), max_concurrency=most)
        try:
            return await client.run(load, [0.0] * len(load))
        finally:
            await client.close()

    return asyncio.run(asyncio.wait_for(send(), 2 * START_S))


def plain(count):
    return [Conversation([Turn([1, 2, 3], 6)]) for _ in range(count)]


def test_records_are_what_the_server_sent():
    with Script() as script:
        records = run(script, plain(8), most=3, extra_body={"top_p": 0.5})
    assert script.most <= 3
    assert [record.index for record in records] == list(range(8))
    for record in records:
        assert record.error == ""
        assert (record.input_length, record.output_tokens, record.cached_tokens) == (33, 10, 7)
        assert len(record.event_times_s) == 5
        assert record.text == "t0 t1 t2 t3 t4 "
        times = [record.sent_s, *record.event_times_s, record.done_s]
        assert times == sorted(times)
    body = script.bodies[0]
    assert body["model"] == "scripted"
    assert (body["prompt"], body["max_tokens"], body["top_p"]) == ([1, 2, 3], 6, 0.5)
    assert (body["stream"], body["ignore_eos"], body["temperature"]) == (True, True, 0.0)


@pytest.mark.parametrize("most", [None, 3])
def test_connections_are_open_before_the_first_request(most):
    """Opening one would count as the server's time to the first token."""
    with Script(gap_s=0.01) as script:
        run(script, plain(8), most=most)
    assert len(script.listed) >= (most or 8)
    assert script.answered <= script.listed


def test_a_request_costs_the_same_beside_few_and_many_others():
    """The client shares its machine with the server that it measures."""

    def count_calls(num_requests):
        profile = cProfile.Profile()
        with Script() as script:
            profile.enable()
            run(script, plain(num_requests))
            profile.disable()
        return sum(entry.callcount for entry in profile.getstats()) / num_requests

    assert count_calls(160) < 1.5 * count_calls(20)


def test_a_connection_whose_opening_was_cancelled_is_not_used():
    """httpcore's pool counts one as in use for ever that was cancelled before its request."""

    async def send(url, num_turns):
        client = LoadClient(Target(base_url=url, model="scripted", timeout_s=5.0))
        opening = asyncio.ensure_future(client._open_connections(1))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        opening.cancel()  # As its time limit does.
        await asyncio.gather(opening, return_exceptions=True)
        try:
            return await client.run(plain(1), [0.0])
        finally:
            await client.close()

    with Script() as script:
        for num_turns in range(20):  # Of the event loop, which are all that an opening takes.
            (record,) = asyncio.run(send(script.url, num_turns))
            assert record.error == ""


def test_events_are_counted_where_there_is_no_usage():
    with Script() as script:
        script.has_usage = False
        (record,) = run(script, plain(1), ignores_eos=False)
    assert (record.input_length, record.output_tokens) == (3, 5)
    assert "ignore_eos" not in script.bodies[0]


def test_a_chat_carries_its_history():
    with Script() as script:
        load = make_multi_turn(2, 3, question_length=4, output_length=6, seed=1)
        records = run(script, load, endpoint="chat", model="named")
    assert [record.conversation for record in records] == [0, 0, 0, 1, 1, 1]
    lengths = sorted(len(body["messages"]) for body in script.bodies)
    assert lengths == [1, 1, 3, 3, 5, 5]
    last = max(script.bodies, key=lambda body: len(body["messages"]))["messages"]
    assert last[1] == {"role": "assistant", "content": "t0 t1 t2 t3 t4 "}
    assert script.bodies[0]["model"] == "named"


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Script(status=503), "503"),
        (Script(ending=""), "ended without"),
        (Script(ending="{"), "not JSON"),
        (Script(ending='{"error": {"message": "broke"}}'), "broke"),
    ],
)
def test_what_a_request_does_wrong_is_in_its_record(script, error):
    with script:
        load = make_multi_turn(1, 3, question_length=4, output_length=6, seed=1)
        records = run(script, load, endpoint="chat")
    # The turns after it are not sent.
    assert len(records) == 1
    assert error in records[0].error


def test_nobody_there_is_an_error():
    script = SimpleNamespace(url="http://127.0.0.1:9/v1")
    with pytest.raises(PeerLostError, match="nobody answers"):
        run(script, plain(1))


@pytest.mark.slow
def test_figures_beside_a_script_of_fixed_times():
    """Shown once on a quiet machine: TTFT and TPOT within 1 % of the script's."""
    from tandem.core.loads.figures import summarise

    with Script(tokens=40, first_s=0.5, gap_s=0.05) as script:
        records = run(script, plain(8))
    report = summarise(records, backend="openai-completions", dataset_name="random")
    tpot = 1000 * 0.05 * 39 / 79
    print(f"TTFT {report.ttft_ms.mean / 500:.4f}, TPOT {report.tpot_ms.mean / tpot:.4f}")
    print(f"ITL {report.itl_ms.mean / 50:.4f}, E2E {report.e2e_latency_ms.mean / 2450:.4f}")
    assert report.completed == 8
