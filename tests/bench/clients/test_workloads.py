"""Goal: loads are what they say, and the same for the same seed.

Method: lengths, shared prefixes and arrivals of small loads; a trace's equal hash ids must become
equal tokens, which is what a server's prefix cache is measured by.
"""

import json

import pytest

from tandem.bench.clients.workloads import (
    IdRange,
    draw_arrivals,
    make_multi_turn,
    make_random,
    make_shared_prefix,
    read_sharegpt,
    read_trace,
)
from tandem.core.errors import ConfigError, NotFoundError

IDS = IdRange(10, 99)


def test_random_lengths_and_ids():
    load = make_random(40, 100, 20, ratio=0.5, ids=IDS, seed=3)
    lengths = [len(c.turns[0].prompt) for c in load]
    assert 50 <= min(lengths) < max(lengths) <= 100
    assert all(10 <= c.turns[0].output_length <= 20 for c in load)
    assert {type(token) for token in load[0].turns[0].prompt} == {int}
    assert all(10 <= token <= 99 for c in load for token in c.turns[0].prompt)
    again = make_random(40, 100, 20, ratio=0.5, ids=IDS, seed=3)
    assert [c.turns for c in load] == [c.turns for c in again]
    other = make_random(40, 100, 20, ratio=0.5, ids=IDS, seed=4)
    assert load[0].turns != other[0].turns


def test_groups_share_their_prefix_alone():
    load = make_shared_prefix(
        3, 4, prefix_length=50, question_length=10, output_length=5, ids=IDS, seed=1
    )
    prompts = [c.turns[0].prompt for c in load]
    assert len({tuple(p[:50]) for p in prompts}) == 3
    assert len({tuple(p) for p in prompts}) == 12


def test_turns_of_a_chat_follow_each_other():
    (first, _) = make_multi_turn(2, 3, question_length=7, output_length=5, seed=1)
    assert [len(turn.prompt.split()) for turn in first.turns] == [7, 7, 7]


def test_a_trace_keeps_lengths_hits_and_times(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 40, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 9, "hash_ids": [0, 1, 5]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = read_trace(path, None, ids=IDS, slowdown=2.0, seed=1)
    a, b = first.turns[0].prompt, second.turns[0].prompt
    assert (len(a), len(b)) == (1100, 1500)
    assert a[:1024] == b[:1024]
    assert a[1024:1100] != b[1024:1100]
    assert (first.arrival_s, second.arrival_s) == (0.0, 6.0)
    small, _ = read_trace(path, 2, ids=IDS, length_divisor=16, seed=1)
    assert len(small.turns[0].prompt) == 1100 // 16
    assert small.turns[0].output_length == 2
    with pytest.raises(ConfigError, match="divisor of 512"):
        read_trace(path, 1, ids=IDS, length_divisor=3, seed=1)


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"timestamp": 0, "input_length": -1, "output_length": 1}']
)
def test_lines_that_are_no_trace_are_named(line, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match="line 1"):
        read_trace(path, None, ids=IDS, seed=1)


def test_questions_of_sharegpt(tmp_path):
    path = tmp_path / "share.json"
    talk = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
    path.write_text(json.dumps([{"conversations": talk}, {"conversations": []}, 7]))
    (only,) = read_sharegpt(path, 5, output_length=8, seed=1)
    assert only.turns[0].prompt == "Why?"
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no rows of ShareGPT"):
        read_sharegpt(path, 5, output_length=8, seed=1)
    with pytest.raises(NotFoundError):
        read_sharegpt(tmp_path / "none.json", 5, output_length=8, seed=1)


def test_arrivals_follow_the_rate():
    times = draw_arrivals(4000, 20.0, seed=2)
    assert times[0] == 0
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(20, rel=0.1)
    assert draw_arrivals(3, None, seed=2) == [0.0, 0.0, 0.0]
