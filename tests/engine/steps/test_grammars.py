"""Output under a grammar: it matches, and depends on the request alone.

Method: the demo model, whose own words are no JSON. The same requests run one by one, side by side,
with and without overlap, with so few blocks that they are preempted, and from the middle on in
another engine.
"""

import json

import jsonschema
import pytest

from tandem.core.clock import MonotonicClock
from tandem.core.wire import AddRequest, Continuation, FinishReason, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.models.config import ModelConfig
from tandem.models.loading.hub import resolve_folder
from tandem.models.tokenizing.grammars import write_grammar
from tandem.models.tokenizing.tokenizer import load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = [
    write_grammar(
        "json_schema", json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})
    ),
    write_grammar("regex", "[a-f]{4,30}-[0-9]{1,5}"),
    write_grammar("choice", json.dumps(["yes, of course", "no, never"])),
    "",
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_folder("demo"))


def build(**settings):
    settings = {"max_model_len": 256, "num_kv_blocks": 128, "block_size": 16} | settings
    model = ModelConfig(path="demo", dtype="float32")
    return build_engine(model, EngineConfig(**settings), MonotonicClock()).engine


def make_requests(tokenizer, num_each=2):
    prompt = tokenizer.encode("Tell me about a person. " * 3)
    requests = []
    for number in range(num_each):
        for index, grammar in enumerate(GRAMMARS):
            params = SamplingParams(
                max_tokens=120,
                temperature=1.0,
                seed=number,
                grammar=grammar,
                ignore_eos=not grammar,
            )
            name = f"{index}-{number}"
            requests.append(AddRequest(request_id=name, prompt_ids=prompt, sampling=params))
    return requests


def run(engine, requests):
    """Run requests to their end; return tokens and reasons by id."""
    tokens = {request.request_id: [] for request in requests}
    reasons = {}
    for request in requests:
        engine.add(request)
    for _ in range(5000):
        if not engine.has_requests:
            break
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                assert output.finish_reason is not FinishReason.ERROR, output.error_text
                reasons[output.request_id] = output.finish_reason
    assert len(reasons) == len(requests)
    return tokens, reasons


@pytest.fixture(scope="module")
def expected(tokenizer):
    """Tokens of each request when it runs by itself."""
    engine = build()
    tokens = {}
    for request in make_requests(tokenizer):
        found, reasons = run(engine, [request])
        if request.sampling.grammar:
            text = tokenizer.decode(found[request.request_id])
            assert reasons[request.request_id] is FinishReason.STOP, text
        tokens |= found
    return tokens


def test_output_matches(expected, tokenizer):
    for name, tokens in expected.items():
        text = tokenizer.decode(tokens)
        match name[0]:
            case "0":
                jsonschema.validate(json.loads(text), SCHEMA)
            case "1":
                assert text[4:].lstrip("abcdef")[0] == "-", text
            case "2":
                assert text in ("yes, of course", "no, never")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"overlap": "on"}, marks=pytest.mark.slow),
        pytest.param({"overlap": "off"}, marks=pytest.mark.slow),
        {"overlap": "on", "num_kv_blocks": 22, "block_size": 8, "max_model_len": 160},
    ],
    ids=["overlap", "plain", "preempted"],
)
def test_tokens_do_not_depend_on_the_others(expected, tokenizer, settings):
    engine = build(**settings)
    tokens, _ = run(engine, make_requests(tokenizer))
    assert tokens == expected
    if "num_kv_blocks" in settings:
        assert engine.get_stats().num_preemptions > 0


def test_another_engine_goes_on_after_any_token(expected, tokenizer):
    engine = build()
    for request in make_requests(tokenizer, num_each=1):
        tokens = expected[request.request_id]
        for count in (1, len(tokens) // 2, len(tokens) - 1):
            if not 0 < count < len(tokens):
                continue
            continued = AddRequest(
                request_id=f"{request.request_id}-{count}",
                prompt_ids=request.prompt_ids,
                sampling=request.sampling,
                continuation=Continuation(token_ids=tokens[:count], seed=request.sampling.seed),
            )
            found, _ = run(engine, [continued])
            assert tokens[:count] + found[continued.request_id] == tokens


def test_greedy_bias_and_penalties_stay_within_the_grammar(tokenizer):
    engine = build()
    prompt = tokenizer.encode("Once upon a time")
    for number, more in enumerate(
        ({"temperature": 0.0}, {"repetition_penalty": 1.5, "min_tokens": 50}, {"top_k": 1})
    ):
        params = SamplingParams(max_tokens=60, seed=1, grammar=GRAMMARS[2], logprobs=2, **more)
        request = AddRequest(request_id=str(number), prompt_ids=prompt, sampling=params)
        found, reasons = run(engine, [request])
        assert tokenizer.decode(found[str(number)]) in ("yes, of course", "no, never")
        assert reasons[str(number)] is FinishReason.STOP
