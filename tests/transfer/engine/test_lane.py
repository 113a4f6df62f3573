"""A control channel whose calls go by connections of an engine, on loops that poll and others."""

import asyncio
import contextlib
import logging

import pytest

from tandem.core.errors import DeadlineError, InternalError, PeerLostError
from tandem.rpc import Auth, LaneRouter, RpcClient, RpcServer, make_identity, make_runtime_dir
from tandem.transfer import EngineLanes, PollingLoop, TransferConfig, TransferEngine

SECRET = "s" * 32
CALL_S = 20.0
LOOPS = pytest.mark.parametrize("loop_factory", [PollingLoop, asyncio.SelectorEventLoop])


def make_engine(name):
    return TransferEngine(TransferConfig(name=name, secret=SECRET, listen=("127.0.0.1:0",)))


@contextlib.asynccontextmanager
async def connect(register):
    """Yield a client with a lane to a server, both peers, and both engines."""
    with make_engine("server") as theirs, make_engine("client") as ours:
        server = RpcServer(
            f"ipc://{make_runtime_dir()}/s.sock",
            identity=make_identity("server"),
            auth=Auth.local(),
            lanes=LaneRouter(EngineLanes(theirs)),
        )
        register(server)
        async with server:
            client = RpcClient(
                server.endpoint,
                identity=make_identity("client"),
                auth=Auth.local(),
                lanes=LaneRouter(EngineLanes(ours)),
            )
            client._methods.register("back", lambda _, n: n + 1, int, int)
            async with client:
                peers = client.peer, server.peers[0]
                while not all(peer.has_lane for peer in peers):
                    await asyncio.sleep(0.001)
                yield client, peers, (ours, theirs)


def run(main, loop_factory):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(main(), 60))


@LOOPS
def test_calls_of_the_loop_and_of_threads_are_answered(loop_factory, caplog):
    """Also one whose answer no message can carry; it is its caller's alone."""
    caplog.set_level(logging.CRITICAL)

    def register(server):
        async def echo(peer, text):
            await peer.call("back", 1, int, timeout_s=CALL_S)
            return "\udc80" if text == "bad" else text

        server.register("echo", echo, str, str)

    async def main():
        async with connect(register) as (client, _, __):
            texts = ["bad" if i % 4 == 0 else f"good {i}" for i in range(24)]

            def ask(text):
                begun = client.begin_threadsafe("echo", text, str, timeout_s=CALL_S)
                return begun.wait(CALL_S)

            work = [asyncio.to_thread(ask, text) for text in texts]
            work += [client.call("echo", text, str, timeout_s=CALL_S) for text in texts]
            answers = await asyncio.gather(*work, return_exceptions=True)
            for text, answer in zip(texts * 2, answers, strict=True):
                if text == "bad":
                    assert isinstance(answer, InternalError)
                else:
                    assert answer == text
            assert await client.call("echo", "y" * 2**21, str) == "y" * 2**21

    run(main, loop_factory)


@LOOPS
def test_asyncio_timeout_works_inside_handlers(loop_factory):
    """It needs the handler to be a task: before, during and after it waits."""

    def register(server):
        async def late(_, text):
            try:
                async with asyncio.timeout(0.001):
                    await asyncio.Event().wait()
            except TimeoutError:
                return f"late {text}"

        async def in_time(peer, text):
            async with asyncio.timeout(CALL_S):
                await peer.call("back", 1, int, timeout_s=CALL_S)
            async with asyncio.timeout(CALL_S):
                return await asyncio.wait_for(asyncio.sleep(0, text), CALL_S)

        def plain(_, text):
            return late(_, text)

        server.register("late", late, str, str)
        server.register("in_time", in_time, str, str)
        server.register("plain", plain, str, str)

    async def main():
        async with connect(register) as (client, _, __):
            calls = [client.call(method, "a", str) for method in ("late", "in_time", "plain")]
            assert await asyncio.gather(*calls) == ["late a", "a", "late a"]

    run(main, loop_factory)


@LOOPS
def test_long_and_short_calls_begin_in_one_order(loop_factory):
    begun = []

    def register(server):
        async def slow(_, text):
            begun.append(text[:3])
            await asyncio.sleep(0)
            return ""

        def quick(_, text):
            begun.append(text[:3])
            return ""

        server.register("slow", slow, str, str)
        server.register("quick", quick, str, str)

    async def main():
        async with connect(register) as (client, _, __):
            texts = [f"{i:03}" + "x" * (2**20 if i % 7 == 3 else 0) for i in range(60)]
            calls = [
                client.call("quick" if i % 3 else "slow", text, str) for i, text in enumerate(texts)
            ]
            await asyncio.gather(*calls)
            assert begun == [text[:3] for text in texts]

    run(main, loop_factory)


@LOOPS
def test_a_lane_whose_engine_is_gone_is_left(loop_factory):
    def register(server):
        server.register("double", lambda _, n: 2 * n, int, int)

    async def main():
        async with connect(register) as (client, peers, (_, theirs)):
            assert await client.call("double", 2, int) == 4
            await asyncio.to_thread(theirs.close)
            answer = None
            while answer is None:
                with contextlib.suppress(DeadlineError, PeerLostError):
                    answer = await client.call("double", 3, int, timeout_s=1)
            assert answer == 6
            assert not peers[0].has_lane
            assert not peers[0].is_lost

    run(main, loop_factory)
