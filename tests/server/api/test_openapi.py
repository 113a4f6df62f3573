"""/openapi.json says what is served: its paths, and schemas that real bodies and answers fit.

Method: answers of a real server are checked against the document with a small validator, which
unlike JSON Schema refuses fields that the schema does not name.
"""

import json
import re
from functools import partial

import pytest
import requests
from serving import wait_until

from tandem.server.api.endpoints import list_endpoints
from tandem.server.edge.auth import ADMIN_PATHS


@pytest.fixture
def server(shared, tokenizer):
    shared.renew()
    shared.engine.answer = tokenizer.encode("hello world")
    shared.engine.stop_token_id = 0
    return shared


@pytest.fixture
def document(server):
    reply = server.get("/openapi.json")
    assert reply.status_code == 200
    return reply.json()


TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def find_fault(value, schema: dict, document: dict, where: str = "$") -> str | None:
    """Return the first place where a value does not fit."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/components/schemas/")
        return find_fault(value, document["components"]["schemas"][name], document, where)
    if "anyOf" in schema:
        faults = [find_fault(value, each, document, where) for each in schema["anyOf"]]
        return None if None in faults else f"{where}: {faults}"
    if "enum" in schema:
        return None if value in schema["enum"] else f"{where}: {value!r} is none of the enum"
    kind = schema.get("type")
    if kind is None:
        return None
    is_bool = isinstance(value, bool)
    if not isinstance(value, TYPES[kind]) or (is_bool and kind != "boolean"):
        return f"{where}: {value!r} is no {kind}"
    if kind in ("integer", "number") and not (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
    ):
        return f"{where}: {value!r} is out of bounds"
    if kind == "string" and len(value) < schema.get("minLength", 0):
        return f"{where}: {value!r} is too short"
    faults = []
    if kind == "object":
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        missing = set(schema.get("required", ())) - set(value)
        faults = [f"{where}: lacks {missing}"] if missing else []
        for name, item in value.items():
            if name not in fields and "properties" in schema:
                faults.append(f"{where}.{name} is not in the schema")
            each = fields.get(name, rest if isinstance(rest, dict) else {})
            faults.append(find_fault(item, each, document, f"{where}.{name}"))
    elif kind == "array":
        heads = schema.get("prefixItems", [])
        rest = schema.get("items") or {}
        for index, item in enumerate(value):
            each = heads[index] if index < len(heads) else rest
            faults.append(find_fault(item, each, document, f"{where}[{index}]"))
    return next((fault for fault in faults if fault is not None), None)


def schema_of(document: dict, path: str, method: str, kind: str, status: str = "200") -> dict:
    content = document["paths"][path][method]["responses"][status]["content"]
    return content[kind]["schema"]


def event_schema_of(document: dict, path: str) -> dict:
    """Return the schema of the JSON in an event's data, beside the text that ends a stream."""
    event = schema_of(document, path, "post", "text/event-stream")
    done, text = event["properties"]["data"]["anyOf"]
    assert done == {"const": "[DONE]"}
    return text["contentSchema"]


CHAT = {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 2}
POSTS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/messages", CHAT | {"max_tokens": 3}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hello"}]}),
    ("/api/chat", {"messages": CHAT["messages"], "stream": False, "logprobs": True}),
    ("/api/generate", {"prompt": "hello", "stream": False}),
    ("/api/embed", {"input": "hello"}),
    ("/api/embeddings", {"prompt": "hello"}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    *((path, {"text_1": "a", "text_2": "b"}) for path in ("/v1/score", "/score")),
    *(
        (path, {"query": "a", "documents": ["b", {"text": "c"}]})
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    ("/api/show", {"model": "tiny"}),
    ("/v1/responses", {"input": "hello", "top_logprobs": 1}),
    ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 2}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
    ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 2}),
    ("/generate", {"text": ["a", "b"], "return_logprob": True, "logprob_start_len": 0}),
    ("/tokenize", {"prompt": "a b", "return_token_strs": True}),
    ("/v1/tokenize", {"prompt": ["a", "b"]}),
    ("/detokenize", {"tokens": [70, 71]}),
    ("/v1/detokenize", {"tokens": [[70], [71]]}),
    ("/abort_request", {"rid": "none"}),
    ("/flush_cache", None),
    ("/traffic", {"action": "start", "block_tokens": 64}),
    ("/ping", None),
]
GETS = [
    "/v1/models", "/v1/models/tiny", "/get_model_info", "/model_info", "/get_server_info",
    "/server_info", "/expert_counts", "/flush_cache", "/instances", "/health", "/ping", "/live",
    "/ready", "/version", "/openapi.json", "/api/tags", "/api/ps", "/api/version",
]  # fmt: skip


RESPONSE_CALLS = (("/cancel", "post"), ("", "get"), ("", "delete"))
"""Of a response that is kept."""


def test_paths_are_those_of_the_table(server, document):
    described = {(path, m) for path, item in document["paths"].items() for m in item}
    served = {
        (re.sub(r":\w+}", "}", each.path), method.lower())
        for each in list_endpoints(server.config)
        for method in each.methods
    }
    assert described == served
    tried = (
        {(path, "post") for path, _ in POSTS} | {(p, "get") for p in GETS} | {("/metrics", "get")}
    )
    tried |= {("/requests/{id}/timeline", "get"), ("/models", "get")}
    tried |= {(f"/v1/responses/{{id}}{end}", m) for end, m in RESPONSE_CALLS}
    tried |= {(path, method) for method, path in FILE_CALLS}
    # In test_adapters.py, where there is an admin key.
    tried |= {(path, "post") for path in ADMIN_PATHS}
    assert {(p.replace("/tiny", "/{name}"), m) for p, m in tried} == served, "every one is tried"
    assert document["openapi"].startswith("3.1")


FILE_CALLS = [
    ("post", "/v1/files"), ("get", "/v1/files"), ("get", "/v1/files/{id}"),
    ("get", "/v1/files/{id}/content"), ("post", "/v1/batches"), ("get", "/v1/batches"),
    ("get", "/v1/batches/{id}"), ("post", "/v1/batches/{id}/cancel"), ("delete", "/v1/files/{id}"),
    ("delete", "/v1/batches/{id}"),
]  # fmt: skip


def is_over(url: str) -> bool:
    return requests.get(url, timeout=10).json()["status"] in ("failed", "cancelled")


def test_files_and_batches_fit(server, document):
    ids = {}
    for method, path in FILE_CALLS:
        kind = path.split("/")[2]
        options = {}
        if (method, path) == ("post", "/v1/files"):
            options = {"files": {"file": ("a", b"{}\n")}, "data": {"purpose": "batch"}}
        elif (method, path) == ("post", "/v1/batches"):
            body = {"input_file_id": ids["files"], "endpoint": "/v1/completions"}
            options = {"json": body}
        elif method == "delete":
            # The batch that needs it has failed by then, or is cancelled.
            wait_until(partial(is_over, f"{server.url}/v1/batches/{ids['batches']}"))
        url = server.url + path.replace("{id}", ids.get(kind, ""))
        reply = requests.request(method, url, timeout=10, **options)
        assert reply.status_code == 200, (path, reply.text)
        if path.endswith("/content"):
            assert reply.content == b"{}\n"
            continue
        told = reply.json()
        ids.setdefault(kind, told.get("id"))
        schema = schema_of(document, path, method, "application/json")
        assert find_fault(told, schema, document) is None


def test_timelines_fit(server, document):
    reply = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
    told = server.get(f"/requests/{reply.json()['id']}/timeline")
    assert told.status_code == 200
    answer = document["paths"]["/requests/{id}/timeline"]["get"]["responses"]["200"]
    schema = answer["content"]["application/json"]["schema"]
    assert find_fault(told.json(), schema, document) is None


def test_kept_responses_fit(server, document):
    made = server.post("/v1/responses", {"input": "a", "background": True}).json()
    for end, method in RESPONSE_CALLS:
        url = f"{server.url}/v1/responses/{made['id']}{end}"
        reply = requests.request(method, url, timeout=10)
        assert reply.status_code == 200, reply.text
        schema = schema_of(document, f"/v1/responses/{{id}}{end}", method, "application/json")
        assert find_fault(reply.json(), schema, document) is None
    assert server.get(f"/v1/responses/{made['id']}").status_code == 404


@pytest.mark.parametrize(("path", "body"), POSTS)
def test_posts_fit(server, document, path, body):
    if body is not None:
        content = document["paths"][path]["post"]["requestBody"]["content"]
        assert find_fault(body, content["application/json"]["schema"], document) is None
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    schema = schema_of(document, path, "post", "application/json")
    assert find_fault(reply.json(), schema, document) is None


@pytest.mark.parametrize("path", GETS)
def test_gets_fit(server, document, path):
    reply = server.get(path)
    assert reply.status_code == 200, reply.text
    schema = schema_of(document, path.replace("/tiny", "/{name}"), "get", "application/json")
    assert find_fault(reply.json(), schema, document) is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": "a", "logprobs": 1}),
        ("/generate", {"text": ["a", "b"], "return_logprob": True}),
    ],
)
def test_events_fit(server, document, path, body):
    schema = event_schema_of(document, path)
    with requests.post(
        server.url + path, json=body | {"stream": True}, stream=True, timeout=10
    ) as reply:
        events = [line[6:] for line in reply.iter_lines() if line]
    assert events.pop() == b"[DONE]"
    assert events
    for event in events:
        assert find_fault(json.loads(event), schema, document) is None


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere", "/v1/models/none"])
def test_errors_fit(server, document, path):
    reply = server.get(path)
    assert reply.status_code >= 400
    schema = schema_of(document, "/v1/completions", "post", "application/json", "default")
    assert find_fault(reply.json(), schema, document) is None


def test_the_validator_finds_faults(document):
    schema = {"$ref": "#/components/schemas/Health"}
    assert find_fault({"status": "ready"}, schema, document) is None
    for wrong in ({}, {"status": 1}, {"status": "ready", "more": 1}, [], None):
        assert find_fault(wrong, schema, document) is not None


def test_bounds_of_fields_are_told(document):
    schema = document["components"]["schemas"]["ChatRequest"]["properties"]["temperature"]
    numbers = [each for each in schema["anyOf"] if each.get("type") == "number"]
    assert numbers[0]["minimum"] == 0.0
    assert numbers[0]["maximum"] == 100.0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_stop_ids_end_where_the_vocabulary_does(server, document, path):
    name, make_body = {
        "/v1/completions": ("CompletionRequest", lambda ids: {"prompt": "a", **ids}),
        "/v1/chat/completions": ("ChatRequest", lambda ids: {**CHAT, **ids}),
        "/generate": ("SglangSampling", lambda ids: {"text": "a", "sampling_params": ids}),
    }[path]
    schema = document["components"]["schemas"][name]["properties"]["stop_token_ids"]
    highest = document["components"]["schemas"]["TokenId"]["maximum"]
    for last, status in ((highest, 200), (highest + 1, 400)):
        fault = find_fault([0, last], schema, document)
        assert (fault is None) == (status == 200), fault
        answer = server.post(path, make_body({"stop_token_ids": [0, last]}))
        assert answer.status_code == status


def test_choices_are_bounded_as_the_server_bounds_them(server, document):
    limit = server.config.max_choices
    for name in ("CompletionRequest", "ChatRequest", "SglangSampling"):
        schema = document["components"]["schemas"][name]["properties"]["n"]
        assert find_fault(limit, schema, document) is None
        assert find_fault(limit + 1, schema, document) is not None
    refused = server.post("/v1/completions", {"prompt": "a", "n": limit + 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


def test_a_stream_that_fails_fits(server, document):
    """Its status is sent by then, so the error is an event."""
    schema = event_schema_of(document, "/v1/completions")
    server.engine.hang = True
    body = {"prompt": "a", "stream": True, "timeout": 0.05}
    reply = server.post("/v1/completions", body)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line[6:8] == '{"']
    assert "error" in events[-1]
    for event in events:
        assert find_fault(event, schema, document) is None


def test_an_empty_name_of_an_adapter_is_refused_by_schema_and_server(server, document):
    schema = document["components"]["schemas"]["GenerateRequest"]["properties"]["lora_path"]
    for wrong, param in (("", "lora_path"), ([""], "lora_path[0]")):
        assert find_fault(wrong, schema, document) is not None
        answer = server.post("/generate", {"text": "a", "lora_path": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_keys_are_asked_for_where_they_are_needed(serve_text):
    live = serve_text(api_key=("k",), admin_api_key=("a",))
    assert live.get("/openapi.json").status_code == 401
    document = live.get("/openapi.json", headers={"Authorization": "Bearer k"}).json()
    assert document["components"]["securitySchemes"]
    needing = {
        path
        for path, item in document["paths"].items()
        if any("security" in o for o in item.values())
    }
    assert set(document["paths"]) - needing == {"/health", "/ping", "/live", "/ready"}


def test_what_no_key_opens_asks_for_none(server, document, serve_text):
    """Without an admin's key the answer is 403 to everyone; 401 would ask for one."""
    for path in ADMIN_PATHS:
        methods = set(document["paths"][path])
        assert methods - {"get"} == {"post"}
        assert server.get(path).status_code == (200 if "get" in methods else 405)
        loading = document["paths"][path]["post"]
        assert "security" not in loading
        assert "401" not in loading["responses"]
        assert "server.admin_api_key" in loading["responses"]["403"]["description"]
        assert server.post(path, {"lora_name": "a", "lora_path": "a"}).status_code == 403
    live = serve_text(admin_api_key=("k",))
    described = live.get("/openapi.json").json()["paths"]
    for path in ADMIN_PATHS:
        assert described[path]["post"]["security"] == [{"admin_key": []}]
        assert live.post(path, {"lora_name": "a", "lora_path": "a"}).status_code == 401


def test_what_the_rules_of_bodies_say_is_what_the_handlers_do(serve):
    """A body that keeps the rules is answered, one that breaks a rule alone is a 400."""
    live = serve()
    user = {"role": "user", "content": "a"}
    cases = [
        ("/tokenize", {"prompt": "a"}, 200), ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": [user]}, 400),
        ("/detokenize", {"tokens": [70.0]}, 200), ("/detokenize", {"tokens": [70.5]}, 400),
        ("/detokenize", {"tokens": []}, 200), ("/detokenize", {"tokens": [None]}, 400),
        ("/abort_request", {"rid": "x"}, 200), ("/abort_request", {}, 400),
        ("/generate", {"text": "a", "input_ids": None}, 200), ("/generate", {}, 400),
        ("/v1/completions", {"prompt": [70.0, 71], "n": 1.0, "max_tokens": 2.0}, 200),
        ("/v1/completions", {"prompt": "a", "n": 1.5}, 400),
        ("/v1/completions", {"prompt": ""}, 400),
        ("/v1/chat/completions", {"messages": [user], "max_tokens": 2}, 200),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, 400),
        ("/v1/chat/completions", {"messages": [user], "top_logprobs": 2}, 400),
        ("/v1/chat/completions", {"messages": [user], "max_tokens": 0}, 400),
    ]  # fmt: skip
    for path, body, status in cases:
        assert live.post(path, body).status_code == status, (path, body)


def test_keys_and_errors_have_names(serve_text):
    """Who reads the document learns which key an endpoint takes and how an error looks."""
    document = (
        serve_text(api_key=("k",), admin_api_key=("a",))
        .get("/openapi.json", headers={"Authorization": "Bearer k"})
        .json()
    )
    assert set(document["components"]["securitySchemes"]) == {"key", "admin_key"}
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["security"] == [{"key": []}, {"admin_key": []}]
    loading = document["paths"]["/v1/load_lora_adapter"]["post"]
    assert loading["security"] == [{"admin_key": []}]
    for status in ("400", "401", "403", "408", "413", "503", "504", "default"):
        schema = chat["responses"][status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorReply"}
    ready = document["paths"]["/ready"]["get"]
    assert "security" not in ready
    schema = ready["responses"]["503"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/Readiness"}
