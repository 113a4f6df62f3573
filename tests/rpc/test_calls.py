"""Calls between a server and a client of one process, over a real Unix socket."""

import asyncio
import contextlib
import logging
import os
import socket

import msgspec
import pytest

from tandem.core.errors import (
    ERROR_CODES,
    CancelledError,
    CapacityError,
    ConfigError,
    ConflictError,
    CorruptionError,
    DeadlineError,
    InternalError,
    PeerLostError,
    UnsupportedError,
)
from tandem.rpc import Auth, MethodTable, RpcClient, RpcConfig, RpcServer, make_identity

TEST_TIMEOUT_S = 60


class Point(msgspec.Struct):
    x: int
    label: str = ""


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, TEST_TIMEOUT_S))


def make_server(endpoint, config=None):
    return RpcServer(endpoint, identity=make_identity("server"), auth=Auth.local(), config=config)


def make_client(endpoint, config=None, **more):
    return RpcClient(
        endpoint, identity=make_identity("client"), auth=Auth.local(), config=config, **more
    )


@contextlib.asynccontextmanager
async def connect(server, config=None, **more):
    async with server, make_client(server.endpoint, config, **more) as client:
        yield client


def test_plain_and_async_handlers_answer(endpoint):
    server = make_server(endpoint)

    @server.method("move", Point, Point)
    async def move(peer, point):
        await asyncio.sleep(0)
        return Point(point.x + 1, peer.name)

    server.register("length", lambda peer, points: len(points), list[Point], int)

    async def scenario():
        async with connect(server) as client:
            assert await client.call("move", Point(1), Point) == Point(2, "client")
            assert await client.call("length", [Point(1), Point(2)], int) == 2
            assert client.peer.name == "server"
            assert server.counters.calls_started == 2

    run(scenario())


def test_two_hundred_calls_at_once_each_get_their_own_answer(endpoint):
    server = make_server(endpoint)
    release = asyncio.Event()
    started = 0

    @server.method("gate", int, int)
    async def gate(peer, number):
        nonlocal started
        started += 1
        if started == 200:
            release.set()
        await release.wait()
        for _ in range(200 - number):  # Later callers are answered earlier.
            await asyncio.sleep(0)
        return number * 2

    async def scenario():
        async with connect(server) as client:
            calls = [client.call("gate", number, int) for number in range(200)]
            assert await asyncio.gather(*calls) == [2 * number for number in range(200)]
            assert server.peers[0].running_calls == 0

    run(scenario())


@pytest.mark.parametrize("code", sorted(ERROR_CODES))
@pytest.mark.parametrize("is_async", [True, False])
def test_every_error_class_arrives_as_itself(endpoint, code, is_async):
    server = make_server(endpoint)
    error_class = ERROR_CODES[code]

    def fail(peer, _):
        raise error_class("engine.add", "prompt of 9 tokens, limit 8: shorten it", field="prompt")

    async def fail_later(peer, _):
        await asyncio.sleep(0)
        fail(peer, _)

    server.register("fail", fail_later if is_async else fail, type(None), type(None))

    async def scenario():
        async with connect(server) as client:
            with pytest.raises(error_class) as caught:
                await client.call("fail", None, type(None))
            assert type(caught.value) is error_class
            assert str(caught.value) == "[engine.add] prompt of 9 tokens, limit 8: shorten it"
            assert caught.value.field == "prompt"

    run(scenario())


@pytest.mark.parametrize("is_async", [True, False])
def test_other_exceptions_arrive_as_internal_and_leak_nothing(endpoint, caplog, is_async):
    server = make_server(endpoint)

    def fail(peer, _):
        raise KeyError("secret-value")

    async def fail_later(peer, _):
        fail(peer, _)

    server.register("fail", fail_later if is_async else fail, type(None), type(None))

    async def scenario():
        async with connect(server) as client:
            with pytest.raises(InternalError) as caught:
                await client.call("fail", None, type(None))
            assert "KeyError" in str(caught.value)
            assert "secret-value" not in str(caught.value)
            assert "Traceback" not in str(caught.value)

    with caplog.at_level(logging.ERROR, logger="tandem.rpc"):
        run(scenario())
    assert "secret-value" in caplog.text, "the server's own log must have the trace"


def test_an_unknown_method_is_refused_by_name(endpoint):
    server = make_server(endpoint)
    server.register("known", lambda peer, _: None, type(None), type(None))

    async def scenario():
        async with connect(server) as client:
            with pytest.raises(UnsupportedError, match=r"'ad'.*serves known") as caught:
                await client.call("ad", None, type(None))
            assert caught.value.field == "method"
            assert server.counters.unknown_methods == 1

    run(scenario())


def test_a_request_of_the_wrong_type_names_the_place(endpoint):
    server = make_server(endpoint)
    server.register("move", lambda peer, point: point, Point, Point)

    async def scenario():
        async with connect(server) as client:
            with pytest.raises(ConfigError, match=r"\$\.x"):
                await client.call("move", {"x": "one"}, Point)

    run(scenario())


def test_an_answer_of_the_wrong_type_is_corruption(endpoint):
    server = make_server(endpoint)
    server.register("move", lambda peer, point: point, Point, Point)

    async def scenario():
        async with connect(server) as client:
            with pytest.raises(CorruptionError, match="move"):
                await client.call("move", Point(1), int)

    run(scenario())


def test_a_message_without_msgpack_form_fails_the_side_that_made_it(endpoint):
    server = make_server(endpoint)
    server.register("bad", lambda peer, _: object(), type(None), int)

    async def scenario():
        async with connect(server) as client:
            with pytest.raises(ConfigError, match="msgpack"):
                await client.call("bad", object(), int)
            with pytest.raises(InternalError, match="msgpack"):
                await client.call("bad", None, int)

    run(scenario())


def test_a_hanging_handler_meets_the_deadline_on_both_sides(endpoint):
    server = make_server(endpoint)
    stopped = asyncio.Event()

    @server.method("hang", type(None), type(None))
    async def hang(peer, _):
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def scenario():
        async with connect(server) as client:
            with pytest.raises(DeadlineError, match="hang"):
                await client.call("hang", None, type(None), timeout_s=0.05)
            await asyncio.wait_for(stopped.wait(), 60)
            counters = server.counters
            assert counters.calls_expired + counters.calls_cancelled == 1
            assert server.peers[0].running_calls == 0

    run(scenario())


def test_the_deadline_ends_a_handler_whose_caller_says_nothing(endpoint):
    # The caller's own timer is disabled, so that only the time sent along can act.
    server = make_server(endpoint)

    @server.method("hang", type(None), type(None))
    async def hang(peer, _):
        while True:
            # A handler that ignores its cancellation is answered for all the same.
            with contextlib.suppress(asyncio.CancelledError):
                await ended.wait()
                return

    ended = asyncio.Event()

    async def scenario():
        async with connect(server) as client:
            client.peer._outgoing._expire = lambda *_: None
            with pytest.raises(DeadlineError, match="did not end within 50 ms"):
                await client.call("hang", None, type(None), timeout_s=0.05)
            assert server.counters.calls_expired == 1
            assert server.peers[0].running_calls == 1, "it lives on, and counts"
            ended.set()

    run(scenario())


def test_cancelling_the_caller_cancels_the_handler(endpoint):
    server = make_server(endpoint)
    started, stopped = asyncio.Event(), asyncio.Event()

    @server.method("hang", type(None), type(None))
    async def hang(peer, _):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def scenario():
        async with connect(server) as client:
            call = asyncio.create_task(client.call("hang", None, type(None)))
            await asyncio.wait_for(started.wait(), 60)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.wait_for(stopped.wait(), 60)
            assert server.counters.calls_cancelled == 1

    run(scenario())


def test_a_call_cancelled_before_its_handler_began_never_runs(endpoint):
    server = make_server(endpoint)
    ran = []

    async def note(peer, number):
        ran.append(number)
        return number

    server.register("note", note, int, int)

    async def scenario():
        async with connect(server) as client:
            call = asyncio.create_task(client.call("note", 1, int))
            await asyncio.sleep(0)  # It is sent, and its cancel follows in the same turn.
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await client.call("note", 2, int) == 2
            # Either the cancel came in time, or the handler had begun; never twice, never later.
            assert ran in ([2], [1, 2])
            assert server.peers[0].running_calls == 0

    run(scenario())


def test_a_handler_that_is_cancelled_from_within_still_answers(endpoint):
    server = make_server(endpoint)

    @server.method("self_cancel", type(None), type(None))
    async def self_cancel(peer, _):
        raise asyncio.CancelledError

    async def scenario():
        async with connect(server) as client:
            with pytest.raises(CancelledError, match="self_cancel"):
                await client.call("self_cancel", None, type(None), timeout_s=60)

    run(scenario())


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), 1e9])
def test_a_timeout_out_of_bounds_is_refused(endpoint, timeout_s):
    server = make_server(endpoint)

    async def scenario():
        async with connect(server) as client:
            with pytest.raises(ConfigError) as caught:
                await client.call("any", None, int, timeout_s=timeout_s)
            assert caught.value.field == "timeout_s"

    run(scenario())


def test_more_handlers_than_allowed_are_refused_not_queued(endpoint):
    server = make_server(endpoint, RpcConfig(max_pending_per_peer=4))
    release = asyncio.Event()

    @server.method("hang", int, int)
    async def hang(peer, number):
        await release.wait()
        return number

    async def scenario():
        async with connect(server) as client:
            calls = [asyncio.create_task(client.call("hang", n, int)) for n in range(4)]
            await asyncio.sleep(0)
            with pytest.raises(CapacityError, match="4 calls are running, limit 4"):
                await client.call("hang", 4, int)
            release.set()
            assert await asyncio.gather(*calls) == [0, 1, 2, 3]

    run(scenario())


def test_more_open_calls_than_allowed_are_refused_here(endpoint):
    server = make_server(endpoint)

    @server.method("hang", int, int)
    async def hang(peer, number):
        await asyncio.Event().wait()

    async def scenario():
        async with connect(server, RpcConfig(max_pending_per_peer=4)) as client:
            calls = [asyncio.create_task(client.call("hang", n, int)) for n in range(4)]
            await asyncio.sleep(0)
            with pytest.raises(CapacityError, match="limit 4"):
                await client.call("hang", 4, int)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    run(scenario())


def test_oversized_messages_are_refused_by_name_on_either_side(endpoint):
    server = make_server(endpoint, RpcConfig(max_message_bytes=2048))
    server.register("size", lambda peer, text: len(text), str, int)
    server.register("make", lambda peer, size: "x" * size, int, str)

    async def scenario():
        async with connect(server) as client:  # The client's own limit is 64 MiB.
            with pytest.raises(CapacityError, match=r"limit 2048.*tandem\.transfer"):
                await client.call("size", "x" * 3000, int)
            with pytest.raises(CapacityError, match="limit 2048"):
                await client.call("make", 3000, str)
            assert await client.call("make", 1000, str) == "x" * 1000

    run(scenario())


def test_a_server_can_call_its_clients(endpoint):
    server = make_server(endpoint)
    methods = MethodTable()
    methods.register("double", lambda peer, number: 2 * number, int, int)

    @server.method("ask_back", int, int)
    async def ask_back(peer, number):
        return await peer.call("double", number, int) + 1

    async def scenario():
        async with connect(server, methods=methods) as client:
            assert await client.call("ask_back", 5, int) == 11

    run(scenario())


def test_closing_either_side_ends_open_calls_and_tells_once(endpoint):
    async def scenario(closer):
        server = make_server(endpoint)
        losses: list[tuple[str, str]] = []
        begun = asyncio.Event()

        @server.method("hang", type(None), type(None))
        async def hang(peer, _):
            begun.set()
            await asyncio.Event().wait()

        server.on_peer_lost(lambda peer, error: losses.append(("server", error.code)))
        async with server:
            client = make_client(server.endpoint)
            client.on_peer_lost(lambda peer, error: losses.append(("client", error.code)))
            async with client:
                peer = client.peer
                call = asyncio.create_task(client.call("hang", None, type(None)))
                await asyncio.wait_for(begun.wait(), 60)
                await {"server": server, "client": client}[closer].aclose()
                with pytest.raises(PeerLostError):
                    await asyncio.wait_for(call, 60)
                with pytest.raises(PeerLostError):
                    await peer.call("hang", None, type(None))
                with pytest.raises(PeerLostError):
                    await client.call("hang", None, type(None))
                while len(losses) < 2:
                    await asyncio.sleep(0.001)
                assert not server.peers
        assert sorted(losses) == [("client", "peer_lost"), ("server", "peer_lost")]

    run(scenario("server"))
    run(scenario("client"))


def test_a_name_is_registered_once_and_types_are_checked(endpoint):
    server = make_server(endpoint)
    server.register("add", lambda peer, number: number, int, int)
    with pytest.raises(ConflictError, match="twice"):
        server.register("add", lambda peer, number: number, int, int)
    with pytest.raises(ConfigError, match="cannot be sent"):
        server.register("other", lambda peer, number: number, int | Point | list | dict, int)


def test_a_served_socket_is_not_taken_over_and_a_stale_file_is(endpoint):
    async def scenario():
        async with make_server(endpoint):
            with pytest.raises(ConflictError, match="served by another"):
                make_server(endpoint).start()
        path = endpoint.removeprefix("ipc://")
        assert not os.path.exists(path)
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(path)
        async with make_server(endpoint):
            assert os.stat(path).st_mode & 0o777 == 0o600

    run(scenario())


def test_it_runs_on_uvloop(endpoint):
    uvloop = pytest.importorskip("uvloop")
    server = make_server(endpoint)
    server.register("echo", lambda peer, point: point, Point, Point)

    async def scenario():
        async with connect(server) as client:
            for number in range(50):
                assert await client.call("echo", Point(number), Point) == Point(number)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), TEST_TIMEOUT_S))
