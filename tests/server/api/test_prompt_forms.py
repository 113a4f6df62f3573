"""Completions beyond a plain prompt: a suffix, and the log-probabilities of the prompt.

Method: the official client, a real server over the fake engine, which has what it was asked.
"""

import threading

import ollama
import openai
import pytest
from fake_engine import FakeEngine, make_info
from serving import LiveServers
from vocabularies import make_byte_level_tokenizer

from tandem.core.errors import UnsupportedError
from tandem.core.wire import PromptLogprobs
from tandem.server.text.middle import find_middle_tokens

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
MARKS = {
    "qwen": (QWEN, "{0}A{1}B{2}"),
    "starcoder": (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "{0}A{1}B{2}"),
    "glm": (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), "{0}A{1}B{2}"),
    "deepseek": (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "{0}A{1}B{2}"),
    "codellama": (("▁<PRE>", "▁<SUF>", "▁<MID>"), "{0}A{1}B{2}"),
    "codestral": (("[SUFFIX]", "[PREFIX]"), "{0}B{1}A"),
}
"""By family: the tokens, and the prompt for a middle between A and B."""


@pytest.fixture(scope="module")
def live():
    with LiveServers(make_byte_level_tokenizer(more=QWEN)) as servers:
        yield servers.start(FakeEngine(info=make_info(323, max_model_len=4096)))


@pytest.fixture
def client(live):
    live.renew()
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.mark.parametrize("family", MARKS)
def test_a_middle_of_each_family(family):
    marks, expected = MARKS[family]
    tokenizer = make_byte_level_tokenizer(more=marks)
    ids = find_middle_tokens(tokenizer).join(
        tokenizer.encode("A"), tokenizer.encode("B"), adds_special=True
    )
    assert tokenizer.decode(ids) == expected.format(*marks)


def test_a_vocabulary_without_the_tokens_is_refused():
    with pytest.raises(UnsupportedError, match="cannot fill in a middle"):
        find_middle_tokens(make_byte_level_tokenizer())


def test_suffix(client, live):
    tokenizer = make_byte_level_tokenizer(more=QWEN)
    live.engine.answer = tokenizer.encode("return a")
    for prompt in ("def f(a):", tokenizer.encode("def f(a):")):
        reply = client.completions.create(model="tiny", prompt=prompt, suffix=" + 1", max_tokens=99)
        assert reply.choices[0].text == "return a"
        sent = live.engine.requests[-1].prompt_ids
        assert tokenizer.decode(sent) == f"{QWEN[0]}def f(a):{QWEN[1]} + 1{QWEN[2]}"
        assert reply.usage.prompt_tokens == len(sent)
    with ollama.Client(host=live.url) as own:
        assert own.generate("tiny", "def f(a):", suffix=" + 1").response == "return a"
        assert live.engine.requests[-1].prompt_ids == sent
        assert "insert" in own.show("tiny").capabilities
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        client.completions.create(model="tiny", prompt="a", suffix="b", echo=True)


def test_prompt_logprobs_in_the_form_of_vllm(client):
    extra = {"prompt_logprobs": 2}
    reply = client.completions.create(
        model="tiny",
        prompt=[[70, 71, 72]],
        n=2,
        max_tokens=1,
        logprobs=1,
        echo=True,
        extra_body=extra,
    )
    for choice in reply.choices:
        first, *rest = choice.model_extra["prompt_logprobs"]
        assert first is None
        assert [list(entry) for entry in rest] == [["71", "72"], ["72", "73"]]
        assert rest[0]["71"]["rank"] == 1
        assert (rest[0]["72"]["logprob"], rest[0]["72"]["rank"]) == (-0.5, 2)
        # The form of OpenAI has as many as it asked for.
        assert [len(top) for top in choice.logprobs.top_logprobs[1:]] == [1] * 3
        assert choice.logprobs.token_logprobs[0] is None
    ask = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(
        model="tiny", messages=ask, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    first, *rest = chat.model_extra["prompt_logprobs"]
    assert first is None
    assert len(rest) == chat.usage.prompt_tokens - 1
    # A token that is not among the likeliest has the rank that the engine counted.
    assert [told["rank"] for entry in rest for told in entry.values()] == [17] * len(rest)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        client.completions.create(model="tiny", prompt="a", stream=True, extra_body=extra)


def test_log_probabilities_of_a_long_prompt_are_decoded_off_the_loop(client, live, monkeypatch):
    threads = []
    unpack = PromptLogprobs.unpack

    def note(self):
        threads.append(threading.get_ident())
        return unpack(self)

    monkeypatch.setattr(PromptLogprobs, "unpack", note)
    loops = []
    live.call_soon(lambda: loops.append(threading.get_ident()))
    for options in ({"echo": True, "logprobs": 5}, {"extra_body": {"prompt_logprobs": 5}}):
        client.completions.create(model="tiny", prompt=[70] * 2000, max_tokens=1, **options)
    assert len(threads) == 2
    assert loops[0] not in threads
