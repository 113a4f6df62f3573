"""A store in the simulated world of ``tandem.sim``.

The master, hosts and clients are the product's classes; only the loop's clock, the control channel
and the data path are models, each worse than the real one:

- a call may be lost (either way), late (even after its session has ended) or doubled;
- bytes move in slices at times of their own, so a reader can see half of a write, and slices of a
  writer that failed, gave up or died may still arrive, until the host has closed its place;
- a process dies between any two steps; a host's segment survives it, nothing else does;
- a stalled client stops dead and goes on a minute later; its place cannot be closed meanwhile.
"""

import asyncio
import itertools

import numpy as np

from tandem.core.errors import (
    CapacityError,
    ConflictError,
    DeadlineError,
    InternalError,
    NotFoundError,
    PeerLostError,
)
from tandem.sim import Faults, MemoryDisk, MemoryPort, Process, Session, World
from tandem.store.client.client import AsyncStoreClient
from tandem.store.config import StoreConfig
from tandem.store.election.roster import MemoryRosterStore
from tandem.store.host.disk import DiskTier
from tandem.store.host.host import StoreHost
from tandem.store.host.segment import HostSegment
from tandem.store.master.master import StoreMaster
from tandem.store.ports import FORMER_WRITERS

BASE_STEP = 2**40
BUCKET_BYTES = 2**17
DISK_BYTES = 6 * BUCKET_BYTES


class SimHostPort:
    """The memory of a host on the network. ``segment`` outlives the process."""

    def __init__(self, world: "StoreWorld", process: Process, segment: HostSegment) -> None:
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
                for begin, end in self.world.draw_slices(length):
                    await self.world.travel()
                    data = self.world.peek(
                        source.address, source.read_base, source_offset + begin, source_offset + end
                    )
                    self.segment.data[offset + begin : offset + end] = data
        except TimeoutError:
            raise DeadlineError("world.fetch", "too slow") from None


class SimClientPort:
    def __init__(self, world: "StoreWorld", process: Process) -> None:
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
            for begin, end in world.draw_slices(length):
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
                    for begin, end in world.draw_slices(length):
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

    def __init__(self, world: "StoreWorld", process: Process) -> None:
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


class StoreWorld(World):
    """A master, hosts and clients. Made inside a ``VirtualLoop``."""

    def __init__(self, seed: int, config: StoreConfig, faults: Faults) -> None:
        super().__init__(seed, faults)
        self.config = config
        self.bases = itertools.count(BASE_STEP, BASE_STEP)
        self.ports: dict[str, SimHostPort] = {}
        self.segments: dict[str, HostSegment] = {}
        self.disks: dict[str, MemoryDisk] = {}
        """Of the hosts that have an SSD tier; they survive processes."""
        self.hosts: dict[str, tuple[Process, StoreHost]] = {}
        self.joins: dict[str, asyncio.Task] = {}
        """Keep each host joined."""
        self.master_process: Process | None = None
        self.master: StoreMaster
        self._epochs = itertools.count(1)
        self.roster = MemoryRosterStore()

    @property
    def has_master(self) -> bool:
        """Whether one is there to connect to, as far as can be known without asking."""
        return self.master_process is not None

    # Chance.

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
        process, self.master_process = self.master_process, None
        if process is not None:
            self.kill(process)

    def start_host(self, name: str, capacity: int) -> None:
        if name not in self.segments:
            self.segments[name] = self._watch(HostSegment.make_anonymous(capacity))
        process = Process(self, name)
        segment, disk = self.segments[name], None
        if name in self.disks:
            self.disks[name].empty()
            disk = DiskTier(
                MemoryPort(self.disks[name]), segment, capacity_bytes=DISK_BYTES, clock=self.clock
            )
            disk.writing._bucket_bytes = BUCKET_BYTES
        host = StoreHost(name, name, segment, SimHostPort(self, process, segment), disk)
        process.serve(host.orders.methods())
        self.hosts[name] = (process, host)
        self.joins[name] = process.spawn(self._keep_joined(process, host))

    def _watch(self, segment: HostSegment) -> HostSegment:
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
        process, _ = self.hosts.pop(name)
        if name in self.disks:
            self.disks[name].lose_process()
        self.kill(process)

    async def _keep_joined(self, process: Process, host: StoreHost) -> None:
        """As ``RpcClient`` with ``reconnect`` does; opens the disk before, as a service does."""
        if host.disk is not None:
            try:
                await host.disk.open()
            except (InternalError, CapacityError):
                self.disks[host.name].is_condemned = True
                host.disk = host.orders.disk = None
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

    def on_session_end(self, session: Session) -> None:
        if self.master_process is not None and session.far is self.master_process:
            self.master_process.run(self.master.on_caller_lost, session.back)
