"""No body brings a server error, whatever it holds.

Method: bodies made of the fields that each endpoint knows, with values of every JSON type and near
every bound; and arbitrary bytes. The answer is 200 or a 4xx of the common shape, and afterwards the
engine holds nothing.
"""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.core.errors import ConfigError, TandemError
from tandem.server.protocol.decode import decode_body
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
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "x"]), "content": values}
    ),
    max_size=3,
)


def bodies(struct: type, **known: st.SearchStrategy):
    fields = dict.fromkeys(struct.__struct_fields__, values) | known
    # A stream's errors come as events; its status says nothing.
    fields.pop("stream", None)
    required = {name: strategy for name, strategy in known.items() if name not in ("n", "timeout")}
    optional = {name: strategy for name, strategy in fields.items() if name not in required}
    few = st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True)
    return few.flatmap(
        lambda names: st.fixed_dictionaries(required | {name: optional[name] for name in names})
    )


texts = st.sampled_from(["hello", ["a", "b"], [5, 6], [[5], [6, 7]]]) | values
numbers = {"n": st.integers(-1, 300) | values}
params = bodies(SglangSampling, **numbers)
REQUESTS = st.one_of(
    st.tuples(st.just("/v1/completions"), bodies(CompletionRequest, prompt=texts, **numbers)),
    st.tuples(
        st.just("/v1/chat/completions"), bodies(ChatRequest, messages=messages | values, **numbers)
    ),
    st.tuples(
        st.just("/generate"),
        bodies(
            GenerateRequest,
            text=texts,
            sampling_params=params | st.lists(params, max_size=2) | values,
        ),
    ),
    st.tuples(st.just("/tokenize"), st.fixed_dictionaries({"prompt": texts})),
    st.tuples(st.just("/detokenize"), st.fixed_dictionaries({"tokens": texts})),
    st.tuples(st.sampled_from(["/generate", "/v1/completions", "/abort_request"]), values),
)


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(REQUESTS)
def test_a_strange_body_is_answered_and_nothing_leaks(shared, request_):
    path, body = request_
    reply = shared.post(path, data=json.dumps(body).encode())
    assert reply.status_code in (200, 400, 404), (path, body, reply.text)
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert error["message"]
        assert error["type"] == "invalid_request_error"
    assert shared.engine.num_held == 0


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
