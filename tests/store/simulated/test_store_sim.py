"""The store under every fault there is, in virtual time.

Goal: whatever dies, stalls, is lost, late or doubled, what was acknowledged is readable as
docs/design/store/store.md promises, no reader ever sees a byte that was not written, no two objects
lie in one place, and all space returns. Method: seeded schedules over the product's own classes;
each key has one writing client, so that its history is known, and many readers. A failing seed is
named.
"""

import asyncio
import gc
import itertools
import random

import msgspec
import pytest
from store_world import SimHostPort, StoreWorld

from quick import rest_slow
from tandem._native import BatchRead
from tandem.core.errors import CorruptionError, NotFoundError, TandemError
from tandem.sim import Faults, run_virtual
from tandem.store.client.options import PutOptions, PutResult
from tandem.store.client.put_batch import MAX_INLINE_BATCH_BYTES
from tandem.store.client.reading import ObjectReader
from tandem.store.config import StoreConfig
from tandem.store.host.disk_removal import Removal
from tandem.store.host.orders import HostOrders
from tandem.store.master.put_batch import PutBatch
from tandem.store.master.state.drops import Drops
from tandem.store.master.state.ledger import ExtentEvent
from tandem.store.master.state.writers import Writers

CAPACITY = 2**18
CONFIG = StoreConfig(
    lease_ms=2000,
    put_timeout_ms=8000,
    put_wait_ms=3000,
    deadline_ms=20_000,
    recovery_ms=1000,
    # No host is away for so long: what it has is never absent. See test_membership_sim.py.
    member_lease_ms=120_000,
    high_watermark=0.9,
)
HOSTS = ("h0", "h1", "h2")


class History:
    """What may be under one key."""

    def __init__(self, key: str, *, is_pinned: bool) -> None:
        self.key = key
        self.is_pinned = is_pinned
        self.now: set[bytes | None] = {None}
        """What a reader may find: more than one where the outcome of a write is not known."""
        self.log: list[set[bytes | None]] = [self.now]
        self.ever: set[bytes | None] = {None}
        self.limbo: set[bytes | None] = set()
        """Outcomes of calls that failed, or whose client died: they may come true later."""
        self.order: dict[bytes, int] = {}
        """Values by when they were written."""
        self.newest_read = 0
        """The newest value that a read which is over has found."""

    def change(self, states: set[bytes | None]) -> None:
        self.now = states
        self.log.append(states)
        self.ever |= states

    def note_removed(self) -> None:
        """A removal was answered: nothing of before is there any more, whoever was away."""
        self.ever = {None, *self.limbo}
        self.change({None})

    def can_be_absent(self, mark: int) -> bool:
        """Whether an object that is never evicted may be missed by a read begun at ``mark``."""
        return not self.is_pinned or None in set().union(*self.log[mark:], self.limbo)

    def went_back(self, value: bytes, newest_before: int) -> bool:
        """Whether a read that began when ``newest_before`` had been found finds an older value."""
        number = self.order.get(value, 0)
        went_back = number < newest_before and value not in self.limbo
        self.newest_read = max(self.newest_read, number)
        return went_back

    def possible_since(self, mark: int) -> set[bytes | None]:
        return set().union(*self.log[mark:], self.limbo)

    @property
    def possible(self) -> set[bytes | None]:
        return self.now | self.limbo


class Run:
    """One seeded schedule."""

    def __init__(self, seed: int, faults: Faults, *, crashes: bool) -> None:
        self.seed, self.crashes = seed, crashes
        self.chance = random.Random(seed ^ 0x5EED)
        # Both ways to put: small values with the request, and everything into granted space.
        config = msgspec.structs.replace(CONFIG, inline_bytes=0 if seed % 2 else 8192)
        self.world = StoreWorld(seed, config, faults)
        self.is_rotting = faults.rot_per_s > 0
        """Rot may take the last good replica; what is read is right all the same."""
        self.capacity = CAPACITY // 2 if seed % 3 == 0 else CAPACITY
        if faults.disk:
            for name in HOSTS[: 1 + seed % 3]:
                self.world.add_disk(name)
        self.histories: dict[str, History] = {}
        self.count = 0
        self.reads = self.found = self.acked = self.known = 0
        self.trace: list[str] = []

    def fail(self, text: str) -> None:
        self.world.violations.append(text)

    def note(self, key: str, text: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self.trace.append(f"{now_s:9.3f} {self.world.steps:6} {key} {text}")

    async def run(self, num_ops: int) -> None:
        world = self.world
        world.start_master()
        for name in HOSTS:
            world.start_host(name, self.capacity)
        await asyncio.sleep(2)
        rot = asyncio.ensure_future(world.rot())
        trouble = asyncio.ensure_future(world.trouble_disks())
        clients = [asyncio.ensure_future(self.client(i, num_ops)) for i in range(3)]
        chaos = asyncio.ensure_future(self.chaos()) if self.crashes else None
        await asyncio.gather(*clients)
        rot.cancel()
        trouble.cancel()
        if chaos is not None:
            chaos.cancel()
        await self.heal()
        await self.check_end()

    async def client(self, number: int, num_ops: int) -> None:
        """Work; a client that dies is followed by another."""
        left = num_ops
        while left > 0:
            process, client = self.world.start_client(f"c{number}")
            if self.crashes and self.chance.random() < 0.5:
                # It dies somewhere within its next operations.
                self.world.crash_at[self.world.steps + self.chance.randrange(1, 400)] = (
                    lambda process=process: self.world.kill(process)
                )
            while left > 0 and process.is_alive:
                left -= 1
                await process.pass_stall()
                work = process.spawn(self.operate(number, client))
                try:
                    await asyncio.wait([work], timeout=200)
                    if not work.done():
                        self.fail(f"an operation of c{number} hangs")
                        work.cancel()
                        return
                finally:
                    await asyncio.sleep(self.chance.uniform(0, 0.05))

    async def operate(self, number: int, client) -> None:
        kind = self.chance.choices(
            ("put", "upsert", "remove", "get", "range", "batch", "exists", "watch"),
            (6, 2, 1, 8, 2, 2, 1, 2),
        )[0]
        if kind in ("put", "upsert", "remove"):
            await self.write(kind, client, self.history(number))
        elif kind == "batch":
            await self.write_batch(client, number)
        elif kind == "exists":
            await self.quietly(client.exists(self.any_key()))
        elif kind == "watch":
            await self.watch(client)
        else:
            await self.read(kind, client, self.histories.get(self.any_key()))

    async def watch(self, client) -> None:
        """Get the same objects again and again, well within a lease, while others change them."""
        histories = [h for h in (self.histories.get(self.any_key()) for _ in range(3)) if h]
        loop = asyncio.get_running_loop()
        end_s = loop.time() + 2
        for _ in range(self.chance.randrange(2, 8)):
            for history in histories:
                if loop.time() > end_s:
                    return  # What is away is waited for, and then nothing is known any more.
                known = BatchRead([history.key], 1)
                self.known += known.place_known(client._places.cache, client._calls.clock.now_s())
                await self.read("get", client, history)
            await asyncio.sleep(self.chance.uniform(0, 0.02))

    def history(self, number: int) -> History:
        index = self.chance.randrange(10)
        key = f"c{number}/{index}"
        return self.histories.setdefault(key, History(key, is_pinned=index < 3))

    def any_key(self) -> str:
        return f"c{self.chance.randrange(3)}/{self.chance.randrange(10)}"

    def value(self, key: str) -> bytes:
        self.count += 1
        head = f"{key}:{self.count}:".encode()
        length = self.chance.choice((0, 10, 700, 5000, 40_000))
        value = (head + self.chance.randbytes(64)) * (length // 64 + 1) if length else head
        self.histories[key].order[value] = self.count
        return value

    async def write(self, kind: str, client, history: History) -> None:
        before = history.now
        if kind == "remove":
            history.change(before | {None})
            history.limbo.add(None)
            self.note(history.key, "remove")
            try:
                await client.remove(history.key)
            except TandemError as error:
                self.note(history.key, f"remove: {error}")
                return
            history.limbo.discard(None)
            history.note_removed()
            self.note(history.key, "removed")
            return
        value = self.value(history.key)
        options = PutOptions(
            replicas=self.chance.choice((1, 2, 2, 3)),
            upsert=kind == "upsert",
            hard_pin=history.is_pinned,
        )
        history.change(before | {value})
        history.limbo.add(value)
        self.note(history.key, f"{kind} {value[:12]!r} of {len(value)} {options.replicas}")
        try:
            result = await client.put(history.key, value, options)
        except TandemError as error:
            self.note(history.key, f"{kind} failed: {error}")
            return
        self.settle(history, before, value, result, upsert=kind == "upsert")

    def settle(self, history, before, value, result, *, upsert) -> None:
        self.acked += 1
        history.limbo.discard(value)
        self.note(history.key, f"{value[:12]!r} {result}")
        if result is PutResult.EXISTS:
            if upsert:
                self.fail(f"upsert of {history.key} says EXISTS")
            # What was there stays; or it is ours, by an attempt whose answer was lost.
            history.change((before | history.limbo | {value}) - {None})
            return
        is_safe = history.is_pinned and None not in before
        is_safe = is_safe and not self.crashes and not self.is_rotting
        if is_safe and not upsert and None not in history.limbo:
            # Only while all its hosts are lost may a plain put take the place of a pinned object.
            self.fail(f"put of {history.key} says {result} over a pinned object")
        history.change({value})

    async def write_batch(self, client, number: int) -> None:
        pinned = self.chance.random() < 0.5
        drawn = [self.history(number) for _ in range(8)]
        histories = {h.key: h for h in drawn if h.is_pinned == pinned}
        values = {key: self.value(key) for key in histories}
        befores = {key: history.now for key, history in histories.items()}
        for key, history in histories.items():
            history.change(befores[key] | {values[key]})
            history.limbo.add(values[key])
        try:
            results = await client.put_many(
                list(histories), list(values.values()), PutOptions(hard_pin=pinned, replicas=2)
            )
        except TandemError:
            return
        for (key, history), result in zip(histories.items(), results, strict=True):
            if isinstance(result, PutResult):
                self.settle(history, befores[key], values[key], result, upsert=False)

    async def read(self, kind: str, client, history: History | None) -> None:
        if history is None:
            return
        mark, newest_before = len(history.log) - 1, history.newest_read
        self.reads += 1
        try:
            if kind == "range":
                size = await client.size(history.key)
                begin = self.chance.randrange(size + 1)
                length = self.chance.randrange(size - begin + 1)
                value = await client.get_range(history.key, begin, length)
            else:
                value = await client.get(history.key)
        except CorruptionError as error:
            if not self.is_rotting:
                self.fail(f"corrupt without a corruption: {error}")
            return
        except NotFoundError:
            if not self.is_rotting and not history.can_be_absent(mark):
                self.fail(f"{kind} of {history.key}, which is pinned and there, finds nothing")
            return
        except TandemError:
            return
        self.found += 1
        possible = history.possible_since(mark)
        if kind == "range":
            fits = any(v is not None and v[begin : begin + length] == value for v in possible)
        else:
            fits = value in possible
        if kind == "get" and fits and history.went_back(value, newest_before):
            self.fail(f"get of {history.key} gave an older value than one before: {value[:40]!r}")
        if not fits:
            kinds = "an old value" if value in history.ever else "bytes nobody wrote"
            self.fail(f"{kind} of {history.key} gave {kinds}: {value[:40]!r}")

    async def quietly(self, work) -> None:
        try:
            await work
        except TandemError:
            return

    async def chaos(self) -> None:
        """Kill and restart hosts and masters at random, also several at a time."""
        world = self.world
        while True:
            await asyncio.sleep(self.chance.uniform(0.5, 8))
            step = world.steps + self.chance.randrange(1, 60)
            if self.chance.random() < 0.4:
                world.crash_at[step] = world.kill_master
                await asyncio.sleep(self.chance.uniform(0.5, 4))
                if world.master_process is None:
                    world.start_master()
            elif len(world.hosts) == len(HOSTS):
                name = self.chance.choice(HOSTS)
                world.crash_at[step] = lambda name=name: world.kill_host(name)
                await asyncio.sleep(self.chance.uniform(0.5, 6))
            for name in HOSTS:
                if name not in world.hosts:
                    world.start_host(name, self.capacity)

    async def heal(self) -> None:
        world = self.world
        world.faults = Faults()
        world.crash_at.clear()
        for disk in world.disks.values():
            disk.heal()
        if world.master_process is None:
            world.start_master()
        for name in HOSTS:
            if name not in world.hosts:
                world.start_host(name, self.capacity)
        await asyncio.sleep(100)  # Late messages arrive, stalled clients wake, puts expire.

    async def check_end(self) -> None:
        process, client = self.world.start_client("checker")
        for history in self.histories.values():
            try:
                value = await client.get(history.key)
            except NotFoundError:
                value = None
            except CorruptionError as error:
                if not self.is_rotting:
                    self.fail(f"{history.key} at the end: {error}")
                continue
            except TandemError as error:
                if "is on a disk" not in str(error) or self.has_room(history.key):
                    self.fail(f"{history.key} at the end: {error}")
                continue
            allowed = history.possible
            is_safe = history.is_pinned and not self.is_rotting
            if value is None and is_safe and None not in allowed:
                self.fail(f"{history.key} was acknowledged, pinned, and is gone")
            if value is not None and value not in allowed:
                self.fail(f"{history.key} holds what it should not: {value[:40]!r}")
        await client.remove_prefix("")
        await asyncio.sleep(30)
        status = await client.status()
        for host in status.hosts:
            if host.used_bytes or host.quarantined_bytes or host.num_objects:
                self.fail(f"space of {host.name} did not return: {host}")
        if status.num_unfinished or status.num_objects:
            self.fail(f"left over: {status}")
        for name, segment in self.world.segments.items():
            if left := list(segment.scan()):
                self.fail(f"headers left in {name}: {left[:3]}")
        for name in self.world.disks:
            await self.check_disk(name)
        self.world.kill(process)

    def has_room(self, key: str) -> bool:
        """Whether an object on a disk could be read: pinned ones may leave no room in memory."""
        master = self.world.master
        row = master.state.directory.find(key)
        length = master.state.extent_of(row, 0).length
        return any(
            master.state.hosts[host].ledger.allocator.find_largest_free_bytes() >= length
            for host in master.state.directory.copies.disks(row)
        )

    async def check_disk(self, name: str) -> None:
        """What was removed is gone from the disk as well, also after a restart."""
        _, host = self.world.hosts[name]
        if host.disk is not None and len(host.disk.index):
            self.fail(f"left on the disk of {name}: {host.disk.index.list_records()[:3]}")
        self.world.kill_host(name)
        self.world.start_host(name, self.capacity)
        await asyncio.sleep(5)
        _, host = self.world.hosts[name]
        if host.disk is not None and len(host.disk.index):
            self.fail(f"back on the disk of {name}: {host.disk.index.list_records()[:3]}")


def simulate(seed: int, *, num_ops: int = 40) -> Run:
    chance = random.Random(seed)
    faults = (
        Faults(),
        Faults(lose=0.03, late=0.02, double=0.05),
        Faults(stall=0.1),
        Faults(lose=0.01, late=0.01, double=0.02, stall=0.03, drag=0.05),
        Faults(drag=0.3, rot_per_s=3.0),
    )[seed % 5]
    if seed // 5 % 2:
        faults = msgspec.structs.replace(faults, disk=chance.choice((0.001, 0.2)))
    run: Run | None = None

    async def main() -> None:
        nonlocal run
        run = Run(seed, faults, crashes=chance.random() < 0.75)
        await run.run(num_ops)

    run_virtual(main)
    assert run is not None
    assert not run.world.violations, f"seed {seed}: " + "\n".join(run.world.violations[:10])
    return run


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=[pytest.mark.slow] * (n >= 10)) for n in range(0, 100, 10)],
)
def test_seeds(first):
    """Ten have each kind of faults, with and without disks."""
    num_known = 0
    for seed in range(first, first + 10):
        run = simulate(seed)
        assert run.world.steps >= 500, f"seed {seed} had only {run.world.steps} steps"
        num_known += run.known
    assert num_known > 50, "clients read from places that they remember"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 10_000, 100))
def test_many_seeds(first):
    for seed in range(first, first + 100):
        simulate(seed)


STEP_CONFIG = msgspec.structs.replace(CONFIG, high_watermark=0.5)
VICTIMS = ("master", "h0", "h1", "client")


class Scenario(Run):
    """Every kind of step once: put, upsert, copy, evict, remove, drain; one process dies at one."""

    def __init__(
        self, victim: str, step: int, *, inline: bool = False, has_disks: bool = False
    ) -> None:
        super().__init__(7, Faults(), crashes=False)
        if has_disks:
            for name in HOSTS[:2]:
                self.world.add_disk(name)
        self.capacity = CAPACITY
        # Its values are large, for something to be evicted.
        limit = MAX_INLINE_BATCH_BYTES if inline else 0
        self.world.config = msgspec.structs.replace(STEP_CONFIG, inline_bytes=limit)
        self.victim, self.step = victim, step

    async def run(self, num_ops: int = 0) -> None:
        world = self.world
        world.start_master()
        for name in HOSTS[:2]:
            world.start_host(name, CAPACITY)
        await asyncio.sleep(2)
        world.steps = 0
        process, client = world.start_client("c0")
        kill = {
            "master": world.kill_master,
            "client": lambda: world.kill(process),
            "h0": lambda: world.kill_host("h0"),
            "h1": lambda: world.kill_host("h1"),
        }[self.victim]
        world.crash_at[self.step] = kill
        work = process.spawn(self.play(client))
        revive = asyncio.ensure_future(self.revive())
        await asyncio.wait([work], timeout=300)
        if not work.done():
            self.fail("the scenario hangs")
        revive.cancel()
        self.num_steps = world.steps
        await self.heal()
        await self.check_end()

    async def play(self, client) -> None:
        keys = [History(f"c0/{i}", is_pinned=i < 3) for i in range(12)]
        self.histories = {history.key: history for history in keys}
        for history in keys[:4]:
            await self.write("put", client, history)
        await self.write("upsert", client, keys[1])
        await self.read("get", client, keys[1])
        self.world.start_host("h2", CAPACITY)
        for history in keys[4:]:
            await self.write("put", client, history)  # Past the watermark: something is evicted.
        await self.write("remove", client, keys[2])
        await self.quietly(client.drain("h0"))
        await asyncio.sleep(3)
        for history in keys:
            await self.read("get", client, history)

    def value(self, key: str) -> bytes:
        self.count += 1
        return f"{key}:{self.count}:".encode() * 2000

    async def revive(self) -> None:
        world = self.world
        while True:
            await asyncio.sleep(1.5)
            if world.master_process is None:
                world.start_master()
            for name in HOSTS[:2]:
                if name not in world.hosts:
                    world.start_host(name, CAPACITY)


def play_scenario(
    victim: str, step: int, *, inline: bool = False, has_disks: bool = False
) -> Scenario:
    scenario: Scenario | None = None

    async def main() -> None:
        nonlocal scenario
        scenario = Scenario(victim, step, inline=inline, has_disks=has_disks)
        await scenario.run()

    run_virtual(main)
    assert scenario is not None
    violations = "\n".join(scenario.world.violations[:10])
    assert not violations, f"{victim} killed at step {step}: {violations}"
    return scenario


# The master and a host, and each way to put; a client dies in the seeds.
SAMPLED = [("master", True), ("h0", False)]


@pytest.mark.parametrize(
    ("victim", "inline"), rest_slow(SAMPLED, itertools.product(VICTIMS, [False, True]))
)
def test_a_crash_at_a_sample_of_steps(victim, inline):
    whole = play_scenario(victim, -1, inline=inline)
    counters, num_steps = whole.world.master.state.counters, whole.num_steps
    assert (whole.world.num_answers["put_inline"] > 0) is inline
    assert (whole.world.num_answers["commit_put"] > 0) is not inline
    assert num_steps > 150
    assert counters.objects_evicted > 0
    assert counters.replicas_copied > 0
    for step in range(1, num_steps, 131):
        play_scenario(victim, step, inline=inline)


@pytest.mark.parametrize("victim", rest_slow(["h1"], VICTIMS))
def test_a_crash_at_a_sample_of_steps_with_disks(victim):
    """Steps of disks are steps: between an eviction and the write behind, in loads, in removals."""
    whole = play_scenario(victim, -1, has_disks=True)
    counters, num_steps = whole.world.master.state.counters, whole.num_steps
    assert counters.objects_demoted > 0
    assert counters.objects_promoted > 0
    for step in range(1, num_steps, 147):
        play_scenario(victim, step, has_disks=True)


@pytest.mark.slow
@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("has_disks", [False, True])
def test_a_crash_at_every_step(victim, has_disks, inline):
    whole = play_scenario(victim, -1, inline=inline, has_disks=has_disks)
    for step in range(1, whole.num_steps + 1):
        play_scenario(victim, step, inline=inline, has_disks=has_disks)
        if step % 25 == 0:
            gc.collect()  # Worlds are cycles that hold segments: thousands would fill the machine.


def free_without_proof(writers: Writers, client: str) -> None:
    writer = writers._writers.pop(client, None)
    for offsets in writer.held.values() if writer is not None else ():
        writers._ledger.move(ExtentEvent.GIVE_BACK, offsets)
        writers._on_space()


async def accept_all(reader, into, scratch, num_bytes) -> None:
    return None


def accept_unseen(reader, into, scratch) -> None:
    return None


async def seal_nowhere(batch: PutBatch, number, checksums, blob) -> bool:
    return True


async def bury_nothing(removal: Removal, records) -> None:
    return None


def forget_nothing(drops: Drops, key: str, version: int, *, after=None) -> asyncio.Future:
    done = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done


MUTANTS = {
    "what is removed stays on the disk": [(Removal, "bury", bury_nothing)],
    "hosts are not told to forget what is on the disk": [(Drops, "forget", forget_nothing)],
    "space is free before its writer is proven gone": [(Writers, "fence", free_without_proof)],
    "hosts obey late, doubled and stale orders": [(HostOrders, "_obey", lambda host, order: None)],
    "puts are acknowledged unsealed": [(PutBatch, "_seal_on", seal_nowhere)],
    "remembered places are read without their headers": [
        (ObjectReader, "_check_headers", accept_unseen)
    ],
    "readers check nothing": [
        (ObjectReader, "_check_values", accept_all),
        (ObjectReader, "_check_headers", accept_unseen),
    ],
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, monkeypatch):
    """The simulator can fail: each safety rule, taken away, is missed within some seeds."""
    for owner, attribute, replacement in MUTANTS[name]:
        monkeypatch.setattr(owner, attribute, replacement)
    caught = []
    # Every other five have disks. A writer that is late enough comes in few seeds.
    first = 115 if "disk" in name else 112 if "writer" in name else 0
    for seed in range(first, first + 100):
        if "disk" in name and not seed // 5 % 2:
            continue
        try:
            simulate(seed)
        except AssertionError as error:
            caught.append(error)
            break
    assert caught, name


async def wake_after_restart(seed: int) -> dict[str, bytes | TandemError]:
    """Stop a client in the middle of a copy, restart the host, put others, let the client wake.

    Returns what is found under the keys put meanwhile: each is its own value.
    """
    config = msgspec.structs.replace(CONFIG, inline_bytes=0)
    world = StoreWorld(seed, config, Faults(stall=1.0))
    world.start_master()
    world.start_host("h0", CAPACITY)
    await asyncio.sleep(2)
    sleeper, client = world.start_client("c0")
    sleeper.spawn(client.put("lost", bytes(CAPACITY // 4)))
    (port,) = world.ports.values()
    async with asyncio.timeout(30):
        while not port.copying:
            await asyncio.sleep(0.001)
    world.faults = Faults()
    world.kill_host("h0")
    world.start_host("h0", CAPACITY)
    _, other = world.start_client("c1")
    keys = [f"{i}".ljust(3000, ".") for i in range(20)]
    acknowledged: set[str] = set()
    async with asyncio.timeout(200):
        while len(acknowledged) < len(keys):
            for key in [key for key in keys if key not in acknowledged]:
                try:
                    await other.put(key[:8], key.encode())
                except TandemError:
                    await asyncio.sleep(1)
                else:
                    acknowledged.add(key)
    await asyncio.sleep(100)
    found = await other.get_many([key[:8] for key in keys])
    return dict(zip(keys, found, strict=True))


@pytest.mark.parametrize("is_proven", [True, False])
def test_a_client_that_wakes_in_the_middle_of_a_copy_harms_no_restarted_host(
    is_proven, monkeypatch
):
    """No space is given out while a client of the former life may write; else bytes are wrong."""
    if not is_proven:
        monkeypatch.setattr(SimHostPort, "former_writers", lambda port: set())
    runs = [run_virtual(lambda seed=seed: wake_after_restart(seed)) for seed in range(4)]
    is_right = [all(value == key.encode() for key, value in run.items()) for run in runs]
    assert all(is_right) is is_proven
