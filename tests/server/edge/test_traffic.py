"""Goal: an admin records which prefixes clients share, and no word of theirs.

Method: a real server over the fake engine, whose clock the test's own times are not compared with.
"""

import re
from itertools import pairwise

import msgspec

from tandem.cli.simulating.record import write_rows
from tandem.core.loads.traces import TraceRow, read_rows
from tandem.server.telemetry.traffic import (
    IDLE_S,
    MAX_RECORDINGS,
    MAX_WAITING_TOKENS,
    EndedRequest,
    TrafficLog,
)

PROMPT = list(range(100, 140))


def ask(live, action, recording="", **fields):
    body = {"action": action, "recording": recording, "block_tokens": 16, **fields}
    reply = live.post("/traffic", body)
    assert reply.status_code == 200, reply.text
    return reply


def complete(live, prompt, max_tokens, **fields):
    body = {"prompt": prompt, "max_tokens": max_tokens, **fields}
    reply = live.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text


def test_a_recording_has_lengths_and_shared_prefixes_of_requests_since_its_start(
    serve_text, tmp_path
):
    live = serve_text()
    complete(live, [7, 7], 1)
    name = ask(live, "start").json()["recording"]
    complete(live, PROMPT, 3)
    complete(live, [*PROMPT[:33], 9], 2)
    complete(live, PROMPT, 1, cache_salt="mine")
    reply = ask(live, "read", name)
    # A token of its own, not digits of a time.
    assert not re.search(rf"(?<![\d.]){PROMPT[5]}(?!\d)", reply.text)
    complete(live, PROMPT, 4, n=2)
    rows = reply.json()["rows"] + ask(live, "stop", name).json()["rows"]
    assert [(row["input_length"], row["output_length"], row["hash_ids"]) for row in rows] == [
        (40, 3, [0, 1, 2]),
        (34, 2, [0, 1, 3]),
        (40, 1, [4, 5, 6]),
        (40, 4, [0, 1, 2]),
        (40, 4, [0, 1, 2]),
    ]
    assert live.post("/traffic", {"action": "read", "recording": name}).status_code == 404
    path = tmp_path / "trace.jsonl"
    write_rows(path, msgspec.convert(rows[::-1], list[TraceRow]))
    written = list(read_rows(path, 16))
    assert [row.output_length for row in written][:3] == [3, 2, 1]
    assert written[0].timestamp == 0.0
    assert all(a.timestamp <= b.timestamp for a, b in pairwise(written))


def test_only_an_admin_records(serve_text):
    live = serve_text(api_key=("one", "two"))
    reply = live.post("/traffic", {"action": "start"}, headers={"Authorization": "Bearer one"})
    assert reply.status_code == 403


def test_what_nobody_asks_for_is_bounded_and_forgotten():
    log = TrafficLog()
    names = [log.start(0.0, 16) for _ in range(MAX_RECORDINGS)]
    kept = log.find(names[0], 1.0)
    large = EndedRequest(0.5, range(MAX_WAITING_TOKENS), 1, "")
    log.note_end(large, 1.0)
    log.note_end(large._replace(prompt_ids=[1]), 1.0)
    assert (len(kept.take()), kept.num_lost) == (1, 1)
    log.note_end(large._replace(arrived_s=-1.0), 1.0)
    assert kept.take() == []
    log.note_end(large, 1.0 + IDLE_S)
    assert len(kept.take()) == 1
    assert log.is_recorded
    log.note_end(large, 1.1 + IDLE_S)
    assert not log.is_recorded
