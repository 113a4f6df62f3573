"""The data path between instances in the simulated world, worse than the real one.

Bytes move in slices, each at a time of its own, from memory that its owner goes on writing; a slice
may bring a flipped bit. A connection breaks by chance, when a process dies, and when it stays
silent; a process that listens at the same address later is another run. Calls are carried out once
or not at all. When a read has ended, in whatever way, nothing writes into the reader's memory.
"""

import asyncio

import numpy as np

from tandem.core.errors import DeadlineError, PeerLostError, TandemError
from tandem.sim import Process
from tandem.sim.world import SILENT_S

FLIP_SHARE = 0.2
"""Of slices, where ``World.flips``."""


class Listener:
    """The pool of one run of an instance, as others may read it."""

    def __init__(
        self, process: Process, memory: np.ndarray, announcer, epoch: int, states=None
    ) -> None:
        self.states = states
        self.process, self.memory, self.announcer, self.epoch = process, memory, announcer, epoch
        self.pools: list[SimPool] = []

    def break_all(self) -> None:
        pools, self.pools = self.pools, []
        for pool in pools:
            pool.close()


class SimPool:
    """A ``RemotePool``: one connection."""

    can_read = True

    def __init__(self, listener: Listener, *, is_mapped: bool) -> None:
        self.listener = listener
        self.name = listener.process.name
        self.epoch = listener.epoch
        self.length = listener.memory.nbytes
        self.is_mapped = is_mapped
        """Shared memory: can be read while its owner is stopped."""
        self.broken = asyncio.Event()
        listener.pools.append(self)

    def close(self) -> None:
        self.broken.set()


class SimCall:
    """An ``IncomingCall``."""

    def __init__(self, world, listener: Listener, peer: Process, payload: bytes, answer) -> None:
        self._world, self._listener, self._answer = world, listener, answer
        self.peer, self.payload = peer.name, payload

    def reply(self, payload: bytes) -> None:
        self._world.network.spawn(self._travel(payload))

    def fail(self, error: TandemError) -> None:
        self._world.network.spawn(self._travel(error))

    async def _travel(self, outcome) -> None:
        await self._world.travel()
        if not self._answer.done():
            self._answer.set_result(outcome)


class SimPeerPort:
    """The ``PeerPort`` of one process; writes into ``memory``."""

    def __init__(self, world, process: Process, memory: np.ndarray, states=None) -> None:
        self._states = states
        self._world, self._process, self._memory = world, process, memory

    async def open(self, address: str, buffers, *, deadline_s: float) -> SimPool:
        kinds = ("kv",) if self._states is None else ("kv", "states")
        assert buffers == {kind: kind for kind in kinds}
        try:
            async with asyncio.timeout(deadline_s):
                await self._world.travel()
                listener = self._world.listeners.get(address)
                if listener is None:
                    raise PeerLostError("world.open", f"nobody listens at {address}")
                while self._world.is_cut(self._process, listener.process):
                    await asyncio.sleep(0.5)
                await listener.process.pass_stall()
                await self._world.travel()
        except TimeoutError:
            raise DeadlineError("world.open", f"no answer from {address}") from None
        if not listener.process.is_alive:
            raise PeerLostError("world.open", f"{listener.process.name} is gone")
        return SimPool(listener, is_mapped=self._world.random.random() < 0.5)

    async def call(self, pool: SimPool, payload: bytes, *, deadline_s: float) -> bytes:
        answer = asyncio.get_running_loop().create_future()
        self._world.network.spawn(self._deliver(pool, payload, answer))
        try:
            outcome = await self._wait(pool, answer, deadline_s)
        finally:
            answer.cancel()  # What was not carried out by now never is.
        if isinstance(outcome, TandemError):
            raise outcome
        return outcome

    async def _deliver(self, pool: SimPool, payload: bytes, answer) -> None:
        world, listener = self._world, pool.listener
        if world.random.random() < world.faults.lose:
            pool.close()
        await world.travel()
        await listener.process.pass_stall()
        if not listener.process.is_alive or pool.broken.is_set() or answer.done():
            return
        call = SimCall(world, listener, self._process, payload, answer)
        [outcome] = listener.process.run(listener.announcer.handle_calls, [call])
        if isinstance(outcome, TandemError):
            call.fail(outcome)
        elif outcome is not None:
            call.reply(outcome)

    async def read(self, pool: SimPool, ranges, *, deadline_s: float) -> None:
        moving = asyncio.get_running_loop().create_task(self._move(pool, ranges))
        try:
            await self._wait(pool, moving, deadline_s)
        finally:
            moving.cancel()
            # A stopped process goes on with its copies before it learns that they are over.
            await self._process.pass_stall()

    async def _move(self, pool: SimPool, ranges) -> None:
        world, listener = self._world, pool.listener
        slices = [
            (each.local + begin, each.remote + begin, end - begin, each.kind)
            for each in ranges
            for begin, end in world.draw_slices(each.length)
        ]
        # In a few turns, not in one for each: what lies between is what matters.
        world.random.shuffle(slices)
        for turn in range(3):
            await world.travel()
            if world.random.random() < world.faults.drag:
                await asyncio.sleep(world.random.uniform(0, 1))
            if not pool.is_mapped:
                await listener.process.pass_stall()
            if not listener.process.is_alive:
                await asyncio.sleep(3600)
            for local, remote, length, kind in slices[turn::3]:
                ours = self._states if kind == "states" else self._memory
                theirs = listener.states if kind == "states" else listener.memory
                ours[local : local + length] = theirs[remote : remote + length]
                if world.flips and world.random.random() < FLIP_SHARE:
                    ours[local + world.random.randrange(length)] ^= 1

    async def _wait(self, pool: SimPool, work, deadline_s: float):
        """Wait for something that ends with the connection, or with the deadline."""
        world, listener = self._world, pool.listener
        broken = asyncio.ensure_future(pool.broken.wait())
        silence_s = deadline_s
        if world.is_cut(self._process, listener.process):
            silence_s = min(deadline_s, SILENT_S)
        try:
            await asyncio.wait(
                (work, broken), timeout=silence_s, return_when=asyncio.FIRST_COMPLETED
            )
            await self._process.pass_stall()
            if pool.broken.is_set() or (silence_s < deadline_s and not work.done()):
                raise PeerLostError("world.peer", f"{listener.process.name} is gone")
            if not work.done():
                raise DeadlineError("world.peer", f"no answer in {deadline_s} s")
            return work.result()
        finally:
            broken.cancel()
