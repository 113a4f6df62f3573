"""Goal: the membership survives whoever writes it, and damage to it is noticed.

Method: the same promises on every ``RosterStore``; torn and flipped bytes in the files; a term that
is over in etcd; a store that fails for a while under the writer.
"""

import asyncio
import errno
from unittest.mock import Mock

import msgspec
import pytest
from etcd_server import EtcdServer, needs_etcd

from tandem.core.clock import MonotonicClock
from tandem.core.errors import DeadlineError, InternalError, PeerLostError, UnsupportedError
from tandem.sim import run_virtual
from tandem.store.config import StoreElectionConfig
from tandem.store.corruption_log import CorruptionLog
from tandem.store.election import etcd_roster
from tandem.store.election.election import Holder
from tandem.store.election.etcd import EtcdBackend
from tandem.store.election.etcd_gateway import encode_bytes
from tandem.store.election.etcd_roster import EtcdRosterStore
from tandem.store.election.roster import (
    MAX_RETIRED,
    Member,
    MemoryRosterStore,
    Roster,
    RosterWriter,
    Tombstone,
    Tombstones,
)
from tandem.store.election.roster_file import FileRosterStore
from tandem.store.formats import headers

ROSTER = Roster(
    members={"h0": Member("aa", "dd"), "h\u00e9\n": Member("bb", is_lost=True)},
    retired={"cc": 2**60},
)
FIRST = [Tombstone("key", 7), Tombstone("p/", 9, is_prefix=True), Tombstone("\u00e9\n\0", 2**62)]
SECOND = [Tombstone("other", 8)]


async def check_store(open_store) -> None:
    """What every store promises; ``open_store`` returns another way to the same one."""
    store = open_store()
    roster, batches, is_new = await store.load()
    assert (roster, list(batches), is_new) == (None, [], True)
    await store.save(ROSTER)
    for _ in range(2):  # It may be repeated.
        await store.add((1, FIRST))
    await store.add((3, SECOND))
    saved = await open_store().load()
    assert saved.roster == ROSTER
    found = Tombstones()
    for number, batch in saved.tombstones:
        found.add(number, batch)
    assert [found.find(key) for key in ("key", "p/x", "\u00e9\n\0", "other", "none")] == [
        7, 9, 2**62, 8, -1,
    ]  # fmt: skip
    await store.drop(3)
    assert [(n, list(batch)) for n, batch in (await open_store().load()).tombstones] == [
        (3, SECOND)
    ]
    await store.drop(4)
    await store.save(Roster())
    saved = await open_store().load()
    assert (saved.roster, list(saved.tombstones)) == (Roster(), [])


@pytest.mark.asyncio
async def test_files(tmp_path):
    await check_store(lambda: FileRosterStore(tmp_path, "m.sock"))
    assert (await FileRosterStore(tmp_path, "another").load()).roster is None


@pytest.mark.asyncio
async def test_memory():
    store = MemoryRosterStore()
    await check_store(lambda: store)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    server = EtcdServer(tmp_path_factory.mktemp("etcd")).start()
    yield server
    server.kill()


def make_backend(etcd: EtcdServer, prefix: str) -> EtcdBackend:
    config = StoreElectionConfig(backend="etcd", endpoints=(etcd.url,), prefix=prefix)
    return EtcdBackend(config, clock=MonotonicClock())


async def lead(backend: EtcdBackend) -> Holder:
    claim = await backend.acquire("here", ttl_s=60, min_epoch=0, timeout_s=5)
    assert claim.is_ours
    return claim.holder


@needs_etcd
@pytest.mark.asyncio
async def test_etcd_keeps_it_for_the_leader_alone(etcd):
    async with make_backend(etcd, "/test/roster") as backend:
        holder = await lead(backend)
        await check_store(lambda: EtcdRosterStore(backend, holder, timeout_s=5))
        old = EtcdRosterStore(backend, holder, timeout_s=5)
        await old.save(ROSTER)
        await old.add((1, FIRST))
        await backend.release(5)
        changes = (lambda: old.save(Roster()), lambda: old.add((2, SECOND)), lambda: old.drop(9))
        for change in changes:  # Nobody leads, then another does.
            with pytest.raises(PeerLostError, match="epoch 1 is over"):
                await change()
        new = EtcdRosterStore(backend, await lead(backend), timeout_s=5)
        for change in changes:
            with pytest.raises(PeerLostError, match="epoch 1 is over"):
                await change()
        saved = await new.load()
        assert saved.roster == ROSTER
        assert [(n, list(batch)) for n, batch in saved.tombstones] == [(1, FIRST)]


@needs_etcd
@pytest.mark.asyncio
async def test_etcd_takes_many_tombstones(etcd, monkeypatch):
    monkeypatch.setattr(etcd_roster, "CHUNK_BYTES", 5_000)
    async with make_backend(etcd, "/test/many") as backend:
        store = EtcdRosterStore(backend, await lead(backend), timeout_s=5)
        # The last is a key as long as any: it takes a chunk for itself.
        many = [Tombstone(f"key{i}" * 5, i) for i in range(1000)] + [Tombstone("\0" * 60_000, 1)]
        await store.add((1, many))
        await store.add((2, SECOND))
        found = (await store.load()).tombstones
        assert [t for number, batch in found for t in batch if number == 1] == many
        assert [t for number, batch in found for t in batch if number == 2] == SECOND
        await store.drop(2)
        assert [number for number, _ in (await store.load()).tombstones] == [2]


@needs_etcd
@pytest.mark.asyncio
async def test_a_later_term_without_members_is_no_new_store(etcd):
    async with make_backend(etcd, "/test/later") as backend:
        await lead(backend)
        await backend.release(5)
        holder = await lead(backend)
        assert holder.epoch == 2
        saved = await EtcdRosterStore(backend, holder, timeout_s=5).load()
        assert (saved.roster, saved.is_new) == (None, False)


@pytest.mark.asyncio
async def test_a_flipped_bit_costs_nothing_and_is_named(tmp_path):
    """Neither a host, nor a removal, which would come undone."""
    corruption = CorruptionLog()
    store = FileRosterStore(tmp_path, "m", corruption)
    await store.save(ROSTER)
    await store.add((1, FIRST))
    await store.add((2, SECOND))
    whole = {name: (tmp_path / name).read_bytes() for name in ("members.m", "tombstones.m")}
    assert (await store.load()).roster == ROSTER
    assert not corruption.names
    for name, data in whole.items():
        # Every third byte, and both ends.
        for at in sorted({*range(0, len(data), 3), len(data) - 2, len(data) - 1}):
            damaged = bytearray(data)
            damaged[at] ^= 1 << at % 8
            (tmp_path / name).write_bytes(damaged)
            corruption.names.clear()
            saved = await store.load()
            assert (saved.roster, saved.is_new) == (ROSTER, False), at
            assert list(saved.tombstones) == [(1, FIRST), (2, SECOND)], at
            # Without its last line break the last copy is torn, which is no damage.
            assert len(corruption.names) == (at < len(data) - 1), at
            assert (tmp_path / name).read_bytes() == data, "made anew from the other copy"


@pytest.mark.asyncio
async def test_members_without_a_whole_copy_are_not_believed(tmp_path):
    corruption = CorruptionLog()
    store = FileRosterStore(tmp_path, "m", corruption)
    await store.save(ROSTER)
    path = tmp_path / "members.m"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"dd", b"de"))
    for _ in range(2):  # It stays: a master that starts once more must not take the store for new.
        saved = await store.load()
        assert (saved.roster, saved.is_new) == (None, False)
    assert corruption.names == ["roster"]
    for length in range(len(whole) // 2 - 1):
        path.write_bytes(whole[:length])
        saved = await store.load()
        assert (saved.roster, saved.is_new) == (None, False), length
    await store.save(ROSTER)
    assert (await store.load()).roster == ROSTER


@pytest.mark.asyncio
async def test_tombstones_without_a_whole_copy_are_named_and_take_no_others_along(tmp_path):
    corruption = CorruptionLog()
    store = FileRosterStore(tmp_path, "m", corruption)
    await store.add((1, FIRST))
    await store.add((2, SECOND))
    path = tmp_path / "tombstones.m"
    path.write_bytes(path.read_bytes().replace(b"key", b"kex"))
    assert [number for number, _ in (await store.load()).tombstones] == [2]
    assert corruption.names == ["tombstones"]


@pytest.mark.asyncio
async def test_a_torn_line_takes_no_other_with_it(tmp_path):
    """Whoever wrote it had no answer: that is no damage."""
    corruption = CorruptionLog()
    store = FileRosterStore(tmp_path, "m", corruption)
    await store.add((1, FIRST))
    path = tmp_path / "tombstones.m"
    whole = path.read_bytes()
    await store.add((2, SECOND))
    longer = path.read_bytes()
    seen = set()
    for length in range(len(whole), len(longer)):
        path.write_bytes(longer[:length])
        numbers = [number for number, _ in (await store.load()).tombstones]
        assert numbers in ([1], [1, 2])
        seen.add(len(numbers))
        await store.add((3, SECOND))  # What was torn is not joined to it.
        assert [number for number, _ in (await store.load()).tombstones] == [*numbers, 3]
    assert seen == {1, 2}
    assert not corruption.names


@pytest.mark.asyncio
async def test_a_round_that_failed_leaves_no_half_a_line(tmp_path, monkeypatch):
    corruption = CorruptionLog()
    store = FileRosterStore(tmp_path, "m", corruption)
    await store.add((1, FIRST))
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "no space")))
    with pytest.raises(InternalError, match="no space"):
        await store.add((2, SECOND))
    monkeypatch.undo()
    await store.add((2, SECOND))
    assert [number for number, _ in (await store.load()).tombstones] == [1, 2]
    assert not corruption.names


@pytest.mark.asyncio
async def test_files_of_a_later_version_are_left_alone(tmp_path, monkeypatch):
    store = FileRosterStore(tmp_path, "m")
    with monkeypatch.context() as later:
        later.setattr(headers, "FORMAT", headers.FORMAT + 1)
        await store.save(ROSTER)
        await store.add((1, FIRST))
    whole = (tmp_path / "members.m").read_bytes()
    with pytest.raises(UnsupportedError, match="has format 3, this build knows 2"):
        await store.load()
    assert (tmp_path / "members.m").read_bytes() == whole


@needs_etcd
@pytest.mark.asyncio
async def test_what_cannot_be_read_in_etcd_is_named(etcd):
    async with make_backend(etcd, "/test/damaged") as backend:
        holder, corruption = await lead(backend), CorruptionLog()
        store = EtcdRosterStore(backend, holder, timeout_s=5, corruption=corruption)
        await store.save(ROSTER)
        await store.add((1, FIRST))
        await store.add((2, SECOND))
        for key in ("members", "tombstones/0000000000000001-00000000"):
            request = {"key": backend.key(key), "value": encode_bytes(b"[[")}
            await backend.post("kv/put", request, dict, backend.deadline_s(5))
        saved = await store.load()
        assert (saved.roster, saved.is_new) == (None, False)
        assert list(saved.tombstones) == [(2, SECOND)]
        assert corruption.names == ["roster", "tombstones"]


@pytest.mark.asyncio
async def test_a_folder_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    store = FileRosterStore(tmp_path / "missing", "m")
    for change in (store.save(Roster()), store.add((1, FIRST)), store.drop(3)):
        with pytest.raises(InternalError, match="No such file"):
            await change


class Failing(MemoryRosterStore):
    """Fails for a while, after it has carried the call out or before."""

    def __init__(self) -> None:
        super().__init__()
        self.num_failures = 0
        self.num_calls = 0

    async def add(self, batch) -> None:
        self.num_calls += 1
        await asyncio.sleep(0.01)
        if self.num_failures % 2:
            await super().add(batch)
        if self.num_failures:
            self.num_failures -= 1
            raise DeadlineError("test.roster", "lost")
        await super().add(batch)


def test_the_writer_goes_on_until_it_is_done_and_groups_what_comes_meanwhile():
    async def main() -> None:
        store, roster, tasks = Failing(), Roster(), set()
        writer = RosterWriter(
            store,
            roster,
            Tombstones(),
            lambda work: tasks.add(asyncio.get_running_loop().create_task(work)),
        )
        store.num_failures = 3
        adding = [asyncio.ensure_future(writer.add([Tombstone(f"{i}", i)])) for i in range(3)]
        await asyncio.sleep(0.005)
        roster.members["h"] = Member("a")
        saving = asyncio.ensure_future(writer.save())
        adding += [asyncio.ensure_future(writer.add([Tombstone(f"{i}", i)])) for i in range(3, 50)]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in adding)
        await asyncio.gather(*adding, saving)
        assert store.num_calls == 3 + 2
        saved = await store.load()
        assert saved.roster == roster
        assert sorted(t.version for _, batch in saved.tombstones for t in batch) == list(range(50))
        await writer.settle()
        writer.drop(writer.number)
        await writer.settle()
        assert not (await store.load()).tombstones

    run_virtual(main)


def test_tombstones_of_the_same_keys_take_no_more_room_for_ever(monkeypatch):
    """A store in which one key is replaced again and again while a host is away stays small."""
    monkeypatch.setattr("tandem.store.election.roster.COMPACT_TOMBSTONES", 20)

    async def main() -> None:
        store, tombstones, tasks = MemoryRosterStore(), Tombstones(), set()
        writer = RosterWriter(
            store,
            Roster(),
            tombstones,
            lambda work: tasks.add(asyncio.get_running_loop().create_task(work)),
        )
        for version in range(1, 200):
            some = [Tombstone(f"{version % 3}", version), Tombstone("p", version, is_prefix=True)]
            tombstones.add(writer.number, some)
            await writer.add(some)
            saved = await store.load()
            listed = [t for _, batch in saved.tombstones for t in batch]
            assert len(listed) <= 2 * 4 + 20 + 2
            newest = {
                (t.key, t.is_prefix): t.version for t in sorted(listed, key=lambda t: t.version)
            }
            assert newest["p", True] == version
            for key in tombstones._keys:
                assert newest[key, False] == tombstones.find(key)
        await writer.settle()
        assert not tombstones.release(min(number for number, _ in saved.tombstones))
        assert tombstones.release(writer.number)
        assert not len(tombstones)

    run_virtual(main)


def test_retired_storage_is_bounded():
    roster = Roster()
    for i in range(MAX_RETIRED + 5):
        roster.retire(f"{i}", i)
    assert len(roster.retired) == MAX_RETIRED
    assert "4" not in roster.retired
    assert roster.retired[f"{MAX_RETIRED + 4}"] == MAX_RETIRED + 4


def test_a_later_release_may_add_fields():
    data = msgspec.json.encode({"members": {"h": ["a", "b", False, "more"]}, "more": 1})
    assert msgspec.json.decode(data, type=Roster).members == {"h": Member("a", "b")}
