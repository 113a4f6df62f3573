"""Goal: a small real model that is served answers as one should, however it is served.

Method: SmolLM2-135M-Instruct by itself, then as a pair with a store whose instance is killed;
greedy answers are the same, token by token.
"""

import json
import os
import signal
import time

import httpx
import pytest

import tandem

pytestmark = pytest.mark.real
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
LONG = "You are a helpful assistant who answers briefly and truthfully. " * 24
WAIT_S = 120.0


@pytest.fixture(scope="module")
def llm(smollm2):
    with tandem.LLM(str(smollm2), max_model_len=1024) as opened:
        yield opened


def ask(llm, **body):
    """Return the message that ``/v1/chat/completions`` answers with."""

    async def post():
        transport = httpx.ASGITransport(llm._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/chat/completions", json=body)

    reply = llm._call(post())
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]


def answer(llm):
    messages = [{"role": "system", "content": LONG}, *FRANCE]
    (output,) = llm.chat(messages, temperature=0, max_tokens=24)
    return output


def test_it_knows_the_capital_of_france(llm):
    (output,) = llm.chat(FRANCE, temperature=0, max_tokens=24)
    assert "Paris" in output.text


def test_a_schema_and_a_forced_call_hold(llm):
    """Its template knows no tools: the server tells the model of them."""
    schema = {**TOOL["function"]["parameters"], "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"messages": FRANCE, "temperature": 0, "max_tokens": 200}
    found = json.loads(ask(llm, response_format=form, **body)["content"])
    assert set(found) <= {"city", "days"}
    assert isinstance(found["city"], str)
    choice = {"type": "function", "function": {"name": "get_weather"}}
    (call,) = ask(llm, tools=[TOOL], tool_choice=choice, **body)["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "get_weather"
    assert isinstance(arguments["days"], int)


def test_a_pair_with_a_store_answers_the_same_also_after_a_kill(llm, smollm2):
    expected = answer(llm).token_ids
    options = {"prefill": 1, "decode": 1, "store__memory": "256MiB"}
    with tandem.LLM(str(smollm2), max_model_len=1024, **options) as pair:
        assert answer(pair).token_ids == expected
        engine = pair._context.engine
        killed = next(each for each in engine.instances if each.role == "prefill")
        os.kill(killed.pid, signal.SIGKILL)
        until_s = time.monotonic() + WAIT_S
        while not any(each.num_restarts and each.pid for each in engine.instances):
            assert time.monotonic() < until_s
            time.sleep(0.05)
        pair._call(engine.wait_ready())
        again = answer(pair)
        assert again.token_ids == expected
