"""``tandem explain``: the text says what the record says, and errors are one line."""

import msgspec
import pytest
from typer.testing import CliRunner

from tandem.cli.commands.explain import render_timeline
from tandem.cli.main import app
from tandem.core.errors import TandemError
from tandem.core.timeline import (
    ChoiceTimeline,
    InstanceTimeline,
    KvLoadRecord,
    MissReason,
    PrefixMiss,
    RequestTimeline,
    StoreLookup,
)


def make_instance(**fields):
    values = {
        "request_id": "e1",
        "instance": "instance-0",
        "state": "finished",
        "age_s": 1.9,
        "prompt_tokens": 100,
        "output_tokens": 8,
        "lookup": StoreLookup(asked_blocks=6, found_blocks=4, seconds=0.01, is_answered=True),
        "admitted_s": 0.4,
        "loads": [
            KvLoadRecord(
                source="store", begin_s=0.1, end_s=0.3, asked_blocks=4, loaded_blocks=3,
                loaded_bytes=3 * 2**20, failures={"corruption": 1},
            )
        ],
        "device_tokens": 16,
        "loaded_tokens": 48,
        "computed_tokens": 36,
        "miss": PrefixMiss(reason=MissReason.LOAD_FAILED, position=64, detail="corruption"),
        "num_preemptions": 1,
        "preempted_s": [1.2],
        "num_prefill_steps": 2,
        "prefill_s": 0.6,
        "num_decode_steps": 7,
        "decode_s": 0.7,
        "first_token_s": 1.0,
        "end_s": 1.9,
        "finish_reason": "stop",
    }  # fmt: skip
    return InstanceTimeline(**(values | fields))


def make_timeline(*instances, is_ended=True, **fields):
    choice = {
        "index": 0,
        "submitted_s": 0.1,
        "first_token_s": 1.11,
        "end_s": 2.0,
        "finish_reason": "stop",
        "prompt_tokens": 100,
        "output_tokens": 8,
        "instances": list(instances),
    }
    return RequestTimeline(
        id="cmpl-1", request_id="1", path="/v1/completions", arrived_at=0.0, age_s=2.0,
        tokenized_s=0.1, is_ended=is_ended, choices=[ChoiceTimeline(**(choice | fields))],
    )  # fmt: skip


def test_the_text_tells_each_phase_and_the_reason():
    text = render_timeline(make_timeline(make_instance()))
    assert text.startswith("cmpl-1  /v1/completions  ended after 2.00 s\n")
    rows = {line[:18].strip(): line for line in text.splitlines() if "|" in line}
    assert list(rows) == ["read, tokenized", "lookup", "queue", "load", "prefill", "decode"]
    assert "500.0 ms  600.0 ms" in rows["prefill"]
    assert rows["load"].endswith("3 of 4 blocks from store, 3.0 MiB, 1 corruption")
    assert "16 prompt tokens from the device, 48 loaded, 36 computed" in text
    assert "why computed: loading from token 64 on failed: corruption" in text
    assert "preempted 1 times, at 1.20 s" in text
    assert "100 tokens of prompt, 8 generated; ended: stop" in text


def test_bars_never_leave_their_frame():
    late = make_instance(age_s=50.0, first_token_s=40.0, admitted_s=30.0)
    for timeline in (make_timeline(late), make_timeline(make_instance(admitted_s=0.0))):
        bars = [
            line.split("|")[1] for line in render_timeline(timeline).splitlines() if "|" in line
        ]
        assert {len(bar) for bar in bars} == {24}


def test_a_request_in_the_queue_and_one_that_is_forgotten():
    queued = make_instance(
        state="waiting", admitted_s=None, first_token_s=None, end_s=None, miss=None, loads=[]
    )
    text = render_timeline(make_timeline(queued, is_ended=False, end_s=None))
    assert "in flight" in text
    assert "waiting, not admitted yet" in text
    assert "prefill" not in text.split("instance-0")[0]
    assert "remembers nothing of it" in render_timeline(make_timeline())


def test_json_is_the_record(monkeypatch):
    timeline = make_timeline(make_instance())
    monkeypatch.setattr("tandem.cli.commands.explain._fetch", lambda *_: timeline)
    result = CliRunner().invoke(app, ["explain", "cmpl-1", "--json"])
    assert result.exit_code == 0
    assert msgspec.json.decode(result.stdout, type=RequestTimeline) == timeline


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://[::"])
def test_an_unreachable_server_is_one_error(url):
    result = CliRunner().invoke(app, ["explain", "x", "--url", url])
    assert isinstance(result.exception, TandemError)
    assert url in str(result.exception)


def test_prefill_and_decode_of_a_request_are_shown_apart():
    """Each leg under the name of its instance, prefill first, at the times of the server."""
    decode = make_instance(
        instance="decode-0", role="decode", lookup=None, num_prefill_steps=0, num_preemptions=0,
        miss=None, admitted_s=0.6, first_token_s=0.7,
    )  # fmt: skip
    prefill = make_instance(
        instance="prefill-0", role="prefill", lookup=None, loads=[], num_decode_steps=0,
        admitted_s=0.2, first_token_s=0.5, age_s=0.5, sent_s=0.1,
    )  # fmt: skip
    text = render_timeline(make_timeline(decode, prefill))
    assert text.index("prefill-0 (prefill)") < text.index("decode-0 (decode)")
    assert text.count("  prefill ") == 1, "the decode instance computed nothing of the prompt"
    row = next(line for line in text.splitlines() if line.startswith("  prefill "))
    assert row.split()[1:3] == ["400.0", "ms"], "0.1 to submit, 0.1 to send, 0.2 in the queue"
