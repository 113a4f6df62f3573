"""Goal: choices are counted as they were made, and a trace gives them back, damaged or not."""

import logging

import numpy as np
import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import ConfigError, CorruptionError, NotFoundError
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.stepping.expert_log import ExpertLog
from tandem.engine.stepping.expert_trace import (
    TraceHeader,
    TraceWriter,
    open_trace,
    read_decodes,
)
from tandem.models.config import ModelConfig

HEADER = TraceHeader(model="tiny", layers=[1, 3], num_experts=300, top_k=2)


def draw_steps(sizes=(1, 40, 3)):
    generator = np.random.default_rng(0)
    return [
        (generator.integers(0, 300, (2, size, 2)), generator.random(size) < 0.5) for size in sizes
    ]


def test_counts_are_of_all_choices():
    log, steps = ExpertLog(HEADER.layers, HEADER.num_experts), draw_steps((1, 400, 3))
    for choices, _ in steps:
        log.note(choices)
    counts = log.read()
    assert counts.layers == [1, 3]
    assert counts.num_tokens == 404
    for layer, told in enumerate(counts.counts):
        want = [sum(int((c[layer] == e).sum()) for c, _ in steps) for e in range(300)]
        assert told == want


def test_a_trace_gives_back_what_was_written(tmp_path):
    path, steps = tmp_path / "trace", draw_steps()
    log = ExpertLog(HEADER.layers, HEADER.num_experts, TraceWriter(path, HEADER))
    for step in steps:
        log.note(*step)
    log.close()
    assert path.stat().st_mode & 0o077 == 0
    header, records = open_trace(path)
    assert header == HEADER
    read = list(records)
    for (choices, is_output), record in zip(steps, read, strict=True):
        assert np.array_equal(record.choices, choices)
        assert np.array_equal(record.is_output, is_output)
    layers = read_decodes(read, 2)
    output = [step for step in steps if step[1].any()]
    assert layers[1] == [sorted(set(c[1][o].ravel().tolist())) for c, o in output]


def test_a_cut_trace_ends_and_a_damaged_one_is_refused(tmp_path):
    path = tmp_path / "trace"
    writer = TraceWriter(path, HEADER)
    for step in draw_steps():
        writer.write(*step)
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert len(list(open_trace(path)[1])) == 2
    begin = whole.index(b"\n") + 1
    for place, value in ((begin + 3, 0xFF), (begin + 4, 7), (begin + 6, 0xFF)):
        path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
        with pytest.raises(CorruptionError):
            list(open_trace(path)[1])
    path.write_bytes(b"x" * 100)
    with pytest.raises(CorruptionError, match="does not begin"):
        open_trace(path)
    with pytest.raises(NotFoundError):
        open_trace(tmp_path / "none")


def test_traces_are_bounded_and_overwrite_nothing(tmp_path, caplog):
    path, step = tmp_path / "trace", draw_steps()[1]
    path.write_text("mine")
    writer = TraceWriter(path, HEADER, max_bytes=1000)
    assert writer.path == tmp_path / "trace.1"
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            writer.write(*step)
    assert "event=expert_trace_full" in caplog.text
    assert path.read_text() == "mine"
    assert len(list(open_trace(writer.path)[1])) == 2
    with pytest.raises(ConfigError, match="can be written"):
        TraceWriter(tmp_path / "no" / "trace", HEADER)


def test_an_engine_counts_prompts_and_answers(tmp_path):
    path = tmp_path / "trace"
    built = build_engine(
        ModelConfig(path="demo", dtype="float32"),
        EngineConfig(num_kv_blocks=8, max_model_len=128, threads=1, expert_trace=str(path)),
        ManualClock(),
    )
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompt = [5 + i for i in range(20)]
    built.engine.add(AddRequest(request_id="a", prompt_ids=prompt, sampling=params))
    for _ in range(20):
        if built.engine.has_requests:
            built.engine.step()
    assert built.experts is not None
    counts = built.experts.read()
    assert counts.num_tokens == 25, "the last token is never computed"
    assert [sum(layer) for layer in counts.counts] == [25 * 2] * len(counts.layers)
    built.experts.close()
    records = list(open_trace(path)[1])
    assert "".join(str(int(b)) for r in records for b in r.is_output) == "0" * 20 + "1" * 5
    summed = np.zeros_like(counts.counts)
    for record in records:
        for layer, ids in enumerate(record.choices):
            np.add.at(summed[layer], ids.ravel(), 1)
    assert summed.tolist() == counts.counts
