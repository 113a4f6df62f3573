"""Whatever a client sends, it gets a 4xx that names the field, and the server stays unharmed.

Method: a table of wrong requests against one server; after each, nothing is held and the next
request is served.
"""

import json
import re
import socket

import pytest
from serving import WAIT_S

HELLO = [{"role": "user", "content": "hello"}]
CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


def chat(**fields):
    return CHAT, {"messages": HELLO} | fields


def text(**fields):
    return TEXT, {"prompt": "hello"} | fields


def generate(**sampling):
    return GENERATE, {"text": "hello", "sampling_params": sampling}


def message(**fields):
    return CHAT, {"messages": [fields]}


WRONG = [
    (chat(max_tokens="many"), "max_tokens"),
    (chat(max_tokens=True), "max_tokens"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_tokens=-1), "max_tokens"),
    (chat(max_tokens=1.5), "max_tokens"),
    (chat(max_tokens=10**30), "max_tokens"),
    (chat(temperature=-0.1), "temperature"),
    (chat(temperature="hot"), "temperature"),
    (chat(top_p=-0.1), "top_p"),
    (chat(top_p=1.1), "top_p"),
    (chat(top_k=-2), "top_k"),
    (chat(min_p=2), "min_p"),
    (chat(repetition_penalty=0), "repetition_penalty"),
    (chat(frequency_penalty=3), "frequency_penalty"),
    (chat(presence_penalty=-3), "presence_penalty"),
    (chat(seed=2**63), "seed"),
    (chat(seed=1.5), "seed"),
    (chat(n=0), "n"),
    (chat(n=257), "n"),
    (chat(n=10**9), "n"),
    (chat(best_of=3), "best_of"),
    (chat(stop=""), "stop"),
    (chat(stop=[1]), "stop[0]"),
    (chat(stop=["a", "x" * 2000]), "stop[1]"),
    (chat(stop=["x"] * 100_000), "stop"),
    (chat(stop_token_ids=[-1]), "stop_token_ids[0]"),
    (chat(stop_token_ids=[100_000]), "stop_token_ids"),
    (chat(logit_bias={"x": 1}), "logit_bias"),
    (chat(logit_bias={"1": 200}), "logit_bias"),
    (chat(logit_bias={"100000": 1}), "logit_bias"),
    (chat(min_tokens=6, max_tokens=5), "min_tokens"),
    (chat(top_logprobs=3), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(timeout=0), "timeout"),
    (chat(timeout=5e-324), "timeout"),
    (chat(timeout=0.0009), "timeout"),
    (chat(stream="yes"), "stream"),
    (chat(stream_options=[]), "stream_options"),
    (chat(tools=[{"type": "function"}]), "tools[0].function"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(response_format={"type": "yaml"}), "response_format"),
    (chat(response_format={"type": "json_schema"}), "response_format.json_schema.schema"),
    (chat(guided_regex="a("), "guided_regex"),
    (chat(guided_json={"type": "objekt"}), "guided_json"),
    (chat(guided_json={"$dynamicRef": "#a"}), "guided_json"),
    (chat(guided_json="{"), "guided_json"),
    (chat(guided_grammar="start: x"), "guided_grammar"),
    (chat(guided_grammar="start: x", regex="a"), "regex"),
    (chat(structured_outputs={"yaml": "a"}), "structured_outputs.yaml"),
    (chat(custom_logit_processor="x"), "custom_logit_processor"),
    (chat(chat_template="{{ 1 }}"), "chat_template"),
    (chat(modalities=["audio"]), "modalities"),
    (chat(continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
    (chat(model=3), "model"),
    (chat(chat_template_kwargs=[]), "chat_template_kwargs"),
    (chat(messages=[]), "messages"),
    (chat(messages="hello"), "messages"),
    (chat(messages=None), "messages"),
    (chat(messages=[{"role": "user", "content": "hello " * 300}]), "messages"),
    (chat(messages=[{"role": "user", "content": "refuse me"}]), "messages"),
    (message(role="wizard", content="x"), "messages[0].role"),
    (message(content="x"), "messages[0].role"),
    (message(role="user"), "messages[0].content"),
    (message(role="user", content=None), "messages[0].content"),
    (message(role="user", content=7), "messages[0].content"),
    (message(role="user", content=[]), "messages[0].content"),
    (
        message(role="user", content=[{"type": "image_url", "image_url": {}}]),
        "messages[0].content[0].type",
    ),
    (message(role="user", content=[{"type": "text"}]), "messages[0].content[0].text"),
    (message(role="assistant", content="x", tool_calls=[{}]), "messages[0].tool_calls[0].function"),
    ((CHAT, {}), "messages"),
    ((TEXT, {}), "prompt"),
    (text(prompt=""), "prompt"),
    (text(prompt=[]), "prompt"),
    (text(prompt=[[]]), "prompt"),
    (text(prompt={}), "prompt"),
    (text(prompt=[-1]), "prompt"),
    (text(prompt=[100_000]), "prompt"),
    (text(prompt=[True]), "prompt"),
    (text(prompt=[1, "a"]), "prompt"),
    (text(prompt=["a", 1]), "prompt"),
    (text(prompt=["a"] * 300), "n"),
    (text(prompt="hello " * 300), "prompt"),
    (text(prompt="x" * 1_000_000), "prompt"),
    (text(suffix="end"), "suffix"),
    (text(logprobs=21), "logprobs"),
    (text(echo="yes"), "echo"),
    ((GENERATE, {}), "text"),
    ((GENERATE, {"text": "a", "input_ids": [1]}), "text"),
    ((GENERATE, {"text": []}), "text"),
    ((GENERATE, {"input_ids": ["a"]}), "input_ids"),
    ((GENERATE, {"text": ["a"], "sampling_params": [{}, {}]}), "sampling_params"),
    (generate(max_new_tokens=-1), "sampling_params.max_new_tokens"),
    (generate(max_new_tokens=1, min_new_tokens=2), "sampling_params.min_new_tokens"),
    (generate(regex="a("), "sampling_params.regex"),
    (generate(n=0), "sampling_params.n"),
    (
        (GENERATE, {"text": ["a"], "sampling_params": [{"json_schema": "{"}]}),
        "sampling_params[0].json_schema",
    ),
    (("/tokenize", {}), "prompt"),
    (("/tokenize", {"prompt": 1}), "prompt"),
    (("/detokenize", {"tokens": [100_000]}), "tokens"),
    (("/detokenize", {"tokens": [-1]}), "tokens"),
    (("/detokenize", {"tokens": ["a"]}), "tokens"),
    (("/abort_request", {}), "rid"),
]


def check(reply, status: int) -> dict:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert not re.search(r"\[[a-z_]+\.[a-z_]+\]", error["message"]), "where in us is for the log"
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(("request_", "field"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_field_is_named(shared, request_, field):
    path, body = request_
    error = check(shared.post(path, body), 400)
    assert error["param"] == field
    assert shared.engine.num_held == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", None),
        (b"null", None),
        (b"[]", None),
        (b"hello", None),
        (b'{"prompt": "a"', "prompt"),
        (b'{"prompt": "a", "seed": NaN}', "seed"),
        (b'{"prompt": "a", "temperature": Infinity}', "temperature"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "stop": ["x", "\xff"]}', "stop[1]"),
        (b'{"prompt": "a", "ignored": "\xff"}', "ignored"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": "\\ud800 and more text"}', "prompt"),
        (b'{"prompt": "\\udc00\\ud800 and more text"}', "prompt"),
        (b'{"prompt": "a", "x": ' + b"[" * 100_000, None),
        (b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    ],
    ids=range(15),
)
def test_a_body_that_is_no_json_is_refused(shared, body, field):
    error = check(shared.post("/v1/completions", data=body), 400)
    assert error["param"] == field


@pytest.mark.parametrize("depth", [100, 500, 900, 2000])
def test_nested_template_arguments_are_passed_on_or_refused(shared, depth):
    body = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, %s}'
    nested = b'"chat_template_kwargs": {"a": %s%s}' % (b"[" * depth, b"]" * depth)
    reply = shared.post(CHAT, data=body % nested)
    assert reply.status_code in (200, 400), reply.text
    path, plain = chat(max_tokens=1)
    assert shared.post(path, plain).status_code == 200


def test_odd_but_valid_text_is_served(shared):
    for prompt in ("\x00", "\ufeff\u202e", "😀" * 10, "\r\n\t ", "\uffff"):
        reply = shared.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "later": [{}]})
        assert reply.status_code == 200, reply.text


def test_a_huge_body_is_refused_while_it_arrives(serve):
    live = serve(max_body_bytes=4096)
    check(live.post("/v1/completions", {"prompt": "a" * 100_000}), 413)
    # Without a declared length: the server must count.
    chunks = (b"a" * 1000 for _ in range(100))
    check(live.post("/v1/completions", data=chunks), 413)
    assert live.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_body_that_never_comes_is_given_up(serve):
    live = serve(body_timeout_s=0.1)
    with socket.create_connection(("127.0.0.1", live.running.port), WAIT_S) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        )
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 408")
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "body_timeout"


def test_unknown_path_and_wrong_method(shared):
    missing = check(shared.get("/v2/nothing"), 404)
    assert missing["code"] == "not_found"
    assert missing["message"] == ("there is no endpoint /v2/nothing: GET /openapi.json lists all")
    assert "mean" not in check(shared.post("/pooling", {}), 404)["message"]
    missing = check(shared.post("/chat/completions", {}), 404)
    assert "did you mean /v1/chat/completions?" in missing["message"]
    assert check(shared.get(CHAT), 405)["code"] == "method_not_allowed"


def test_fields_that_ask_for_nothing_pass(shared):
    path, body = chat(
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        functions=None,
        guided_json=None,
        use_beam_search=False,
        stop=[],
        logit_bias={},
        best_of=1,
        user="someone",
        metadata={"a": "b"},
        max_tokens=2,
    )
    assert shared.post(path, body).status_code == 200


def test_null_is_as_good_as_absent(shared):
    names = ("max_tokens", "temperature", "stop", "seed", "n", "stream", "logit_bias", "timeout")
    path, body = text(**dict.fromkeys(names))
    assert shared.post(path, body).status_code == 200


def test_what_does_not_fit_names_both_sizes(shared):
    _, body = text(prompt=[1] * 256)
    error = check(shared.post(TEXT, body), 400)
    assert error["message"].count("256") == 2
    _, body = text(prompt=[1] * 255, max_tokens=1)
    assert shared.post(TEXT, body).status_code == 200
    # Chat without a limit takes what fits.
    path, body = chat()
    assert shared.post(path, body).json()["usage"]["total_tokens"] == 256
