"""Goal: what runs on the event loop does not depend on the size of a request or of its answer.

Method: the lines of Python that the loop's thread executes are counted, for small bodies and for
ones of twenty times as many items; documents that one call encodes are looked at one by one.
"""

import gc
import sys
import threading

import msgspec
import pytest
from fake_engine import FakeEngine, make_info

from tandem.core.errors import ConfigError
from tandem.core.wire import TokenLogprob
from tandem.server.dialects import dialect, openai_answer, sglang
from tandem.server.dialects.usage import make_chat_logprobs
from tandem.server.protocol.decode import MAX_CONTAINERS, check_containers
from tandem.server.text.work_threads import SMALL_COST

FEW, MANY = 100, 2000
MESSAGES = [{"role": ("user", "assistant")[i % 2], "content": "hi"} for i in range(MANY)]
KINDS = {
    "prompts to tokenize": lambda n: ("/tokenize", {"prompt": ["ab"] * n}),
    "ids to text": lambda n: ("/detokenize", {"tokens": [[5, 6]] * n}),
    "a chat to tokenize": lambda n: ("/tokenize", {"messages": MESSAGES[:n]}),
    "a chat": lambda n: ("/v1/chat/completions", {"messages": MESSAGES[:n], "max_tokens": 1}),
    "ids": lambda n: ("/v1/completions", {"prompt": [7] * n, "max_tokens": 1}),
    "ids for SGLang": lambda n: (
        "/generate",
        {"input_ids": [7] * n, "sampling_params": {"max_new_tokens": 1}},
    ),
    "ids with their log-probabilities": lambda n: (
        "/v1/completions",
        {"prompt": [7] * n, "max_tokens": 1, "echo": True, "logprobs": 5},
    ),
    "a list of ids": lambda n: ("/v1/completions", {"prompt": [[7]] * n, "max_tokens": 1}),
    "a bias": lambda n: (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 1, "logit_bias": {str(i % 500): 1 for i in range(n)}},
    ),
    "unknown fields": lambda n: (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 1, **{f"x{i}": 0 for i in range(n)}},
    ),
}


class Lines:
    """Counts the lines of Python that a thread executes while ``is_on``."""

    def __init__(self):
        self.count, self.is_on = 0, False

    def trace(self, frame, event, _):
        if frame.f_code.co_filename.endswith("fake_engine.py"):
            return None
        if event == "line":
            self.count += self.is_on
        return self.trace


@pytest.fixture(scope="module")
def traced(tokenizer):
    """(server, the count of its loop's lines)."""
    from serving import LiveServers

    lines = Lines()
    with LiveServers(tokenizer) as servers:
        live = servers.start(FakeEngine(info=make_info(tokenizer.vocab_size, 8192)))
        live.post("/tokenize", {"messages": MESSAGES[:1]}).raise_for_status()
        is_set = threading.Event()

        def begin():
            sys.settrace(lines.trace)
            is_set.set()

        live.call_soon(begin)
        assert is_set.wait(60)
        yield live, lines


def count(traced, kind, size):
    live, lines = traced
    path, body = KINDS[kind](size)
    lines.count, lines.is_on = 0, True
    reply = live.post(path, body)
    lines.is_on = False
    assert reply.status_code in (200, 400), reply.text
    return lines.count


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_does_as_much_for_a_large_body(traced, kind):
    """But for the pieces in which the body comes and the answer goes."""
    count(traced, kind, FEW)
    few = count(traced, kind, FEW)
    many = count(traced, kind, MANY)
    assert few > 50, "lines are counted"
    assert many < 2.5 * few, (few, many)


BODIES = {
    "echo": (
        "/v1/completions",
        {"prompt": "ab " * 700, "n": 16, "max_tokens": 1, "echo": True},
    ),
    "echo of a stream": (
        "/v1/completions",
        {"prompt": "ab " * 6000, "max_tokens": 1, "echo": True, "stream": True},
    ),
    "log-probabilities": (
        "/v1/completions",
        {"prompt": [7] * 100, "max_tokens": 1, "echo": True, "logprobs": 20},
    ),
    "likeliest tokens": (
        "/v1/chat/completions",
        {"messages": MESSAGES[:1], "n": 20, "max_tokens": 9, "logprobs": True, "top_logprobs": 20},
    ),
    "SGLang": (
        "/generate",
        {"text": ["a"] * 40, "sampling_params": {"max_new_tokens": 300}},
    ),
    "a long stream of SGLang": (
        "/generate",
        {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 4000}},
    ),
}


@pytest.mark.parametrize("kind", BODIES)
def test_large_documents_are_encoded_on_a_thread(serve, tokenizer, kind, monkeypatch):
    found = []

    def note(encode):
        def encode_noting(document):
            text = encode(document)
            found.append((len(text), threading.current_thread().name))
            return text

        return encode_noting

    for module in (dialect, openai_answer, sglang):
        monkeypatch.setattr(module, "_encode", note(module._encode))
    live = serve(FakeEngine(info=make_info(tokenizer.vocab_size, 32_768), tokens_per_step=50))
    path, body = BODIES[kind]
    live.post(path, body).raise_for_status()
    assert max(size for size, _ in found) > 2 * SMALL_COST, "the answer is large"
    # A little more than planned is no matter: an estimate decides.
    on_loop = [size for size, name in found if not name.startswith("text")]
    assert max(on_loop, default=0) <= 2 * SMALL_COST


@pytest.mark.parametrize(
    ("path", "item"),
    [("/v1/completions", b"[]"), ("/generate", b"{}"), ("/tokenize", b'{"a":[]}'),
     ("/detokenize", b"[[],[]]")],
)  # fmt: skip
def test_a_body_of_too_many_lists_is_refused_before_it_is_decoded(serve_text, path, item):
    """One call that decodes them keeps the interpreter's lock, and the loop out, for seconds."""
    live = serve_text()
    body = b'{"x": "[[[", "prompt": [%s]}' % b",".join([item] * MAX_CONTAINERS)
    reply = live.post(path, data=body)
    assert reply.status_code == 400
    assert str(MAX_CONTAINERS) in reply.json()["error"]["message"]


def test_brackets_within_texts_are_no_lists():
    check_containers(b'{"prompt": "' + b'[{\\"' * MAX_CONTAINERS + b'"}')
    check_containers(b'{"prompt": [' + b'"[", "\\\\", ' * 4 + b'"' + b"[" * MAX_CONTAINERS + b'"]}')
    with pytest.raises(ConfigError):
        check_containers(b'{"prompt": ["\\\\", ' + b"[]," * MAX_CONTAINERS + b"[]]}")


def test_too_many_prompts_are_refused_before_they_are_looked_at(serve_text):
    live = serve_text()
    live.app.state.context.encoder.tokenizer.encode = None
    for path, name in (("/v1/completions", "prompt"), ("/generate", "text")):
        reply = live.post(path, {name: ["a"] * 300})
        assert reply.status_code == 400, reply.text
        assert "300 generations" in reply.json()["error"]["message"]


def test_log_probabilities_are_nothing_to_the_garbage_collector(tokenizer):
    """It stops the loop for as long as it looks at objects, and an answer has a million of them."""
    top = [(i, -1.0) for i in range(20)]
    told = msgspec.msgpack.encode([TokenLogprob(5, -0.5, top) for _ in range(MANY)])
    gc.collect()
    before = len(gc.get_objects())
    logprobs = msgspec.msgpack.decode(told, type=list[TokenLogprob])
    gc.collect()
    assert len(gc.get_objects()) - before < 1.5 * MANY, "of a token its list of tops"
    before = len(gc.get_objects())
    answer = make_chat_logprobs(tokenizer, logprobs)
    gc.collect()
    assert len(gc.get_objects()) - before < 1.5 * MANY
    assert len(answer.content) == MANY
