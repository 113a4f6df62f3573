"""Orders to a host: numbers, order of arrival, what a host refuses, and lanes that break."""

import asyncio

import msgspec
import numpy as np
import pytest

from tandem.core.clock import MonotonicClock
from tandem.core.errors import CancelledError, ConflictError, DeadlineError, PeerLostError
from tandem.store import HostService, MasterService, StoreConfig
from tandem.store.formats.checksum import checksum_table, make_table
from tandem.store.formats.headers import ExtentHeader
from tandem.store.formats.records import append_record
from tandem.store.host.host import StoreHost
from tandem.store.host.segment import HostSegment
from tandem.store.master.state.orders import OrderLine
from tandem.store.messages import (
    Ack,
    Endpoint,
    ExtentRecords,
    Joined,
    PullObject,
    WipeExtents,
)
from tandem.transfer import PollingLoop


class Host:
    """Notes the numbers of what it is told."""

    is_lost = False

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.gate = asyncio.Event()

    def begin(self, method, request, response_type, *, timeout_s):
        self.numbers.append(request.number)
        return self.answer()

    async def answer(self):
        await self.gate.wait()
        return Ack()


class Port:
    """The data path of a host that nobody writes to."""

    address, read_base = "nowhere", 0

    def former_writers(self) -> set[int]:
        return set()


class ForgetfulMaster:
    """Joins a host, but its last answer is lost; answers no second attempt."""

    def __init__(self) -> None:
        self.is_asked_again = asyncio.Event()

    async def call(self, method, request, response_type, *, timeout_s):
        if method == "inventory_done":
            raise DeadlineError("test.call", "the answer was lost")
        if request.attempt > 1:
            self.is_asked_again.set()
            await asyncio.get_running_loop().create_future()
        return Joined(epoch=1, host=0, session=7)


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def make_line(host: "Host", epoch) -> OrderLine:
    line = OrderLine("h", MonotonicClock(), epoch, lambda: None)
    line.begin(host, 1)
    return line


def send(line: OrderLine) -> asyncio.Future:
    return asyncio.ensure_future(line.send("wipe", WipeExtents, Ack, timeout_s=5, offsets=[0]))


def test_orders_leave_in_the_order_of_their_numbers_and_none_after_the_session():
    async def main() -> None:
        host = Host()
        line = make_line(host, lambda: 1)
        tasks = [send(line) for _ in range(5)]
        await asyncio.sleep(0)
        assert host.numbers == list(range(5))
        line.end()
        with pytest.raises(PeerLostError):
            await send(line)
        host.gate.set()
        assert await asyncio.gather(*tasks) == [Ack()] * 5
        assert host.numbers == list(range(5))

    run(main())


def test_an_order_of_a_term_that_has_ended_takes_no_number():
    async def main() -> None:
        host = Host()
        host.gate.set()
        epochs = iter([1, None, 2])

        def epoch() -> int:
            value = next(epochs)
            if value is None:
                raise PeerLostError("store.order", "the term has ended")
            return value

        line = make_line(host, epoch)
        assert await send(line) == Ack()
        with pytest.raises(PeerLostError, match="term has ended"):
            await send(line)
        assert await send(line) == Ack()
        assert host.numbers == [0, 1]

    run(main())


@pytest.mark.parametrize("is_polling", [False, True])
def test_orders_go_on_when_the_lane_to_a_host_breaks(tmp_path, is_polling):
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
            space = master.elected.master.state.hosts[0]
            peer = space.caller
            while not peer.has_lane:
                await asyncio.sleep(0.01)
            assert await space.line.order("wipe", WipeExtents, Ack, offsets=[0]) == Ack()
            number = host.host.orders.last_number
            order = WipeExtents(
                epoch=master.epoch, session=space.session, number=number, offsets=[0]
            )
            with pytest.raises(ConflictError, match="late or doubled"):
                await peer.call("wipe", order, Ack, timeout_s=60)
            other = msgspec.structs.replace(order, number=number + 1, session=space.session + 1)
            with pytest.raises(ConflictError, match="session"):
                await peer.call("wipe", other, Ack, timeout_s=60)
            assert host.host.orders.last_number == number
            # The session goes on without it.
            peer.transport.lane.close()
            answers = []
            for _ in range(3):
                try:
                    answer = await space.line.order("wipe", WipeExtents, Ack, offsets=[0])
                except (DeadlineError, ConflictError):
                    continue
                answers.append(answer)
            assert answers[-1:] == [Ack()]
            assert not peer.has_lane

    if is_polling:
        with asyncio.Runner(loop_factory=PollingLoop) as runner:
            runner.run(asyncio.wait_for(main(), 60))
    else:
        run(main())


def test_a_host_that_joins_again_obeys_nothing_of_the_attempt_before():
    """That master may have joined it; its pull would end in space that the next inventory frees."""

    async def main() -> None:
        master = ForgetfulMaster()
        host = StoreHost("h", "m", HostSegment.make_anonymous(1 << 20), Port())
        wipe = {name: handler for name, handler, *_ in host.orders.methods()}["wipe"]
        host.on_master(master)
        await master.is_asked_again.wait()
        with pytest.raises(ConflictError, match="session"):
            wipe(master, WipeExtents(epoch=1, session=7, number=0, offsets=[]))
        await host.aclose()

    run(main())


class PullPort(Port):
    """The data path of a host whose pulls end when they are told to, also cancelled ones."""

    def __init__(self) -> None:
        self.ends: dict[int, asyncio.Event] = {}
        self.fill = lambda offset: None

    async def fetch(self, source, source_offset, offset, length, timeout_s):
        end = self.ends.setdefault(offset // EXTENT, asyncio.Event())
        try:
            await end.wait()
        except asyncio.CancelledError:
            await end.wait()  # A transfer ends when no byte can come any more.
            raise
        self.fill(offset // EXTENT * EXTENT)


EXTENT = 4096


class Master:
    """Joins a host, and has no complaints."""

    async def call(self, method, request, response_type, *, timeout_s):
        return Joined(epoch=1, host=0, session=7) if method == "join" else Ack()


def test_a_wipe_ends_all_pulls_of_its_extents():
    """One that ended while another was waited for left its object in space that was free then."""

    async def main() -> None:
        segment, port = HostSegment.make_anonymous(1 << 20), PullPort()
        value = np.arange(100, dtype=np.uint8)
        table = make_table([value])
        header = ExtentHeader("k", 100, 1 << 40, checksum_table(table), 1, False, 0)
        table_at, end = segment.span(header)

        def fill(offset: int) -> None:
            data = segment.data[offset : offset + end]
            data[table_at : table_at + len(table)] = np.frombuffer(table, np.uint8)
            data[end - 100 :] = value

        port.fill = fill
        host = StoreHost("h", "m", segment, port)
        handlers = {name: handler for name, handler, *_ in host.orders.methods()}
        master = Master()
        host.on_master(master)
        await host.is_joined.wait()
        pulls, source = [], Endpoint(1, "other", "o", "", 0)
        for number in range(2):
            records = ExtentRecords()
            append_record(records, number * EXTENT, header._replace(key="kl"[number]))
            order = PullObject(epoch=1, session=7, number=number, source=source,
                               source_offset=0, records=records, timeout_ms=1000)  # fmt: skip
            pulls.append(asyncio.ensure_future(handlers["pull"](master, order)))
        while len(port.ends) < 2:
            await asyncio.sleep(0)
        wiping = asyncio.ensure_future(handlers["wipe"](
            master, WipeExtents(epoch=1, session=7, number=2, offsets=[0, EXTENT])
        ))  # fmt: skip
        await asyncio.sleep(0)
        port.ends[1].set()
        await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
        port.ends[0].set()
        assert await wiping == Ack()
        assert segment.list_offsets() == []
        for pull in pulls:
            with pytest.raises(CancelledError):
                await pull
        await host.aclose()

    run(main())
