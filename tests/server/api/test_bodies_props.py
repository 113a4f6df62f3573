"""No body brings a server error, whatever it holds.

Method: bodies made of the fields that each endpoint knows, with values of every JSON type and near
every bound; and arbitrary bytes. The answer is 200 or a 4xx of the common shape, and afterwards the
engine holds nothing.
"""

import json
import re

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import WAIT_S, wait_until

from tandem.core.errors import ConfigError, TandemError
from tandem.server.api.endpoints import list_endpoints
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
    import msgspec

    try:
        decode_body(data, msgspec.json.Decoder(struct))
    except TandemError as error:
        assert isinstance(error, ConfigError)
        assert error.what


@given(st.sampled_from(sorted(SamplingFields.__struct_fields__)), values)
def test_the_named_field_is_the_wrong_one(name, value):
    import msgspec

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
