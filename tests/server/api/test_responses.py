"""The official OpenAI client gets what it expects of the Responses API.

Method: real servers over the fake engine, which answers with texts as models write them.
"""

import asyncio
import json

import openai
import pytest
import requests
from pydantic import BaseModel
from serving import KEYS, wait_until
from vocabularies import CALL

from tandem.server.dialects.responses import endpoints

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Tell the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
TOOLS = [WEATHER, PATCH, {"type": "web_search"}, {"type": "namespace", "name": "mcp", "tools": []}]


@pytest.fixture
def client(live):
    live.engine.cached_len = 3
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEYS[0], max_retries=0) as opened:
        yield opened


@pytest.fixture
def stranger(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEYS[1], max_retries=0) as opened:
        yield opened


def test_text(client, say, live):
    """The first documented example."""
    say("Hello you")
    reply = client.responses.create(model="tiny", instructions="Be brief.", input="hello")
    assert reply.output_text == "Hello you"
    assert [item.type for item in reply.output] == ["message"]
    assert (reply.status, reply.object, reply.error) == ("completed", "response", None)
    assert reply.usage.input_tokens == len(live.engine.requests[-1].prompt_ids)
    assert reply.usage.input_tokens_details.cached_tokens == 3
    assert reply.usage.output_tokens == len(live.engine.answer) + 1
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert say.prompt() == "[system]Be brief.[user]hello[assistant]"
    cut = client.responses.create(model="tiny", input="hello", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete"


TEXT_EVENTS = [
    "response.output_item.added", "response.content_part.added", "response.output_text.delta",
    "response.output_text.done", "response.content_part.done", "response.output_item.done",
]  # fmt: skip
REASONING_EVENTS = [
    "response.output_item.added", "response.content_part.added", "response.reasoning_text.delta",
    "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
]  # fmt: skip
CALL_EVENTS = [
    "response.output_item.added", "response.function_call_arguments.delta",
    "response.function_call_arguments.done", "response.output_item.done",
]  # fmt: skip


def read_events(reply: requests.Response) -> list[dict]:
    """Return the events of a stream, each with the name it was framed under."""
    events = []
    for block in reply.text.split("\n\n"):
        if block:
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def test_events_have_openais_names_and_order(client, say, live):
    say(f"<think>Hm.</think>I look.\n{CALL}")
    body = {"input": "weather?", "tools": TOOLS, "stream": True}
    auth = {"Authorization": f"Bearer {KEYS[0]}"}
    events = read_events(live.post("/v1/responses", body, headers=auth))
    kinds = [event["type"] for event in events]
    # Deltas of one kind come in a row, as many as there are tokens.
    kinds = [kind for index, kind in enumerate(kinds) if kinds[index - 1 : index] != [kind]]
    assert kinds == [
        "response.created", "response.in_progress", *REASONING_EVENTS, *TEXT_EVENTS, *CALL_EVENTS,
        "response.completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    final = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    assert [item["status"] for item in done] == ["completed"] * 3
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2]
    assert [event["item"]["id"] for event in added] == [item["id"] for item in done]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == done[event["output_index"]]["id"]
    text = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(text) == done[1]["content"][0]["text"] == "I look."
    assert 0 < final["usage"]["output_tokens_details"]["reasoning_tokens"] < 20


def test_clients_helper_puts_a_stream_together(client, say):
    say(f"<think>Hm.</think>I look.\n{CALL}\n{CALL}")
    with client.responses.stream(model="tiny", input="weather?", tools=TOOLS) as stream:
        deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    reasoning, message, *calls = final.output
    assert reasoning.content[0].text == "Hm."
    assert message.content[0].text == "I look."
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Bern 😀"}] * 2
    assert calls[0].call_id != calls[1].call_id
    assert len(deltas) > 6


def test_a_round_of_function_calling(client, say):
    """The documented example: the items of the answer and the tool's output are the next input."""
    say(f"<think>Hm.</think>{CALL}")
    items = [{"role": "user", "content": "weather?"}]
    first = client.responses.create(
        model="tiny", input=items, tools=TOOLS, instructions="Be brief."
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Bern 😀"})
    items += first.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    say("It rains.")
    second = client.responses.create(model="tiny", input=items, tools=TOOLS)
    assert second.output_text == "It rains."
    prompt = say.prompt()
    assert "<think>Hm.</think><tool_call>" in prompt
    assert f"[tool]rain(get_weather {call.call_id})" in prompt
    assert "apply_patch" in prompt
    assert "web_search" not in prompt


def test_a_tool_that_takes_a_text(client, say):
    arguments = json.dumps({"input": "*** Begin\n+a"})
    say(f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>')
    options = {"model": "tiny", "tools": TOOLS}
    reply = client.responses.create(input="edit", **options)
    (call,) = reply.output
    assert (call.type, call.name, call.input) == (
        "custom_tool_call",
        "apply_patch",
        "*** Begin\n+a",
    )
    kinds = [event.type for event in client.responses.create(input="edit", stream=True, **options)]
    assert kinds[3:5] == [
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
    ]
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    say("Edited.")
    client.responses.create(previous_response_id=reply.id, input=[output], **options)
    assert arguments in say.prompt()
    assert "[tool]Done.(apply_patch" in say.prompt()


class Event(BaseModel):
    """What the structured example extracts."""

    name: str
    participants: list[str]


def test_structured_output(client, say, live):
    """The documented example of ``responses.parse``."""
    say('{"name": "Fair", "participants": ["Ann"]}')
    reply = client.responses.parse(model="tiny", input="Ann goes to the fair.", text_format=Event)
    assert reply.output_parsed == Event(name="Fair", participants=["Ann"])
    assert "participants" in live.engine.requests[-1].sampling.grammar
    form = {"type": "json_object"}
    client.responses.create(model="tiny", input="x", text={"format": form})
    assert "object" in live.engine.requests[-1].sampling.grammar
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        client.responses.create(model="tiny", input="x", tools=TOOLS, tool_choice=choice)
        assert "get_weather" in live.engine.requests[-1].sampling.grammar
    only = {"type": "allowed_tools", "mode": "required", "tools": [WEATHER]}
    client.responses.create(model="tiny", input="x", tools=TOOLS, tool_choice=only)
    assert "apply_patch" not in live.engine.requests[-1].sampling.grammar


def test_reasoning(client, say):
    say("<think>Hm.</think>Yes.")
    include = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    reply = client.responses.create(
        model="tiny", input="so?", include=include, top_logprobs=1, reasoning={"effort": "high"}
    )
    hidden = reply.output[0].encrypted_content
    logprobs = reply.output[1].content[0].logprobs
    assert "".join(entry.token for entry in logprobs).endswith("Yes.<|endoftext|>")
    # A client without state hands back what it may not read.
    item = {"type": "reasoning", "summary": [], "encrypted_content": hidden}
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    history = [{"role": "user", "content": "so?"}, foreign, item, *reply.output[1:]]
    client.responses.create(model="tiny", input=history, store=False)
    assert "[assistant]Yes.<think>Hm.</think>" in say.prompt()


def test_developers_words_join_the_instructions(client, say):
    say("ok")
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "B"}]},
        {"role": "user", "content": "hello"},
    ]
    client.responses.create(model="tiny", instructions="A", input=items)
    assert say.prompt().startswith("[system]A\n\nB[user]hello")


def test_previous_response(client, stranger, say):
    say("I am Tandem.")
    first = client.responses.create(model="tiny", input="who?", instructions="Old.")
    say("Again.")
    options = {"model": "tiny", "input": "what?"}
    second = client.responses.create(previous_response_id=first.id, instructions="New.", **options)
    assert say.prompt() == "[system]New.[user]who?[assistant]I am Tandem.[user]what?[assistant]"
    assert second.previous_response_id == first.id
    # Both may be gone on from.
    third = client.responses.create(previous_response_id=second.id, stream=True, **options)
    assert [event.type for event in third][-1] == "response.completed"
    assert say.prompt().count("[user]what?") == 2
    client.responses.create(previous_response_id=first.id, **options)
    assert say.prompt().count("[user]what?") == 1
    with pytest.raises(openai.NotFoundError) as foreign:
        stranger.responses.create(previous_response_id=first.id, **options)
    assert foreign.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        stranger.responses.retrieve(first.id)
    unkept = client.responses.create(store=False, **options)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(previous_response_id=unkept.id, **options)


def test_retrieve_and_delete(client, stranger, say, live):
    say("Hello")
    made = client.responses.create(model="tiny", input="hello", metadata={"a": "b"})
    found = client.responses.retrieve(made.id)
    assert found.to_dict() == made.to_dict()
    with pytest.raises(openai.NotFoundError):
        stranger.responses.delete(made.id)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


def test_background(client, say, live):
    say("Hello you")
    made = client.responses.create(model="tiny", input="hello", background=True)
    assert made.status in ("queued", "in_progress")
    wait_until(lambda: client.responses.retrieve(made.id).status == "completed")
    assert client.responses.retrieve(made.id).output_text == "Hello you"
    live.engine.hang = True
    made = client.responses.create(model="tiny", input="hello", background=True)
    wait_until(lambda: live.engine.num_held == 1)
    with pytest.raises(openai.BadRequestError, match="still runs"):
        client.responses.create(model="tiny", input="x", previous_response_id=made.id)
    assert client.responses.cancel(made.id).status == "cancelled"
    assert live.engine.num_held == 0
    assert client.responses.cancel(made.id).status == "cancelled"
    made = client.responses.create(model="tiny", input="hello", background=True)
    wait_until(lambda: live.engine.num_held == 1)
    client.responses.delete(made.id)
    wait_until(lambda: live.engine.num_held == 0)
    live.engine.hang, live.engine.die_after = False, 1
    made = client.responses.create(model="tiny", input="hello", background=True)
    wait_until(lambda: client.responses.retrieve(made.id).status == "failed")
    assert client.responses.retrieve(made.id).error.code == "peer_lost"
    for wrong in ({"store": False}, {"stream": True}):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="tiny", input="x", background=True, **wrong)


def is_job(work) -> bool:
    """Tell whether a coroutine makes a response in the background."""
    return getattr(work, "cr_code", None) is endpoints._run.__code__


def cancel_jobs(hops: int) -> None:
    """Cancel what runs in the background after so many turns of the loop."""
    if hops:
        asyncio.get_running_loop().call_soon(cancel_jobs, hops - 1)
        return
    for task in asyncio.all_tasks():
        if is_job(task.get_coro()):
            task.cancel()


def test_a_background_response_is_cancelled_at_any_turn_of_the_loop(client, say, live, monkeypatch):
    """No place at the engine is lost and no response stays open, whichever await is cancelled."""
    live.engine.hang = True
    submit = live.engine.submit

    def is_cancelled(name):
        return client.responses.retrieve(name).status == "cancelled"

    for hops in range(16):

        async def submit_and_cancel(request, hops=hops):
            stream = await submit(request)
            cancel_jobs(hops)
            return stream

        monkeypatch.setattr(live.engine, "submit", submit_and_cancel)
        made = client.responses.create(model="tiny", input="hello", background=True)
        wait_until(lambda name=made.id: is_cancelled(name))
        wait_until(lambda: live.engine.num_held == 0)


def test_a_background_response_is_cancelled_before_it_begins(client, say, live, monkeypatch):
    """The handlers of a task that never took a step do not run; its response ends all the same."""
    live.engine.hang = True
    create = asyncio.create_task

    def create_cancelled(work):
        task = create(work)
        if is_job(work):
            task.cancel()
        return task

    monkeypatch.setattr(endpoints.asyncio, "create_task", create_cancelled)
    made = client.responses.create(model="tiny", input="hello", background=True)
    wait_until(lambda: client.responses.retrieve(made.id).status == "cancelled")
    assert live.engine.num_held == 0


def test_a_stream_that_fails(client, say, live):
    live.engine.die_after = 1
    say("Hello you")
    events = list(client.responses.create(model="tiny", input="hello", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "peer_lost"
    assert events[-1].response.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x" * 5000}, "input"),
    ],
)
def test_errors_name_the_field(client, live, body, param):
    reply = live.post("/v1/responses", body, headers={"Authorization": f"Bearer {KEYS[0]}"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
