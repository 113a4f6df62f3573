"""No body brings a server error, whatever it holds.

Method: bodies made of the fields that each endpoint knows, with values of every JSON type and near
every bound; and arbitrary bytes. The answer is 200 or a 4xx of the common shape, and afterwards the
engine holds nothing.
"""

import itertools
import json
import re

import msgspec
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import WAIT_S, LiveServers, wait_until

from tandem.core.errors import ConfigError, TandemError
from tandem.server.api.endpoints import list_endpoints
from tandem.server.protocol import anthropic, ollama, openai, responses
from tandem.server.protocol.decode import decode_body
from tandem.server.protocol.ollama import OllamaChatRequest
from tandem.server.protocol.openai import ChatRequest, CompletionRequest, SamplingFields
from tandem.server.protocol.sglang import GenerateRequest, SglangSampling

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 30)
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**40, 1e308, 1e-320, 0.5, -0.0])
    | st.text(max_size=6)
    | st.sampled_from(["user", "hello", "tiny", "text", "\x00", "😀", "<|im_end|>"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("01ax", max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)
VALID = {
    "temperature": st.floats(0, 2),
    "top_p": st.sampled_from([0.1, 1]),
    "top_k": st.integers(-1, 5),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "n": st.integers(1, 3),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3)),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 300), max_size=3),
    "ignore_eos": st.booleans(),
    "echo": st.booleans(),
    "logprobs": st.booleans() | st.integers(0, 20),
    "top_logprobs": st.integers(0, 20),
    "return_logprob": st.booleans(),
    "logprob_start_len": st.integers(-1, 3),
    "priority": st.integers(-5, 5),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=3), values, max_size=3),
}
"""Values that fit, of fields where most others do not."""


def mostly(valid: st.SearchStrategy, otherwise: st.SearchStrategy) -> st.SearchStrategy:
    return st.sampled_from([valid, valid, valid, otherwise]).flatmap(lambda chosen: chosen)


def bodies(struct: type, **required: st.SearchStrategy) -> st.SearchStrategy:
    """Bodies with the required fields and up to three others that the struct knows."""
    # A stream's errors come as events; its status says nothing.
    names = sorted({*struct.__struct_fields__} - {*required, "stream"})
    optional = {name: mostly(VALID.get(name, values), values) for name in names}
    few = st.lists(st.sampled_from(names), max_size=3, unique=True)
    return few.flatmap(
        lambda chosen: st.fixed_dictionaries(required | {name: optional[name] for name in chosen})
    )


few_tokens = mostly(st.integers(1, 4), values)
texts = mostly(st.sampled_from(["hello", ["a", "b"], [5, 6], [[5], [6, 7]]]), values)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": mostly(st.sampled_from(["user", "system", "assistant"]), values),
            "content": mostly(st.text(max_size=5), values),
        }
    ),
    min_size=1,
    max_size=2,
)
params = bodies(SglangSampling, max_new_tokens=few_tokens)
REQUESTS = st.one_of(
    st.tuples(
        st.just("/v1/completions"), bodies(CompletionRequest, prompt=texts, max_tokens=few_tokens)
    ),
    st.tuples(
        st.just("/v1/chat/completions"),
        bodies(ChatRequest, messages=mostly(messages, values), max_tokens=few_tokens),
    ),
    st.tuples(
        st.just("/generate"),
        bodies(GenerateRequest, text=texts, sampling_params=mostly(params, values)),
    ),
    st.tuples(
        st.just("/api/chat"),
        bodies(OllamaChatRequest, messages=mostly(messages, values), stream=st.just(False)),
    ),
    st.tuples(st.just("/tokenize"), st.fixed_dictionaries({"prompt": texts})),
    st.tuples(st.just("/detokenize"), st.fixed_dictionaries({"tokens": texts})),
    st.tuples(st.sampled_from(["/generate", "/v1/completions", "/abort_request"]), values),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(REQUESTS)
def test_a_strange_body_is_answered_and_nothing_leaks(shared, request_):
    path, body = request_
    reply = shared.post(path, data=json.dumps(body).encode())
    assert reply.status_code in (200, 400, 404), (path, body, reply.text)
    if reply.status_code != 200:
        error = reply.json()["error"]
        if path != "/api/chat":
            assert error["type"] == "invalid_request_error"
            error = error["message"]
        assert error
    wait_until(lambda: shared.engine.num_held == 0)


@pytest.mark.parametrize("struct", [ChatRequest, CompletionRequest, GenerateRequest])
@given(data=st.binary(max_size=60) | st.text('{}[]":,\\ud8c0te1-. ', max_size=60).map(str.encode))
def test_arbitrary_bytes_decode_or_are_refused(struct, data):
    try:
        decode_body(data, msgspec.json.Decoder(struct))
    except TandemError as error:
        assert isinstance(error, ConfigError)
        assert error.what


@given(st.sampled_from(sorted(SamplingFields.__struct_fields__)), values)
def test_the_named_field_is_the_wrong_one(name, value):
    body = json.dumps({"prompt": "a", name: value}).encode()
    try:
        decode_body(body, msgspec.json.Decoder(CompletionRequest))
    except ConfigError as error:
        assert error.field is not None
        assert error.field.split(".")[0].split("[")[0] == name


@pytest.mark.parametrize("depth", [500, 3000])
def test_json_in_a_text_that_is_nested_too_deep_is_refused(shared, depth):
    """Python reads it by recursion, which ends in an error that is not ``ValueError``."""
    schema = '{"anyOf":[' * depth + '{"type":"string"}' + "]}" * depth
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": schema}}
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    items = [{"type": "function_call", "call_id": "a", "name": "f", "arguments": schema}]
    for path, body in {
        "/generate": {"text": "a", "sampling_params": {"json_schema": schema}},
        "/v1/completions": {"prompt": "a", "guided_json": schema},
        "/v1/chat/completions": {"messages": said},
        "/v1/responses": {"input": items},
    }.items():
        reply = shared.post(path, json=body)
        # What a call's arguments are is no matter: a template gets them as a text.
        assert reply.status_code in (200, 400), (path, reply.text)
    wait_until(lambda: shared.engine.num_held == 0)


def test_no_number_or_name_of_a_query_or_path_is_an_error_of_the_server(shared):
    for endpoint in list_endpoints(shared.config):
        for value in ("9" * 5000, "%00", "%ff", "-1", "[" * 300):
            path = re.sub(r"{.*?}", value, endpoint.path)
            for method in endpoint.methods:
                query = f"?limit={value}&after={value}&stream={value}&purpose={value}"
                reply = requests.request(method, shared.url + path + query, timeout=WAIT_S)
                assert reply.status_code < 500, (path[:99], reply.text)


DEEP = "[" * 500 + "]" * 500
HOSTILE = [
    *("9" * 5000, "-1", "-0.0", "1e999", "-1e999", "1e308", "5e-324", "1" * 400),
    *("NaN", "Infinity", "18446744073709551616", "-9223372036854775808", "null", "true"),
    *('""', '"\\u0000"', '"\\ud800"', '"\\udc00x"', '"\xff"', "[]", "{}", "[[]]", "[null]"),
    *(DEEP, "[" * 980 + "]" * 980, "[" * 5000, '{"a":' * 500 + "1" + "}" * 500),
    # Texts that something here may read as a number, JSON, a pattern, a path or base64.
    *('"%s"' % ("9" * 5000), '"1e999"', '"nan"', '"%s"' % ("\u0661" * 5000)),
    *(json.dumps(DEEP), json.dumps('{"anyOf":[' * 500 + "{}" + "]}" * 500), '"(((((((((("'),
    *(
        json.dumps("(" * 5000),
        json.dumps("../" * 5000),
        '"data:image/png;base64,%%%"',
        '"a\\ud83d"',
    ),
]
"""Values as JSON, or what is none."""
BASES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "model": "tiny"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}], "model": "tiny"},
    "/v1/responses": {"input": "a"},
    "/v1/batches": {"input_file_id": "a", "endpoint": "/v1/completions"},
    "/v1/embeddings": {"input": "a"},
    "/api/chat": {"messages": [{"role": "user", "content": "a"}], "stream": False},
    "/api/generate": {"prompt": "a", "stream": False},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/generate": {"text": "a"},
}
"""Bodies that are answered, to which a hostile field is added; others have this field alone."""
SHORT = {
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/completions": {"max_tokens": 1},
    "/v1/messages": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1},
    "/generate": {"sampling_params": {"max_new_tokens": 1}},
    "/api/chat": {"options": {"num_predict": 1}},
    "/api/generate": {"options": {"num_predict": 1}},
}
INNER = [  # A path, the struct whose field is hostile, and the rest of the body around it.
    ("/v1/chat/completions", openai.InputMessage, '{"messages":[{"role":"user",FIELD}]}'),
    ("/v1/chat/completions", openai.InputMessage, '{"messages":[{"role":"assistant",FIELD}]}'),
    ("/v1/chat/completions", openai.ContentPart,
     '{"messages":[{"role":"user","content":[{"type":"text",FIELD}]}]}'),
    ("/v1/chat/completions", openai.InputFunction,
     '{"messages":[{"role":"user","content":"a"},{"role":"assistant","tool_calls":'
     '[{"id":"a","type":"function","function":{"name":"f",FIELD}}]}]}'),
    ("/v1/chat/completions", openai.Function,
     '{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"tool_choice":"required",'
     '"tools":[{"type":"function","function":{"name":"f",FIELD}}]}'),
    ("/v1/chat/completions", openai.ResponseFormat,
     '{"messages":[{"role":"user","content":"a"}],"max_tokens":1,'
     '"response_format":{"type":"json_schema",FIELD}}'),
    ("/v1/messages", anthropic.AnthropicBlock,
     '{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":[{"type":"text",FIELD}]}]}'),
    ("/v1/messages", anthropic.AnthropicTool,
     '{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"a"}],'
     '"tools":[{"name":"f",FIELD}]}'),
    ("/v1/responses", responses.InputItem,
     '{"max_output_tokens":1,"input":[{"type":"message",FIELD}]}'),
    ("/v1/responses", responses.ResponseTool,
     '{"max_output_tokens":1,"input":"a","tools":[{"type":"function","name":"f",FIELD}]}'),
    ("/v1/responses", responses.TextFormat,
     '{"max_output_tokens":1,"input":"a","text":{"format":{"type":"json_schema",FIELD}}}'),
    ("/generate", SglangSampling, '{"text":"a","sampling_params":{FIELD}}'),
    ("/api/generate", ollama.OllamaOptions, '{"prompt":"a","stream":false,"options":{FIELD}}'),
    ("/api/chat", ollama.OllamaMessage, '{"stream":false,"messages":[{"role":"user",FIELD}]}'),
]  # fmt: skip


def list_hostile_bodies(config):
    """Yield paths and functions that write a body with a field's value, for each field."""
    for endpoint in list_endpoints(config):
        if not isinstance(endpoint.body, type) or not issubclass(endpoint.body, msgspec.Struct):
            continue
        base = BASES.get(endpoint.path, {}) | SHORT.get(endpoint.path, {})
        for name in endpoint.body.__struct_encode_fields__:
            rest = [f"{json.dumps(k)}:{json.dumps(v)}" for k, v in base.items() if k != name]
            yield endpoint.path, "{" + ",".join([*rest, "FIELD"]) + "}", name
    for path, struct, around in INNER:
        for name in struct.__struct_encode_fields__:
            yield path, around, name


@pytest.fixture(scope="module")
def open_server(tokenizer, tmp_path_factory):
    """A server that refuses nobody anything: with an admin's key, adapters and batches."""
    with LiveServers(tokenizer) as servers:
        folder = tmp_path_factory.mktemp("adapters")
        yield servers.start(admin_api_key=("admin",), adapter_folder=folder, max_body_bytes=1 << 20)


def check_answers(server, asked):
    """Send requests by one connection; none may be an error of the server."""
    with requests.Session() as session:
        session.headers["Authorization"] = "Bearer admin"
        for method, path, options in asked:
            reply = session.request(method, server.url + path, timeout=WAIT_S, **options)
            assert reply.status_code < 500, (method, path[:99], str(options)[:300], reply.text)
    wait_until(lambda: server.engine.num_held == 0)


@pytest.mark.parametrize(
    "stride", [pytest.param(1, id="all", marks=pytest.mark.slow), pytest.param(31, id="some")]
)
def test_no_hostile_value_of_any_field_is_an_error_of_the_server(open_server, stride):
    """Each field of each body with each value; quickly, each field and each value once or twice."""
    fields = [*list_hostile_bodies(open_server.config)]
    assert len(fields) > 300
    pairs = itertools.islice(itertools.product(HOSTILE, fields), 0, None, stride)

    def write(template, name, value):
        body = template.replace("FIELD", f"{json.dumps(name)}:{value}")
        return {"data": body.encode("latin-1" if "\xff" in value else "utf-8")}

    check_answers(
        open_server,
        (("POST", path, write(template, name, value)) for value, (path, template, name) in pairs),
    )


def test_no_hostile_header_is_an_error_of_the_server(open_server):
    names = (
        *("traceparent", "x-slo-ttft-ms", "x-slo-tpot-ms", "content-type", "content-encoding"),
        *("accept", "accept-encoding", "range", "if-range", "if-none-match", "x-request-id"),
        *("expect", "origin", "cookie", "x-api-key", "anthropic-version"),
    )
    hostile = (
        *("", "9" * 5000, "-1", "nan", "inf", "1e999", "\xff", "a;" * 5000, ";charset=punycode"),
        *("gzip", "bytes=0-,-" + "9" * 5000, "bytes=" + "0-," * 5000, "00-" + "0" * 32 + "-"),
    )
    upload = {"files": {"file": ("a", b"abc")}, "data": {"purpose": "batch"}}
    url, admin = open_server.url, {"Authorization": "Bearer admin"}
    file = requests.post(f"{url}/v1/files", headers=admin, timeout=WAIT_S, **upload).json()["id"]
    body = {"data": b'{"prompt": "a", "max_tokens": 1}'}

    def ask():
        for name, value in itertools.product(names, hostile):
            header = {"headers": {name: value.encode("latin-1")}}
            yield "POST", "/v1/completions", body | header
            yield "GET", f"/v1/files/{file}/content", header
            yield "GET", "/", header
            if name != "expect":
                yield "POST", "/v1/files", body | header

    check_answers(open_server, ask())
