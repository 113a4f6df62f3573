"""Goal: a model whose experts lie on disk gives bitwise the tokens that it gives in memory.

Method: the demo model with slots for two of eight experts a layer, through the whole engine, beside
the same model in memory; then with a disk that fails, and with files that are cut or written to.
"""

import msgspec
import pytest

pytest.importorskip("transformers", reason="models need the `serve` extra")

from quick import rest_slow
from tandem._native import DirectReader
from tandem.core.clock import MonotonicClock
from tandem.core.errors import ConfigError, InternalError
from tandem.core.wire import AddRequest, FinishReason, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.planning import plan_engine
from tandem.kernels.cpu.expert_slots import LayerSlots
from tandem.models.config import ModelConfig
from tandem.placement.experts.tier import GuessGate

PROMPTS = [[(7 * i * i + 3) % 4000 + 3 for i in range(n)] for n in (75, 40, 9)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Where packed experts are kept; written by the first build."""
    return tmp_path_factory.mktemp("packed")


def build(packed, *, slots=2, expert_format="int8", dtype="bfloat16", **settings):
    config = EngineConfig(kv_cache_gib=0.02, block_size=16, max_batch_tokens=64, **settings)
    model = ModelConfig(
        path="demo",
        dtype=dtype,
        expert_format=expert_format,
        packed_cache=str(packed) if slots else "off",
        expert_slots=slots,
    )
    return build_engine(model, config, MonotonicClock())


def generate(engine, prompts, max_tokens=20):
    """The outputs of each prompt, all at once: (tokens, log-probabilities), and its last one."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
    for i, prompt in enumerate(prompts):
        engine.add(AddRequest(request_id=str(i), prompt_ids=prompt, sampling=sampling))
    found = [([], []) for _ in prompts]
    last = {}
    for _ in range(2000):
        if not engine.has_requests:
            break
        for output in engine.step():
            tokens, scores = found[int(output.request_id)]
            tokens += output.token_ids
            scores += [msgspec.to_builtins(x) for x in output.logprobs or []]
            last[int(output.request_id)] = output
    assert not engine.has_requests
    return found, [last[i] for i in range(len(prompts))]


@pytest.mark.parametrize("expert_format", rest_slow(["int8"], ["int8", "bf16"]))
def test_tokens_are_those_of_experts_in_memory(packed, expert_format):
    expected, _ = generate(build(None, slots=0, expert_format=expert_format).engine, PROMPTS)
    for _ in range(2):  # Packed and written first, then found.
        built = build(packed, expert_format=expert_format)
        assert generate(built.engine, PROMPTS)[0] == expected
        tier = built.model.plan.tier
        assert (tier.num_slots, tier.num_layers) == (2, 6)
        assert built.model.weight_bytes < built.model.plan.weight_bytes


def test_guessed_experts_change_no_token_and_are_often_right(packed, monkeypatch):
    """Read whenever there is a guess, right or not."""
    expected, _ = generate(build(None, slots=0).engine, PROMPTS)
    monkeypatch.setattr("tandem.placement.experts.tier.MIN_GUESSES", 0)
    monkeypatch.setattr("tandem.placement.experts.tier.MIN_RIGHT", 0.0)
    seen = []
    insert = LayerSlots.guess

    def note(self, expert_ids):
        seen.extend(expert_ids)
        insert(self, expert_ids)

    monkeypatch.setattr(LayerSlots, "guess", note)
    assert generate(build(packed, slots=3).engine, PROMPTS)[0] == expected
    assert len(seen) > 50


def test_a_gate_opens_by_what_was_right():
    gate = GuessGate()
    assert not gate.is_open
    for _ in range(40):
        gate.note([1, 2], [1, 5])
    assert not gate.is_open
    for _ in range(60):
        gate.note([1, 2], [2, 1])
    assert gate.is_open
    for _ in range(60):
        gate.note([1, 2], [7])
    assert not gate.is_open


def test_a_failed_read_is_the_error_of_requests_that_need_it(packed, monkeypatch):
    """An expert of layer 3 fails; nobody gets a token of it, others go on, and later all do."""
    expected, _ = generate(build(packed).engine, PROMPTS)
    begin, finish = DirectReader.begin, DirectReader.finish
    broken, bad = set(), set()

    def note(self, file, offset, length, at):
        read = begin(self, file, offset, length, at)
        if (file, offset // length) in broken:
            bad.add(read)
        return read

    def fail(self, read, timeout_ms):
        finish(self, read, timeout_ms)
        if read in bad:
            raise InternalError("transfer.read_direct", "read failed: Input/output error")

    monkeypatch.setattr(DirectReader, "begin", note)
    monkeypatch.setattr(DirectReader, "finish", fail)
    outcomes = []
    for expert_id in range(0, 8, 2):
        broken.add((3, expert_id))
        engine = build(packed).engine
        found, last = generate(engine, PROMPTS, max_tokens=3)
        failed = [output.finish_reason is FinishReason.ERROR for output in last]
        outcomes.append(tuple(failed))
        for (tokens, _), (right, _), is_failed, output in zip(
            found, expected, failed, last, strict=True
        ):
            assert tokens == right[: len(tokens)]
            if is_failed:
                assert "Input/output error" in output.error_text
            else:
                assert len(tokens) == 3
        broken.clear()
        bad.clear()
        assert generate(engine, PROMPTS)[0] == expected, "a failed read left something wrong"
    assert any(any(failed) for failed in outcomes)
    assert any(not all(failed) for failed in outcomes)


@pytest.mark.parametrize("damage", rest_slow(["cut"], ["cut", "written"]))
def test_a_file_that_changes_while_it_serves_gives_errors(tmp_path, damage):
    engine = build(tmp_path).engine
    before, _ = generate(engine, PROMPTS[2:], max_tokens=2)
    files = sorted(tmp_path.rglob("*.packed"))
    assert len(files) == 6
    with files[3].open("r+b") as opened:
        if damage == "cut":
            opened.truncate(8192)
        else:
            opened.seek(files[3].stat().st_size // 2)
            opened.write(b"x" * 4096)
    found, last = generate(engine, PROMPTS[:1])
    assert last[0].finish_reason is FinishReason.ERROR
    assert found[0][0] == []
    assert files[3].name in last[0].error_text
    # A new start refuses a cut file and packs it anew.
    if damage == "cut":
        assert generate(build(tmp_path).engine, PROMPTS[2:], max_tokens=2)[0] == before


def test_memory_decides_and_the_plan_says_so(packed):
    def plan(memory, **model):
        wish = ModelConfig(path="demo", dtype="bfloat16", packed_cache=str(packed), **model)
        return plan_engine(wish, EngineConfig(memory=memory, kv_cache_gib=0.004, block_size=16))

    whole = plan("4GiB")
    assert whole.model.tier is None
    dense = whole.model.weight_bytes - whole.model.expert_bytes
    half = (1 << 30) + dense + whole.model.expert_bytes // 2 + (4 << 20)
    small = plan(f"{half}B")
    tier = small.model.tier
    assert 1 <= tier.num_slots <= 4
    assert small.model.resident_bytes + small.kv.size_bytes <= half - (1 << 30)
    rows = {what: (value, why) for what, value, why in small.rows()}
    assert rows["experts on disk"][0].startswith(f"{tier.num_slots} of 8 in each of 6 layers")
    assert "tokens/s" in rows["disk"][1]
    assert tier.read_rate > 0
    with pytest.raises(ConfigError, match="raise --memory"):
        plan(f"{(1 << 30) + dense + (5 << 20)}B")
    with pytest.raises(ConfigError, match="only routed experts"):
        plan("", expert_slots=2, expert_format="none")
