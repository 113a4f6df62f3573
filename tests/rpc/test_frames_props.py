"""Hostile bytes: the parser, and a live server under them.

Method: random bytes, random msgpack, and valid frames that are cut, flipped or extended. The
parser may only return a frame or raise its named error; the server must count, answer, and go on
serving an honest client beside it.
"""

import asyncio

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tandem.core.errors import CorruptionError, TandemError, UnsupportedError
from tandem.rpc import Auth, RpcClient, RpcConfig, RpcServer, make_identity
from tandem.rpc.handshake import make_limits
from tandem.rpc.wire.frames import (
    Beat,
    Bye,
    Call,
    Cancel,
    Event,
    Fault,
    Hello,
    Reply,
    Welcome,
    as_body,
    decode_frame,
    decode_greeting,
    encode_frame,
    make_bye,
    make_fault,
)

TEST_TIMEOUT_S = 60

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
COUNTS = st.integers(0, 2**63 - 1)
SHORT = st.text(max_size=40)
GREETINGS = st.builds(
    lambda kind, epoch, name: kind(1, 1, epoch, make_identity(name), make_limits(RpcConfig())),
    st.sampled_from([Hello, Welcome]),
    COUNTS,
    SHORT,
)
FRAMES = st.one_of(
    GREETINGS,
    st.builds(Bye, st.just(1), st.just(1), SHORT, SHORT, SHORT, st.none() | SHORT),
    st.builds(Call, COUNTS, SHORT, st.integers(0, 10**6), PLAIN.map(as_body)),
    st.builds(Reply, COUNTS, PLAIN.map(as_body)),
    st.builds(Fault, COUNTS, SHORT, SHORT, SHORT, st.none() | SHORT),
    st.builds(Cancel, COUNTS),
    st.builds(Event, PLAIN.map(as_body)),
    st.builds(Beat, COUNTS, COUNTS),
)


@st.composite
def damaged_frames(draw):
    """A valid frame with one to four bytes cut, changed or inserted."""
    data = bytearray(encode_frame(draw(FRAMES)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        action = draw(st.sampled_from(["cut", "change", "insert"]))
        if action == "cut":
            del data[place:]
        elif action == "insert":
            data[place:place] = draw(st.binary(min_size=1, max_size=5))
        elif place < len(data):
            data[place] = draw(st.integers(0, 255))
    return bytes(data)


HOSTILE = st.one_of(
    st.binary(max_size=200),
    PLAIN.map(msgspec.msgpack.encode),
    st.builds(
        lambda tag, rest: msgspec.msgpack.encode([tag, *rest]),
        st.integers(-1, 10),
        st.lists(PLAIN, max_size=6),
    ),
    damaged_frames(),
)
GIANT_ARRAY = b"\xdd\xff\xff\xff\xff"
GIANT_STRING = b"\xdb\xff\xff\xff\xff"
GIANT_BYTES = b"\xc6\xff\xff\xff\xff"
GIANT_MAP = b"\xdf\xff\xff\xff\xff"
DEEP = b"\x92\x07" + b"\x91" * 100_000


@given(FRAMES)
def test_what_is_encoded_is_read_back(frame):
    data = encode_frame(frame)
    back = decode_frame(data)
    assert type(back) is type(frame)
    # Bodies come back undecoded: compare the bytes they make.
    assert encode_frame(back) == data


@settings(max_examples=80, deadline=None)
@given(HOSTILE)
@example(GIANT_ARRAY)
@example(GIANT_MAP)
@example(b"\x92\x07" + GIANT_ARRAY)
@example(b"\x92\x07" + GIANT_BYTES)
@example(b"\x95\x03\x01" + GIANT_STRING)
@example(b"\x95\x00\x01\x01\x01" + GIANT_MAP)
@example(DEEP)
@example(b"\xc1")
@example(b"\x95\x03\x01\xa2\xff\xfe\x01\xc0")
@example(b"\x92\x06\x01\x00")
def test_the_parser_returns_a_frame_or_its_named_error(data):
    for parse in (decode_frame, decode_greeting):
        try:
            parse(data)
        except (CorruptionError, UnsupportedError) as error:
            assert str(error)


@given(SHORT, st.text(max_size=9000), st.none() | SHORT)
def test_any_error_can_be_told(where, what, field):
    fault = decode_frame(encode_frame(make_fault(1, TandemError(where, what, field=field))))
    assert len(fault.what) <= 4096
    assert what.startswith(fault.what)
    bye = decode_frame(encode_frame(make_bye(TandemError("a", "lone surrogate \udc80"))))
    assert "udc80" in bye.what


class Tick(msgspec.Struct, tag="tick"):
    number: int


async def survive(endpoint, raw_client, attack):
    """Run ``attack(send, say_hello)`` beside an honest client and require that it is served."""
    server = RpcServer(endpoint, identity=make_identity("server"), auth=Auth.local())
    server.register("double", lambda peer, number: 2 * number, int, int)
    server.on_event(lambda peer, event: None, Tick)
    async with (
        server,
        RpcClient(endpoint, identity=make_identity("honest"), auth=Auth.local()) as client,
    ):
        raw = raw_client(endpoint)
        await attack(raw, server)
        assert await client.call("double", 4, int) == 8
        return server.counters


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(before=st.lists(HOSTILE, max_size=10), after=st.lists(HOSTILE, max_size=30))
def test_a_live_server_outlives_hostile_frames(endpoint, raw_client, before, after):
    async def attack(raw, server):
        for data in before:
            raw.send(data)
        raw.say_hello()
        for data in after:
            raw.send(data)
        # A beat is never answered; a call is, once everything before it has been read.
        raw.send(encode_frame(Call(77, "double", 1000, as_body(1))))
        while not isinstance(frame := await raw.receive(), Reply) or frame.call_id != 77:
            if isinstance(frame, Bye):
                return  # A hostile frame was, by chance, a valid farewell or a stale hello.

    asyncio.run(asyncio.wait_for(survive(endpoint, raw_client, attack), TEST_TIMEOUT_S))


@pytest.mark.parametrize(
    "data",
    [GIANT_ARRAY, b"\x92\x07" + GIANT_BYTES, DEEP, b"", b"\xc1", b"\x92\x63\x01"],
    ids=["giant array", "giant bytes", "deep", "empty", "reserved", "unknown tag"],
)
def test_each_malformed_frame_is_counted_and_answered(endpoint, raw_client, data):
    async def attack(raw, server):
        raw.say_hello()
        assert isinstance(await raw.receive(), Welcome)
        raw.send(data)
        notice = await raw.receive()
        assert isinstance(notice, Fault)
        assert (notice.call_id, notice.code) == (0, "corruption")

    counters = asyncio.run(asyncio.wait_for(survive(endpoint, raw_client, attack), TEST_TIMEOUT_S))
    assert counters.malformed_frames == 1


def test_messages_of_several_parts_are_counted_and_skipped(endpoint, raw_client):
    async def attack(raw, server):
        raw.send(b"", b"x", b"y")
        raw.say_hello()
        assert isinstance(await raw.receive(), Welcome)
        raw.send(encode_frame(Cancel(1)), encode_frame(Cancel(2)))
        raw.send(encode_frame(Call(5, "double", 1000, as_body(3))))
        reply = await raw.receive()
        assert msgspec.msgpack.decode(reply.body) == 6

    counters = asyncio.run(asyncio.wait_for(survive(endpoint, raw_client, attack), TEST_TIMEOUT_S))
    assert counters.malformed_frames == 2


def test_frames_over_the_limit_are_refused_by_name_or_cut(endpoint, raw_client):
    config = RpcConfig(max_message_bytes=1024)

    async def scenario():
        server = RpcServer(
            endpoint, identity=make_identity("server"), auth=Auth.local(), config=config
        )
        server.on_event(lambda peer, event: None, Tick)
        lost = []
        server.on_peer_lost(lambda peer, error: lost.append(error))
        async with server:
            raw = raw_client(endpoint)
            raw.say_hello()
            assert isinstance(await raw.receive(), Welcome)
            raw.send(bytes(2000))
            notice = await raw.receive()
            assert notice.code == "capacity"
            assert "2000 bytes, limit 1024" in notice.what
            assert server.counters.oversized_frames == 1
            raw.send(bytes(1024 + 4097))  # ZeroMQ itself ends the connection.
            while not lost:
                await asyncio.sleep(0.001)
            assert not server.peers

    asyncio.run(asyncio.wait_for(scenario(), TEST_TIMEOUT_S))
