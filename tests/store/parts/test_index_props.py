"""The directory against a dictionary. Method: a stateful machine that does to both whatever a
master may do, and compares everything that can be asked after each step."""

import gc
from array import array
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem._native import fill_rows, locate_rows
from tandem.core.errors import ConfigError, TandemError
from tandem.store.master.state.index import NO_ROW, Directory, Passes, Replica

PASSES = Passes(fill_rows, locate_rows)

KEYS = st.sampled_from([f"key-{i}" for i in range(12)])
HOSTS = st.integers(0, 3)
TIMES = st.integers(0, 100)


@dataclass
class Model:
    size: int
    version: int
    checksum: int
    wanted: int
    used: int
    replicas: dict[int, int]
    lease_until_ms: int = 0
    hard: bool = False
    soft_until_ms: int = 0
    disks: set[int] = field(default_factory=set)

    @property
    def hosts(self) -> set[int]:
        return set(self.replicas) | self.disks


class DirectoryMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.directory = Directory(PASSES)
        self.model: dict[str, Model] = {}
        self.lost: set[int] = set()
        self.clock = 0
        self.uses = 0

    def use(self) -> int:
        self.uses += 1
        return self.uses

    @rule(
        key=KEYS,
        size=st.integers(0, 1000),
        hosts=st.lists(HOSTS, min_size=1, max_size=3, unique=True),
        wanted=st.integers(1, 3),
    )
    def insert(self, key, size, hosts, wanted):
        if key in self.model:
            return
        replicas = {host: 512 * (self.uses + i) for i, host in enumerate(hosts)}
        made = Model(size, self.uses, size * 7, wanted, self.use(), replicas)
        self.directory.insert(
            key,
            size=size,
            checksum=made.checksum,
            version=made.version,
            replicas=[Replica(*item) for item in replicas.items()],
            wanted=wanted,
        )
        self.model[key] = made

    @rule(keys=st.lists(KEYS, max_size=6, unique=True), host=HOSTS, wanted=st.integers(1, 300))
    def insert_many(self, keys, host, wanted):
        keys = [key for key in keys if key not in self.model]
        if host in self.lost:
            return
        made = [
            Model(10 * i, self.uses, i, min(wanted, 255), self.use(), {host: 512 * self.uses}, 50)
            for i, _ in enumerate(keys)
        ]
        rows = self.directory.insert_many(
            keys,
            sizes=[m.size for m in made],
            checksums=[m.checksum for m in made],
            versions=[m.version for m in made],
            wanted=[wanted] * len(made),
            host=host,
            offsets=[m.replicas[host] for m in made],
            lease_until_ms=50,
        )
        assert [self.directory.find(key) for key in keys] == list(rows)
        self.model.update(zip(keys, made, strict=True))

    @rule(key=KEYS)
    def remove(self, key):
        row = self.directory.find(key)
        assert (row != NO_ROW) == (key in self.model)
        if row != NO_ROW:
            assert dict(self.directory.remove(row)) == self.model.pop(key).replicas

    @rule(key=KEYS)
    def touch(self, key):
        if key in self.model:
            self.directory.touch(self.directory.find(key))
            self.model[key].used = self.use()

    @rule(key=KEYS, until_ms=TIMES)
    def lease(self, key, until_ms):
        if key in self.model:
            self.directory.extend_lease(self.directory.find(key), until_ms)
            made = self.model[key]
            made.lease_until_ms = max(made.lease_until_ms, until_ms)

    @rule(
        keys=st.lists(KEYS | st.just("none"), min_size=1, max_size=8),
        until_ms=TIMES,
        is_here=st.sampled_from([b"\1\1\1\1", b"\1\0\1\1", b"\1\1"]),
        hidden=st.sets(KEYS, max_size=2),
    )
    def locate(self, keys, until_ms, is_here, hidden):
        rows, found = self.directory.locate_many(keys, is_here, until_ms, hidden=hidden)
        columns, versions, undecided, reads = found
        sent: dict[int, list[int]] = {}
        table = np.frombuffer(columns, "<i8").reshape(4, len(keys)).T.tolist()
        for i, (key, column) in enumerate(zip(keys, table, strict=True)):
            made = None if key in hidden else self.model.get(key)
            version = np.frombuffer(versions, "<i8")[i]
            if made is None:
                assert (rows[i], version, column) == (NO_ROW, -1, [-1] * 4)
                continue
            assert rows[i] == self.directory.find(key)
            made.used = self.use()
            made.lease_until_ms = max(made.lease_until_ms, until_ms)
            size, checksum, host, offset = column
            assert (size, checksum, version) == (made.size, made.checksum, made.version)
            is_alone = len(made.replicas) == 1 and not made.disks
            assert (i in undecided) == bool(size and (made.replicas or made.disks) and not is_alone)
            if size and is_alone and is_here[next(iter(made.replicas)) :][:1] == b"\1":
                assert made.replicas == {host: offset}
                sent.setdefault(host, []).append(size)
            else:
                assert (host, offset) == (-1, -1)
        assert {host: (num_bytes, count) for host, num_bytes, count in reads} == {
            host: (sum(sizes), len(sizes)) for host, sizes in sent.items()
        }

    @rule(key=KEYS, hard=st.booleans(), soft_until_ms=TIMES)
    def pin(self, key, hard, soft_until_ms):
        if key in self.model:
            row = self.directory.find(key)
            self.directory.set_pins(row, hard=hard, soft_until_ms=soft_until_ms)
            self.model[key].hard, self.model[key].soft_until_ms = hard, soft_until_ms

    @rule(key=KEYS, host=HOSTS, offset=st.integers(0, 2**40))
    def add_replica(self, key, host, offset):
        if key in self.model and host not in self.model[key].replicas:
            self.directory.copies.add_replica(self.directory.find(key), Replica(host, offset))
            self.model[key].replicas[host] = offset

    @rule(key=KEYS, host=HOSTS)
    def drop_replica(self, key, host):
        if key in self.model:
            dropped = self.directory.copies.drop_replica(self.directory.find(key), host)
            expected = self.model[key].replicas.pop(host, None)
            assert (dropped and dropped.offset) == expected

    @rule(key=KEYS, host=HOSTS)
    def add_disk(self, key, host):
        if key in self.model and host not in self.model[key].disks:
            self.directory.copies.add_disk(self.directory.find(key), host)
            self.model[key].disks.add(host)

    @rule(key=KEYS, host=HOSTS)
    def drop_disk(self, key, host):
        if key in self.model:
            dropped = self.directory.copies.drop_disk(self.directory.find(key), host)
            assert dropped == (host in self.model[key].disks)
            self.model[key].disks.discard(host)

    @rule(key=KEYS, host=HOSTS)
    def insert_on_disk(self, key, host):
        if key not in self.model:
            made = Model(5, self.uses, 6, 1, self.use(), {}, disks={host})
            self.directory.insert(
                key, size=5, checksum=6, version=made.version, replicas=[], disks=[host]
            )
            self.model[key] = made

    @rule(host=HOSTS)
    def lose_host(self, host):
        self.directory.copies.lose_host(host)
        self.lost.add(host)

    @rule(host=HOSTS)
    def find_host(self, host):
        self.directory.copies.find_host(host)
        self.lost.discard(host)

    @rule(by=st.integers(1, 20))
    def wait(self, by):
        self.clock += by

    @precondition(lambda self: self.model)
    @rule(min_bytes=st.integers(1, 3000), host=st.none() | HOSTS)
    def pick_victims(self, min_bytes, host):
        rows = self.directory.victims.pick(self.clock, min_bytes, host)
        keys = [self.directory.key[row] for row in rows]
        assert len(set(keys)) == len(keys)
        able = {
            key: made
            for key, made in self.model.items()
            if made.lease_until_ms <= self.clock
            and not made.hard
            and (host is None or host in made.replicas)
        }
        assert set(keys) <= set(able)
        is_soft = [able[key].soft_until_ms > self.clock for key in keys]
        assert is_soft == sorted(is_soft), "soft-pinned before others"
        if any(is_soft):
            unpinned = {k for k, made in able.items() if made.soft_until_ms <= self.clock}
            assert unpinned <= set(keys), "a soft pin was broken although others were left"
        freed = sum(max(able[key].size, 1) for key in keys)
        assert freed >= min_bytes or set(keys) == set(able)
        if keys:
            assert freed - max(able[keys[-1]].size, 1) < min_bytes, "more than was asked for"
        for key in keys:  # As a master does.
            self.directory.remove(self.directory.find(key))
            del self.model[key]

    @invariant()
    def same_content(self):
        directory = self.directory
        assert len(directory) == len(self.model)
        assert sorted(directory.list_keys()) == sorted(self.model)
        assert directory.total_bytes == sum(made.size for made in self.model.values())
        unreadable = under = can_be_copied = 0
        for key, made in self.model.items():
            row = directory.find(key)
            live = len(made.hosts - self.lost)
            in_memory = len(set(made.replicas) - self.lost)
            assert directory.key[row] == key
            assert directory.size[row] == made.size
            assert directory.version[row] == made.version
            assert directory.checksum[row] == made.checksum
            assert dict(directory.copies.replicas(row)) == made.replicas
            assert set(directory.copies.disks(row)) == made.disks
            assert directory.num_live[row] == live
            assert directory.num_in_memory[row] == in_memory
            assert directory.lease_until_ms[row] == made.lease_until_ms
            assert directory.is_hard_pinned(row) == made.hard
            assert directory.soft_pinned_until_ms(row) == made.soft_until_ms
            unreadable += live == 0
            under += 0 < live < made.wanted
            can_be_copied += in_memory > 0 and live < made.wanted
        assert directory.copies.num_unreadable == unreadable
        assert directory.count_under_replicated() == under
        assert len(directory.list_under_replicated(100)) == can_be_copied

    @invariant()
    def same_answers(self):
        keys = [f"key-{i}" for i in range(13)]
        expected = [key in self.model and bool(self.model[key].hosts - self.lost) for key in keys]
        assert list(map(bool, self.directory.exists_many(keys))) == expected
        for host in range(4):
            rows = {self.directory.key[row] for row in self.directory.copies.rows_on_host(host)}
            assert rows == {k for k, made in self.model.items() if host in made.replicas}
            rows = {self.directory.key[row] for row in self.directory.copies.rows_on_disk(host)}
            assert rows == {k for k, made in self.model.items() if host in made.disks}


DirectoryMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=50)
TestDirectory = DirectoryMachine.TestCase


def test_victims_go_in_order_of_use():
    directory = Directory(PASSES)
    for i in range(5000):
        directory.insert(str(i), size=10, checksum=0, version=i, replicas=[Replica(0, 512 * i)])
    for i in range(0, 5000, 2):
        directory.touch(directory.find(str(i)))
    order = []
    for _ in range(50):
        rows = directory.victims.pick(0, 1000, 0)
        order += [int(directory.key[row]) for row in rows]
        for row in rows:
            directory.remove(row)
    assert order == [*range(1, 5000, 2), *range(0, 5000, 2)]


def test_a_copy_on_a_disk_is_never_taken_for_one_in_memory():
    directory = Directory(PASSES)
    for key, replicas, disks in (
        ("disk", [], [1]),
        ("both", [Replica(1, 512)], [1]),
        ("memory", [Replica(1, 1024)], []),
    ):
        directory.insert(key, size=1, checksum=2, version=3, replicas=replicas, disks=disks)
    keys = ["disk", "both", "memory"]
    rows, (columns, _, undecided, reads) = directory.locate_many(keys, b"\1\1", 0)
    assert rows == [directory.find(key) for key in keys]
    assert undecided == [0, 1]
    assert np.frombuffer(columns, "<i8")[6:9].tolist() == [-1, -1, 1]
    assert reads == [(1, 1, 1)]


def test_a_batch_with_a_value_that_fits_no_column_changes_nothing():
    directory = Directory(PASSES)
    good = {"sizes": [1], "checksums": [1], "versions": [1], "wanted": [1], "offsets": [0]}
    for bad in ({"checksums": [2**32]}, {"sizes": [2**63]}, {"offsets": [2**64]}):
        with pytest.raises((ConfigError, TypeError)):
            directory.insert_many(["a"], host=0, lease_until_ms=0, **{**good, **bad})
        assert directory.find("a") == NO_ROW
        # Nor is there a trace of it on the first host, whose number is what fresh memory holds.
        assert directory.copies.rows_on_host(0) == []
        directory.copies.lose_host(0)
        directory.copies.find_host(0)
    directory.insert_many(["a"], host=0, lease_until_ms=9, **good)
    assert directory.copies.replicas(directory.find("a")) == [Replica(0, 0)]
    assert directory.lease_until_ms[directory.find("a")] == 9


@pytest.mark.parametrize("kind", "qiIHB")
def test_rows_are_filled_in_all_columns_or_in_none(kind):
    column, other = array(kind, range(6)), array("q", range(6))
    fill_rows([4, 1], [(column, [7, 8]), (other, -1)])
    assert column.tolist() == [0, 8, 2, 3, 7, 5]
    assert other.tolist() == [0, -1, 2, 3, -1, 5]
    limit = 2 ** (8 * column.itemsize - kind.islower())
    wrong = [
        ([4, 6], [(column, 1), (other, 1)]),  # A row beyond the end.
        ([4, 1], [(column, 1), (other, [1])]),
        ([4, 1], [(other, 9), (column, [1, limit])]),
        ([4, 1], [(other, 9), (column, [1, -limit - 1])]),
        ([4, 1], [(other, 9), (array("d", range(6)), 1)]),
    ]
    for rows, columns in wrong:
        with pytest.raises((TandemError, TypeError)):
            fill_rows(rows, columns)
        assert column.tolist() == [0, 8, 2, 3, 7, 5]
        assert other.tolist() == [0, -1, 2, 3, -1, 5]


def test_what_does_not_fit_its_column_leaves_nothing_behind():
    def insert(directory: Directory, *, checksum: int, offset: int = 512) -> list[int]:
        columns = {"sizes": [5, 6], "checksums": [1, checksum], "versions": [7, 8]}
        columns["offsets"] = [0, offset]
        return directory.insert_many(["a", "b"], **columns, wanted=2, host=3, lease_until_ms=11)

    def look(directory: Directory):
        return (
            len(directory),
            directory.total_bytes,
            directory.copies.num_unreadable,
            directory.count_under_replicated(),
            directory.list_under_replicated(9),
            directory.copies.rows_on_host(0),
            directory.copies.rows_on_host(3),
            directory.copies.rows_on_disk(0),
            directory.list_keys(),
            directory.victims.pick(10**9, 10**6),
        )

    directory = Directory(PASSES)
    directory.insert("old", size=1, checksum=1, version=1, replicas=[Replica(0, 4096)])
    before = look(directory)
    for wrong in ({"checksum": 2**32}, {"checksum": 2, "offset": 2**63}):
        with pytest.raises((TandemError, TypeError)):
            insert(directory, **wrong)
        assert look(directory) == before
    # The rows are used again.
    rows = insert(directory, checksum=2)
    assert sorted(rows) == [1, 2]
    for key, size, offset, version in (("a", 5, 0, 7), ("b", 6, 512, 8)):
        row = directory.find(key)
        assert directory.copies.replicas(row) == [Replica(3, offset)]
        assert (directory.size[row], directory.version[row]) == (size, version)
        assert directory.lease_until_ms[row] == 11
    assert directory.total_bytes == 12
    assert directory.list_under_replicated(9) == rows
    assert directory.exists_many(["a", "b", "old"]) == b"\1\1\1"


def test_the_garbage_collector_finds_nothing_to_walk_in_a_directory():
    """A full collection must not take longer for a directory of many objects.

    What it walks are containers that can be part of a cycle. Their number is counted rather than
    a time measured, and a directory made of an object a key is shown to be found out.
    """

    def count_tracked(make) -> int:
        gc.collect()
        before = len(gc.get_objects())
        kept = make()
        gc.collect()
        grown = len(gc.get_objects()) - before
        assert kept is not None
        return grown

    def make_directory() -> Directory:
        directory = Directory(PASSES)
        for begin in (0, 10_000):
            for i in range(begin, begin + 5_000):
                directory.insert(
                    f"key-{i}", size=1, checksum=2, version=i, replicas=[Replica(0, i)]
                )
            numbers = list(range(begin + 5_000, begin + 10_000))
            directory.insert_many(
                [f"key-{i}" for i in numbers],
                sizes=numbers,
                checksums=numbers,
                versions=numbers,
                wanted=[1] * len(numbers),
                host=0,
                offsets=numbers,
                lease_until_ms=0,
            )
        assert not gc.is_tracked(directory._rows)
        return directory

    assert count_tracked(make_directory) < 100
    assert count_tracked(lambda: {f"key-{i}": [Replica(0, i)] for i in range(5_000)}) >= 5_000
