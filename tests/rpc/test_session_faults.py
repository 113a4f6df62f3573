"""Peers that die, stop, restart or hang, in processes of their own; nothing may wait for ever.

Method: real signals to a child process. No time is measured: what is asserted is which mechanism
found the loss, told by the error's ``where``, under a lease that ends after the test gives up.
"""

import asyncio
import contextlib
import gc
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from quick import rest_slow
from tandem.core.clock import ManualClock
from tandem.core.errors import ConflictError, PeerLostError
from tandem.rpc import Auth, RpcClient, RpcConfig, RpcServer, make_identity
from tandem.rpc.wire.frames import Beat, Welcome, encode_frame

TEST_TIMEOUT_S = 60
QUICK = RpcConfig(heartbeat_interval_ms=50, lease_ms=600)
LEASE_S = 60
PATIENT = RpcConfig(heartbeat_interval_ms=1000, lease_ms=1000 * LEASE_S, connect_timeout_ms=20_000)


class Point(msgspec.Struct):
    x: int
    label: str


def to_json(config):
    return msgspec.json.encode(config).decode()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, TEST_TIMEOUT_S))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def make_client(endpoint, config, **more):
    return RpcClient(
        endpoint, identity=make_identity("parent"), auth=Auth.local(), config=config, **more
    )


def make_server(endpoint, config, **more):
    return RpcServer(
        endpoint, identity=make_identity("parent"), auth=Auth.local(), config=config, **more
    )


def test_a_killed_server_fails_open_calls_long_before_the_lease(endpoint, spawn):
    child = spawn("serve", endpoint, to_json(PATIENT))
    child.expect("ready")

    async def scenario():
        losses = []
        client = make_client(endpoint, PATIENT)
        client.on_peer_lost(lambda peer, error: losses.append(error))
        async with client:
            calls = [
                asyncio.create_task(client.call("hang", Point(n, ""), Point)) for n in range(20)
            ]
            for _ in calls:
                await asyncio.to_thread(child.expect, "hanging")
            child.signal(signal.SIGKILL)
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(error, PeerLostError) for error in results)
            assert len({id(error) for error in results}) == 20, "no shared tracebacks"
            assert len(losses) == 1
            assert losses[0].where == "rpc.session"
            with pytest.raises(PeerLostError):
                await client.call("echo", Point(1, ""), Point)

    run(scenario())


def test_a_killed_client_is_noticed_long_before_the_lease(endpoint, spawn):
    async def scenario():
        losses = []
        server = make_server(endpoint, PATIENT)
        server.on_peer_lost(lambda peer, error: losses.append((peer.name, error)))
        async with server:
            child = spawn("connect", endpoint, to_json(PATIENT))
            await asyncio.to_thread(child.expect, "ready")
            await until(lambda: server.peers)
            peer = server.peers[0]
            child.signal(signal.SIGKILL)
            await until(lambda: losses)
            name, error = losses[0]
            assert name == "child"
            assert error.where == "rpc.session"
            assert peer.is_lost
            assert not server.peers

    run(scenario())


def test_a_stopped_server_is_lost_by_its_lease_and_found_again(endpoint, spawn):
    child = spawn("serve", endpoint, to_json(QUICK))
    child.expect("ready")

    async def scenario():
        losses = []
        client = make_client(endpoint, QUICK)
        client.on_peer_lost(lambda peer, error: losses.append(error))
        async with client:
            instance_id = client.peer.instance_id
            child.signal(signal.SIGSTOP)
            with pytest.raises(PeerLostError):
                await client.call("echo", Point(1, ""), Point, timeout_s=60)
            assert len(losses) == 1
            child.signal(signal.SIGCONT)
            await client.aclose()
            peer = await client.connect()
            assert peer.instance_id == instance_id, "it is the same process"
            assert peer.epoch >= 2
            assert await peer.call("echo", Point(2, "b"), Point) == Point(2, "b")

    run(scenario())


def test_a_stopped_client_learns_on_waking_that_it_was_dropped(endpoint, spawn):
    async def scenario():
        losses = []
        server = make_server(endpoint, QUICK)
        server.on_peer_lost(lambda peer, error: losses.append(error))
        async with server:
            child = spawn("connect", endpoint, to_json(QUICK))
            await asyncio.to_thread(child.expect, "ready")
            child.signal(signal.SIGSTOP)
            await until(lambda: losses)
            child.signal(signal.SIGCONT)
            await asyncio.to_thread(child.expect, "lost peer_lost")

    run(scenario())


def test_a_restarted_server_is_another_instance_and_old_handles_stay_dead(endpoint, spawn):
    first = spawn("serve", endpoint)
    first.expect("ready")

    async def scenario():
        joined = []
        client = make_client(endpoint, PATIENT)
        client.on_peer(lambda peer: joined.append(peer.epoch))
        async with client:
            old = client.peer
            assert await client.call("get_pid", None, int) == first.pid
            first.signal(signal.SIGKILL)
            await until(lambda: old.is_lost)
            await client.aclose()
            connecting = asyncio.create_task(client.connect())
            second = spawn("serve", endpoint)
            new = await connecting
            assert await client.call("get_pid", None, int) == second.pid
            assert new.instance_id != old.instance_id
            assert new.epoch == client.epoch > old.epoch
            assert joined == [old.epoch, new.epoch]
            with pytest.raises(PeerLostError):
                await old.call("get_pid", None, int)

    run(scenario())


def test_connecting_again_ends_when_the_new_server_refuses(endpoint):
    async def scenario():
        identity = make_identity("parent", compat={"model": "a"})
        client = RpcClient(endpoint, identity=identity, auth=Auth.local(), config=PATIENT)
        async with RpcServer(endpoint, identity=identity, auth=Auth.local()):
            peer = await client.connect()
        await until(lambda: peer.is_lost)
        await client.aclose()
        other = make_identity("other", compat={"model": "b"})
        async with RpcServer(endpoint, identity=other, auth=Auth.local()):
            with pytest.raises(ConflictError, match="model differs"):
                await client.connect()
            with pytest.raises(PeerLostError, match="closed"):
                await client.call("any", None, int)

    run(scenario())


def test_the_lease_runs_on_the_clock_given(endpoint, raw_client):
    clock = ManualClock()

    async def scenario():
        losses = []
        server = make_server(endpoint, RpcConfig(heartbeat_interval_ms=20), clock=clock)
        server.on_peer_lost(lambda peer, error: losses.append(error))
        async with server:
            raw = raw_client(endpoint)
            raw.say_hello()
            await until(lambda: server.peers)
            for _ in range(4):
                clock.advance(2.5)
                for _ in range(40):  # Two beats and more of real time, none of it silence.
                    await asyncio.sleep(0.001)
            assert not losses
            clock.advance(0.01)
            await until(lambda: losses)
            assert losses[0].where == "rpc.lease"
            assert "silent for 10.010 s, lease 10 s" in str(losses[0])

    run(scenario())


def test_a_loop_that_slept_through_the_lease_blames_nobody(endpoint):
    # Both sides share the loop, so both oversleep; what has arrived meanwhile counts as heard.
    config = RpcConfig(heartbeat_interval_ms=20, lease_ms=100)

    async def scenario():
        async with make_server(endpoint, config) as server, make_client(endpoint, config) as client:
            for _ in range(3):
                client.peer.transport.send_beat()
                server.peers[0].transport.send_beat()
                time.sleep(0.15)
                await asyncio.sleep(0.03)
            assert client.is_connected
            assert server.peers

    run(scenario())


def test_silence_is_kept_shorter_than_the_lease_of_the_other_side(endpoint):
    # The server would beat once a minute by its own configuration; the client's lease is short.
    lazy = RpcConfig(heartbeat_interval_ms=60_000, lease_ms=600_000)
    strict = RpcConfig(heartbeat_interval_ms=100, lease_ms=300)

    async def scenario():
        async with make_server(endpoint, lazy), make_client(endpoint, strict) as client:
            begin = time.monotonic()
            while time.monotonic() - begin < 1.0:
                await asyncio.sleep(0.01)
                assert client.is_connected

    run(scenario())


def let_sockets_work():
    """Hold the loop while ZeroMQ's own threads move what is under way."""
    time.sleep(0.02)


def judge_by_hand(endpoint, raw_client, play):
    """Run ``play(clock, server, raw, peer)``: the lease is judged when the test says so."""
    clock = ManualClock()

    async def scenario():
        async with make_server(endpoint, PATIENT, clock=clock) as server:
            raw = raw_client(endpoint)
            raw.say_hello()
            await until(lambda: server.peers)
            play(clock, server, raw, server.peers[0])

    run(scenario())


def beat(server, raw):
    """Return when a beat is there, unread; holds the loop until then."""
    raw.send(encode_frame(Beat(0, 0)))
    assert server._socket.poll(TEST_TIMEOUT_S * 1000)


def check_silence_is_loss(clock, peer, num_looks):
    """So many looks in time, of which the last finds the lease over."""
    for _ in range(num_looks):
        assert not peer.is_lost
        clock.advance(20.5)
        peer.transport.check_lease()
    assert peer.is_lost


def test_what_has_arrived_counts_as_heard_before_the_lease_is_judged(endpoint, raw_client):
    def play(clock, server, raw, peer):
        beat(server, raw)
        clock.advance(61.0)
        peer.transport.check_lease()  # As the timer does when the loop wakes after a minute.
        check_silence_is_loss(clock, peer, 3)

    judge_by_hand(endpoint, raw_client, play)


def test_a_machine_that_stood_still_loses_nobody(endpoint, raw_client):
    """Who wakes first finds nothing of the others, who slept as well, and waits for them."""

    def play(clock, server, raw, peer):
        for _ in range(2):
            clock.advance(3600.0)
            peer.transport.check_lease()
            assert not peer.is_lost
            beat(server, raw)
            server._pump.drain()
        clock.advance(3600.0)
        check_silence_is_loss(clock, peer, 4)

    judge_by_hand(endpoint, raw_client, play)


def test_a_descriptor_used_again_is_not_taken_for_its_former_owner(endpoint, raw_client):
    # All of it happens while the loop stands still: the farewell of the first connection and the
    # hello of the second, on the same descriptor, are then read in one turn.
    async def scenario():
        async with make_server(endpoint, PATIENT) as server:
            for _ in range(5):
                before = server.counters.peers_joined
                short_lived = raw_client(endpoint)
                short_lived.say_hello()
                let_sockets_work()
                short_lived.close()
                let_sockets_work()
                lasting = raw_client(endpoint)
                lasting.say_hello(identity=make_identity("lasting"))
                let_sockets_work()
                server._pump.drain()  # The messages before the monitor's news: the worse order.
                assert isinstance(await lasting.receive(), Welcome)
                for _ in range(20):
                    await asyncio.sleep(0)
                assert [peer.name for peer in server.peers] == ["lasting"]
                assert server.counters.peers_joined > before
                lasting.close()
                await until(lambda: not server.peers)

    run(scenario())


def list_zmq_threads():
    found = set()
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has just ended.
            if (path / "comm").read_text().startswith("ZMQbg"):
                found.add(path.name)
    return found


@pytest.mark.parametrize("num_turns", rest_slow([1, 3, 5, 8, 11], range(1, 12)))
def test_a_client_that_is_cancelled_while_it_closes_leaves_nothing(endpoint, num_turns):
    """Of a context that nobody closes, threads and descriptors stay until it is collected."""

    async def main():
        before = list_zmq_threads()
        loop = asyncio.get_running_loop()
        executor = ThreadPoolExecutor(1)
        loop.set_default_executor(executor)
        go_on = threading.Event()
        busy = executor.submit(go_on.wait, TEST_TIMEOUT_S)  # What ends the context has to queue.
        client = make_client(endpoint, PATIENT)
        connecting = asyncio.create_task(client.connect())
        for _ in range(10):
            await asyncio.sleep(0)
        connecting.cancel()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.wait([connecting])
        go_on.set()
        await until(busy.done)
        await until(lambda: list_zmq_threads() <= before)
        await client.aclose()

    gc.collect()
    gc.disable()
    try:
        run(main())
    finally:
        gc.enable()
