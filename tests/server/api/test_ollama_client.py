"""Ollama's client gets what it expects.

Method: a real server over the fake engine, which answers with texts as models write them.
"""

import ollama
import pytest
import requests
from serving import KEYS
from vocabularies import CALL, TOOL_TEMPLATE

ASK = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def get_weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: in Switzerland.
    """
    return f"rain in {city}"


@pytest.fixture
def client(live):
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    with ollama.Client(host=live.url, timeout=20, headers=headers) as opened:
        yield opened


def test_chat_whole_and_streamed(client, say, live):
    say("<think>Hm.</think>Hello you")
    whole = client.chat("tiny:latest", messages=ASK, keep_alive="5m")
    assert (whole.message.role, whole.message.content) == ("assistant", "Hello you")
    assert whole["message"]["thinking"] == "Hm."
    assert (whole.done, whole.done_reason, whole.model) == (True, "stop", "tiny")
    assert whole.eval_count == len(live.engine.answer) + 1
    assert whole.prompt_eval_count == len(live.engine.requests[-1].prompt_ids)
    assert whole.total_duration == whole.prompt_eval_duration + whole.eval_duration
    assert min(whole.prompt_eval_duration, whole.eval_duration) >= 0
    chunks = list(client.chat("tiny", messages=ASK, stream=True))
    assert "".join(c.message.content for c in chunks) == "Hello you"
    assert "".join(c.message.thinking or "" for c in chunks) == "Hm."
    assert [c.done for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert (chunks[-1].done_reason, chunks[-1].eval_count) == ("stop", whole.eval_count)


def test_a_stream_is_lines_and_the_default(live, client, say):
    say("a b")
    body = {"model": "tiny", "messages": ASK}
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    answer = requests.post(f"{live.url}/api/chat", json=body, headers=headers, timeout=20)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.count("\n") == len(answer.text.splitlines()) > 1


def test_tools_go_out_whole_and_come_back(client, say):
    say(f"I look.\n{CALL}\n{CALL}")
    for stream in (False, True):
        answer = client.chat("tiny", messages=ASK, tools=[get_weather], stream=stream)
        chunks = list(answer) if stream else [answer]
        calls = [call for c in chunks for call in c.message.tool_calls or []]
        assert [c.function.name for c in calls] == ["get_weather"] * 2
        assert [c.function.arguments for c in calls] == [{"city": "Bern 😀"}] * 2
        assert "".join(c.message.content for c in chunks) == "I look."
    say("It rains.")
    messages = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [calls[0].model_dump()]},
        {"role": "tool", "tool_name": "get_weather", "content": "rain"},
    ]
    client.chat("tiny", messages=messages, tools=[get_weather])
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern 😀"}}' in say.prompt()
    assert "[tool]rain(get_weather " in say.prompt()
    assert '"description": "in Switzerland."' in say.prompt()


def test_a_begun_answer_is_continued(client, say):
    say(" you")
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]
    assert client.chat("tiny", begun).message.content == " you"
    assert say.prompt() == "[user]hi[assistant]Hello"


def test_options_reach_the_sampler(client, say, live):
    say("one two three four")
    options = {
        "num_predict": 50, "temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1, "seed": 3,
        "repeat_penalty": 1.2, "stop": [" three"], "num_gpu": 1, "num_thread": 2,
    }  # fmt: skip
    answer = client.generate("tiny", "count", options=options)
    assert (answer.response, answer.done_reason) == ("one two", "stop")
    sent = live.engine.requests[-1].sampling
    assert (sent.temperature, sent.top_k, sent.top_p, sent.min_p, sent.seed) == (
        0.5,
        7,
        0.8,
        0.1,
        3,
    )
    assert (sent.max_tokens, sent.repetition_penalty) == (50, 1.2)
    cut = client.generate("tiny", "count", options={"num_predict": 2})
    assert (cut.done_reason, cut.eval_count) == ("length", 2)
    for asked in (-1, -2, 0, 10**6):
        client.generate("tiny", "count", options={"num_predict": asked})
        request = live.engine.requests[-1]
        assert request.sampling.max_tokens == 4096 - len(request.prompt_ids)
    client.generate("tiny", "count", options={"num_ctx": 30})
    request = live.engine.requests[-1]
    assert request.sampling.max_tokens == 30 - len(request.prompt_ids)
    with pytest.raises(ollama.ResponseError, match="mirostat") as refused:
        client.generate("tiny", "count", options={"mirostat": 2})
    assert refused.value.status_code == 400


def test_formats_become_grammars(client, say, live):
    say('{"age": 3}')
    client.chat("tiny", messages=ASK)
    assert live.engine.requests[-1].sampling.grammar == ""
    for given, expected in (("json", '"object"'), (SCHEMA, "age")):
        for call in (
            lambda form: client.chat("tiny", messages=ASK, format=form),
            lambda form: client.generate("tiny", "x", format=form),
            lambda form: client.generate("tiny", "x", format=form, raw=True),
        ):
            call(given)
            assert expected in live.engine.requests[-1].sampling.grammar


def test_prompts_of_generate(client, say):
    say("x")
    client.generate("tiny", "why?", system="Be brief.")
    assert say.prompt() == "[system]Be brief.[user]why?[assistant]"
    client.generate("tiny", "why?", think=True)
    assert say.prompt().endswith("<think>")
    client.generate("tiny", "why?", system="Be brief.", raw=True)
    assert say.prompt() == "why?"


def test_log_probabilities(client, say):
    say("ab")
    answer = client.chat("tiny", messages=ASK, logprobs=True, top_logprobs=2)
    assert len(answer.logprobs) == answer.eval_count
    assert answer.logprobs[0].logprob == -0.25
    assert len(answer.logprobs[0].top_logprobs) == 2
    streamed = list(client.chat("tiny", messages=ASK, logprobs=True, stream=True))
    assert sum(len(c.logprobs or ()) for c in streamed) == answer.eval_count


def test_loading_generates_nothing(client, live):
    assert client.generate("tiny", "").done_reason == "load"
    assert client.chat("tiny", messages=[], keep_alive=0).done_reason == "unload"
    assert live.engine.requests == []


def test_models(client):
    (tag,) = client.list().models
    assert (tag.model, tag.details.parameter_size) == ("tiny", "262.1K")
    (running,) = client.ps().models
    assert (running.name, running.context_length) == ("tiny", 4096)
    shown = client.show("tiny")
    family = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{family}.context_length"] == 4096
    assert shown.template == TOOL_TEMPLATE
    assert {"completion", "tools"} <= set(shown.capabilities)


def test_errors_have_the_form_of_the_api(client, live, say):
    for call in (client.show, lambda name: client.chat(name, messages=ASK)):
        with pytest.raises(ollama.ResponseError, match="'other' is not served") as missing:
            call("other")
        assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"messages\[0\].images"):
        client.chat("tiny", messages=[{"role": "user", "content": "", "images": [b"png"]}])
    for call in (client.pull, client.delete):
        with pytest.raises(ollama.ResponseError, match=r"^/api/.* is not served: `tandem pull`"):
            call("other")
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    reply = requests.get(f"{live.url}/api/else", headers=headers, timeout=60)
    assert (reply.status_code, list(reply.json())) == (404, ["error"])
    say("a b c d")
    live.engine.die_after = 1
    with pytest.raises(ollama.ResponseError):
        list(client.chat("tiny", messages=ASK, stream=True))
