"""A store in a world of its own: virtual time, seeded chance, dying processes, lying networks.

The master, hosts and clients are the product's classes; only the loop's clock, the control channel
and the data path are models, each worse than the real one:

- a call may be lost (either way), late (even after its session has ended) or doubled;
- bytes move in slices at times of their own, so a reader can see half of a write, and slices of a
  writer that failed, gave up or died may still arrive, until the host has closed its place;
- a process dies between any two steps; a host's segment survives it, nothing else does;
- a stalled client stops dead and goes on a minute later; its place cannot be closed meanwhile.
"""

import asyncio
import collections
import contextvars
import functools
import heapq
import itertools
import random
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
from disk_world import MemoryDisk, MemoryPort

from tandem.core.errors import (
    CapacityError,
    ConflictError,
    DeadlineError,
    InternalError,
    NotFoundError,
    PeerLostError,
    TandemError,
    make_error,
)
from tandem.store.client import AsyncStoreClient
from tandem.store.config import StoreConfig
from tandem.store.disk import DiskTier
from tandem.store.host import StoreHost
from tandem.store.master import StoreMaster
from tandem.store.ports import FORMER_WRITERS
from tandem.store.roster import MemoryRosterStore
from tandem.store.segment import Segment

BASE_STEP = 2**40
BUCKET_BYTES = 2**17
DISK_BYTES = 6 * BUCKET_BYTES


RUNNING: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("RUNNING", default=None)
"""The process whose code this is."""

MANY_TIMERS = 100
"""From here on a queue is rid of cancelled timers when they are more than half of it."""


class _Call:
    """A callback that is due. ``asyncio``'s own does no more, and takes twice the time."""

    __slots__ = ("args", "callback", "context", "is_cancelled")

    def __init__(self, callback, args, context) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class _Timer(float):
    """A callback that will be due; *is* the time when, so that a heap compares it natively."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "is_waiting", "loop")

    def when(self) -> float:
        return float(self)

    def cancel(self) -> None:
        if self.is_waiting and not self.is_cancelled:
            self.loop.num_cancelled += 1
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time moves only when nothing is left to do.

    What belongs to a stalled process is put off until that wakes, whatever it is. Callbacks run
    in the order in which the loops of ``asyncio`` would run them; it has no sockets and no
    threads, and next to nothing to do for a callback, since runs consist of little else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.stalled_until_s = 0.0
        """No process is stalled beyond."""
        self.num_cancelled = 0
        """Of the timers that wait."""
        self._calls: collections.deque[_Call | _Timer] = collections.deque()
        self._timers: list[_Timer] = []
        # Asked for, and about, every future: what is native is quicker, and bool() is False.
        self.create_future = functools.partial(asyncio.Future, loop=self)
        self.get_debug = bool

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback, *args, context=None):
        if self.now_s < self.stalled_until_s:
            process = RUNNING.get() if context is None else context.get(RUNNING)
            if process is not None and process.is_stalled and process.is_alive:
                return self.call_at(process.stalled_until_s, callback, *args, context=context)
        if context is None:
            context = contextvars.copy_context()
        call = _Call(callback, args, context)
        self._calls.append(call)
        return call

    def call_later(self, delay, callback, *args, context=None):
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(self, when, callback, *args, context=None):
        timer = _Timer(when)
        timer.callback = callback
        timer.args = args
        timer.context = contextvars.copy_context() if context is None else context
        timer.is_cancelled = False
        timer.is_waiting = True
        timer.loop = self
        heapq.heappush(self._timers, timer)
        return timer

    async def poll(self, is_over: Callable[[], bool], draw_period_s: Callable[[], float]) -> None:
        """Sleep until ``is_over()``, which is asked after each period.

        As sleeping in a loop, step by step, but the task sleeps through it.
        """
        over = self.create_future()

        def ring() -> None:
            if is_over():
                wake()
            else:
                self.call_soon(wait)

        def wait() -> None:
            nonlocal timer
            if is_over():
                wake()
            elif not over.done():
                timer = self.call_later(draw_period_s(), ring)

        def wake() -> None:
            if not over.done():
                over.set_result(None)

        timer = self.call_later(draw_period_s(), ring)
        try:
            await over
        finally:
            timer.cancel()

    def call_soon_threadsafe(self, callback, *args, context=None):
        """Of a finalizer, that is; there are no threads."""
        self._calls.append(_Call(callback, args, contextvars.copy_context()))

    def _run_once(self) -> None:
        """Run until told to stop: what ``run_forever`` calls, again and again."""
        calls, pop = self._calls, heapq.heappop
        while True:
            if self.num_cancelled:
                self._drop_cancelled()
            timers, now_s = self._timers, self.now_s
            if not calls and not self._stopping:
                if not timers:
                    raise AssertionError("deadlock: nothing will ever happen again")
                if timers[0] > now_s:
                    # Less is nothing to clocks that count from long ago: they would be asked for
                    # ever.
                    self.now_s = now_s = now_s + max(timers[0] - now_s, 1e-6)
            due_s = now_s + 1e-9
            while timers and timers[0] < due_s:
                timer = pop(timers)
                timer.is_waiting = False
                calls.append(timer)
            for _ in range(len(calls)):
                call = calls.popleft()
                if call.is_cancelled:
                    continue
                try:
                    call.context.run(call.callback, *call.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler(
                        {"message": f"exception in {call.callback}", "exception": error}
                    )
            if self._stopping:
                return

    def _drop_cancelled(self) -> None:
        timers = self._timers
        if len(timers) > MANY_TIMERS and self.num_cancelled > len(timers) / 2:
            self._timers = [timer for timer in timers if not timer.is_cancelled]
            for timer in timers:
                timer.is_waiting = not timer.is_cancelled
            heapq.heapify(self._timers)
            self.num_cancelled = 0
            return
        while timers and timers[0].is_cancelled:
            heapq.heappop(timers).is_waiting = False
            self.num_cancelled -= 1


class LoopClock:
    """The time of the loop that it was made in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now_s(self) -> float:
        return self._loop.time()


class Faults(msgspec.Struct, frozen=True):
    """Probabilities, each of one message or one write."""

    lose: float = 0.0
    late: float = 0.0
    double: float = 0.0
    stall: float = 0.0
    drag: float = 0.0
    """A slice of a read that takes up to a second: readers that space could be reused under."""
    rot_per_s: float = 0.0
    """Bytes of objects that flip by themselves."""
    disk: float = 0.0
    """How often a disk fails, fills, slows down or hangs, each a few times a minute at 1."""


class Process:
    """Something that can die. Its tasks end with it, at whatever step they are."""

    _ids = itertools.count()

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.instance_id = f"{name}#{next(world.ids)}"
        self.is_alive = True
        self.stalled_until_s = 0.0
        self.loop = asyncio.get_running_loop()
        self.context = contextvars.copy_context()
        self.context.run(RUNNING.set, self)
        self.methods: dict[str, tuple[Callable, type, type]] = {}
        self.tasks: dict[asyncio.Task, None] = {}
        """In order: a set would make a run depend on addresses."""

    def serve(self, methods) -> None:
        for name, handler, request, response in methods:
            self.methods[name] = (handler, request, response)

    @property
    def is_stalled(self) -> bool:
        return self.stalled_until_s > self.loop.now_s

    def stall_until(self, time_s: float) -> None:
        """Stop it dead; it goes on then."""
        self.stalled_until_s = time_s
        self.loop.stalled_until_s = max(self.loop.stalled_until_s, time_s)

    def run(self, function: Callable, *args):
        """Call a function as this process: what it starts is stalled with it."""
        if RUNNING.get() is self:
            return function(*args)
        return self.context.run(function, *args)

    def spawn(self, work: Coroutine) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(work, context=self.context)
        self.tasks[task] = None
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task) -> None:
        self.tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            if self.is_alive and not isinstance(error, TandemError):
                self.world.violations.append(f"{self.name} failed: {error!r}")

    def kill(self) -> None:
        self.is_alive = False
        for task in list(self.tasks):
            task.cancel()

    async def pass_stall(self) -> None:
        while self.stalled_until_s > self.loop.now_s:
            await asyncio.sleep(self.stalled_until_s - self.loop.now_s)


class Session:
    """One direction of a session: calls from ``near`` to ``far``."""

    def __init__(self, world: "World", near: Process, far: Process) -> None:
        self.world, self.near, self.far = world, near, far
        self.is_open = True
        self.back: Session
        self.lost: asyncio.Event = asyncio.Event()

    @property
    def name(self) -> str:
        return self.far.name

    @property
    def instance_id(self) -> str:
        return self.far.instance_id

    @property
    def is_lost(self) -> bool:
        return not self.is_open

    def close(self) -> None:
        for side in (self, self.back):
            side.is_open = False
            side.lost.set()

    async def call(self, method, request, response_type, *, timeout_s=None):
        await self.near.pass_stall()
        if not (self.is_open and self.near.is_alive):
            raise PeerLostError("world.call", f"no session with {self.far.name}")
        world, chance = self.world, self.world.random
        data = msgspec.msgpack.encode(request)
        reply = asyncio.get_running_loop().create_future()
        copies = 2 if chance.random() < world.faults.double else 1
        for number in range(copies):
            if chance.random() < world.faults.lose:
                continue
            world.network.spawn(self._deliver(method, data, reply if number == 0 else None))
        lost = asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait(
                (reply, lost), timeout=timeout_s or 30.0, return_when=asyncio.FIRST_COMPLETED
            )
            await self.near.pass_stall()
            if reply.done():
                code, where, what, field, body = reply.result()
                if code:
                    raise make_error(code, where, what, field)
                return msgspec.msgpack.decode(body, type=response_type)
            if self.lost.is_set():
                raise PeerLostError("world.call", f"{self.far.name} is gone")
            raise DeadlineError("world.call", f"{method}: no answer in {timeout_s} s")
        finally:
            lost.cancel()
            if not reply.done():
                reply.cancel()

    async def _deliver(self, method, data, reply) -> None:
        world = self.world
        await world.travel()
        await self.far.pass_stall()
        if not self.far.is_alive or world.is_cut(self.near, self.far):
            return
        handler, request_type, response_type = self.far.methods[method]
        request = msgspec.msgpack.decode(data, type=request_type)
        try:
            answer = self.far.run(handler, self.back, request)
            if asyncio.iscoroutine(answer):
                answer = await self.far.spawn(answer)
            body = msgspec.msgpack.encode(answer)
            msgspec.msgpack.decode(body, type=response_type)
            result = ("", "", "", None, body)
        except TandemError as error:
            result = (error.code, error.where, error.what, error.field, b"")
        except asyncio.CancelledError:
            return
        world.note_step()
        world.num_answers[method] += 1
        world.note_answer(self.far, method, error=result[0], body=result[4])
        if world.random.random() < world.faults.lose or world.is_cut(self.near, self.far):
            return
        await world.travel()
        if reply is not None and not reply.done() and self.near.is_alive:
            reply.set_result(result)


class SimHostPort:
    """The memory of a host on the network. ``segment`` outlives the process."""

    def __init__(self, world: "World", process: Process, segment: Segment) -> None:
        self.world, self.process, self.segment = world, process, segment
        self.address = process.instance_id
        self.read_base = next(world.bases)
        self.writers: dict[int, Process | None] = {}
        self.copying: list[Process] = []
        """Writers that were stopped in the middle of a copy into memory that they map."""
        world.ports[self.address] = self

    def former_writers(self) -> set[int]:
        return {FORMER_WRITERS}

    def open_writer(self) -> int:
        base = next(self.world.bases)
        self.writers[base] = None
        return base

    async def close_writer(self, base: int) -> bool:
        if base == FORMER_WRITERS:
            ports = self.world.ports.values()
            former = [port for port in ports if port.segment is self.segment and port is not self]
            return not any(writer.is_alive for port in former for writer in port.copying)
        await self.world.travel()
        owner = self.writers.get(base)
        if owner is not None and owner.is_alive and owner.is_stalled:
            return False  # It shares memory with us and does not answer.
        self.writers.pop(base, None)
        return True

    async def fetch(self, source, source_offset, offset, length, timeout_s) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                for begin, end in self.world.cut(length):
                    await self.world.travel()
                    data = self.world.peek(
                        source.address, source.read_base, source_offset + begin, source_offset + end
                    )
                    self.segment.data[offset + begin : offset + end] = data
        except TimeoutError:
            raise DeadlineError("world.fetch", "too slow") from None


class SimClientPort:
    def __init__(self, world: "World", process: Process) -> None:
        self.world, self.process = world, process

    def register(self, memory):
        return memory

    def unregister(self, handle) -> None:
        pass

    async def write(self, endpoint, pieces, timeout_s) -> None:
        world = self.world
        if world.random.random() < world.faults.stall:
            world.stall(self.process)
        slices = []
        for memory, local_offset, offset, length in pieces:
            data = bytes(memory[local_offset : local_offset + length])
            for begin, end in world.cut(length):
                slices.append(world.spawn_slice(
                    self.process, endpoint, offset + begin, data[begin:end]
                ))  # fmt: skip
        _, pending = await asyncio.wait(slices, timeout=timeout_s)
        await self.process.pass_stall()
        for task in slices:
            if task.done() and task.exception() is not None:
                raise task.exception()
        if pending:
            raise DeadlineError("world.write", f"{len(pending)} slices are still under way")

    async def read(self, endpoint, pieces, timeout_s) -> None:
        world = self.world
        try:
            async with asyncio.timeout(timeout_s):
                for memory, local_offset, offset, length in pieces:
                    base = offset // BASE_STEP * BASE_STEP
                    for begin, end in world.cut(length):
                        await world.travel()
                        if world.random.random() < world.faults.drag:
                            await asyncio.sleep(world.random.uniform(0, 1))
                        at = offset - base + begin
                        data = world.peek(endpoint.address, base, at, at + end - begin)
                        target = local_offset + begin
                        memory[target : target + end - begin] = data
        except TimeoutError:
            raise DeadlineError("world.read", "too slow") from None
        await self.process.pass_stall()


class ClientChannel:
    """A client's way to whichever master lives."""

    def __init__(self, world: "World", process: Process) -> None:
        self.world, self.process = world, process
        self.session: Session | None = None
        self.client: AsyncStoreClient

    async def call(self, method, request, response_type, *, timeout_s=None):
        session = self.session
        if session is None or not session.is_open:
            raise PeerLostError("world.call", "no master")
        return await session.call(method, request, response_type, timeout_s=timeout_s)

    async def wait_connected(self, timeout_s: float):
        world, loop = self.world, self.process.loop
        await asyncio.sleep(0.02)
        deadline_s = loop.now_s + timeout_s

        def is_over() -> bool:
            return world.has_master or loop.now_s > deadline_s or self.process.is_stalled

        while self.session is None or not self.session.is_open:
            if loop.now_s > deadline_s:
                raise DeadlineError("world.connect", "no master in time")
            before = self.session
            await world.connect_client(self)
            if self.session is not before:
                # Not when it is lost: a client may be the last to hear of that.
                self.client.on_master()
                await asyncio.sleep(0.05)
            else:
                await loop.poll(is_over, lambda: 0.05)
        return self.session


class World:
    """All processes of a run. Made inside a ``VirtualLoop``."""

    def __init__(self, seed: int, config: StoreConfig, faults: Faults) -> None:
        self.random = random.Random(seed)
        self.config = config
        self.faults = faults
        self.ids = itertools.count()
        self.bases = itertools.count(BASE_STEP, BASE_STEP)
        self.ports: dict[str, SimHostPort] = {}
        self.violations: list[str] = []
        self.network = Process(self, "network")
        self.segments: dict[str, Segment] = {}
        self.disks: dict[str, MemoryDisk] = {}
        """Of the hosts that have an SSD tier; they survive processes."""
        self.hosts: dict[str, tuple[Process, StoreHost]] = {}
        self.master_process: Process | None = None
        self.master: StoreMaster
        self.sessions: list[Session] = []
        self.steps = 0
        self.num_answers: collections.Counter[str] = collections.Counter()
        """By method."""
        self.crash_at: dict[int, Callable[[], None]] = {}
        self.clock = LoopClock()
        self._epochs = itertools.count(1)
        self.roster = MemoryRosterStore()

    # For worlds with more to go wrong.

    def is_cut(self, near: Process, far: Process) -> bool:
        """Whether nothing passes between two processes."""
        return False

    @property
    def has_master(self) -> bool:
        """Whether one is there to connect to, as far as can be known without asking."""
        return self.master_process is not None

    def note_answer(self, far: Process, method: str, *, error: str, body: bytes) -> None:
        """Look at an answer that is about to leave."""

    def make_clock(self):
        """Return the clock of a new process."""
        return self.clock

    # Chance and time.

    async def travel(self) -> None:
        self.note_step()
        delay_s = self.random.expovariate(1 / 0.001)
        if self.random.random() < self.faults.late:
            delay_s += self.random.uniform(0.1, 12.0)
        await asyncio.sleep(delay_s)

    def note_step(self) -> None:
        self.steps += 1
        action = self.crash_at.pop(self.steps, None)
        if action is not None:
            # Between two steps, not in the middle of one.
            asyncio.get_running_loop().call_soon(action)

    def cut(self, length: int) -> list[tuple[int, int]]:
        if length <= 0:
            return []
        cuts = {0, length, *(self.random.randrange(length) for _ in range(2))}
        return list(itertools.pairwise(sorted(cuts)))

    async def rot(self) -> None:
        """Flip bytes of objects, wherever they are, for as long as this runs."""
        while self.faults.rot_per_s:
            await asyncio.sleep(self.random.expovariate(self.faults.rot_per_s))
            if self.disks and self.random.random() < 0.5:
                self.disks[self.random.choice(sorted(self.disks))].rot()
                continue
            segment = self.segments[self.random.choice(sorted(self.segments))]
            objects = list(segment.scan())
            if objects:
                offset, header = self.random.choice(objects)
                begin, end = segment.span(header)
                if end > begin:
                    at = offset + self.random.randrange(begin, end)
                    segment.data[at] ^= 1 << self.random.randrange(8)

    def add_disk(self, name: str) -> None:
        disk = MemoryDisk(self.random.getrandbits(32))
        disk.on_step = self.note_step
        self.disks[name] = disk

    async def trouble_disks(self) -> None:
        """Let disks fail, fill, slow down and hang, one after the other and each for a while."""
        while self.faults.disk and self.disks:
            await asyncio.sleep(self.random.expovariate(self.faults.disk))
            disk = self.disks[self.random.choice(sorted(self.disks))]
            kind = self.random.choice(("fail", "full", "slow", "hang"))
            if kind == "fail":
                disk.fail_rate = self.random.choice((0.05, 0.5))
            elif kind == "full":
                disk.room_bytes = disk.used_bytes + self.random.choice((0, BUCKET_BYTES))
            elif kind == "slow":
                disk.slow_s = self.random.choice((0.05, 1.0))
            else:
                disk.is_hung = True
            await asyncio.sleep(self.random.choice((0.5, 3.0, 40.0 if kind == "hang" else 8.0)))
            disk.heal()

    def stall(self, process: Process) -> None:
        process.stall_until(asyncio.get_running_loop().time() + self.random.uniform(5, 60))
        for session in self.sessions:
            if session.near is process or session.far is process:
                self.network.spawn(self._lose_silent(session))

    async def _lose_silent(self, session: Session) -> None:
        await asyncio.sleep(3.0)  # The lease of the control channel.
        self.end_session(session)

    # Memory.

    def peek(self, address: str, base: int, begin: int, end: int) -> np.ndarray:
        port = self.ports[address]
        if not port.process.is_alive:
            raise PeerLostError("world.read", f"{port.process.name} is dead")
        if base != port.read_base or end > port.segment.usable_bytes:
            raise NotFoundError("world.read", "no such buffer")
        return port.segment.data[begin:end].copy()

    def spawn_slice(self, writer: Process, endpoint, offset: int, data: bytes) -> asyncio.Task:
        return self.network.spawn(self._move_slice(writer, endpoint, offset, data))

    async def _move_slice(self, writer: Process, endpoint, offset: int, data: bytes) -> None:
        await self.travel()
        port = self.ports[endpoint.address]
        base, at = offset // BASE_STEP * BASE_STEP, offset % BASE_STEP
        # A writer that is stopped in the middle of a copy goes on with it when it wakes, also if
        # the host has ended meanwhile: the file is mapped here.
        is_copying = base in port.writers and port.process.is_alive and writer.is_stalled
        if is_copying:
            port.writers[base] = writer
            port.copying.append(writer)
        try:
            if writer.is_alive:
                await writer.pass_stall()
        finally:
            if is_copying:
                port.copying.remove(writer)
        if not port.process.is_alive and not (is_copying and writer.is_alive):
            raise PeerLostError("world.write", f"{port.process.name} is dead")
        if base not in port.writers:
            raise NotFoundError("world.write", "the place was taken back")
        port.writers[base] = writer
        port.segment.data[at : at + len(data)] = np.frombuffer(data, np.uint8)

    # Processes.

    def start_master(self) -> None:
        process = Process(self, "master")
        self.master = StoreMaster(
            self.config,
            clock=self.clock,
            epoch=next(self._epochs),
            draw=self.random.randrange,
            roster=self.roster,
        )
        process.serve(self.master.methods())
        self.master_process = process
        process.spawn(self.master._run())

    def kill_master(self) -> None:
        process = self.master_process
        if process is None:
            return
        process.kill()
        for task in list(self.master._tasks):
            task.cancel()
        for host in self.master.hosts.values():
            for task in list(host._tasks):
                task.cancel()
        self.master_process = None
        for session in [s for s in self.sessions if process in (s.near, s.far)]:
            self.end_session(session)

    def start_host(self, name: str, capacity: int) -> None:
        if name not in self.segments:
            self.segments[name] = self._watch(Segment.make_anonymous(capacity))
        process = Process(self, name)
        segment, disk = self.segments[name], None
        if name in self.disks:
            self.disks[name].empty()
            disk = DiskTier(
                MemoryPort(self.disks[name]), segment, capacity_bytes=DISK_BYTES, clock=self.clock
            )
            disk._bucket_bytes = BUCKET_BYTES
        host = StoreHost(name, name, segment, SimHostPort(self, process, segment), disk)
        process.serve(host.methods())
        self.hosts[name] = (process, host)
        process.spawn(self._keep_joined(process, host))

    def _watch(self, segment: Segment) -> Segment:
        seal_many = segment.seal_many

        def watched(records, **missing) -> None:
            try:
                seal_many(records, **missing)
            except ConflictError as error:
                self.violations.append(f"two objects in one place: {error}")
                raise

        segment.seal_many = watched
        return segment

    def kill_host(self, name: str) -> None:
        if name not in self.hosts:
            return
        process, host = self.hosts.pop(name)
        process.kill()
        tasks = [host._joining, host._reporting, *host._pulls.values(), *host._forgetting]
        if name in self.disks:
            self.disks[name].lose_process()
        if host.disk is not None:
            tasks += [host.disk._running, *host.disk._io.tasks]
        for task in tasks:
            if task is not None:
                task.cancel()
        for session in [s for s in self.sessions if process in (s.near, s.far)]:
            self.end_session(session)

    async def _keep_joined(self, process: Process, host: StoreHost) -> None:
        """As ``RpcClient`` with ``reconnect`` does; opens the disk before, as a service does."""
        if host.disk is not None:
            try:
                await host.disk.open()
            except (InternalError, CapacityError):
                self.disks[host.name].is_condemned = True
                host.disk = None
            else:
                host.disk.start()
        while True:
            await process.loop.poll(
                lambda: self.has_master, lambda: self.random.uniform(0.02, 0.25)
            )
            session = self.open_session(process, self.master_process)
            host.on_master(session)
            await session.lost.wait()
            host.on_master_lost()

    def start_client(self, name: str) -> tuple[Process, AsyncStoreClient]:
        process = Process(self, name)
        channel = ClientChannel(self, process)
        client = AsyncStoreClient(
            channel,
            SimClientPort(self, process),
            clock=self.make_clock(),
            config=self.config,
            machine=name,
        )
        channel.client = client
        return process, client

    async def connect_client(self, channel: ClientChannel) -> None:
        await channel.process.pass_stall()
        if self.master_process is not None:
            channel.session = self.open_session(channel.process, self.master_process)

    def kill_client(self, process: Process) -> None:
        process.kill()
        for session in [s for s in self.sessions if process in (s.near, s.far)]:
            self.end_session(session)

    # Sessions.

    def open_session(self, near: Process, far: Process) -> Session:
        session = Session(self, near, far)
        session.back = Session(self, far, near)
        session.back.back = session
        self.sessions.append(session)
        return session

    def end_session(self, session: Session) -> None:
        """Close it, and tell the master, as the control channel does."""
        if not session.is_open:
            return
        session.close()
        self.sessions = [other for other in self.sessions if other.is_open]
        if self.master_process is not None and session.far is self.master_process:
            self.master_process.run(self.master.on_caller_lost, session.back)


def run_virtual(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run ``main()`` to its end in virtual time, and end what it left."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main())
    finally:
        for _ in range(10):  # What is cancelled may begin something else.
            if not (tasks := asyncio.all_tasks(loop)):
                break
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()
