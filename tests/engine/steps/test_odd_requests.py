"""Goal: no values of a request, and no adapter, change or end another request.

Method: the demo model with adapters whose weights are near the largest float; each odd request runs
in one batch with good ones, whose tokens must be those that they get alone. Requests are decoded
from JSON, as a client sends them: every numeric field at, within and beyond each of its bounds, and
next to them.
"""

import json
import math

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from tandem.core.adapter import AdapterSource
from tandem.core.clock import MonotonicClock
from tandem.core.errors import ConfigError
from tandem.core.wire import AddRequest, FinishReason, SamplingParams
from tandem.engine.adapters import AdapterTable
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.models.config import ModelConfig
from tandem.server.api.sampling import make_sampling
from tandem.server.defaults import SamplingDefaults
from tandem.server.protocol.openai import CompletionRequest

PROMPTS = {"greedy": [(7 * i) % 300 + 5 for i in range(40)], "drawn": [9, 8, 7, 6]}
GOOD = {
    "greedy": SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=1),
    "drawn": SamplingParams(max_tokens=5, temperature=1.0, seed=3, ignore_eos=True, top_k=20),
}
HUGE = 3e38
SLOW_FLOAT32 = pytest.param("float32", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["bfloat16", SLOW_FLOAT32])
def served(request, tmp_path_factory):
    """(engine, digests of adapters that overflow)."""
    folder = tmp_path_factory.mktemp("adapters")
    config = EngineConfig(num_kv_blocks=256, block_size=16, max_model_len=128, threads=1)
    model = ModelConfig(path="demo", dtype=request.param, packed_cache="off")
    built = build_engine(model, config, MonotonicClock())
    adapters = built.model.enable_adapters(3)
    table = AdapterTable(adapters, built.engine, built.identity, None)
    digests = []
    for name, a, b in (("both", HUGE, HUGE), ("a", HUGE, 0.0), ("b", 1.0, -HUGE)):
        write_adapter(adapters.modules, folder / name, a, b)
        digests.append(table.load(AdapterSource(name=name, folder=str(folder / name))).digest)
    return built.engine, digests


def write_adapter(modules, folder, a, b):
    tensors = {}
    for name, part in modules.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.full((2, part.in_features), a)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.full((part.out_features, 2), b)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 1e6}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def list_bounds(annotation):
    """Bounds of a field's numbers, by msgspec's own account of its type."""
    found = set()
    info = msgspec.inspect.type_info(annotation)
    for each in getattr(info, "types", (info,)):
        if isinstance(each, msgspec.inspect.IntType | msgspec.inspect.FloatType):
            found |= {b for b in (each.ge, each.gt, each.le, each.lt) if b is not None}
            found.add(type(each))
    return found


def list_odd_values():
    """Pairs of a field and the JSON of a value that may be refused, or not."""
    tiny = [5e-324, 1e-46, 1e-45, 1.1754943e-38, 1e-7]
    pairs = []
    for field in msgspec.structs.fields(CompletionRequest):
        bounds = list_bounds(field.type)
        if not bounds:
            continue
        numbers = {b for b in bounds if not isinstance(b, type)} | {0, 1}
        if msgspec.inspect.FloatType in bounds:
            near = [math.nextafter(n, to) for n in numbers for to in (-math.inf, math.inf)]
            numbers |= {*near, *tiny, *(-t for t in tiny), -0.0, 1e39, HUGE, 1.7976931348623157e308}
        else:
            numbers |= {n + d for n in numbers for d in (-1, 1)} | {2**63, -(2**63) - 1}
        pairs += [(field.name, json.dumps(n)) for n in sorted(numbers)]
    for value in (100, -100, 1e-46, 5e-324, 101, 1e39):
        pairs.append(("logit_bias", json.dumps({"1": value, "5": value})))
    pairs += [("stop_token_ids", "[0, 1, 2, 3]"), ("stop_token_ids", "[2147483647]")]
    return pairs


def make_odd(field, text, vocab_size=1024):
    """Return the parameters of a request, None where it is refused as a client sees it."""
    body = b'{"prompt": "x", "%s": %s}' % (field.encode(), text.encode())
    try:
        asked = msgspec.json.decode(body, type=CompletionRequest)
        return make_sampling(
            asked,
            SamplingDefaults(),
            vocab_size=vocab_size,
            max_tokens=min(asked.max_tokens or 4, 4),
            min_tokens=asked.min_tokens,
            seed=asked.seed,
            logprobs=asked.logprobs,
        )
    except (msgspec.ValidationError, ConfigError):
        return None


def run(engine, requests):
    """Return (tokens, last output) by request."""
    tokens, ends = {}, {}
    for request_id, (prompt, sampling, adapter) in requests.items():
        engine.add(
            AddRequest(request_id=request_id, prompt_ids=prompt, sampling=sampling, adapter=adapter)
        )
    for _ in range(60):
        if not engine.has_requests:
            break
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ends[output.request_id] = output
    assert not engine.has_requests
    return tokens, ends


def run_beside_good(engine, odd):
    good = {name: (PROMPTS[name], GOOD[name], "") for name in GOOD}
    engine.flush_cache()
    want, _ = run(engine, good)
    engine.flush_cache()
    got, ends = run(engine, {**odd, **good})
    for name in GOOD:
        assert ends[name].finish_reason is FinishReason.LENGTH, ends[name]
        assert got[name] == want[name]
    return ends


def test_odd_values_of_every_field(served):
    engine, _ = served
    odd = {}
    for field, text in list_odd_values():
        sampling = make_odd(field, text)
        if sampling is not None:
            odd[f"{field}={text}"] = (PROMPTS["drawn"], sampling, "")
    assert len({name.partition("=")[0] for name in odd}) >= 14, "fields are tried"
    assert "repetition_penalty=1e-46" not in odd, "0 as a float32"
    ends = {}
    names = list(odd)
    for begin in range(0, len(names), 48):
        some = {name: odd[name] for name in names[begin : begin + 48]}
        ends |= run_beside_good(engine, some)
    broken = {name: e.error_text for name, e in ends.items() if e.error_code is not None}
    assert broken == {}, "what is accepted is served"


def test_adapters_that_overflow(served):
    engine, digests = served
    odd = {
        f"{digest}{kind}": (PROMPTS[kind], GOOD[kind], digest)
        for digest in digests
        for kind in GOOD
    }
    ends = run_beside_good(engine, odd)
    failed = [end for name, end in ends.items() if end.finish_reason is FinishReason.ERROR]
    assert failed, "some of these adapters give no finite logits"
    for end in failed:
        assert end.error_text == "the model's logits are not numbers", end.error_text


def test_values_that_come_from_elsewhere(served):
    """What the wire takes and no client can send: refused when it is added, not in a step."""
    engine, _ = served
    for bias in (math.inf, math.nan, 1e39):
        sampling = SamplingParams(logit_bias={1: bias})
        with pytest.raises(ConfigError):
            engine.add(AddRequest(request_id="a", prompt_ids=[1], sampling=sampling))
    text = msgspec.json.encode({"repetition_penalty": 1e-46})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=SamplingParams)


def test_the_rule_of_a_row_is_not_the_batch(served):
    """A rule that the sampler refuses ends its own request; the step is not over for the others."""
    engine, _ = served
    sampling = SamplingParams(max_tokens=3, repetition_penalty=0.0)
    ends = run_beside_good(engine, {"odd": (PROMPTS["drawn"], sampling, "")})
    assert ends["odd"].finish_reason is FinishReason.ERROR
    assert "repetition_penalty" in ends["odd"].error_text
