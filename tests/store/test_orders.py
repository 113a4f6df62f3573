"""Orders to a host by two ways, of which one is fast: numbers, order of arrival, failures."""

import asyncio

import msgspec
import pytest

from tandem.core.errors import ConflictError, DeadlineError, PeerLostError
from tandem.store import HostService, MasterService, StoreConfig
from tandem.store.fast_calls import CallWay
from tandem.store.master.state.orders import OrderLine
from tandem.store.messages import Ack, WipeExtents
from tandem.transfer import PollingLoop


class Way:
    """A way whose calls wait until they are let through."""

    def __init__(self, arrived: list[tuple[str, int]], name: str) -> None:
        self.arrived, self.name = arrived, name
        self.largest = 10
        self.is_closed = False
        self.is_lost = False
        self.error: Exception | None = None
        self.gate = asyncio.Event()

    def takes(self, request) -> bool:
        return len(request.offsets) <= self.largest

    async def call(self, method, request, response_type, *, timeout_s):
        self.arrived.append((self.name, request.number))
        if request.offsets:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return Ack()

    def close(self) -> None:
        self.is_closed = True


class World:
    def __init__(self) -> None:
        self.arrived: list[tuple[str, int]] = []
        self.slow, self.fast = Way(self.arrived, "slow"), Way(self.arrived, "fast")
        self.line = OrderLine(self.slow, 1, lambda: 1)

    def send(self, count: int = 1) -> asyncio.Task:
        work = self.line.send("wipe", WipeExtents, Ack, timeout_s=5, offsets=[0] * count)
        return asyncio.ensure_future(work)


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_change_of_way_waits_until_what_went_before_has_begun():
    async def main() -> None:
        world = World()
        tasks = [world.send(), world.send()]
        await settle()
        world.line.use(world.fast)
        tasks += [world.send(), world.send(), world.send(11), world.send()]
        await settle()
        # An empty order goes last by the old way; its answer tells that those before have begun,
        # however long they take.
        slow, fast = "slow", "fast"
        assert world.arrived == [
            (slow, 0), (slow, 1), (slow, 3), (fast, 4), (fast, 5), (fast, 7), (slow, 8), (slow, 10),
            (fast, 11),
        ]  # fmt: skip
        world.slow.gate.set()
        world.fast.gate.set()
        await asyncio.gather(*tasks)

    run(main())


def test_a_broken_fast_way_is_left_and_its_order_is_in_doubt():
    async def main() -> None:
        world = World()
        world.line.use(world.fast)
        world.fast.gate.set()
        world.slow.gate.set()
        world.fast.error = PeerLostError("transfer.call", "the connection broke")
        with pytest.raises(DeadlineError, match="the connection broke"):
            await world.send()
        assert await world.send() == Ack()
        assert world.arrived == [("fast", 0), ("slow", 1)]
        assert world.fast.is_closed
        # With the session gone as well, that is what there is to say.
        world = World()
        world.line.use(world.fast)
        world.fast.gate.set()
        world.fast.error = PeerLostError("transfer.call", "the connection broke")
        world.slow.is_lost = True
        with pytest.raises(PeerLostError):
            await world.send()

    run(main())


def test_nothing_is_sent_after_the_session():
    async def main() -> None:
        world = World()
        first = world.send()
        await settle()
        world.line.use(world.fast)
        world.line.end()
        assert world.fast.is_closed
        with pytest.raises(PeerLostError):
            await world.send()
        world.slow.gate.set()
        await first
        assert world.arrived == [("slow", 0)]
        late = Way([], "late")
        world.line.use(late)
        assert late.is_closed

    run(main())


def test_an_order_that_waits_to_change_its_way_asks_for_the_term_again():
    async def main() -> None:
        world = World()
        is_over = False

        def epoch() -> int:
            if is_over:
                raise PeerLostError("store.order", "the term has ended")
            return 1

        world.line = OrderLine(world.slow, 1, epoch)
        first = world.send()
        await settle()
        world.line.use(world.fast)
        real_call = world.slow.call

        async def call(method, request, response_type, *, timeout_s):
            nonlocal is_over
            answer = await real_call(method, request, response_type, timeout_s=timeout_s)
            is_over = not request.offsets
            return answer

        world.slow.call = call
        with pytest.raises(PeerLostError, match="term has ended"):
            await world.send()
        assert world.arrived == [("slow", 0), ("slow", 2)]
        world.slow.gate.set()
        await first

    run(main())


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_host_takes_fast_orders_of_its_master_alone(tmp_path, is_shared):
    """Who holds the secret may call; only who was told the token may give orders."""

    async def main() -> None:
        config = StoreConfig(
            master=f"ipc://{tmp_path}/m.sock",
            segment_dir=str(tmp_path / "segments"),
            segment_bytes=2**22,
            recovery_ms=0,
            transports=("local", "tcp"),
        )
        tmp_path.chmod(0o700)
        async with MasterService(config) as master, HostService(config) as host:
            await host.host.is_joined.wait()
            space = master.seat.master.state.hosts[0]
            while space.line.fast is None:
                await asyncio.sleep(0.01)
            assert await space.order("wipe", WipeExtents, Ack, offsets=[0]) == Ack()
            number = host.host._last_number
            engine, segment = master._engine, space.line.fast._segment
            stranger = CallWay(engine, segment, "0" * 32)
            order = WipeExtents(
                epoch=master.epoch, session=space.session, number=number + 1, offsets=[0]
            )
            with pytest.raises(PeerLostError, match="no session"):
                await stranger.call("wipe", order, Ack, timeout_s=5)
            assert host.host._last_number == number
            late = msgspec.structs.replace(order, number=number)
            with pytest.raises(ConflictError, match="late or doubled"):
                await space.line.fast.call("wipe", late, Ack, timeout_s=5)
            # The way breaks: the session goes on without it.
            space.line.fast._segment.close()
            answers = []
            for _ in range(3):
                try:
                    answers.append(await space.order("wipe", WipeExtents, Ack, offsets=[0]))
                except (DeadlineError, ConflictError):
                    continue
            assert answers[-1:] == [Ack()]

    if is_shared:
        with asyncio.Runner(loop_factory=PollingLoop) as runner:
            runner.run(asyncio.wait_for(main(), 30))
    else:
        run(main())
