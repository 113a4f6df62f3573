"""Structured output of the demo model, through every name that clients have for it.

Goal: what the official client asks for comes back, whole and as a stream, although the model's own
words are nothing like it.
"""

import json
import re

import jsonschema
import openai
import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "rain": {"type": "boolean"},
        "days": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["city", "rain", "days"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
ASK = [{"role": "user", "content": "How is the weather?"}]
FORM = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_json_schema_whole_and_streamed(client):
    options = {"model": "demo", "messages": ASK, "response_format": FORM, "seed": 3}
    whole = client.chat.completions.create(**options, max_tokens=150).choices[0]
    jsonschema.validate(json.loads(whole.message.content), SCHEMA)
    assert whole.finish_reason == "stop"
    stream = client.chat.completions.create(**options, max_tokens=150, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.message.content


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"guided_regex": "[ab]{3,5}"}, "[ab]{3,5}"),
        ({"regex": "[ab]{3,5}"}, "[ab]{3,5}"),
        ({"guided_choice": ["red", "dark blue"]}, "red|dark blue"),
        ({"structured_outputs": {"choice": ["red", "dark blue"]}}, "red|dark blue"),
        ({"guided_grammar": 'start: "x" ("y" | "z")'}, "x[yz]"),
        ({"ebnf": 'root ::= "x" [0-9] [0-9]'}, "x[0-9][0-9]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_names_of_vllm_and_sglang(server, body, pattern):
    prompt = {"prompt": "One day", "max_tokens": 20, "ignore_eos": True}
    reply = server.client.post("/v1/completions", json=prompt | body).json()
    assert re.fullmatch(pattern, reply["choices"][0]["text"])
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_sampling_params_of_generate(server):
    for params, pattern in (
        ({"regex": "[ab]{3,5}"}, "[ab]{3,5}"),
        ({"json_schema": '{"enum": [1, 2]}'}, "[12]"),
        ({"ebnf": 'root ::= "yes" | "no"'}, "yes|no"),
    ):
        body = {"text": "One day", "sampling_params": params | {"max_new_tokens": 20}}
        reply = server.client.post("/generate", json=body).json()
        assert re.fullmatch(pattern, reply["text"])
        assert reply["meta_info"]["finish_reason"]["type"] == "stop"


def test_json_object_and_refusals(client):
    ask = client.chat.completions.create
    text = ask(
        model="demo",
        messages=ASK,
        response_format={"type": "json_object"},
        max_tokens=40,
        seed=1,
    ).choices[0]
    assert text.message.content.lstrip().startswith("{")
    with pytest.raises(openai.BadRequestError, match="dynamicRef"):
        ask(
            model="demo",
            messages=ASK,
            extra_body={"guided_json": {"type": "object", "$dynamicRef": "#x"}},
        )


TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "strict": True, "parameters": SCHEMA},
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {"type": "object", "additionalProperties": False},
        },
    },
]
NOW = {"type": "function", "function": {"name": "now"}}


def test_forced_tool_calls(client):
    ask = {"model": "demo", "messages": ASK, "tools": TOOLS, "max_tokens": 200}
    named = client.chat.completions.create(**ask, tool_choice=NOW).choices[0]
    assert [call.function.name for call in named.message.tool_calls] == ["now"]
    assert named.message.tool_calls[0].function.arguments == "{}"
    assert named.finish_reason == "tool_calls"
    options = {"tool_choice": "required", "parallel_tool_calls": False, "n": 3, "seed": 5}
    for choice in client.chat.completions.create(**ask, **options).choices:
        (call,) = choice.message.tool_calls
        schema = next(t for t in TOOLS if t["function"]["name"] == call.function.name)
        jsonschema.validate(json.loads(call.function.arguments), schema["function"]["parameters"])
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None


def test_forced_tool_call_streams(client):
    ask = {"model": "demo", "messages": ASK, "tools": TOOLS[:1], "max_tokens": 200, "seed": 7}
    with client.chat.completions.stream(
        **ask, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert choice.finish_reason == "tool_calls"


def test_responses(client):
    """The Responses API's structured text, forced call and next turn, whole and streamed."""
    form = {"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA}}
    ask = {"model": "demo", "input": "How is the weather?", "max_output_tokens": 150}
    whole = client.responses.create(**ask, text=form, extra_body={"seed": 3})
    jsonschema.validate(json.loads(whole.output_text), SCHEMA)
    assert whole.status == "completed"
    with client.responses.stream(**ask, text=form, extra_body={"seed": 3}) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text == whole.output_text
    tool = {"type": "function", "name": "get_weather", "strict": True, "parameters": SCHEMA}
    called = client.responses.create(
        **ask, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = called.output
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    after = client.responses.create(
        model="demo",
        previous_response_id=called.id,
        input=[output],
        tools=[tool],
        tool_choice="none",
        text={"format": {"type": "json_object"}},
        max_output_tokens=20,
    )
    assert after.output_text.lstrip().startswith("{")


def test_wrong_choices_are_refused(client):
    for options in (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nothing"}}},
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": "required", "response_format": FORM},
    ):
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            client.chat.completions.create(model="demo", messages=ASK, max_tokens=5, **options)
