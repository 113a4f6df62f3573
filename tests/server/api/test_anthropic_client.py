"""The official Anthropic client gets what it expects.

Method: a real server over the fake engine, which answers with texts as models write them.
"""

from functools import partial

import anthropic
import pytest
import requests
from serving import KEYS
from vocabularies import CALL, TOOL_TEMPLATE, make_byte_level_tokenizer

TOOLS = [
    {
        "name": "get_weather",
        "description": "Tell the weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"type": "web_search_20250305", "name": "web_search"},
]
ASK = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(live):
    live.engine.cached_len = 3
    with anthropic.Anthropic(base_url=live.url, api_key=KEYS[0], max_retries=0) as opened:
        yield opened


def test_message(client, say, live):
    say("Hello you")
    reply = client.messages.create(model="tiny", max_tokens=100, messages=ASK, system="Be brief.")
    assert [block.type for block in reply.content] == ["text"]
    assert reply.content[0].text == "Hello you"
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert reply.usage.cache_read_input_tokens == 3
    prompt_len = len(live.engine.requests[-1].prompt_ids)
    assert reply.usage.input_tokens + 3 == prompt_len
    assert reply.usage.output_tokens == len(live.engine.answer) + 1
    assert say.prompt().startswith("[system]Be brief.[user]hello")
    counted = client.messages.count_tokens(model="tiny", messages=ASK, system="Be brief.")
    assert counted.input_tokens == prompt_len


def test_reasons(client, say):
    say("one two three")
    create = client.messages.create
    cut = create(model="tiny", max_tokens=2, messages=ASK)
    assert cut.stop_reason == "max_tokens"
    stopped = create(model="tiny", max_tokens=100, messages=ASK, stop_sequences=[" three"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
    assert stopped.content[0].text == "one two"


def test_thinking_and_tools_whole_and_streamed(client, say):
    say(f"<think>Hm.</think>I look.\n{CALL}")
    options = {"model": "tiny", "max_tokens": 200, "messages": ASK, "tools": TOOLS}
    whole = client.messages.create(**options)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert whole.content[0].thinking == "Hm."
    assert whole.content[2].input == {"city": "Bern 😀"}
    assert whole.content[2].id.startswith("toolu_")
    assert whole.stop_reason == "tool_use"
    assert "web_search" not in say.prompt()
    kinds = []
    with client.messages.stream(**options) as stream:
        for event in stream:
            kinds.append(event.type)
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[0].thinking == "Hm."
    assert final.content[1].text == "I look."
    assert final.content[2].input == {"city": "Bern 😀"}
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_a_call_that_breaks_off_has_what_is_whole(client, say, live):
    """As at max_tokens; no key that the model did not write."""
    begun = '<tool_call>\n{"name": "get_weather", "arguments": {'
    for text, given in (
        ("", {}),
        ('"city": "Be', {}),
        ('"city": "Bern", "days": ', {"city": "Bern"}),
        ('"city": "Bern", "days": [1, 2', {"city": "Bern", "days": [1]}),
    ):
        say(begun + text)
        options = {"model": "tiny", "max_tokens": len(live.engine.answer), "messages": ASK}
        whole = client.messages.create(**options, tools=TOOLS)
        assert whole.stop_reason == "max_tokens", text
        assert (whole.content[-1].name, whole.content[-1].input) == ("get_weather", given), text


def test_conversation_with_tools_goes_to_the_template(client, say):
    say("It rains.")
    client.messages.create(
        model="tiny",
        max_tokens=100,
        tools=TOOLS,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=a1b2c;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I must look.", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "B"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "rain"}],
                    },
                    {"type": "text", "text": "And tomorrow?"},
                ],
            },
        ],
    )
    prompt = say.prompt()
    assert "billing" not in prompt
    assert "[system]Be brief." in prompt
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "B"}}</tool_call>' in prompt
    assert "[tool]rain(get_weather t1)" in prompt
    assert prompt.index("[tool]rain") < prompt.index("[user]And tomorrow?")
    assert "<think>I must look.</think>" in prompt


def test_cache_control_pins_the_prompt_before_it(client, say, live):
    say("ok")
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [{"type": "text", "text": "Be brief. " * 5, **mark}]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "Hello you"},
        {"role": "user", "content": "bye"},
    ]
    create = client.messages.create
    options = {"model": "tiny", "max_tokens": 20, "tools": TOOLS}

    def pinned(reply):
        request = live.engine.requests[-1]
        usage = reply.usage
        total = usage.input_tokens + usage.cache_creation_input_tokens
        assert total + usage.cache_read_input_tokens == len(request.prompt_ids)
        assert usage.cache_read_input_tokens == 3
        assert usage.cache_creation_input_tokens == max(request.pin_len - 3, 0)
        text = say.prompt()
        head = make_byte_level_tokenizer(TOOL_TEMPLATE).decode(
            request.prompt_ids[: request.pin_len]
        )
        assert text.startswith(head)
        return head, request.pin_s

    head, pin_s = pinned(create(messages=turns, system="Be brief.", **options))
    assert (head, pin_s) == ("", 0.0)
    head, pin_s = pinned(create(messages=turns, system=system, **options))
    assert head.rstrip("[").endswith("Be brief. ")
    assert pin_s == 3600.0
    turns[0]["content"][0]["cache_control"] = {"type": "ephemeral"}
    head, pin_s = pinned(create(messages=turns, system=system, **options))
    # This template asks for the answer behind whatever it gets.
    assert head.removesuffix("[assistant]").endswith("[user]hello")
    assert pin_s == 300.0
    reply = create(messages=turns, extra_body=mark, **options)
    assert pinned(reply) == (say.prompt(), 3600.0)
    assert reply.usage.cache_creation.ephemeral_1h_input_tokens > 0


def test_a_begun_answer_is_continued(client, say):
    """A conversation that ends in an assistant's text; one that ends in its calls is a new turn."""
    say(" you")
    begun = [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]}]
    reply = client.messages.create(model="tiny", max_tokens=9, messages=begun)
    assert reply.content[0].text == " you"
    assert say.prompt() == "[user]hello[assistant]Hello"
    counted = client.messages.count_tokens(model="tiny", messages=begun)
    assert counted.input_tokens == reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    say("so.</think>Hi")
    thinking = [*ASK, {"role": "assistant", "content": "<think>\nIt says hello,"}]
    reply = client.messages.create(model="tiny", max_tokens=30, messages=thinking)
    assert [reply.content[0].thinking, reply.content[1].text] == ["so.", "Hi"]
    call = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {}}
    begun[1]["content"].append(call)
    client.messages.create(model="tiny", max_tokens=9, messages=begun)
    assert say.prompt().endswith("</tool_call>[assistant]")


def test_choice_becomes_a_grammar(client, say, live):
    say(CALL)
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        client.messages.create(
            model="tiny", max_tokens=100, messages=ASK, tools=TOOLS, tool_choice=choice
        )
        assert "get_weather" in live.engine.requests[-1].sampling.grammar
    client.messages.create(
        model="tiny", max_tokens=100, messages=ASK, tools=TOOLS, tool_choice={"type": "none"}
    )
    assert live.engine.requests[-1].sampling.grammar == ""


def test_formats_become_grammars(client, say, live):
    """By the newer name and by the older one; what is not supported is refused by name."""
    say('{"city": "Bern"}')
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    form = {"type": "json_schema", "schema": schema}
    create = partial(client.messages.create, model="tiny", max_tokens=50, messages=ASK)
    create()
    assert live.engine.requests[-1].sampling.grammar == ""
    grammars = set()
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert create(extra_body=fields).content[0].text == '{"city": "Bern"}'
        grammars.add(live.engine.requests[-1].sampling.grammar)
    assert len(grammars) == 1
    assert "city" in grammars.pop()
    for fields, name in (
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
        ({"mcp_servers": [{"name": "a", "type": "url", "url": "b"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=name):
            create(extra_body=fields)


def test_errors_have_the_form_of_the_api(client, live):
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=5, messages=ASK)
    assert missing.value.body["error"]["type"] == "not_found_error"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(
            model="tiny", max_tokens=5, messages=[{"role": "user", "content": [image]}]
        )
    assert refused.value.body["type"] == "error"
    assert "messages[0].content[0].type" in refused.value.body["error"]["message"]
    without = requests.post(f"{live.url}/v1/messages", json={}, timeout=10)
    assert without.status_code == 401
    live.engine.die_after = 1
    live.engine.answer = [5, 6, 7, 8]
    with pytest.raises(anthropic.APIStatusError) as lost:
        list(client.messages.create(model="tiny", max_tokens=5, messages=ASK, stream=True))
    assert lost.value.body["type"] == "error"


def test_the_request_of_claude_code(live, say):
    """As version 2.1.331 sends it, shortened: it asks to clear thinking and to keep all of it, and
    tells its surroundings in a system message after the user's.
    """
    say("Hello.")
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "tiny",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.331.f79;"},
            {"type": "text", "text": "You are an agent.", **cached},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Say hello"}]},
            {"role": "system", "content": [{"type": "text", "text": "# Environment", **cached}]},
        ],
        "tools": [{**TOOLS[0], "defer_loading": False}],
        "metadata": {"user_id": "{}"},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    url, headers = f"{live.url}/v1/messages?beta=true", {"Authorization": f"Bearer {KEYS[0]}"}
    reply = requests.post(url, json=body, headers=headers, timeout=60)
    assert (reply.status_code, '"end_turn"' in reply.text) == (200, True), reply.text
    assert "# Environment" in say.prompt()
    assert "billing" not in say.prompt()
    for edit in (
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
        {"type": "clear_thinking_20251015"},
        {"type": "clear_tool_uses_20250919", "keep": "all"},
    ):
        body["context_management"] = {"edits": [edit]}
        reply = requests.post(url, json=body, headers=headers, timeout=60)
        assert reply.status_code == 400
        assert "context_management.edits[0]" in reply.json()["error"]["message"]
