"""Goal: no grammar of a client takes the server's time or memory, and each is compiled by what
tokens really say.

Method: hostile grammars against small limits; tokenizers of every kind that puts a space before a
text.
"""

import asyncio
import json
import math
import os
import signal
import threading

import pytest
from fake_engine import make_info
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers
from vocabularies import make_byte_level_tokenizer

from tandem.core.clock import ManualClock
from tandem.core.errors import ConfigError, PeerLostError
from tandem.models.tokenizing.grammars import (
    ExactEncoder,
    list_vocabulary,
    make_matcher,
    make_token_table,
    write_grammar,
)
from tandem.models.tokenizing.tokenizer import Tokenizer
from tandem.server.api import grammars as grammars_module
from tandem.server.api.grammars import GrammarCompiler, write_literal
from tandem.server.outputs.writing import WRITTEN_CALLS, write_calls
from tandem.server.text import grammar_worker
from tandem.server.text.grammar_worker import compile_grammar
from tandem.server.text.work_threads import WorkThreads

INFO = make_info(320)


@pytest.fixture
def compiler():
    made = GrammarCompiler(make_byte_level_tokenizer(), timeout_s=30.0, clock=ManualClock())
    yield made
    made.close()


def test_grammars_are_converted_and_compiled_in_another_process(compiler, monkeypatch):
    for kind, text in {
        "regex": "a+",
        "choice": '["a", "b"]',
        "grammar": 'root ::= "a"',
        "json_schema": '{"type": "object"}',
    }.items():
        grammar = compiler.write(INFO, kind, text, "field")
        assert grammar == write_grammar(kind, text)
        compiler.check(grammar, INFO, "field")
    schema = '{"properties": {"a": {"type": "string"}}}'
    listed = compiler.write(INFO, "arguments", schema, "field")
    assert listed == write_grammar("arguments", schema)
    with pytest.raises(ConfigError, match="field: minProperties"):
        compiler.write(INFO, "arguments", '{"minProperties": 1}', "field")
    for kind, text in {"regex": "(", "json_schema": "{", "choice": "7", "grammar": "::="}.items():
        with pytest.raises(ConfigError, match="field: "):
            compiler.check(compiler.write(INFO, kind, text, "field"), INFO, "field")
    long = compiler.write(INFO, "regex", "x" * (1 << 18), "field")
    with pytest.raises(ConfigError, match="give up to 262144"):
        compiler.check(long, INFO, "field")


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_is_not(compiler):
    compiler.write(INFO, "regex", "a", "field")
    (worker,) = compiler._processes._workers
    os.kill(worker.pid, signal.SIGSTOP)
    compiler._timeout_s = 0.1
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"field: the grammar takes more than 0\.1 s"):
            compiler.write(INFO, "regex", "b+", "field")
    assert worker.poll() is not None
    compiler._timeout_s = 30.0
    assert compiler.write(INFO, "regex", "c+", "field")
    # The machine may have been the cause, so the refusal holds for a while only.
    compiler._clock.advance(3600.0)
    assert compiler.write(INFO, "regex", "b+", "field")


def test_text_threads_do_not_wait_for_grammars(compiler, monkeypatch):
    """Two clients' grammars of seconds would keep the texts of all others waiting."""
    passed, asked, run = threading.Event(), threading.Event(), compiler._run

    def run_slowly(question, info):
        asked.set()
        assert passed.wait(60)
        return run(question, info)

    monkeypatch.setattr(compiler, "_run", run_slowly)
    texts, times = WorkThreads(1), []

    def plan():
        times.append(1)
        grammar = compiler.write(INFO, "regex", "a+", "field")
        compiler.check(grammar, INFO, "field")
        return grammar

    async def check():
        planned = asyncio.create_task(compiler.plan(lambda: texts.run(plan, 1)))
        assert await asyncio.to_thread(asked.wait, 60)
        assert await texts.run(lambda: "text", 1) == "text"
        passed.set()
        return await planned

    assert asyncio.run(check()) == write_grammar("regex", "a+")
    assert len(times) == 3
    texts.close()


def test_a_grammar_is_checked_with_its_first_mask(monkeypatch):
    """That may take minutes where all else takes none, and only here can it be ended."""
    vocabulary = list_vocabulary(make_byte_level_tokenizer(), 320, [0])
    table = make_token_table(vocabulary)
    assert compile_grammar(table, write_grammar("regex", "a+")) == ""
    made = Masks()
    monkeypatch.setattr(grammar_worker, "make_matcher", lambda *_: made)
    compile_grammar(table, write_grammar("regex", "a+"))
    assert made.num == 1


class Masks:
    num = 0

    def compute_bitmask(self):
        self.num += 1


def test_what_is_remembered_is_bounded_by_its_bytes(compiler, monkeypatch):
    """Refused ones too: their texts are as long as a body."""
    monkeypatch.setattr(grammars_module, "_MAX_KNOWN_BYTES", 2000)
    asked = []
    monkeypatch.setattr(
        compiler, "_run", lambda question, _: asked.append(question) or ((False, "no"), math.inf)
    )
    for text in ["a" * 100_000, *map(str, range(20)), "19"]:
        with pytest.raises(ConfigError, match="no"):
            compiler.write(INFO, "regex", text, "field")
    assert len(asked) == 21
    assert len(compiler._known) == 2000 // 258
    assert sum(map(len, compiler._known)) < 2000
    monkeypatch.setattr(compiler, "_run", lambda *_: ((True, "x" * 3000), math.inf))
    assert compiler.write(INFO, "regex", "long", "field")
    assert compiler._known_bytes <= 2000


def test_closing_ends_a_compilation_and_begins_no_other(compiler):
    """The server does not wait for grammars when it stops."""
    failed = []

    def compile_long():
        try:
            compiler.write(
                INFO, "grammar", "root ::= " + '("a" | ' * 3000 + '"b"' + ")" * 3000, "x"
            )
        except (ConfigError, PeerLostError) as error:
            failed.append(error)

    compiler.write(INFO, "regex", "a", "field")
    thread = threading.Thread(target=compile_long)
    thread.start()
    compiler.close()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(PeerLostError, match="stopping"):
        compiler.write(INFO, "regex", "b", "field")


def make_tokenizer(kind: str) -> Tokenizer:
    """A tokenizer that puts a space before each text, as real ones do."""
    letters = '▁abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-\\n'
    pieces = ["▁yes", "yes", "ye", "▁{", '{"', "▁name", "name", "▁no", "no", '":', "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters, *pieces]
    if kind == "unigram":
        model = models.Unigram(
            [(t, -float(i)) for i, t in enumerate(tokens)], 0, byte_fallback=True
        )
    else:
        merges = [("y", "e"), ("ye", "s"), ("▁", "yes"), ("n", "o"), ("▁", "no"), ("▁", "{")]
        vocab = {token: i for i, token in enumerate(tokens)}
        model = models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    made = RustTokenizer(model)
    if kind == "prepend":
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always", split=kind == "metaspace")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return Tokenizer(made)


@pytest.mark.parametrize("kind", ["prepend", "metaspace", "unsplit", "unigram"])
def test_a_tokenizer_that_puts_a_space_before_texts_follows_grammars(kind):
    tokenizer = make_tokenizer(kind)
    vocabulary = list_vocabulary(tokenizer, tokenizer.vocab_size, [2])
    encode = ExactEncoder(tokenizer, vocabulary)
    for text in ("yes", "no", '{"name":', "a b", " yes", "", "é\n", "yes no", "<s>", "a </s> no"):
        assert b"".join(map(tokenizer.token_bytes, encode(text))) == text.encode(), text
    table = make_token_table(vocabulary, tokenizer)
    schema = {"type": "object", "properties": {"name": {"enum": ["yes"]}}, "required": ["name"]}
    schema |= {"x-guidance": {"whitespace_flexible": False}, "additionalProperties": False}
    forced = write_calls(
        WRITTEN_CALLS["qwen"],
        lambda text: write_literal(tokenizer, text),
        {"no": schema},
        pytest.fail,
        is_parallel=False,
    )
    call = '<tool_call>\n{"name": "no", "arguments": {"name": "yes"}}\n</tool_call>'
    for grammar, expected in {
        write_grammar("choice", '["yes", "yesno"]'): {"yes", "yesno"},
        write_grammar("choice", '[" yes"]'): {" yes"},
        write_grammar("choice", '["a<s>b"]'): {"a<s>b"},
        write_grammar("regex", "no{3}"): {"nooo"},
        write_grammar("json_schema", json.dumps(schema)): {'{"name":"yes"}'},
        forced: {call},
    }.items():
        matcher, ids = make_matcher(table, grammar), []
        for _ in range(100):
            state = matcher.compute_bitmask()
            allowed = [i for i in range(tokenizer.vocab_size) if state[i // 8] >> i % 8 & 1]
            assert allowed, (grammar, ids)
            if 2 in allowed:
                break
            ids.append(allowed[-1])
            assert matcher.consume_token(ids[-1])
        # The text of an answer is the same with no text before it, where a decoder drops a space.
        for context in ([], [1], tokenizer.encode("no no")):
            detokenizer = tokenizer.detokenizer(context=context, is_exact=True)
            assert detokenizer.feed(ids) + detokenizer.flush() in expected
