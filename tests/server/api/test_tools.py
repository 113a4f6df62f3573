"""Tools and reasoning over /v1/chat/completions, by the official client.

Method: real servers over the fake engine, which answers with texts as models write them.
"""

import itertools
import json

import msgspec
import openai
import pytest
from fake_engine import FakeEngine, make_info
from serving import LiveServers
from vocabularies import CALL, CHAT_TEMPLATE, TOOL_TEMPLATE, make_byte_level_tokenizer

from each import each
from tandem.models.tokenizing.schemas.json_text import parse_begun_object
from tandem.server.api.messages import plain_messages
from tandem.server.outputs.formats import FORMATS
from tandem.server.protocol.openai import InputMessage

TEXT_FORM = next(form for form in FORMATS.values() if form.has_text_arguments)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tell the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ASK = [{"role": "user", "content": "hello"}]


def make_engine():
    """Tools take more room than the fake engine's model has by itself."""
    return FakeEngine(info=make_info(320, max_model_len=4096))


@pytest.fixture(scope="module")
def live():
    with LiveServers(make_byte_level_tokenizer(TOOL_TEMPLATE)) as servers:
        yield servers.start(make_engine())


@pytest.fixture
def ask(live):
    """Ask a server whose model says ``text``."""
    tokenizer = make_byte_level_tokenizer(TOOL_TEMPLATE)
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:

        def ask(text, messages=ASK, **options):
            live.renew()
            live.engine.answer = tokenizer.encode(text)
            live.engine.stop_token_id = 0
            return client.chat.completions.create(model="tiny", messages=messages, **options)

        ask.prompt = lambda: tokenizer.decode(live.engine.requests[-1].prompt_ids)
        yield ask


@each(
    ("arguments", "written", "text"),
    [
        (None, {}, "{}"),
        ([], {}, "{}"),
        ("", {}, "{}"),
        ("null", {}, "{}"),
        (" [] ", {}, "{}"),
        ({"city": "Bern"}, {"city": "Bern"}, '{"city": "Bern"}'),
        ('{"city": "Bern"}', {"city": "Bern"}, '{"city": "Bern"}'),
        ('{"city": "Be', {}, '{"city": "Be'),
        ("7", {}, "7"),
    ],
)
def test_arguments_of_earlier_calls_are_objects_for_templates(arguments, written, text):
    """They iterate over them; a model whose template takes text gets what was written."""
    call = {"function": {"name": "f", "arguments": arguments}}
    message = msgspec.convert({"role": "assistant", "tool_calls": [call]}, InputMessage)
    for form, expected in ((FORMATS["qwen"], written), (TEXT_FORM, text)):
        [plain] = plain_messages([message], form)
        assert plain["tool_calls"][0]["function"]["arguments"] == expected


def test_an_object_that_breaks_off_has_what_is_whole():
    value = {'a"}': "b, [\\", "c": [1, {"d": None, "e": {}}, []], "f": {"g": -2.5}, "h": True}
    text = json.dumps(value)
    assert parse_begun_object(text) == value
    found = [parse_begun_object(text[:end]) for end in range(len(text))]
    for before, after in itertools.pairwise(found):
        assert list(after)[: len(before)] == list(before), "nothing that was whole goes away"
    assert parse_begun_object(text[: text.index("{}")]) == {'a"}': "b, [\\", "c": [1, {"d": None}]}
    assert parse_begun_object(text[: text.index("}, []")]) == {
        'a"}': "b, [\\",
        "c": [1, {"d": None, "e": {}}],
    }
    for odd in ("", "7", "[1", "]{", '{"a" 1, "b": 2', "x{", "[" * 10_000):
        assert parse_begun_object(odd) == {}, odd


def test_call_whole(ask):
    reply = ask(f"I look.\n{CALL}\n{CALL}", tools=TOOLS)
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather"] * 2
    assert json.loads(calls[0].function.arguments) == {"city": "Bern 😀"}
    assert calls[0].id != calls[1].id
    assert '"name": "get_weather"' in ask.prompt()
    assert ask(CALL, tools=TOOLS).choices[0].message.content is None


def test_call_streamed(ask):
    stream = ask(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}", tools=TOOLS, stream=True)
    text, reasoning, calls, reasons = "", "", {}, []
    for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
        for delta in choice.delta.tool_calls or []:
            call = calls.setdefault(delta.index, [])
            if not call:
                assert delta.id
                assert delta.type == "function"
                assert delta.function.name == "get_weather"
            else:
                assert delta.id is None
            call.append(delta.function.arguments or "")
        if choice.finish_reason is not None:
            reasons.append(choice.finish_reason)
    assert (text, reasoning, reasons) == ("I look.", "Hm.", ["tool_calls"])
    assert [json.loads("".join(call)) for call in calls.values()] == [{"city": "Bern 😀"}] * 2
    # Arguments come while they are written, not at the end of the call.
    assert all(len(call) > 3 for call in calls.values())


def test_parser_of_the_client_accumulates_the_stream(ask, live):
    """The official client's own helper puts events together to the whole answer."""
    ask(CALL)
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        options = {"model": "tiny", "messages": ASK, "tools": TOOLS}
        with client.chat.completions.stream(**options) as stream:
            done = stream.get_final_completion()
    (call,) = done.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Bern 😀"}
    assert done.choices[0].finish_reason == "tool_calls"


def test_conversation_with_calls_goes_to_the_template(ask):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "I must look.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    ask("It rains.", messages, tools=TOOLS)
    prompt = ask.prompt()
    assert "[system]Be brief." in prompt
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}' in prompt
    assert "<think>I must look.</think>" in prompt
    assert "[tool]rain(get_weather call_1)" in prompt


def test_none_leaves_calls_in_the_text(ask):
    reply = ask(CALL, tools=TOOLS, tool_choice="none")
    assert reply.choices[0].message.content == CALL
    assert reply.choices[0].finish_reason == "stop"
    assert "get_weather" not in ask.prompt()


def test_call_that_breaks_off_has_length_and_what_came(ask, live):
    tokenizer = make_byte_level_tokenizer(TOOL_TEMPLATE)
    limit = len(tokenizer.encode(CALL)) - 12
    reply = ask(CALL, tools=TOOLS, max_tokens=limit)
    choice = reply.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.name == "get_weather"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"city": "Ber')
    # Of a forced call that was cut off before its name nothing is text.
    choice = ask(CALL, tools=TOOLS, tool_choice="required", max_tokens=4).choices[0]
    assert choice.finish_reason == "length"
    assert not choice.message.content and not choice.message.tool_calls


def test_malformed_call_is_text(ask):
    text = "<tool_call>\n{nothing}\n</tool_call>"
    reply = ask(text, tools=TOOLS)
    assert reply.choices[0].message.content == text
    assert reply.choices[0].finish_reason == "stop"


def test_reasoning(ask):
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    reply = ask("I think.\n</think>\n\nHello", extra_body=thinking)
    assert ask.prompt().endswith("<think>")
    message = reply.choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("Hello", "I think.")
    # A call that the reasoning swallowed.
    reply = ask(f"I think.\n{CALL}", tools=TOOLS, extra_body=thinking)
    assert len(reply.choices[0].message.tool_calls) == 1
    reply = ask("<think>Hm.</think>Hello", extra_body={"separate_reasoning": False})
    assert reply.choices[0].message.content == "<think>Hm.</think>Hello"


def test_stop_string_and_logprobs_beside_a_parser(ask):
    text = "<think>Hm.</think>Hello you there"
    reply = ask(text, stop=" there", logprobs=True)
    choice = reply.choices[0]
    assert choice.message.content == "Hello you"
    tokens = "".join(entry.token for entry in choice.logprobs.content)
    assert tokens.startswith("<think>Hm.</think>Hello you")
    streamed = ask(text, stop=" there", logprobs=True, stream=True)
    entries = [c.choices[0].logprobs for c in streamed if c.choices[0].logprobs is not None]
    assert "".join(e.token for each in entries for e in each.content) == tokens


def test_template_without_tools_is_told_of_them():
    """Such a model gets the tools in its system message, in Hermes' words."""
    tokenizer = make_byte_level_tokenizer(CHAT_TEMPLATE)
    with LiveServers(tokenizer) as servers:
        live = servers.start(make_engine())
        live.engine.answer = tokenizer.encode(CALL)
        reply = live.post("/v1/chat/completions", {"messages": ASK, "tools": TOOLS}).json()
        prompt = tokenizer.decode(live.engine.requests[-1].prompt_ids)
    assert prompt.startswith("<|im_start|>system\n# Tools")
    assert '"name": "get_weather"' in prompt
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


@pytest.mark.parametrize("name", ["kimi_k2", "none"])
def test_setting_overrides_the_template(name):
    tokenizer = make_byte_level_tokenizer(TOOL_TEMPLATE)
    with LiveServers(tokenizer) as servers:
        live = servers.start(make_engine(), output_format=name)
        text = {
            "kimi_k2": "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}",
            "none": "<think>Hm.</think>Hello",
        }[name]
        live.engine.answer = tokenizer.encode(text)
        tools = [] if name == "none" else TOOLS
        reply = live.post("/v1/chat/completions", {"messages": ASK, "tools": tools}).json()
    message = reply["choices"][0]["message"]
    if name == "none":
        assert message == {"content": text, "role": "assistant"}
    else:
        assert message["tool_calls"][0]["id"] == "functions.now:0"
