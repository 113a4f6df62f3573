"""The store under every fault there is, in virtual time.

Goal: whatever dies, stalls, is lost, late or doubled, what was acknowledged is readable as
docs/design/store.md promises, no reader ever sees a byte that was not written, no two objects lie in
one place, and all space returns. Method: seeded schedules over the product's own classes; each key
has one writing client, so that its history is known, and many readers. A seed is the test's name.
"""

import asyncio
import random

import pytest

from tandem.core.errors import CapacityError, CorruptionError, NotFoundError, TandemError
from tandem.store.client import PutOptions, PutResult
from tandem.store.config import StoreConfig
from tests_store_world import Faults, Process, World, run_virtual

CAPACITY = 2**18
CONFIG = StoreConfig(
    lease_ms=2000,
    put_timeout_ms=8000,
    put_wait_ms=3000,
    deadline_ms=20_000,
    recovery_ms=1000,
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
        self.is_loose = False
        """A host was away when something was removed or replaced: it may bring that back."""

    def change(self, states: set[bytes | None]) -> None:
        self.now = states
        self.log.append(states)
        self.ever |= states

    def possible_since(self, mark: int) -> set[bytes | None]:
        if self.is_loose:
            return self.ever
        return set().union(*self.log[mark:])


class Run:
    """One seeded schedule."""

    def __init__(self, seed: int, faults: Faults, *, crashes: bool) -> None:
        self.seed, self.crashes = seed, crashes
        self.chance = random.Random(seed ^ 0x5EED)
        self.world = World(seed, CONFIG, faults)
        self.histories: dict[str, History] = {}
        self.count = 0
        self.reads = self.found = self.acked = 0
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
            world.start_host(name, CAPACITY)
        await asyncio.sleep(2)
        clients = [asyncio.ensure_future(self.client(i, num_ops)) for i in range(3)]
        chaos = asyncio.ensure_future(self.chaos()) if self.crashes else None
        await asyncio.gather(*clients)
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
                    lambda process=process: self.world.kill_client(process)
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
            ("put", "upsert", "remove", "get", "range", "batch", "exists"),
            (6, 2, 1, 8, 2, 2, 1),
        )[0]
        if kind in ("put", "upsert", "remove"):
            await self.write(kind, client, self.history(number))
        elif kind == "batch":
            await self.write_batch(client, number)
        elif kind == "exists":
            await self.quietly(client.exists(self.any_key()))
        else:
            await self.read(kind, client, self.histories.get(self.any_key()))

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
        return (head + self.chance.randbytes(64)) * (length // 64 + 1) if length else head

    @property
    def all_hosts_joined(self) -> bool:
        hosts = self.world.hosts
        return len(hosts) == len(HOSTS) and all(h.is_joined.is_set() for _, h in hosts.values())

    async def write(self, kind: str, client, history: History) -> None:
        before, all_there = history.now, self.all_hosts_joined
        if kind == "remove":
            history.change(before | {None})
            self.note(history.key, "remove")
            try:
                await client.remove(history.key)
            except TandemError as error:
                self.note(history.key, f"remove: {error}")
                self.loosen(history, all_there)
                return
            self.loosen(history, all_there)
            history.change({None})
            self.note(history.key, f"removed loose={history.is_loose}")
            return
        value = self.value(history.key)
        options = PutOptions(
            replicas=self.chance.choice((1, 2, 2, 3)),
            upsert=kind == "upsert",
            hard_pin=history.is_pinned,
        )
        history.change(before | {value})
        self.note(history.key, f"{kind} {value[:12]!r} of {len(value)} {options.replicas}")
        try:
            result = await client.put(history.key, value, options)
        except TandemError as error:
            self.note(history.key, f"{kind} failed: {error}")
            self.loosen(history, all_there)
            return
        self.settle(history, before, value, result, all_there, upsert=kind == "upsert")

    def settle(self, history, before, value, result, all_there, *, upsert) -> None:
        self.acked += 1
        self.note(history.key, f"{value[:12]!r} {result} all_there={all_there}")
        if result is PutResult.EXISTS:
            if upsert:
                self.fail(f"upsert of {history.key} says EXISTS")
            if before == {None} and not history.is_loose:
                # Ours, by an attempt whose answer was lost; or nobody's, which is wrong.
                history.change({value})
            elif None not in before or not upsert:
                history.change((before | {value}) - {None})
            return
        if None not in before and not upsert and history.is_pinned and not history.is_loose:
            # A pinned object can only be replaced while all its hosts are lost.
            if all_there and self.all_hosts_joined and not self.crashes:
                self.fail(f"put of {history.key} says {result} over a pinned object")
        self.loosen(history, all_there, value)
        history.change({value})

    def loosen(self, history: History, all_there: bool, kept: bytes | None = None) -> None:
        """If a host was away, an older value may be there, and come back if the master dies too."""
        older = history.ever - {None, kept}
        if older and not (all_there and self.all_hosts_joined):
            history.is_loose = True

    async def write_batch(self, client, number: int) -> None:
        histories = {h.key: h for h in (self.history(number) for _ in range(4))}
        values = {key: self.value(key) for key in histories}
        befores = {key: history.now for key, history in histories.items()}
        all_there = self.all_hosts_joined
        for key, history in histories.items():
            history.change(befores[key] | {values[key]})
        try:
            # Pinned or not is decided by the batch; what it says must hold for all its keys.
            pinned = all(history.is_pinned for history in histories.values())
            results = await client.put_many(
                list(histories), list(values.values()), PutOptions(hard_pin=pinned, replicas=2)
            )
        except TandemError:
            for history in histories.values():
                self.loosen(history, all_there)
            return
        for (key, history), result in zip(histories.items(), results, strict=True):
            if isinstance(result, PutResult):
                if not pinned:
                    history.is_pinned = False
                self.settle(history, befores[key], values[key], result, all_there, upsert=False)

    async def read(self, kind: str, client, history: History | None) -> None:
        if history is None:
            return
        mark = len(history.log) - 1
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
            self.fail(f"corrupt without a corruption: {error}")
            return
        except TandemError:
            return
        self.found += 1
        possible = history.possible_since(mark)
        if kind == "range":
            fits = any(v is not None and v[begin : begin + length] == value for v in possible)
        else:
            fits = value in possible
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
                    world.start_host(name, CAPACITY)

    async def heal(self) -> None:
        world = self.world
        world.faults = Faults()
        world.crash_at.clear()
        if world.master_process is None:
            world.start_master()
        for name in HOSTS:
            if name not in world.hosts:
                world.start_host(name, CAPACITY)
        await asyncio.sleep(100)  # Late messages arrive, stalled clients wake, puts expire.

    async def check_end(self) -> None:
        process, client = self.world.start_client("checker")
        for history in self.histories.values():
            try:
                value = await client.get(history.key)
            except NotFoundError:
                value = None
            except TandemError as error:
                self.fail(f"{history.key} at the end: {error}")
                continue
            allowed = history.ever if history.is_loose else history.now
            if value is None and history.is_pinned and None not in allowed:
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
        self.world.kill_client(process)


def simulate(seed: int, *, num_ops: int = 60) -> Run:
    chance = random.Random(seed)
    faults = (
        Faults(),
        Faults(lose=0.03, late=0.02, double=0.05),
        Faults(stall=0.1),
        Faults(lose=0.01, late=0.01, double=0.02, stall=0.03),
    )[seed % 4]
    run: Run | None = None

    async def main() -> None:
        nonlocal run
        run = Run(seed, faults, crashes=chance.random() < 0.75)
        await run.run(num_ops)

    run_virtual(main)
    assert run is not None
    assert not run.world.violations, f"seed {seed}: " + "\n".join(run.world.violations[:10])
    return run


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_seeds(first):
    for seed in range(first, first + 20):
        run = simulate(seed)
        assert run.world.steps >= 500, f"seed {seed} had only {run.world.steps} steps"
