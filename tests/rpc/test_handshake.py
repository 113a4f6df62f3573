"""Who is let in: versions, compatibility, epochs, limits; refusals told by name on both sides."""

import asyncio
import contextlib
import logging

import msgspec
import pytest
import zmq

from tandem.core.errors import (
    CapacityError,
    ConflictError,
    InternalError,
    PermissionDeniedError,
    UnsupportedError,
)
from tandem.rpc import Auth, RpcClient, RpcConfig, RpcServer, make_identity
from tandem.rpc.handshake import make_limits
from tandem.rpc.session import ClientSession
from tandem.rpc.wire.frames import Bye, Cancel, Welcome, decode_frame, encode_frame

TEST_TIMEOUT_S = 60


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, TEST_TIMEOUT_S))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def make_server(endpoint, compat=None, **more):
    identity = make_identity("server", "instance", compat)
    return RpcServer(endpoint, identity=identity, auth=Auth.local(), **more)


def make_client(endpoint, compat=None, **more):
    identity = make_identity("client", "server", compat)
    return RpcClient(endpoint, identity=identity, auth=Auth.local(), **more)


def test_both_sides_learn_who_the_other_is(endpoint):
    async def scenario():
        async with (
            make_server(endpoint, {"model": "a"}) as server,
            make_client(endpoint, {"page": "b"}) as client,
        ):
            assert client.peer.identity == server.identity
            assert server.peers[0].identity == client.identity
            assert client.epoch == client.peer.epoch == server.peers[0].epoch == 1
            assert client.identity.instance_id != make_identity("client").instance_id

    run(scenario())


@pytest.mark.parametrize(("protocol", "min_protocol"), [(9, 7), (0, 0)])
def test_another_protocol_version_is_refused_by_name(endpoint, raw_client, protocol, min_protocol):
    async def scenario():
        async with make_server(endpoint) as server:
            raw = raw_client(endpoint)
            raw.say_hello(protocol=protocol, min_protocol=min_protocol)
            bye = await raw.receive()
            assert isinstance(bye, Bye)
            assert (bye.code, bye.field) == ("unsupported", "protocol")
            assert f"theirs {min_protocol} to {protocol}, ours 1 to 1" in bye.what
            assert server.counters.handshakes_refused == 1
            assert not server.peers

    run(scenario())


def test_a_version_whose_hello_we_cannot_read_is_refused_by_its_version(endpoint, raw_client):
    async def scenario():
        async with make_server(endpoint):
            raw = raw_client(endpoint)
            raw.send(msgspec.msgpack.encode([0, 12, 11, {"all": "different"}]))
            bye = await raw.receive()
            assert (bye.code, bye.field) == ("unsupported", "protocol")
            assert "theirs 11 to 12" in bye.what

    run(scenario())


def test_elements_appended_by_a_later_version_are_ignored(endpoint, raw_client):
    hello = [
        0,
        3,
        1,
        1,
        msgspec.to_builtins(make_identity("later")),
        [4096, 60_000, 16, 4096, 5],
        None,
        None,
        "new",
    ]

    async def scenario():
        async with make_server(endpoint) as server:
            raw = raw_client(endpoint)
            raw.send(msgspec.msgpack.encode(hello))
            assert isinstance(await raw.receive(), Welcome)
            await until(lambda: server.peers)
            assert server.peers[0].name == "later"

    run(scenario())


@contextlib.contextmanager
def fake_server(endpoint):
    """A ROUTER for answers that no server of ours gives."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind(endpoint)
        yield socket


async def answer_hello(socket, frame):
    while not socket.poll(0):
        await asyncio.sleep(0.001)
    routing_id, _ = socket.recv_multipart()
    socket.send_multipart([routing_id, encode_frame(frame)])
    return routing_id


def test_the_client_refuses_a_server_of_another_version_and_tells_it(endpoint):
    welcome = Welcome(9, 8, 1, make_identity("future"), make_limits(RpcConfig()))

    async def scenario():
        with fake_server(endpoint) as socket:
            connecting = asyncio.create_task(make_client(endpoint).connect())
            await answer_hello(socket, welcome)
            with pytest.raises(UnsupportedError, match="theirs 8 to 9, ours 1 to 1"):
                await connecting
            while not socket.poll(0):
                await asyncio.sleep(0.001)
            bye = decode_frame(socket.recv_multipart()[1])
            assert isinstance(bye, Bye)
            assert bye.code == "unsupported"

    run(scenario())


def test_differing_facts_are_refused_naming_field_and_both_values(endpoint, caplog):
    async def scenario():
        async with make_server(endpoint, {"model": "aaa", "block_size": "16"}) as server:
            client = make_client(endpoint, {"model": "aaa", "block_size": "32"})
            with pytest.raises(ConflictError, match=r"'32'.*'16'") as caught:
                await client.connect()
            assert caught.value.field == "compat.block_size"
            assert server.counters.handshakes_refused == 1
            assert client.counters.handshakes_refused == 1
            assert not server.peers

    with caplog.at_level(logging.WARNING, logger="tandem.rpc"):
        run(scenario())
    assert "block_size differs" in caplog.text


def test_the_clients_own_check_refuses_and_the_server_learns_of_it(endpoint):
    def refuse(theirs, ours):
        raise ConflictError("test.check", f"{theirs.name} is not for {ours.name}", field="layout")

    async def scenario():
        async with make_server(endpoint) as server:
            losses = []
            server.on_peer_lost(lambda peer, error: losses.append(str(error)))
            with pytest.raises(ConflictError, match="server is not for client"):
                await make_client(endpoint, check_compat=refuse).connect()
            await until(lambda: losses)
            assert "server is not for client" in losses[0]

    run(scenario())


def test_a_check_that_breaks_refuses_too(endpoint):
    def fail(theirs, ours):
        raise KeyError("bug")

    async def scenario():
        async with make_server(endpoint, check_compat=fail):
            with pytest.raises(InternalError, match="KeyError"):
                await make_client(endpoint).connect()

    run(scenario())


def test_facts_of_one_side_alone_pass(endpoint):
    async def scenario():
        async with make_server(endpoint, {"model": "a"}), make_client(endpoint, {"other": "b"}):
            pass

    run(scenario())


def test_a_newer_session_of_a_client_replaces_the_older_and_a_stale_one_is_refused(
    endpoint, raw_client
):
    identity = make_identity("twice")

    async def scenario():
        async with make_server(endpoint) as server:
            losses = []
            server.on_peer_lost(lambda peer, error: losses.append((peer.epoch, str(error))))
            first, second, stale = (raw_client(endpoint) for _ in range(3))
            first.say_hello(identity=identity, epoch=4)
            assert isinstance(await first.receive(), Welcome)
            second.say_hello(identity=identity, epoch=5)
            assert isinstance(await second.receive(), Welcome)
            bye = await first.receive()
            assert isinstance(bye, Bye)
            assert "connected anew" in bye.what
            assert [epoch for epoch, _ in losses] == [4]
            stale.say_hello(identity=identity, epoch=5)
            bye = await stale.receive()
            assert (bye.code, bye.field) == ("conflict", "epoch")
            assert [peer.epoch for peer in server.peers] == [5]

    run(scenario())


def test_more_clients_than_allowed_are_refused(endpoint):
    async def scenario():
        async with (
            make_server(endpoint, config=RpcConfig(max_peers=1)),
            make_client(endpoint),
        ):
            with pytest.raises(CapacityError, match="1 clients"):
                await make_client(endpoint, config=RpcConfig(connect_timeout_ms=1000)).connect()

    run(scenario())


def test_a_refusal_is_told_although_later_attempts_get_no_answer(endpoint, monkeypatch):
    open_session, attempts = ClientSession.open, []

    async def open_once(session, timeout_s):
        attempts.append(timeout_s)
        return await open_session(session, timeout_s if len(attempts) == 1 else 0.0)

    async def scenario():
        async with (
            make_server(endpoint, config=RpcConfig(max_peers=1)),
            make_client(endpoint),
        ):
            monkeypatch.setattr(ClientSession, "open", open_once)
            with pytest.raises(CapacityError, match="1 clients"):
                await make_client(endpoint, config=RpcConfig(connect_timeout_ms=1000)).connect()
        assert len(attempts) > 1

    run(scenario())


def test_frames_without_a_session_are_told_so(endpoint, raw_client):
    async def scenario():
        async with make_server(endpoint) as server:
            raw = raw_client(endpoint)
            raw.send(encode_frame(Cancel(3)))
            bye = await raw.receive()
            assert (bye.code, bye.where) == ("peer_lost", "rpc.session")
            assert server.counters.frames_without_session == 1

    run(scenario())


def test_connecting_is_bounded_when_nobody_serves_or_answers(endpoint):
    config = RpcConfig(connect_timeout_ms=150)

    async def scenario():
        with pytest.raises(ConnectionError, match="nobody serves"):
            await make_client(endpoint, config=config).connect()
        with fake_server(endpoint), pytest.raises(TimeoutError, match="did not shake hands"):
            await make_client(endpoint, config=config).connect()

    run(scenario())


def test_a_client_may_come_before_its_server(endpoint):
    async def scenario():
        client = make_client(endpoint)
        connecting = asyncio.create_task(client.connect())
        await until(lambda: client.epoch >= 1)
        async with make_server(endpoint):
            await connecting
            assert client.is_connected
            await client.aclose()

    run(scenario())


def test_a_client_does_not_enter_a_folder_of_others(folder):
    folder.chmod(0o755)
    client = make_client(f"ipc://{folder}/server.sock")

    async def scenario():
        with pytest.raises(PermissionDeniedError, match="mode 0755"):
            await client.connect()

    run(scenario())
    folder.chmod(0o700)
