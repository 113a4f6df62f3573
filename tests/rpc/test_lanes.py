"""Calls by two ways: they begin in the order in which they were made, and each is answered once."""

import asyncio
import contextlib
import gc
import threading

import msgspec
import pytest

from tandem.core.errors import (
    CapacityError,
    ConflictError,
    DeadlineError,
    InternalError,
    NotFoundError,
    PeerLostError,
)
from tandem.rpc import Auth, LaneRouter, MethodTable, RpcClient, RpcServer, make_identity
from tandem.rpc.outgoing import OutgoingCalls
from tandem.rpc.wire.frames import (
    Call,
    Event,
    Fault,
    as_body,
    decode_frame,
    encode_frame,
)

TEST_TIMEOUT_S = 60
CALL_S = 10.0


class Answer:
    """To one request, for the loop and for threads."""

    def __init__(self, lanes, payload):
        self.lanes, self.payload = lanes, payload
        self.done = threading.Event()
        self.awaited = lanes.loop.create_future()
        self.result = None

    def _end(self, result):
        if self.done.is_set():
            return False
        self.result = result
        self.done.set()
        self.lanes.loop.call_soon_threadsafe(self._wake)
        return True

    def _wake(self):
        if not self.awaited.done():
            self.awaited.set_result(None)

    def reply(self, payload):
        assert len(payload) <= self.lanes.max_bytes
        return self._end(payload)

    def fail(self, error):
        return self._end(error)

    def wait(self, deadline_s):
        if not self.done.wait(deadline_s):
            raise DeadlineError("test.lane", "late")
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def wait_async(self, timeout_s):
        try:
            async with asyncio.timeout(timeout_s):
                await self.awaited
        except TimeoutError:
            raise DeadlineError("test.lane", "late") from None
        return self.wait(0)


class Lanes:
    """Of both sides, in one process. What is sent waits at a gate."""

    max_bytes = 1000
    address = "here"

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.sent = []
        self.is_gated = False
        self.is_full = False
        self.is_broken = False
        self.is_closed = False

    def serve(self, handler):
        self.handler = handler

    async def open(self, address, timeout_s):
        assert address == self.address
        return self

    def begin(self, request):
        if self.is_full:
            raise CapacityError("test.lane", "full")
        if self.is_broken:
            raise PeerLostError("test.lane", "broken")
        answer = Answer(self, request)
        self.sent.append(answer)
        self.loop.call_soon_threadsafe(self.deliver)
        return answer

    def begin_async(self, request, timeout_s):
        return self.begin(request).wait_async(timeout_s)

    def deliver(self):
        if not self.is_gated:
            sent, self.sent = self.sent, []
            self.handler(sent)

    def drop(self):
        self.is_broken = True
        for answer in self.sent:
            answer.fail(PeerLostError("test.lane", "broken"))
        self.sent.clear()

    def close(self):
        self.is_closed = True


class World:
    """A server whose handlers note in which order they begin, and a client with a lane to it."""

    def __init__(self):
        self.begun = []
        self.gate = asyncio.Event()
        self.cancelled = asyncio.Event()

    def quick(self, _, n):
        self.begun.append(n)
        return n

    async def slow(self, _, n):
        self.begun.append(n)
        await asyncio.sleep(0)
        return n

    def maybe(self, _, n):
        self.begun.append(n)
        return n if n % 2 else self._later(n)

    async def _later(self, n):
        await asyncio.sleep(0)
        return n

    async def hang(self, _, n):
        self.begun.append(n)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return n

    async def timed(self, _, n):
        try:
            async with asyncio.timeout(n):
                await asyncio.Event().wait()
        except TimeoutError:
            return "timed out"

    def length(self, _, text):
        self.begun.append(text[:1])
        return text

    def bad(self, _, n):
        return "\udc80" if n else object

    def refuse(self, _, what):
        raise {"deadline": DeadlineError, "lost": PeerLostError, "conflict": ConflictError}[what](
            "test.refuse", what, field="f"
        )


@contextlib.asynccontextmanager
async def connect(endpoint):
    world = World()
    world.lanes = Lanes()
    server = RpcServer(
        endpoint,
        identity=make_identity("server"),
        auth=Auth.local(),
        lanes=LaneRouter(world.lanes),
    )
    for name in ("quick", "slow", "maybe", "hang", "timed", "bad"):
        server.register(name, getattr(world, name), float if name == "timed" else int, object)
    server.register("length", world.length, str, str)
    server.register("refuse", world.refuse, str, str)
    client = RpcClient(
        endpoint,
        identity=make_identity("client"),
        auth=Auth.local(),
        methods=MethodTable(),
        lanes=LaneRouter(world.lanes, accepts=False),
    )
    async with server, client:
        world.server, world.client = server, client
        while not client.peer.has_lane:
            await asyncio.sleep(0)
        yield world


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, TEST_TIMEOUT_S))


def ask(world, method, argument, response=object):
    return asyncio.ensure_future(world.client.call(method, argument, response, timeout_s=CALL_S))


LONG = "x" * 2000


@pytest.mark.parametrize("methods", [("quick",), ("slow", "quick"), ("maybe", "slow", "quick")])
def test_calls_begin_in_the_order_in_which_they_were_made(endpoint, methods):
    """Also a plain function, which runs at once, behind a coroutine that waits for its turn."""

    async def scenario():
        async with connect(endpoint) as world:
            calls = [ask(world, methods[i % len(methods)], i) for i in range(100)]
            assert await asyncio.gather(*calls) == list(range(100))
            assert world.begun == list(range(100))
            assert world.server.peers[0].running_calls == 0

    run(scenario())


def test_the_ways_do_not_overtake_each_other(endpoint):
    """What is too long for the lane goes by the socket; all begin in the order of their making."""

    async def scenario():
        async with connect(endpoint) as world:
            world.lanes.is_gated = True
            calls = [ask(world, "length", text) for text in ("a", "b" * 2000, "c", "d" * 2000)]
            calls.append(ask(world, "quick", 5))
            other = world.client.peer
            # By the socket, and answered before anything that is held.
            for _ in range(200):
                await asyncio.sleep(0.001)
            assert world.begun == []
            assert other.has_lane
            world.lanes.is_gated = False
            world.lanes.deliver()
            answers = await asyncio.gather(*calls)
            assert [answer if answer == 5 else answer[:1] for answer in answers] == [*"abcd", 5]
            assert world.begun == [*"abcd", 5]

    run(scenario())


def test_a_lane_that_is_full_is_no_obstacle(endpoint):
    async def scenario():
        async with connect(endpoint) as world:
            world.lanes.is_gated = world.lanes.is_full = False
            first = ask(world, "quick", 1)
            await asyncio.sleep(0)
            world.lanes.is_full = True
            second = ask(world, "quick", 2)
            assert await asyncio.gather(first, second) == [1, 2]
            assert world.begun == [1, 2]
            assert world.client.peer.has_lane

    run(scenario())


def test_an_answer_too_long_for_the_lane_comes_by_the_socket(endpoint):
    async def scenario():
        async with connect(endpoint) as world:
            world.server.register("long", lambda _, n: "y" * n, int, str)
            calls = [ask(world, "long", n, str) for n in (5, 5000, 50_000)]
            assert [len(answer) for answer in await asyncio.gather(*calls)] == [5, 5000, 50_000]
            begin = world.client.begin_threadsafe
            begun = begin("long", 7000, str, timeout_s=CALL_S)
            assert len(await asyncio.to_thread(begun.wait, CALL_S)) == 7000

    run(scenario())


def test_a_broken_lane_leaves_its_calls_in_doubt_and_the_session_alive(endpoint):
    async def scenario():
        async with connect(endpoint) as world:
            world.lanes.is_gated = True
            lost = ask(world, "quick", 1)
            held = ask(world, "length", LONG)
            await asyncio.sleep(0.02)
            assert world.begun == []
            world.lanes.drop()
            with pytest.raises(DeadlineError, match="once or not at all"):
                await lost
            # What waited for the lost one is not held for ever.
            assert await held == LONG
            assert await ask(world, "quick", 2) == 2
            assert world.lanes.is_closed
            assert not world.client.peer.has_lane
            assert world.begun == ["x", 2]

    run(scenario())


def test_a_lane_found_broken_when_it_is_used_costs_no_call(endpoint):
    async def scenario():
        async with connect(endpoint) as world:
            world.lanes.drop()
            assert await ask(world, "quick", 1) == 1
            begin = world.client.begin_threadsafe
            begun = begin("quick", 2, int, timeout_s=CALL_S)
            assert await asyncio.to_thread(begun.wait, CALL_S) == 2

    run(scenario())


def test_what_comes_by_a_lane_after_it_was_left_is_refused(endpoint):
    async def scenario():
        async with connect(endpoint) as world:
            world.lanes.is_gated = True
            late = ask(world, "quick", 1)
            await asyncio.sleep(0)
            (sent,) = world.lanes.sent
            sent._end(PeerLostError("test.lane", "broken"))  # To its sender; it still arrives.
            with pytest.raises(DeadlineError):
                await late
            assert await ask(world, "quick", 2) == 2
            copy = Answer(world.lanes, sent.payload)
            world.lanes.handler([copy])
            assert isinstance(copy.result, PeerLostError)
            assert world.begun == [2]

    run(scenario())


def test_errors_of_handlers_are_not_errors_of_the_lane(endpoint):
    async def scenario():
        async with connect(endpoint) as world:
            for what, kind in (
                ("deadline", DeadlineError),
                ("lost", PeerLostError),
                ("conflict", ConflictError),
            ):
                with pytest.raises(kind) as caught:
                    await ask(world, "refuse", what)
                assert (caught.value.where, caught.value.what) == ("test.refuse", what)
                assert caught.value.field == "f"
                begin = world.client.begin_threadsafe
                begun = begin("refuse", what, str, timeout_s=CALL_S)
                with pytest.raises(kind, match=what):
                    await asyncio.to_thread(begun.wait, CALL_S)
            for n in (0, 1):  # No msgpack has it.
                with pytest.raises(InternalError):
                    await ask(world, "bad", n)
            assert world.client.peer.has_lane

    run(scenario())


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_handler_ends_with_its_caller(endpoint, how):
    async def scenario():
        async with connect(endpoint) as world:
            timeout_s = CALL_S if how == "cancel" else 0.05
            call = asyncio.ensure_future(world.client.call("hang", 1, int, timeout_s=timeout_s))
            while not world.begun:
                await asyncio.sleep(0)
            if how == "cancel":
                call.cancel()
            with pytest.raises((asyncio.CancelledError, DeadlineError)):
                await call
            await asyncio.wait_for(world.cancelled.wait(), CALL_S)

    run(scenario())


def test_nothing_waits_for_a_call_that_was_given_up_before_it_left(endpoint):
    async def scenario():
        async with connect(endpoint) as world:
            world.lanes.is_gated = True
            call = ask(world, "quick", 1)
            await asyncio.sleep(0)
            world.lanes.sent.clear()  # As an engine without a connection does with one given up.
            call.cancel()
            assert await ask(world, "length", LONG) == LONG
            assert world.begun == ["x"]

    run(scenario())


@pytest.mark.parametrize("is_thread", [False, True])
def test_a_call_that_was_given_up_is_not_run_when_it_comes_after_all(endpoint, is_thread):
    """Its place in the order is free by then, and calls after it have begun."""

    async def scenario():
        async with connect(endpoint) as world:
            world.lanes.is_gated = True
            if is_thread:
                begun = world.client.begin_threadsafe("quick", 1, int, timeout_s=CALL_S)
            else:
                begun = ask(world, "quick", 1)
                await asyncio.sleep(0)
            (sent,) = world.lanes.sent
            held = ask(world, "length", LONG)
            await asyncio.sleep(0.02)
            assert world.begun == []
            if is_thread:
                del begun
                gc.collect()
            else:
                begun.cancel()
            assert await held == LONG
            world.lanes.is_gated = False
            world.lanes.deliver()
            assert isinstance(sent.result, PeerLostError)
            assert await ask(world, "quick", 2) == 2
            assert world.begun == ["x", 2]

    run(scenario())


def test_a_flood_of_calls_that_wait_for_one_is_refused(endpoint, raw_client):
    """The table of calls that wait is bounded, and those after a refused one are not lost."""

    async def scenario():
        async with connect(endpoint) as world:
            raw = raw_client(endpoint)
            raw.say_hello()
            await raw.receive()
            (peer,) = [peer for peer in world.server.peers if peer.name == "raw"]
            peer._incoming._max_calls = 2
            for number in (2, 3, 4):
                raw.send(encode_frame(Call(number, "quick", 9000, as_body(number), number)))
            fault = await raw.receive()
            assert (fault.call_id, fault.code) == (4, "capacity")
            for number in (1, 5):
                raw.send(encode_frame(Call(number, "quick", 9000, as_body(number), number)))
            assert [(await raw.receive()).call_id for _ in range(4)] == [1, 2, 3, 5]
            assert world.begun == [1, 2, 3, 5]

    run(scenario())


def test_timeouts_work_inside_handlers(endpoint):
    async def scenario():
        async with connect(endpoint) as world:
            assert await ask(world, "timed", 0.001) == "timed out"

    run(scenario())


def test_a_session_that_ends_ends_its_calls_by_the_lane(endpoint):
    async def scenario():
        async with connect(endpoint) as world:
            calls = [ask(world, "hang", 1), ask(world, "slow", 2)]
            begun = world.client.begin_threadsafe("hang", 3, int, timeout_s=CALL_S)
            while len(world.begun) < 3:
                await asyncio.sleep(0)
            world.server.peers[0].close()
            for call in (calls[0], asyncio.ensure_future(asyncio.to_thread(begun.wait, CALL_S))):
                # The lane may tell before the socket does.
                with pytest.raises((PeerLostError, DeadlineError)):
                    await call
            await asyncio.wait_for(world.cancelled.wait(), CALL_S)
            with pytest.raises(PeerLostError):
                await ask(world, "quick", 1)
            with pytest.raises(PeerLostError):
                world.client.begin_threadsafe("quick", 1, int, timeout_s=CALL_S)

    run(scenario())


def test_who_does_not_know_the_token_is_refused(endpoint):
    """Whatever comes by a lane: a stranger's call, frames that are no calls, no frames."""

    async def scenario():
        async with connect(endpoint) as world:
            token = world.client.peer.transport._greeting.lane.token
            call = encode_frame(Call(1, "quick", 1000, as_body(1), 1))
            for payload in (b"", token[:-1], bytes(16) + call, call):
                answer = world.lanes.begin(payload)
                await asyncio.sleep(0)
                assert isinstance(answer.result, PeerLostError), payload
            event = encode_frame(Event(as_body(1)))
            for payload in (b"", b"\xc1", call[:-3], event):
                answer = world.lanes.begin(token + payload)
                await asyncio.sleep(0)
                fault = decode_frame(answer.result)
                assert isinstance(fault, Fault)
                assert fault.code == "corruption"
            assert world.begun == []

    run(scenario())


def test_a_request_that_comes_before_the_welcome_waits_for_it(endpoint):
    class Recorder:
        def __init__(self):
            self.result = None

        def fail(self, error):
            self.result = error
            return True

    async def scenario():
        lanes, taken = Lanes(), []
        router = LaneRouter(lanes)
        offer, gone = router.offer(), router.offer()
        first, second = Recorder(), Recorder()
        first.payload, second.payload = offer.token + b"a", gone.token + b"b"
        lanes.handler([first, second])
        router.begin(offer, lambda data, request: taken.append((data, request)))
        router.withdraw(gone)
        assert taken == [(b"a", first)]
        assert isinstance(second.result, PeerLostError)
        router.withdraw(offer)
        lanes.handler([first])
        assert isinstance(first.result, PeerLostError)
        router.withdraw(offer)  # Again, and of one that was never given out.
        router.withdraw(None)

    run(scenario())


def test_threads_without_a_lane_go_by_the_loop(endpoint):
    """In the same order as the loop's own calls; one that is dropped is cancelled."""

    async def scenario():
        world = World()
        server = RpcServer(endpoint, identity=make_identity("server"), auth=Auth.local())
        server.register("quick", world.quick, int, int)
        server.register("hang", world.hang, int, int)
        client = RpcClient(endpoint, identity=make_identity("client"), auth=Auth.local())
        async with server, client:
            begun = client.begin_threadsafe("quick", 4, int, timeout_s=CALL_S)
            assert await client.call("quick", 5, int) == 5
            assert await asyncio.to_thread(begun.wait, CALL_S) == 4
            assert world.begun == [4, 5]
            begun = client.begin_threadsafe("nothing", 4, int, timeout_s=CALL_S)
            with pytest.raises(Exception, match="unknown method"):
                await asyncio.to_thread(begun.wait, CALL_S)
            begun = client.begin_threadsafe("hang", 6, int, timeout_s=CALL_S)
            while world.begun[-1] != 6:
                await asyncio.sleep(0)
            del begun
            await asyncio.wait_for(world.cancelled.wait(), CALL_S)

    run(scenario())


def test_a_lane_that_cannot_be_opened_is_done_without(endpoint):
    async def scenario():
        lanes = Lanes()

        async def fail(address, timeout_s):
            raise NotFoundError("test.open", "nobody there")

        server = RpcServer(
            endpoint, identity=make_identity("s"), auth=Auth.local(), lanes=LaneRouter(lanes)
        )
        server.register("double", lambda _, n: 2 * n, int, int)
        other = Lanes()
        other.open = fail
        client = RpcClient(
            endpoint,
            identity=make_identity("c"),
            auth=Auth.local(),
            lanes=LaneRouter(other, accepts=False),
        )
        async with server, client:
            assert await client.call("double", 4, int) == 8
            await asyncio.wait_for(client.peer.transport._opening, CALL_S)
            assert not client.peer.has_lane
            assert await client.call("double", 5, int) == 10

    run(scenario())


@pytest.mark.parametrize("numbers", [([], []), ([1, 0], [2, 0])], ids=["none", "of a way"])
def test_peers_of_older_versions_are_served(endpoint, raw_client, numbers):
    """They name no numbers, or those of each way and which came before by the other."""

    async def scenario():
        async with connect(endpoint) as world:
            raw = raw_client(endpoint)
            raw.say_hello()
            await raw.receive()
            raw.send(msgspec.msgpack.encode([3, 9, "quick", 1000, 4, *numbers[0]]))
            raw.send(msgspec.msgpack.encode([3, 7, "quick", 1000, 5, *numbers[1]]))
            assert (await raw.receive()).call_id == 9
            assert (await raw.receive()).call_id == 7
            assert world.begun == [4, 5]

    run(scenario())


class _CollectingTransport:
    """Sends calls by a lane, and runs the garbage collector in them, as anything that allocates
    may."""

    name = "far"

    def encode(self, frame: object) -> bytes:
        return b""

    def send(self, data: bytes) -> None:
        raise AssertionError

    send_threadsafe = send

    def send_quietly(self, frame: object) -> None:
        pass

    def begin_by_lane(self, data: bytes, begin: object) -> tuple[object, object]:
        gc.collect()
        return object(), object()


def test_a_call_that_the_collector_drops_in_another_call_holds_up_no_thread():
    """The error of a call may keep the call itself in a cycle; it then ends wherever memory is
    allocated, also inside the lock that gives calls their order."""
    ended: list[int] = []

    def work() -> None:
        async def main() -> None:
            calls = OutgoingCalls(_CollectingTransport(), 100)
            for _ in range(3):
                cycle: list[object] = [calls.begin_threadsafe("m", 1, int, 1.0)]
                cycle.append(cycle)
                del cycle
                ended.append(len(calls))

        asyncio.run(main())

    gc.disable()  # For the cycle to last until the next call.
    try:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(60)
    finally:
        gc.enable()
    assert not thread.is_alive(), "a thread waits for a lock that it holds"
    assert ended == [1, 1, 1], "what was dropped is forgotten"
