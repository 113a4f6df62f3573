"""Output under a grammar: it matches, and depends on the request alone.

Method: the demo model, whose own words are no JSON. The same requests run one by one, side by side,
with and without overlap, with so few blocks that they are preempted, and from the middle on in
another engine.
"""

import json
import threading

import jsonschema
import pytest

from tandem.core.clock import MonotonicClock
from tandem.core.wire import AddRequest, Continuation, FinishReason, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.stepping import grammar as grammar_module
from tandem.engine.stepping.grammar import Grammars, GrammarState
from tandem.models.config import ModelConfig
from tandem.models.loading.hub import resolve_folder
from tandem.models.tokenizing.grammars import (
    find_end_ids,
    list_vocabulary,
    make_matcher,
    make_token_table,
    write_grammar,
)
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
        assert engine.wait_for_work(60)
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


def make_request(tokenizer, name, grammar="", **fields):
    params = SamplingParams(max_tokens=12, temperature=0.0, grammar=grammar, ignore_eos=not grammar)
    ids = tokenizer.encode("Once upon a time")
    return AddRequest(request_id=name, prompt_ids=ids, sampling=params, **fields)


def take_outputs(engine, wanted, *, num_steps=1000):
    """Step until requests have ended; return the number of steps and the reasons of all ends."""
    reasons = {}
    for count in range(1, num_steps):
        assert engine.wait_for_work(60)
        reasons |= {o.request_id: o.finish_reason for o in engine.step() if o.finish_reason}
        if wanted <= reasons.keys():
            return count, reasons
    raise AssertionError(f"{wanted - reasons.keys()} go on")


class Gate:
    """Holds the compilation of grammars until it is opened."""

    def __init__(self, monkeypatch):
        self.is_open, make = threading.Event(), grammar_module.make_matcher
        monkeypatch.setattr(grammar_module, "make_matcher", lambda *args: self.wait(make, *args))

    def wait(self, make, *args):
        assert self.is_open.wait(60)
        return make(*args)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_request_whose_grammar_is_not_compiled_holds_up_no_other(tokenizer, monkeypatch, overlap):
    engine, gate = build(overlap=overlap), Gate(monkeypatch)
    held = [f"held{number}" for number in range(3)]
    for number, name in enumerate(held):
        more = {"timeout_s": 1e-6} if number == 2 else {}
        engine.add(make_request(tokenizer, name, GRAMMARS[2], **more))
    engine.add(make_request(tokenizer, "free"))
    _, reasons = take_outputs(engine, {"free", held[2]})
    assert reasons == {"free": FinishReason.LENGTH, held[2]: FinishReason.DEADLINE}
    assert engine.cancel(held[1])
    take_outputs(engine, {held[1]})
    engine.step()
    assert not engine.wait_for_work(0.0)
    gate.is_open.set()
    _, reasons = take_outputs(engine, {held[0]})
    assert reasons[held[0]] is FinishReason.STOP
    assert not engine.has_requests


def test_a_grammar_that_is_compiled_takes_as_many_steps_as_none(tokenizer):
    engine = build()
    for name in ("compiles", "has been"):
        engine.add(make_request(tokenizer, name, write_grammar("regex", "[a-z]{40}")))
        guided, _ = take_outputs(engine, {name})
    engine.add(make_request(tokenizer, "free"))
    assert guided == take_outputs(engine, {"free"})[0]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_sequence_whose_masks_are_slow_holds_up_no_other(
    tokenizer, monkeypatch, overlap, is_known
):
    """Its tokens are those that it gets with quick masks. Whether the masks before it were slow or
    not: nobody knows of a grammar which mask is the first slow one."""
    request = make_request(tokenizer, "slow", write_grammar("regex", "[a-z ]{60}"))
    quick, _ = run(build(overlap=overlap), [request])
    blocked, passed = threading.Event(), threading.Event()
    compute = GrammarState._compute

    def compute_slowly(state, token_ids):
        if len(token_ids) == 4:
            blocked.set()
            assert passed.wait(60)
        return compute(state, token_ids)

    monkeypatch.setattr(GrammarState, "_compute", compute_slowly)
    if is_known:
        monkeypatch.setattr(
            GrammarState, "is_slow", property(lambda _: True, lambda *_: None), raising=False
        )
    engine = build(overlap=overlap)
    engine.add(request)
    slow = []
    while not blocked.is_set():
        engine.wait_for_work(0.01)
        slow += [token for output in engine.step() for token in output.token_ids]
    engine.add(make_request(tokenizer, "free"))
    free, reasons = [], {}
    while "free" not in reasons:
        assert engine.wait_for_work(60)
        for output in engine.step():
            (free if output.request_id == "free" else slow).extend(output.token_ids)
            reasons[output.request_id] = output.finish_reason
            if output.finish_reason is None:
                del reasons[output.request_id]
    assert (len(free), len(slow)) == (12, 4)
    passed.set()
    while engine.has_requests:
        assert engine.wait_for_work(60)
        slow += [token for output in engine.step() for token in output.token_ids]
    assert slow == quick["slow"]


def test_compiled_grammars_are_kept_while_requests_use_them(monkeypatch):
    made = []
    monkeypatch.setattr(grammar_module, "make_matcher", lambda _, text: made.append(text) or Failed)
    monkeypatch.setattr(grammar_module, "_MAX_COMPILED", 2)
    grammars = Grammars(lambda: "table")
    for text in "abcd":
        done = threading.Event()
        if not grammars.prepare(text, done.set):
            assert done.wait(60)
    assert grammars.prepare("a", pytest.fail)
    for text in "abcda":
        grammars.release(text)
    assert len(grammars._compiled) == 2
    assert made == [*"abcd"]


def test_a_grammar_whose_requests_have_ended_is_not_compiled(tokenizer, monkeypatch):
    """One client that asks and leaves, again and again, keeps no other's grammar waiting."""
    gate, made = threading.Event(), []
    started = threading.Semaphore(0)

    def make(_, text):
        made.append(text)
        started.release()
        assert gate.wait(60)
        return Failed

    monkeypatch.setattr(grammar_module, "make_matcher", make)
    grammars, done = Grammars(lambda: "table"), threading.Event()
    for text in "abcdefgh":
        assert not grammars.prepare(text, lambda: None)
    for _ in range(grammar_module._NUM_COMPILING):
        assert started.acquire(timeout=60)
    begun = [*made]
    for text in "abcdefgh":
        grammars.release(text)
    assert not grammars.prepare("wanted", done.set)
    gate.set()
    assert done.wait(60)
    assert made == [*begun, "wanted"]


def test_what_waits_behind_a_slow_mask_goes_on_without_it(tokenizer, monkeypatch):
    """And a grammar whose mask took too long gets no second chance."""
    vocabulary = list_vocabulary(tokenizer, tokenizer.vocab_size, [0])
    table, text = make_token_table(vocabulary, tokenizer), write_grammar("regex", "[a-z]+")
    passed, begun, compute = threading.Event(), threading.Event(), GrammarState._compute

    def compute_slowly(state, token_ids):
        if not begun.is_set():
            begun.set()
            assert passed.wait(60)
        return compute(state, token_ids)

    monkeypatch.setattr(GrammarState, "_compute", compute_slowly)
    grammars, compiled = Grammars(lambda: table), threading.Event()
    if not grammars.prepare(text, compiled.set):
        assert compiled.wait(60)
    for sequence_id in (1, 2):
        grammars.open(sequence_id, text)
    masks = {1: grammars.begin_mask(1, [])}
    assert begun.wait(60)
    masks[2] = grammars.begin_mask(2, [])
    assert grammars.find_late(masks) == {1, 2}
    letter = grammars.begin_mask(2, []).result(60).nonzero()[0].tolist()[0]
    done = threading.Event()
    assert not grammars.await_mask(1, done.set)
    monkeypatch.setattr(grammar_module, "_MAX_MASK_S", 0.0)
    passed.set()
    assert done.wait(60)
    assert grammars.begin_mask(1, []).result(60) is None
    monkeypatch.undo()
    assert grammars.begin_mask(1, [letter]).result(60) is None
    assert grammars.begin_mask(2, [letter]).result(60) is not None


class Failed:
    @staticmethod
    def is_error():
        return True


def test_a_model_without_an_end_of_text_ends_with_its_grammar(tokenizer):
    """As one whose end is no token that it has. What ends the answer is no text of it, though it is
    a token like others."""
    for eos_ids in ((), (10**6,), (-1,)):
        assert find_end_ids(eos_ids, 300) == [299]
        vocabulary = list_vocabulary(tokenizer, 300, eos_ids)
        word = vocabulary.tokens[299].decode()
        assert tokenizer.encode(word) == [299]
        for text in ("y", word):
            matcher = make_matcher(
                make_token_table(vocabulary, tokenizer), write_grammar("choice", json.dumps([text]))
            )
            state, ids = GrammarState(matcher), []
            while (allowed := state.compute_mask(ids).nonzero()[0].tolist()) != [299]:
                ids.append(allowed[0])
            assert tokenizer.decode(ids) == text
