"""Goal: a value that was replaced is never read again, whoever dies, is late or loses its memory.

Method: the host of an older copy is away, or is lost in the middle of an upsert; masters change;
hosts come back in the order that would show the older copy first. Each rule, taken away, is missed.
"""

import asyncio

import msgspec
import pytest
from store_world import StoreWorld
from test_membership_sim import CAPACITY, CONFIG, HOSTS, change_master, joined, on, play, start

from tandem.core.errors import CapacityError, InternalError, TandemError
from tandem.sim import Faults, run_virtual
from tandem.store.client.options import PutOptions, PutResult
from tandem.store.master.burials import Burials
from tandem.store.master.state.state import StoreState

UPSERT = PutOptions(upsert=True)


def upsert_on(name: str) -> PutOptions:
    return PutOptions(upsert=True, preferred=[name])


async def read_after_recovery(seed: int, kind: str) -> None:
    """Replace while the old copy's host is away; that host returns first to the next master."""
    world, client = await start(seed)
    await client.put("key", b"old", on("h0"))
    await client.put("other", b"value", on("h0"))
    world.kill_host("h0")
    if kind == "unknown":  # The master that replaces has never heard of the old copy.
        change_master(world)
        await joined(world, 2)
    if kind == "evicted":  # Nor does any master know of it when it is replaced.
        state = world.master.state
        world.master.departures.evict_row(state.directory.find("key"))
        await asyncio.sleep(1)
    assert await client.put("key", b"new", upsert_on("h1"))
    world.kill_host("h1")
    change_master(world)
    world.start_host("h0", CAPACITY)
    await joined(world, 2)
    assert await client.get("other") == b"value"
    reading = asyncio.ensure_future(client.get("key"))
    await asyncio.sleep(1)
    assert not reading.done(), "the new value is on a host that has not come yet"
    world.start_host("h1", CAPACITY)
    assert await reading == b"new"
    await joined(world, 3)
    await asyncio.sleep(1)
    assert not (await world.roster.load()).tombstones


@pytest.mark.parametrize("kind", ["known", "unknown", "evicted"])
def test_an_older_copy_that_returns_first_is_not_read(kind):
    play(read_after_recovery, kind)


async def lose_host_and_memory(seed: int, delay_s: float) -> bool:
    """Lose the host of both versions while the first is wiped; its disk has that one still."""
    world = StoreWorld(seed, CONFIG, Faults())
    world.add_disk("h2")
    world.start_master()
    for name in HOSTS:
        world.start_host(name, CAPACITY)
    await asyncio.sleep(2)
    _, client = world.start_client("c")
    async with asyncio.timeout(30):
        while not len(world.hosts["h2"][1].disk.index):
            await client.put("key", b"old" * 1000, upsert_on("h2"))
            await asyncio.sleep(1)
    putting = asyncio.ensure_future(client.put("key", b"new" * 1000, upsert_on("h2")))
    await asyncio.sleep(delay_s)
    world.kill_host("h2")
    was_read = asyncio.ensure_future(client.get("key"))
    await asyncio.sleep(0.01)
    is_answered = putting.done()
    is_new = was_read.done() and not was_read.exception() and was_read.result() == b"new" * 1000
    was_read.cancel()
    change_master(world)
    if not is_answered:
        putting.cancel()
    del world.segments["h2"]  # As after a restart of the machine.
    world.start_host("h2", CAPACITY)
    await joined(world, 3)
    try:
        found = await client.get("key")
    except TandemError:
        found = None
    assert not (is_answered or is_new) or found != b"old" * 1000, f"{delay_s=}"
    return is_answered


def test_a_replaced_version_does_not_come_back_from_a_disk():
    """Whenever in the upsert the host and the master die."""
    num_answered = 0
    for seed in range(60):
        delay_s = 0.0005 + 0.0002 * seed
        num_answered += run_virtual(lambda seed=seed, at=delay_s: lose_host_and_memory(seed, at))
    assert 5 < num_answered < 55, "some upserts are answered, some are not"


async def upsert_that_no_host_seals(seed: int) -> None:
    """The old copy's host is away; a tombstone for what never came would be its end."""
    world, client = await start(seed)
    await client.put("key", b"old", on("h0"))
    world.kill_host("h0")
    change_master(world)
    await joined(world, 2)

    def fail(*_: object, **__: object) -> None:
        raise InternalError("test", "no header can be written")

    healthy = {name: world.hosts[name][1].segment for name in ("h1", "h2")}
    with pytest.MonkeyPatch.context() as patch:
        for segment in healthy.values():
            patch.setattr(segment, "seal_many", fail)
        with pytest.raises(TandemError):
            await client.put("key", b"new", upsert_on("h1"))
    change_master(world)
    world.start_host("h0", CAPACITY)
    await joined(world, 3)
    assert await client.get("key") == b"old"


def test_an_upsert_that_no_host_seals_leaves_the_older_value():
    play(upsert_that_no_host_seals)


async def get_with_one_host_dead(seed: int) -> None:
    world, client = await start(seed)
    keys = [f"key{i}" for i in range(30)]
    for i, key in enumerate(keys):
        await client.put(key, b"value", PutOptions(replicas=2, preferred=[HOSTS[i % 2], "h2"]))
    world.kill_host("h2")
    change_master(world)
    await joined(world, 2)
    await client.exists(keys[0])  # Its session.
    assert world.master.state.awaited.is_learning
    loop = asyncio.get_running_loop()
    for i, key in enumerate(keys):
        if i % 3 == 0:  # Whether it was replaced a moment ago or not.
            await client.put(key, b"anew", upsert_on("h0"))
        begin_s = loop.time()
        assert await client.get(key) == (b"value" if i % 3 else b"anew")
        assert loop.time() - begin_s < 0.1


def test_known_keys_are_read_while_a_dead_host_is_waited_for():
    play(get_with_one_host_dead)


async def fill_tombstones(seed: int) -> None:
    """Removals wait for room, are refused by name, and go on when a host returns."""
    config = msgspec.structs.replace(CONFIG, put_wait_ms=2000)
    world, client = await start(seed, config)
    for i in range(40):
        await client.put(f"key{i}", b"value", PutOptions(replicas=3))
    world.kill_host("h2")
    await asyncio.sleep(11)  # It is declared lost.
    for i in range(30):
        await client.remove(f"key{i}")
    for work in (
        client.remove("key30"),
        client.remove_prefix("key31"),
        client.put("key32", b"new", UPSERT),
    ):
        with pytest.raises(CapacityError, match="h2"):
            await work
    found = await client.get_many([f"key{i}" for i in range(30, 40)])
    assert found == [b"value"] * 10, "what is refused changes nothing"
    assert await client.put("fresh", b"value") is PutResult.CREATED
    waiting = asyncio.ensure_future(client.remove("key30"))
    await asyncio.sleep(1)
    assert not waiting.done()
    world.start_host("h2", CAPACITY)
    assert await waiting
    await joined(world, 3)
    await asyncio.sleep(1)
    saved = await world.roster.load()
    assert set(saved.roster.members) == set(HOSTS), "nobody was given up for room"
    assert not saved.tombstones
    assert set((await client.list_keys()).keys) == {"fresh", *(f"key{i}" for i in range(31, 40))}


def test_a_removal_without_room_for_its_tombstone_waits_and_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("tandem.store.master.burials.MAX_TOMBSTONES", 30)
    play(fill_tombstones)


async def lose_the_roster(seed: int, *, is_late: bool) -> None:
    """The members are forgotten, the tombstones are whole: no removal comes undone."""
    world, client = await start(seed)
    for key in ("before", "after", "kept"):
        await client.put(key, b"value", on("h2"))
    world.kill_host("h2")
    await client.remove("before")
    world.kill_master()
    world.roster._roster = None
    world.start_master()
    await joined(world, 2)
    await asyncio.sleep(11)  # Nobody that is not known now is waited for.
    assert not world.master.state.awaited.is_learning
    assert not await client.remove("after")
    if is_late:
        await asyncio.sleep(60)
    change_master(world)
    await joined(world, 2)
    assert (await world.roster.load()).tombstones
    world.start_host("h2", CAPACITY)
    await joined(world, 3)
    await asyncio.sleep(1)
    assert (await client.list_keys()).keys == ["kept"]
    assert await client.get("kept") == b"value"


@pytest.mark.parametrize("is_late", [False, True])
def test_removals_hold_while_the_roster_is_unknown(is_late):
    for seed in range(4):
        run_virtual(lambda seed=seed: lose_the_roster(seed, is_late=is_late))


async def set_a_floor(seed: int) -> None:
    """The administrator lets copies of hosts that are unknown go: nothing else is dropped."""
    world, client = await start(seed)
    await client.put("removed", b"value", on("h2"))
    await client.put("there", b"value", on("h0"))
    await client.put("stray", b"value", on("h2"))
    world.kill_host("h2")
    await client.remove("removed")
    world.kill_master()
    world.roster._roster = None
    world.start_master()
    await joined(world, 2)
    told = await client.set_floor(dry_run=True)
    assert told.num_tombstones == 1
    assert set(told.hosts) == {"h0", "h1"}
    await asyncio.sleep(11)
    assert (await world.roster.load()).tombstones
    told = await client.set_floor(dry_run=False)
    assert told.version > 0
    await asyncio.sleep(1)
    assert not (await world.roster.load()).tombstones
    change_master(world)
    await joined(world, 2)
    world.start_host("h2", CAPACITY)
    await joined(world, 3)
    await asyncio.sleep(1)
    assert (await client.list_keys()).keys == ["there"]
    assert await client.put("stray", b"anew", on("h2")) is PutResult.CREATED
    change_master(world)
    assert await client.get("stray") == b"anew", "it is a member now"


def test_a_floor_drops_the_copies_of_unknown_hosts_alone():
    play(set_a_floor)


async def bury_nothing(self, tombstones) -> None:
    return


MUTANTS = {
    "upserts leave no tombstone": (Burials, "bury", bury_nothing, read_after_recovery, ("known",)),
    "unknown hosts have no older copies": (
        Burials,
        "is_blind",
        property(lambda self: False),
        read_after_recovery,
        ("unknown",),
    ),
    "nobody notes what a lost host keeps": (
        StoreState,
        "note_unlisted",
        lambda self, key: None,
        read_after_recovery,
        ("evicted",),
    ),
    "tombstones go while the roster is unknown": (
        Burials,
        "is_complete",
        property(lambda self: True),
        lose_the_roster,
        (),
    ),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, monkeypatch):
    owner, attribute, replacement, scenario, arguments = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, replacement)
    more = {"is_late": False} if scenario is lose_the_roster else {}
    with pytest.raises((AssertionError, TandemError, TimeoutError)):
        for seed in range(4):
            run_virtual(lambda seed=seed: scenario(seed, *arguments, **more))
