"""Goal: what a master does not know of is not absent, and what was removed stays so.

A new master knows from the roster which hosts there are. Method: hosts that are stopped, killed and
started again around changes of the master, in virtual time; each promise by a scenario of its own,
and all of them under a leader that is stopped again and again. Each rule, taken away, is missed.
"""

import asyncio

import msgspec
import pytest
from store_masters import MastersWorld
from store_world import StoreWorld

from tandem.core.errors import ConflictError, DeadlineError, NotFoundError, TandemError
from tandem.sim import Faults, run_virtual
from tandem.store.client.options import PutOptions, PutResult
from tandem.store.config import StoreConfig
from tandem.store.election.roster import MemoryRosterStore, Tombstones
from tandem.store.master.burials import Burials
from tandem.store.master.membership import Membership
from tandem.store.master.state.awaited import Awaited
from tandem.store.messages import HostStage

HOSTS = ("h0", "h1", "h2")
CAPACITY = 2**18
CONFIG = StoreConfig(lease_ms=500, member_lease_ms=10_000, deadline_ms=30_000)
SEEDS = range(4)


async def start(seed: int, config: StoreConfig = CONFIG):
    """Return a world with three hosts that have joined, and a client."""
    world = StoreWorld(seed, config, Faults())
    world.start_master()
    for name in HOSTS:
        world.start_host(name, CAPACITY)
    await asyncio.sleep(2)
    _, client = world.start_client("c")
    return world, client


def change_master(world: StoreWorld) -> None:
    world.kill_master()
    world.start_master()


def stall(world: StoreWorld, name: str, seconds: float) -> None:
    """Stop a host; the others are there in a moment."""
    world.hosts[name][0].stall_until(asyncio.get_running_loop().time() + seconds)


async def joined(world: StoreWorld, count: int) -> None:
    async with asyncio.timeout(60):
        while sum(host.is_settled for host in world.master.state.hosts.values()) < count:
            await asyncio.sleep(0.001)


def play(scenario, *arguments) -> None:
    for seed in SEEDS:
        run_virtual(lambda seed=seed: scenario(seed, *arguments))


def on(name: str) -> PutOptions:
    return PutOptions(preferred=[name])


# A new master and a host that comes late, much later than ``recovery_ms``.


async def ask_a_new_master(seed: int) -> None:
    world, client = await start(seed)
    await client.put("key", b"value", on("h2"))
    stall(world, "h2", 5)
    change_master(world)
    await joined(world, 2)
    await asyncio.sleep(2)
    getting = asyncio.ensure_future(client.get("key"))
    assert await client.exists("key")
    assert await client.size("key") == 5
    assert await getting == b"value"
    assert [await client.exists("other"), (await client.list_keys()).keys] == [False, ["key"]]


def test_a_new_master_says_that_nothing_is_absent_before_all_have_told():
    play(ask_a_new_master)


async def put_twice(seed: int, size: int) -> None:
    world, client = await start(seed)
    assert await client.put("key", b"a" * size, on("h2")) is PutResult.CREATED
    stall(world, "h2", 5)
    change_master(world)
    await joined(world, 2)
    await asyncio.sleep(2)
    assert await client.put("key", b"b" * size, on("h0")) is PutResult.EXISTS
    assert await client.get("key") == b"a" * size


@pytest.mark.parametrize("size", [100, 20_000])
def test_nothing_is_created_twice(size):
    """Neither by a put that travels with the request, nor by one into granted space."""
    play(put_twice, size)


async def put_beside_a_host_that_is_away(seed: int) -> None:
    """The same master, which knows what the host has."""
    world, client = await start(seed)
    await client.put("key", b"first", on("h2"))
    world.kill_host("h2")
    await asyncio.sleep(0.5)
    putting = asyncio.ensure_future(client.put("key", b"second", on("h0")))
    looking = asyncio.ensure_future(client.exists("key"))
    assert await client.put("other", b"value") is PutResult.CREATED
    await asyncio.sleep(2)
    assert not putting.done()
    assert not looking.done()
    world.start_host("h2", CAPACITY)
    assert await putting is PutResult.EXISTS
    assert await looking
    assert await client.get("key") == b"first"


def test_a_host_that_is_away_for_a_moment_makes_nothing_absent():
    play(put_beside_a_host_that_is_away)


async def upsert_at_a_new_master(seed: int) -> None:
    world, client = await start(seed)
    await client.put("key", b"old", on("h2"))
    stall(world, "h2", 5)
    change_master(world)
    await joined(world, 2)
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    options = PutOptions(upsert=True, preferred=["h0"])
    assert await client.put("key", b"new", options) is PutResult.REPLACED
    assert await client.get("key") == b"new"
    assert loop.time() - begin_s < 1
    await joined(world, 3)
    await asyncio.sleep(1)
    assert await client.get("key") == b"new"
    world.kill_host("h0")
    world.kill_host("h1")
    change_master(world)
    await joined(world, 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.get("key"), 5)  # And not the old one.


def test_an_upsert_waits_for_nobody():
    play(upsert_at_a_new_master)


async def wait_in_vain(seed: int) -> None:
    """Nobody can say for as long as the membership cannot be written."""
    world, client = await start(seed, msgspec.structs.replace(CONFIG, deadline_ms=15_000))
    await client.put("key", b"value", on("h2"))

    async def fail(roster) -> None:
        raise DeadlineError("test.roster", "is away")

    world.roster.save = fail
    world.kill_host("h2")
    change_master(world)
    await joined(world, 2)
    for work in (client.get("key"), client.exists("key"), client.remove("key")):
        with pytest.raises(TandemError) as caught:
            await work
        assert caught.value.retryable
    del world.roster.save
    with pytest.raises(NotFoundError):
        await client.get("key")


def test_a_host_is_not_lost_before_that_is_written():
    play(wait_in_vain)


async def lose_a_host(seed: int) -> None:
    world, client = await start(seed)
    await client.put("key", b"first", on("h2"))
    world.kill_host("h2")
    change_master(world)
    await joined(world, 2)
    await asyncio.sleep(9)
    assert world.master.state.awaited.is_learning
    assert await client.put("key", b"second", on("h0")) is PutResult.CREATED
    assert {host.name for host in (await client.status()).hosts} == set(HOSTS)
    loop = asyncio.get_running_loop()
    change_master(world)
    await joined(world, 2)
    begin_s = loop.time()
    assert not await client.exists("another")
    assert loop.time() - begin_s < 1, "a host that is lost is not waited for again"
    world.start_host("h2", CAPACITY)
    await joined(world, 3)
    await asyncio.sleep(1)
    assert await client.get("key") == b"second"
    change_master(world)
    stall(world, "h2", 5)
    await joined(world, 2)
    begin_s = loop.time()
    assert not await client.exists("another")
    assert loop.time() - begin_s > 3, "it is a member again"


def test_a_host_is_lost_by_its_lease_until_it_returns():
    play(lose_a_host)


async def cut_off_a_leader(seed: int) -> None:
    """It reaches etcd and no host, for longer than a lease; then it dies, and all hosts live."""
    world = MastersWorld(seed, CONFIG, Faults())
    world.start_master()
    for name in HOSTS:
        world.start_host(name, CAPACITY)
    await asyncio.sleep(5)
    _, client = world.start_client("c")
    await client.put("key", b"value", on("h2"))
    leader = world.leader.process.name
    mend = world.cut_off(leader, HOSTS)
    await asyncio.sleep(30)
    saved = await world.roster.load()
    assert not any(member.is_lost for member in saved.roster.members.values())
    mend()
    world.kill_node(leader)
    stall(world, "h2", 8)
    assert await client.get("key") == b"value"


def test_a_leader_that_reaches_no_host_declares_none_lost():
    play(cut_off_a_leader)


async def come_back_one_by_one(seed: int) -> None:
    """The same master: the first that it reaches again says nothing of the others."""
    world, client = await start(seed)
    await client.put("key", b"value", on("h2"))
    for name in HOSTS:
        world.kill_host(name)
    change_master(world)
    await asyncio.sleep(20)
    world.start_host("h0", CAPACITY)
    await joined(world, 1)
    looking = asyncio.ensure_future(client.exists("key"))
    await asyncio.sleep(5)
    world.start_host("h1", CAPACITY)
    world.start_host("h2", CAPACITY)
    assert await looking


def test_leases_begin_anew_with_the_first_host_that_is_reached():
    play(come_back_one_by_one)


async def add_a_slow_host(seed: int) -> None:
    """A host that was never a member, and one that is lost, hold up nobody while they join."""
    world, client = await start(seed)
    await client.put("old", b"value", on("h2"))
    world.kill_host("h2")
    await asyncio.sleep(12)
    change_master(world)
    await joined(world, 2)
    for name in ("h2", "h3"):
        world.start_host(name, CAPACITY)
        async with asyncio.timeout(10):
            while not any(
                host.name == name and host.stage is HostStage.JOINING
                for host in world.master.state.hosts.values()
            ):
                await asyncio.sleep(0.0002)
        stall(world, name, 5)
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        assert await client.put(f"beside {name}", b"value") is PutResult.CREATED
        assert not await client.exists("another")
        assert loop.time() - begin_s < 1
    await joined(world, 4)
    assert await client.get("old") == b"value"


def test_hosts_that_nobody_waits_for_hold_up_nobody_when_they_join():
    play(add_a_slow_host)


# Removals.


async def remove_behind_a_host(seed: int, kind: str, num_masters: int) -> None:
    """Remove while a host that has the object is away, change masters, let the host return."""
    world, client = await start(seed)
    await client.put("key", b"value", PutOptions(replicas=3))
    await client.put("kept", b"value", on("h2"))
    world.kill_host("h2")
    await asyncio.sleep(0.1)
    if num_masters > 1:
        change_master(world)
        await joined(world, 2)
    if kind == "key":
        await client.remove("key")
    else:
        await client.remove_prefix("ke")
    if kind == "put again":
        await client.put("key", b"anew", PutOptions(replicas=2))
    change_master(world)
    world.start_host("h2", CAPACITY)
    expected = {"key": {"kept"}, "prefix": set(), "put again": {"key"}}[kind]
    assert set((await client.list_keys()).keys) == expected
    await asyncio.sleep(2)
    assert not len(world.master.burials.tombstones)
    change_master(world)
    assert set((await client.list_keys()).keys) == expected
    if kind == "put again":
        assert await client.get("key") == b"anew"
    saved = await world.roster.load()
    assert not saved.tombstones
    assert not any(member.is_lost for member in saved.roster.members.values())


@pytest.mark.parametrize("num_masters", [1, 2])
@pytest.mark.parametrize("kind", ["key", "prefix", "put again"])
def test_a_host_that_returns_brings_nothing_back(kind, num_masters):
    """Whether the master that removed had ever heard of the object or not."""
    play(remove_behind_a_host, kind, num_masters)


async def remove_beside_a_stalled_host(seed: int) -> None:
    world, client = await start(seed)
    await client.put("key", b"value", PutOptions(replicas=3))
    stall(world, "h2", 5)
    change_master(world)
    await joined(world, 2)
    await asyncio.sleep(1.5)
    assert await client.remove("key")
    assert not await client.exists("key")
    await joined(world, 3)
    await asyncio.sleep(1)
    assert not await client.exists("key")
    change_master(world)
    assert not await client.exists("key")


def test_a_removal_waits_for_a_host_that_comes_late():
    play(remove_beside_a_stalled_host)


async def lose_hosts_one_after_the_other(seed: int) -> None:
    """A tombstone stays while one of those that were away has not confirmed it."""
    world, client = await start(seed)
    await client.put("key", b"value", PutOptions(replicas=3))
    world.kill_host("h1")
    world.kill_host("h2")
    await asyncio.sleep(0.1)
    await client.remove("key")
    for name in ("h1", "h2"):
        change_master(world)
        assert len((await world.roster.load()).tombstones)
        world.start_host(name, CAPACITY)
        await joined(world, 2 if name == "h1" else 3)
        await asyncio.sleep(1)
        assert not await client.exists("key")
    assert not (await world.roster.load()).tombstones


def test_a_tombstone_stays_until_every_host_has_confirmed():
    play(lose_hosts_one_after_the_other)


async def lose_a_host_in_a_removal(seed: int) -> None:
    """It dies between the order to wipe and its answer, or before that reached it."""
    world, client = await start(seed)
    await client.put("key", b"value", PutOptions(replicas=3))
    removing = asyncio.ensure_future(client.remove("key"))
    await asyncio.sleep(world.random.uniform(0.0005, 0.006))
    world.kill_host("h2")
    assert await removing
    change_master(world)
    world.start_host("h2", CAPACITY)
    await joined(world, 3)
    await asyncio.sleep(1)
    assert not await client.exists("key")
    assert not list(world.segments["h2"].scan())


def test_a_host_that_dies_in_a_removal_brings_nothing_back():
    for seed in range(20):
        run_virtual(lambda seed=seed: lose_a_host_in_a_removal(seed))


async def retire_a_host(seed: int, *, is_early: bool) -> None:
    """Nothing waits for it any more, and what it brings is dropped."""
    world, client = await start(seed)
    await client.put("key", b"value", PutOptions(replicas=3))
    await client.put("alone", b"value", on("h2"))
    with pytest.raises(ConflictError, match="connected"):
        await client.retire("h2")
    with pytest.raises(NotFoundError):
        await client.retire("nobody")
    world.kill_host("h2")
    await asyncio.sleep(0.1)
    await client.remove("key")
    if not is_early:
        change_master(world)
        await joined(world, 2)
    assert len((await world.roster.load()).tombstones)
    await client.retire("h2")
    await asyncio.sleep(0.5)
    saved = await world.roster.load()
    assert not saved.tombstones
    assert set(saved.roster.members) == {"h0", "h1"}
    assert {host.name for host in (await client.status()).hosts} == {"h0", "h1"}
    assert not await client.exists("alone")
    world.start_host("h2", CAPACITY)
    await joined(world, 3)
    await asyncio.sleep(1)
    assert not any(await client.exists_many(["key", "alone"]))
    assert not list(world.segments["h2"].scan())
    assert await client.put("alone", b"anew", on("h2")) is PutResult.CREATED
    saved = await world.roster.load()
    assert set(saved.roster.members) == set(HOSTS)
    assert not saved.roster.retired
    change_master(world)
    assert await client.get("alone") == b"anew"


@pytest.mark.parametrize("is_early", [True, False])
def test_a_retired_host_is_not_waited_for_and_brings_nothing(is_early):
    for seed in SEEDS:
        run_virtual(lambda seed=seed: retire_a_host(seed, is_early=is_early))


async def remove_many_by_prefix(seed: int) -> None:
    """One tombstone is enough for all of them."""
    world, client = await start(seed)
    for i in range(40):
        await client.put(f"key{i}", b"value", PutOptions(replicas=3))
    world.kill_host("h2")
    await asyncio.sleep(11)  # It is declared lost.
    assert await client.remove_prefix("key") == 40
    await asyncio.sleep(0.5)
    saved = await world.roster.load()
    assert set(saved.roster.members) == set(HOSTS)
    assert sum(len(batch) for _, batch in saved.tombstones) == 1


def test_a_removal_by_prefix_writes_one_tombstone(monkeypatch):
    monkeypatch.setattr("tandem.store.master.burials.MAX_TOMBSTONES", 30)
    play(remove_many_by_prefix)


async def replace_storage(seed: int) -> None:
    """Another segment under the name of a host: the old one is given up."""
    world, client = await start(seed)
    await client.put("key", b"value", on("h2"))
    old = world.segments["h2"]
    world.kill_host("h2")
    del world.segments["h2"]
    world.start_host("h2", CAPACITY)
    await joined(world, 3)
    assert not await client.exists("key")
    assert await client.remove("key") is False
    world.kill_host("h2")
    world.segments["h2"] = old
    change_master(world)
    world.start_host("h2", CAPACITY)
    await joined(world, 3)
    await asyncio.sleep(1)
    assert not await client.exists("key")


def test_a_segment_that_was_replaced_brings_nothing_back():
    play(replace_storage)


async def move_disks(seed: int) -> None:
    """What is removed while a host is away does not come back from its disk either."""
    world = StoreWorld(seed, CONFIG, Faults())
    world.add_disk("h2")
    world.start_master()
    for name in HOSTS:
        world.start_host(name, CAPACITY)
    await asyncio.sleep(2)
    _, client = world.start_client("c")
    options = PutOptions(preferred=["h2"], upsert=True)
    async with asyncio.timeout(30):
        # A report of the disk that overtakes the commit has it forgotten there.
        while not len(world.hosts["h2"][1].disk.index):
            await client.put("key", b"value" * 1000, options)
            await asyncio.sleep(1)
    world.kill_host("h2")
    await asyncio.sleep(0.1)
    await client.remove("key")
    change_master(world)
    del world.segments["h2"]  # As after a restart of the machine.
    world.start_host("h2", CAPACITY)
    await joined(world, 3)
    await asyncio.sleep(2)
    assert not await client.exists("key")
    assert not len(world.hosts["h2"][1].disk.index)
    assert not (await world.roster.load()).tombstones


def test_a_disk_brings_nothing_back():
    play(move_disks)


# A leader that is stopped again and again, with all hosts alive.


class Traffic:
    """A client that writes, removes and looks, and knows what must be there."""

    def __init__(self, client, name: str, violations: list[str]) -> None:
        self._client, self._name, self._violations = client, name, violations
        self.present: dict[str, bytes] = {}
        self.removed: list[str] = []
        self.num_created = 0
        self.is_over = False

    async def run(self) -> None:
        number = 0
        while not self.is_over:
            number += 1
            await asyncio.sleep(0.01)
            try:
                await self._step(number)
            except NotFoundError as error:
                self._violations.append(f"false NotFound: {error}")
            except TandemError as error:
                assert error.retryable, error

    async def _step(self, number: int) -> None:
        key, value = f"{self._name}/{number}", f"{number}".encode() * 10
        result = await self._client.put(key, value, PutOptions(replicas=1 + number % 2))
        self.present[key] = value
        self.num_created += result is PutResult.CREATED
        again = await self._client.put(key, b"another")
        if again is not PutResult.EXISTS:
            self._violations.append(f"second put of {key} says {again}")
        old = next(iter(self.present))
        if await self._client.get(old) != self.present[old]:
            self._violations.append(f"{old} holds what it should not")
        if not await self._client.exists(old):
            self._violations.append(f"false exists of {old}")
        if number % 2:
            value = self.present.pop(old)
            await self._client.remove(old)
            self.removed.append(old)
        await self.look_at_removed()

    async def look_at_removed(self) -> None:
        found = await self._client.exists_many(self.removed[-20:])
        self._violations += [
            f"{key} was removed and is there"
            for key, flag in zip(self.removed[-20:], found, strict=True)
            if flag
        ]

    async def check(self) -> None:
        keys = list(self.present)
        for begin in range(0, len(keys), 20):
            some = keys[begin : begin + 20]
            for key, value in zip(some, await self._client.get_many(some), strict=True):
                if value != self.present[key]:
                    self._violations.append(f"{key} is {value!r} in the end")
        found = await self._client.exists_many(self.removed)
        self._violations += [
            f"{key} was removed and is there in the end"
            for key, flag in zip(self.removed, found, strict=True)
            if flag
        ]


async def change_leaders(seed: int, kind: str, num_changes: int) -> tuple[list[str], MastersWorld]:
    config = msgspec.structs.replace(CONFIG, deadline_ms=60_000)
    world = MastersWorld(seed, config, Faults())
    world.start_master()
    for name in HOSTS:
        world.start_host(name, 8 * CAPACITY)
    await asyncio.sleep(5)
    traffic = [
        Traffic(world.start_client(name)[1], name, world.violations) for name in ("c0", "c1")
    ]
    running = [asyncio.ensure_future(one.run()) for one in traffic]
    for _ in range(num_changes):
        await asyncio.sleep(world.random.uniform(1, 4))
        leader = world.leader
        if leader is None:
            continue
        if kind == "stop":
            world.stall_node(leader.process.name, world.random.uniform(4, 8))
        else:
            world.kill_node(leader.process.name)
        # One of the hosts may take its time to come back.
        stall(world, world.random.choice(HOSTS), world.random.uniform(0, 8))
        await asyncio.sleep(world.random.uniform(4, 9))
        world.start_master()
    for one in traffic:
        one.is_over = True
    async with asyncio.timeout(200):
        await asyncio.gather(*running)
        for one in traffic:
            await one.check()
    assert all(one.num_created > 100 for one in traffic)
    assert all(len(one.removed) > 50 for one in traffic)
    return world.violations, world


# Leaders that are killed are real ones in tests/store/processes/test_store_leaders.py.
@pytest.mark.parametrize("kind", ["stop", pytest.param("kill", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_leaders_that_change_make_nothing_absent_and_undo_no_removal(seed, kind):
    violations, world = run_virtual(lambda: change_leaders(seed, kind, 6))
    assert not violations, violations[:5]
    assert world.num_terms > 3


async def forget_members(self) -> None:
    await LOAD(self)
    self._awaited.until_ms.clear()


async def bury_nothing(self, tombstones) -> None:
    return


LOAD = Membership.load
MUTANTS = {
    "a new master waits for nobody": (Membership, "load", forget_members, ask_a_new_master, ()),
    "puts do not wait": (
        Awaited,
        "is_learning",
        property(lambda self: False),
        put_twice,
        (100,),
    ),
    "no tombstone is kept": (Burials, "bury", bury_nothing, remove_behind_a_host, ("key", 1)),
    "tombstones kill nothing": (
        Tombstones,
        "find",
        lambda self, key: -1,
        remove_behind_a_host,
        ("prefix", 2),
    ),
    "a host is lost before that is written": (
        MemoryRosterStore,
        "save",
        None,
        lose_a_host,
        (),
    ),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, monkeypatch):
    owner, attribute, replacement, scenario, arguments = MUTANTS[name]
    if replacement is None:

        async def replacement(self, roster) -> None:
            return

    monkeypatch.setattr(owner, attribute, replacement)
    with pytest.raises((AssertionError, TandemError, TimeoutError)):
        play(scenario, *arguments)
