"""Goal: an event loop serves calls, whether it polls or not, and stays an ordinary loop."""

import asyncio
import threading

import pytest

from tandem.core.errors import ConflictError, PeerLostError, TandemError, UnsupportedError
from tandem.transfer import PollingLoop, TransferConfig, TransferEngine

SECRET = "s" * 32
DEADLINE_S = 20.0
LOOPS = [PollingLoop, asyncio.SelectorEventLoop]


def make_engine(name, **more):
    config = TransferConfig(name=name, secret=SECRET, listen=("127.0.0.1:0",), **more)
    return TransferEngine(config)


def run(loop_factory, main) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(bounded())


def echo(calls):
    return [call.payload for call in calls]


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_calls_are_answered_on_the_loops_thread(loop_factory):
    """Also those that come one after the other, each while the loop polls for it."""
    with make_engine("server") as server, make_engine("client") as client:

        async def main() -> None:
            threads: set[threading.Thread] = set()

            def handle(calls):
                threads.add(threading.current_thread())
                return echo(calls)

            server.serve_calls(handle, loop=asyncio.get_running_loop())
            segment = await asyncio.to_thread(client.open, server.address)

            def ask() -> None:
                for i in range(200):
                    payload = i.to_bytes(2, "little")
                    assert client.call(segment, payload, deadline_s=DEADLINE_S) == payload

            await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(4)))
            assert threads == {threading.current_thread()}
            with pytest.raises(ConflictError):
                server.serve_calls(handle, loop=asyncio.get_running_loop())

        run(loop_factory, main)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_timers_and_other_threads_are_heard_while_calls_come(loop_factory):
    """A loop that is called without pause runs its timers, and what other threads give it."""
    with make_engine("server") as server, make_engine("client") as client:

        async def main() -> None:
            loop = asyncio.get_running_loop()
            server.serve_calls(echo, loop=loop)
            segment = await asyncio.to_thread(client.open, server.address)
            is_over = threading.Event()

            def ask() -> int:
                count = 0
                while not is_over.is_set():
                    client.call(segment, b"x", deadline_s=DEADLINE_S)
                    count += 1
                return count

            asking = asyncio.gather(*(asyncio.to_thread(ask) for _ in range(2)))
            for _ in range(20):
                await asyncio.sleep(0.001)
                told = asyncio.Event()
                await asyncio.to_thread(loop.call_soon_threadsafe, told.set)
                await told.wait()
            is_over.set()
            assert all(await asking)

        run(loop_factory, main)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_closed_engine_leaves_its_loop(loop_factory):
    """The loop goes on; its callers hear of the end; another engine may take the descriptor."""
    with make_engine("client") as client:

        async def main() -> None:
            loop = asyncio.get_running_loop()
            for _ in range(3):
                with make_engine("server") as server:
                    kept = []

                    def keep(calls, kept=kept):
                        kept.extend(calls)
                        return [None] * len(calls)

                    server.serve_calls(keep, loop=loop)
                    segment = await asyncio.to_thread(client.open, server.address)
                    pending = client.begin_call(segment, b"never answered")
                    while not kept:
                        await asyncio.sleep(0.001)
                with pytest.raises(PeerLostError):
                    await asyncio.to_thread(pending.wait, DEADLINE_S)
                await asyncio.sleep(0)
                await asyncio.to_thread(segment.close)

        run(loop_factory, main)


def test_two_engines_share_a_loop():
    """As master and host of a store in one process: each calls the other, on the same loop."""
    with make_engine("one") as one, make_engine("two") as two:

        async def main() -> None:
            loop = asyncio.get_running_loop()
            one.serve_calls(echo, loop=loop)
            two.serve_calls(echo, loop=loop)
            to_two = await asyncio.to_thread(one.open, two.address)
            to_one = await asyncio.to_thread(two.open, one.address)
            for _ in range(100):
                answers = await asyncio.gather(
                    one.call_async(to_two, b"a", deadline_s=DEADLINE_S),
                    two.call_async(to_one, b"b", deadline_s=DEADLINE_S),
                )
                assert answers == [b"a", b"b"]

        run(PollingLoop, main)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_what_a_handler_raises_is_its_callers_error(loop_factory):
    with make_engine("server") as server, make_engine("client") as client:

        async def main() -> None:
            def handle(calls):
                raise UnsupportedError("test.handle", "not today")

            server.serve_calls(handle, loop=asyncio.get_running_loop())
            segment = await asyncio.to_thread(client.open, server.address)
            with pytest.raises(TandemError, match="not today"):
                await client.call_async(segment, b"", deadline_s=DEADLINE_S)

        run(loop_factory, main)


def test_it_is_an_ordinary_loop_without_engines():
    async def main() -> None:
        seen: list[int] = []
        loop = asyncio.get_running_loop()
        loop.set_debug(True)
        loop.call_later(0.001, seen.append, 1)
        await asyncio.to_thread(loop.call_soon_threadsafe, seen.append, 2)
        while len(seen) < 2:
            await asyncio.sleep(0.001)

    run(PollingLoop, main)
