"""One-way events: order, both directions, other threads, bounds, refusals."""

import asyncio
import contextlib
import threading
import time

import msgspec
import pytest

from tandem.core.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    PeerLostError,
    UnsentError,
)
from tandem.rpc import Auth, RpcClient, RpcConfig, RpcServer, make_identity
from tandem.rpc.wire.frames import Event, Welcome, as_body, encode_frame

TEST_TIMEOUT_S = 60


class Tick(msgspec.Struct, tag="tick", frozen=True):
    number: int
    padding: str = ""


class Note(msgspec.Struct, tag="note", frozen=True):
    text: str


class Stranger(msgspec.Struct, tag="stranger", frozen=True):
    number: int


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, TEST_TIMEOUT_S))


async def until(condition):
    """Give the loop turns until ``condition()`` holds; ``run`` bounds the wait."""
    while not condition():
        await asyncio.sleep(0.001)


def make_server(endpoint, config=None):
    return RpcServer(endpoint, identity=make_identity("server"), auth=Auth.local(), config=config)


@contextlib.asynccontextmanager
async def connect(server, events, config=None):
    """Yield a client that collects the server's events, and the server's peer of it."""
    async with server:
        client = RpcClient(
            server.endpoint, identity=make_identity("client"), auth=Auth.local(), config=config
        )
        client.on_event(lambda peer, event: events.append(event), Tick | Note)
        async with client:
            yield client, server.peers[0]


def test_events_arrive_in_order_both_ways_and_typed(endpoint):
    server, there, here = make_server(endpoint), [], []
    server.on_event(lambda peer, event: there.append((peer.name, event)), Tick | Note)

    async def scenario():
        async with connect(server, here) as (client, peer):
            for number in range(500):
                peer.push(Tick(number))
                client.push(Note(str(number)))
            await until(lambda: len(here) == 500 and len(there) == 500)
            assert here == [Tick(number) for number in range(500)]
            assert there == [("client", Note(str(number))) for number in range(500)]

    run(scenario())


def test_an_event_pushed_before_the_answer_arrives_before_it(endpoint):
    server, here = make_server(endpoint), []

    @server.method("add", int, int)
    async def add(peer, number):
        peer.push(Tick(number))
        return number

    async def scenario():
        async with connect(server, here) as (client, _):
            assert await client.call("add", 7, int) == 7
            assert here == [Tick(7)]

    run(scenario())


def test_an_event_pushed_on_admission_finds_the_client_ready(endpoint):
    server, seen = make_server(endpoint), []
    server.on_peer(lambda peer: peer.push(Tick(1)))

    async def scenario():
        async with server:
            client = RpcClient(endpoint, identity=make_identity("client"), auth=Auth.local())
            client.on_event(lambda peer, event: seen.append(client.peer is peer), Tick)
            async with client:
                await until(lambda: seen)
                assert seen == [True]

    run(scenario())


def test_pushing_from_another_thread_keeps_order_and_wakes_the_loop_seldom(endpoint):
    server, here = make_server(endpoint), []

    async def scenario():
        async with connect(server, here) as (_, peer):
            loop, wake_ups = asyncio.get_running_loop(), []
            wake = loop.call_soon_threadsafe

            def count_wake_ups(*arguments):
                wake_ups.append(arguments)
                return wake(*arguments)

            loop.call_soon_threadsafe = count_wake_ups
            pusher = threading.Thread(
                target=lambda: [peer.push_threadsafe(Tick(n)) for n in range(1000)]
            )
            pusher.start()
            pusher.join()  # Holds the loop: all of it must be one batch.
            assert len(wake_ups) == 1
            await until(lambda: len(here) == 1000)
            assert here == [Tick(number) for number in range(1000)]

    run(scenario())


def test_threads_pushing_at_once_each_keep_their_order(endpoint):
    server, here = make_server(endpoint), []

    async def scenario():
        async with connect(server, here) as (_, peer):

            def push_all(thread_number):
                for number in range(300):
                    peer.push_threadsafe(Tick(number, str(thread_number)))

            threads = [threading.Thread(target=push_all, args=(n,)) for n in range(3)]
            for thread in threads:
                thread.start()
            await until(lambda: len(here) == 900)
            for thread in threads:
                thread.join()
            for n in range(3):
                mine = [event.number for event in here if event.padding == str(n)]
                assert mine == list(range(300))

    run(scenario())


def test_a_reader_that_keeps_up_lets_pass_many_times_the_window(endpoint):
    config = RpcConfig(max_pending_per_peer=16)
    server, here = make_server(endpoint, config), []

    async def scenario():
        async with connect(server, here, config) as (_, peer):
            for number in range(1000):
                await until(lambda: peer.pending_messages < 16)
                peer.push(Tick(number))
            await until(lambda: len(here) == 1000)
            assert not peer.is_lost

    run(scenario())


@pytest.mark.parametrize("bound", ["messages", "bytes"])
@pytest.mark.parametrize("threadsafe", [False, True])
def test_a_slow_reader_is_dropped_at_the_bound(endpoint, raw_client, bound, threadsafe):
    config = {
        "messages": RpcConfig(max_pending_per_peer=4),  # The window is twice that.
        "bytes": RpcConfig(max_message_bytes=4096, max_pending_bytes=8 * 1024),
    }[bound]
    server, lost = make_server(endpoint, config), []
    server.on_peer_lost(lambda peer, error: lost.append(error))

    async def scenario():
        async with server:
            raw = raw_client(endpoint)
            raw.say_hello()
            assert isinstance(await raw.receive(), Welcome)
            await until(lambda: server.peers)
            peer = server.peers[0]
            push = peer.push_threadsafe if threadsafe else peer.push
            with pytest.raises(CapacityError, match="unread"):
                for number in range(9):  # 8 messages or 8 KiB fit; the reader reads nothing.
                    push(Tick(number, "x" * 1000))
            await until(lambda: lost)
            assert isinstance(lost[0], PeerLostError)
            assert "slow peer" in str(lost[0])
            assert server.counters.peers_overflowed == 1
            with pytest.raises(PeerLostError, match="slow peer"):
                push(Tick(0))
            assert not server.peers

    run(scenario())


def test_an_oversized_event_is_refused_and_drops_nobody(endpoint):
    server, here = make_server(endpoint, RpcConfig(max_message_bytes=2048)), []

    async def scenario():
        async with connect(server, here) as (_, peer):
            for push in (peer.push, peer.push_threadsafe):
                with pytest.raises(CapacityError, match="limit 2048"):
                    push(Tick(0, "x" * 4000))
                with pytest.raises(ConfigError, match="msgpack"):
                    push(Tick(object()))
            peer.push(Tick(1))
            await until(lambda: here)
            assert here == [Tick(1)]

    run(scenario())


def test_unknown_and_malformed_events_are_refused_by_name_and_counted(endpoint):
    server, there = make_server(endpoint), []
    server.on_event(lambda peer, event: there.append(event), Tick | Note)

    async def scenario():
        async with connect(server, []) as (client, _):
            client.push(Stranger(1))
            client.push(Tick("one"))
            client.push(Tick(2))
            await until(lambda: client.counters.notices_received == 2)
            assert there == [Tick(2)]
            assert server.counters.unknown_events == 2
            assert client.is_connected

    run(scenario())


def test_an_event_nobody_listens_for_is_refused(endpoint):
    server = make_server(endpoint)

    async def scenario():
        async with connect(server, []) as (client, _):
            client.push(Tick(1))
            await until(lambda: client.counters.notices_received == 1)
            assert server.counters.unknown_events == 1

    run(scenario())


def test_a_callback_that_raises_is_logged_and_the_next_event_comes(endpoint, caplog):
    server, there = make_server(endpoint), []

    def take(peer, event):
        there.append(event)
        raise RuntimeError("of the callback")

    server.on_event(take, Tick)

    async def scenario():
        async with connect(server, []) as (client, _):
            client.push(Tick(1))
            client.push(Tick(2))
            await until(lambda: len(there) == 2)
            assert server.counters.callback_errors == 2

    run(scenario())
    assert "of the callback" in caplog.text


def test_a_second_listener_is_refused(endpoint):
    server = make_server(endpoint)
    server.on_event(lambda peer, event: None, Tick)
    with pytest.raises(ConflictError, match="listener"):
        server.on_event(lambda peer, event: None, Note)


def test_pushing_after_the_end_says_so(endpoint):
    server = make_server(endpoint)
    peers = []

    async def scenario():
        async with connect(server, []) as (_, peer):
            peers.append(peer)

    run(scenario())
    with pytest.raises(PeerLostError):
        peers[0].push_threadsafe(Tick(1))


def test_a_false_claim_of_having_read_is_refused(endpoint, raw_client):
    server = make_server(endpoint)
    server.on_event(lambda peer, event: None, Tick)

    async def scenario():
        async with server:
            raw = raw_client(endpoint)
            raw.say_hello()
            assert isinstance(await raw.receive(), Welcome)
            raw.send(msgspec.msgpack.encode([8, 1000, 10**6]))
            raw.send(encode_frame(Event(as_body(Tick(1)))))
            await until(lambda: server.counters.events_received == 1)
            assert server.counters.malformed_frames == 1

    run(scenario())


def test_both_ways_of_pushing_keep_their_common_order(endpoint):
    server, here = make_server(endpoint), []

    async def scenario():
        async with connect(server, here) as (_, peer):
            peer.push_threadsafe(Tick(1))
            peer.push(Tick(2))
            peer.push_threadsafe(Tick(3))
            await until(lambda: len(here) == 3)
            assert here == [Tick(1), Tick(2), Tick(3)]

    run(scenario())


def test_a_call_behind_events_that_find_the_socket_full_tells_of_the_loss(endpoint):
    def fail(data):
        raise UnsentError("test.transmit", "full")

    async def scenario():
        async with connect(make_server(endpoint), []) as (client, _):
            peer = client.peer
            peer.push_threadsafe(Tick(1))  # In the outbox until the loop runs, or sends.
            peer.transport._connection.transmit = fail
            with pytest.raises(PeerLostError, match="slow peer"):
                peer.begin("any", None, int)
            assert peer.is_lost

    run(scenario())


def test_an_arrival_whose_sign_a_send_has_swallowed_is_still_read(endpoint, raw_client):
    # Sending processes the socket's commands; with them goes the edge that the loop waits for.
    patient = RpcConfig(heartbeat_interval_ms=60_000, lease_ms=600_000)
    server, there = make_server(endpoint, patient), []
    server.on_event(lambda peer, event: there.append(event), Tick)

    async def scenario():
        async with server:
            raw = raw_client(endpoint)
            raw.say_hello()
            assert isinstance(await raw.receive(), Welcome)
            await until(lambda: server.peers)
            for number in range(5):
                raw.send(encode_frame(Event(as_body(Tick(number)))))
                time.sleep(0.02)  # The loop stands still while ZeroMQ's thread delivers.
                server.peers[0].push(Tick(number))
                await until(lambda: Tick(number) in there)  # noqa: B023 - awaited right here

    run(scenario())
