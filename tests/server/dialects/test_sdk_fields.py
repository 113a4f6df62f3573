"""No field that an official client can send is ignored in silence."""

import sys
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import requests

from each import each
from tandem.server.dialects.sdk_fields import REQUEST_TYPES
from tandem.server.dialects.sdk_types import NESTED_TYPES

TOOLS = Path(__file__).parents[3] / "tools"


def test_every_field_of_the_clients_is_decided(monkeypatch):
    """With the clients that ``constraints.txt`` pins; a new one has new fields."""
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])
    from page.api import list_sdk_fields, list_sdk_types

    for request in REQUEST_TYPES:
        fields = list_sdk_fields(request)
        assert fields
        undecided = [name for name in fields if not request.find_answer(name)]
        assert not undecided, (request.path, undecided)
    for nested in NESTED_TYPES:
        decided = nested.served | nested.ignored.keys() | nested.refused.keys()
        assert decided == list_sdk_types(nested).keys(), nested.place


CHAT = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}


@each(
    ("path", "fields", "name"),
    [
        ("/v1/chat/completions", {"verbosity": "low"}, "verbosity"),
        ("/v1/chat/completions", {"moderation": {"a": 1}}, "moderation"),
        ("/v1/responses", {"context_management": [1], "input": "a"}, "context_management"),
        ("/v1/messages", {"compaction": {"a": 1}}, "compaction"),
        ("/v1/messages/count_tokens", {"thread": "t"}, "thread"),
        ("/api/chat", {"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "repeat_last_n"),
        ("/api/generate", {"prompt": "a", "width": 64}, "width"),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(live, path, fields, name):
    headers = {"Authorization": "Bearer secret"}
    body = CHAT | fields
    reply = requests.post(live.url + path, json=body, headers=headers, timeout=60)
    assert (reply.status_code, name in reply.text) == (400, True), reply.text
    harmless = {"options": {"repeat_last_n": 64}} if "options" in fields else {}
    kept = {key: value for key, value in body.items() if key == "input" or key not in fields}
    again = requests.post(live.url + path, json=kept | harmless, headers=headers, timeout=60)
    assert again.status_code == 200, again.text


OBJECT = {"type": "object"}
PLACES = {
    "messages of POST /v1/chat/completions": lambda e: {"messages": [*CHAT["messages"], e]},
    "contents of messages of POST /v1/chat/completions": lambda e: {
        "messages": [{"role": "user", "content": [e]}]
    },
    "tools of POST /v1/chat/completions": lambda e: {"tools": [e]},
    "tool_choice of POST /v1/chat/completions": lambda e: {
        "tools": [{"type": "function", "function": {"name": "a", "parameters": OBJECT}}],
        "tool_choice": e,
    },
    "response_format of POST /v1/chat/completions": lambda e: {"response_format": e},
    "input of POST /v1/responses": lambda e: {"input": [*CHAT["messages"], e]},
    "contents of messages of POST /v1/responses": lambda e: {
        "input": [{"role": "user", "content": [e]}]
    },
    "tools of POST /v1/responses": lambda e: {"input": "hi", "tools": [e]},
    "tool_choice of POST /v1/responses": lambda e: {
        "input": "hi",
        "tools": [{"type": each, "name": "a"} for each in ("function", "custom")],
        "tool_choice": e,
    },
    "text.format of POST /v1/responses": lambda e: {"input": "hi", "text": {"format": e}},
    "contents of messages of POST /v1/messages": lambda e: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, e]}]
    },
    "tools of POST /v1/messages": lambda e: {"tools": [e]},
    "tool_choice of POST /v1/messages": lambda e: {
        "tools": [{"name": "a", "input_schema": OBJECT}],
        "tool_choice": e,
    },
    "thinking of POST /v1/messages": lambda e: {"thinking": e},
}
"""Bodies with an example of a type at its place."""
WHOLE = {
    "assistant": {"content": "a"},
    "json_schema": {"json_schema": {"name": "a", "schema": OBJECT}},
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "a"}]},
}
"""What examples need beyond the fields that the clients require."""


def make_example(kind):
    """Return the least value of a client's type."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Required, typing.NotRequired, typing.Annotated):
        return make_example(parts[0])
    if origin is typing.Literal:
        return parts[0]
    if hasattr(kind, "__required_keys__"):  # A TypedDict, of either module.
        hints = typing.get_type_hints(kind, include_extras=True)
        needed = {
            name: each
            for name, each in hints.items()
            if typing.get_origin(each) is typing.Required
            or (kind.__total__ and typing.get_origin(each) is not typing.NotRequired)
        }
        return {name: make_example(each) for name, each in needed.items()}
    if origin is typing.Union:
        return "a" if str in parts else make_example(parts[0])
    if kind is str:
        return "a"
    if kind in (bool, int, float):
        return kind(1)
    if isinstance(origin, type) and issubclass(origin, Iterable) and origin is not dict:
        return {} if issubclass(origin, Mapping) else [make_example(parts[0])]
    return {}


@pytest.mark.slow
def test_every_nested_type_of_the_clients_is_answered_as_its_page_says(live, monkeypatch):
    """A type that is not served is refused with its place, or left out as nothing comes of it."""
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])
    from page.api import list_sdk_types

    headers = {"Authorization": "Bearer secret"}
    assert [nested.place for nested in NESTED_TYPES] == list(PLACES)
    wrong = []
    for nested in NESTED_TYPES:
        _, _, path = nested.place.rpartition(" ")
        for name, kind in list_sdk_types(nested).items():
            example = name
            if kind is not None:
                example = make_example(kind) | {nested.key: name} | WHOLE.get(name, {})
            body = {key: CHAT[key] for key in ("model", "max_tokens")}
            if path != "/v1/responses":
                body["messages"] = CHAT["messages"]
            reply = requests.post(
                live.url + path,
                json=body | PLACES[nested.place](example),
                headers=headers,
                timeout=60,
            )
            wanted = 400 if name in nested.refused else 200
            field = nested.place.split(" of ")[0]
            field = "content" if field == "contents" else field
            is_named = wanted == 200 or field in reply.text
            if reply.status_code != wanted or not is_named:
                wrong.append((nested.place, name, reply.status_code, reply.text[:200]))
    assert not wrong
