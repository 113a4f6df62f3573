"""No field that an official client can send is ignored in silence."""

import sys
from pathlib import Path

import requests

from each import each
from tandem.server.dialects.sdk_fields import REQUEST_TYPES

TOOLS = Path(__file__).parents[3] / "tools"


def test_every_field_of_the_clients_is_decided(monkeypatch):
    """With the clients that ``constraints.txt`` pins; a new one has new fields."""
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])
    from page.api import list_sdk_fields

    for request in REQUEST_TYPES:
        fields = list_sdk_fields(request)
        assert fields
        undecided = [name for name in fields if not request.find_answer(name)]
        assert not undecided, (request.path, undecided)


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
