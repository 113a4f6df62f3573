"""Goal: linearizable per key while hosts and masters are killed and stopped; a million objects.

Method: real processes. Each key has one writer, which numbers its values, and many readers: no read
finds an older number than an earlier read or an acknowledged write. A change whose call failed may
come true at any later time. Figures are printed, since they depend on the machine.
"""

import random
import signal
import threading
import time

import msgspec
import pytest
from store_cluster import Child, Cluster

from tandem.core.errors import NotFoundError, TandemError
from tandem.rpc import RpcConfig
from tandem.store import PutOptions, StoreClient

pytestmark = pytest.mark.long

NUM_OPS = 100_000
MAX_S = 1800.0
MIN_DONE = 20_000
"""Operations that must succeed, or the run has told nothing."""
PROGRESS_S = 20.0
NUM_KEYS, NUM_THREADS = 60, 8
WATCHDOG_S = 60.0
"""A call with a deadline of 12 s that takes longer hangs."""
CHECK = PutOptions(upsert=True, replicas=2, hard_pin=True)


class Register:
    """What may be under one key: numbers of its writer's changes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.writing = threading.Lock()
        self.last = self.low = 0
        self.removed = {0}
        self.limbo: set[int] = set()

    def begin(self, *, is_removal: bool) -> int:
        with self.lock:
            self.last += 1
            self.limbo.add(self.last)
            if is_removal:
                self.removed.add(self.last)
            return self.last

    def end(self, number: int) -> None:
        with self.lock:
            self.limbo.discard(number)
            self.low = max(self.low, number)

    def judge(self, low: int, found: int | None) -> str:
        """Check what a read found that began when ``low`` was the oldest that it might find."""
        with self.lock:
            if found is None:
                numbers = range(low, self.last + 1)
                is_right = any(n in self.removed for n in (*numbers, *self.limbo))
                return "" if is_right else f"nothing, {low=} last={self.last}"
            if found in self.limbo:
                return ""
            if not low <= found <= self.last:
                return f"{found}, {low=} last={self.last}"
            self.low = max(self.low, found)
            return ""


class Attack:
    def __init__(self, cluster: Cluster, num_hosts: int) -> None:
        self.cluster, self.num_hosts = cluster, num_hosts
        self.random = random.Random(11)
        self.registers = [Register() for _ in range(NUM_KEYS)]
        self.violations: list[str] = []
        self.num_ops = self.num_failed = self.num_kills = self.num_stops = 0
        self.slowest_s = 0.0
        self.end_s = time.monotonic() + MAX_S
        self.calls: dict[int, float] = {}
        """When the call of each thread began."""

    @property
    def is_over(self) -> bool:
        return self.num_ops >= NUM_OPS or time.monotonic() > self.end_s

    def describe(self) -> str:
        return (
            f"operations={self.num_ops} failed={self.num_failed} kills={self.num_kills} "
            f"stops={self.num_stops} slowest_s={self.slowest_s:.1f} "
            f"violations={len(self.violations)}"
        )

    def work(self, number: int, client: StoreClient) -> None:
        chance = random.Random(number)
        while not self.is_over:
            at = chance.randrange(NUM_KEYS)
            begin_s = self.calls[number] = time.monotonic()
            try:
                self.step(chance, client, at)
            except TandemError:
                self.num_failed += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - begin_s)
            self.num_ops += 1
        self.calls.pop(number, None)

    def step(self, chance: random.Random, client: StoreClient, at: int) -> None:
        register, key = self.registers[at], f"key{at}"
        kind = chance.random()
        if kind < 0.4 and register.writing.acquire(blocking=False):
            try:
                is_removal = kind < 0.05
                change = register.begin(is_removal=is_removal)
                if is_removal:
                    client.remove(key)
                else:
                    size = chance.choice((1, 1, 100, 3000))
                    client.put(key, f"{change}:".encode() * size, CHECK)
                register.end(change)
            finally:
                register.writing.release()
            return
        with register.lock:
            low = register.low
        try:
            value = client.get(key)
        except NotFoundError:
            found = None
        else:
            found = int(value.partition(b":")[0])
            if value != f"{found}:".encode() * (len(value) // len(f"{found}:")):
                self.violations.append(f"{key}: torn")
        if wrong := register.judge(low, found):
            self.violations.append(f"{key}: {wrong}")

    def trouble(self, master: Child, hosts: dict[str, Child]) -> None:
        while not self.is_over:
            time.sleep(self.random.uniform(0.5, 3))
            name = self.random.choice([*hosts, "master"])
            child = master if name == "master" else hosts[name]
            if self.random.random() < 0.4:
                self.num_stops += 1
                child.signal(signal.SIGSTOP)
                time.sleep(self.random.uniform(0.1, 4))
                child.signal(signal.SIGCONT)
                continue
            self.num_kills += 1
            child.kill()
            time.sleep(self.random.uniform(0, 3))
            if name == "master":
                master = self.cluster.start("master")
            else:
                hosts[name] = self.cluster.start("host", name=name)


def test_reads_are_linearizable_per_key_under_kills_and_stops(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    cluster = Cluster(folder, folder)
    cluster.config = msgspec.structs.replace(
        cluster.config, deadline_ms=12_000, member_lease_ms=120_000, location_cache=1000
    )
    attack = Attack(cluster, 5)
    try:
        master = cluster.start("master")
        hosts = {f"h{i}": cluster.start("host", name=f"h{i}") for i in range(5)}
        clients = [cluster.client() for _ in range(4)]
        cluster.wait_hosts(clients[0], 5)
        threads = [
            threading.Thread(target=attack.work, args=(i, clients[i % 4]), daemon=True)
            for i in range(NUM_THREADS)
        ]
        trouble = threading.Thread(target=attack.trouble, args=(master, hosts), daemon=True)
        for thread in [*threads, trouble]:
            thread.start()
        told_s = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.5)
            now_s = time.monotonic()
            if now_s > told_s + PROGRESS_S:
                told_s = now_s
                print(attack.describe(), flush=True)
            hung = [i for i, begun_s in attack.calls.copy().items() if now_s - begun_s > WATCHDOG_S]
            assert not hung, f"threads {hung} hang"
        trouble.join(60)
        print(attack.describe())
        assert not attack.violations, attack.violations[:10]
        assert attack.num_ops - attack.num_failed >= MIN_DONE
    finally:
        cluster.close()


NUM_OBJECTS, BATCH = 1_000_000, 10_000


def test_a_million_objects_are_known_again_and_removed_while_others_are_answered(
    tmp_path_factory, monkeypatch
):
    # Nobody dies here but the master; on a machine under load a second of silence is nothing.
    monkeypatch.setattr("store_cluster.RPC", RpcConfig())
    folder = tmp_path_factory.mktemp("store")
    cluster = Cluster(folder, folder)
    cluster.config = msgspec.structs.replace(
        cluster.config, deadline_ms=300_000, segment_bytes=2**30, lease_ms=5000
    )
    try:
        master = cluster.start("master")
        cluster.start("host", name="h0")
        client, other = cluster.client(), cluster.client()
        cluster.wait_hosts(client, 1)
        for begin in range(0, NUM_OBJECTS, BATCH):
            keys = [f"object/{i:08d}" for i in range(begin, begin + BATCH)]
            client.put_many(keys, [b"v" * 64] * BATCH)
        client.put("beside", b"value")
        assert client.status().num_objects == NUM_OBJECTS + 1
        master.kill()
        cluster.start("master")
        begin_s = time.monotonic()
        while client.status().num_objects < NUM_OBJECTS + 1:
            assert time.monotonic() < begin_s + 300
            time.sleep(0.1)
        known_s = time.monotonic() - begin_s
        waits: list[float] = []
        is_over = threading.Event()

        def look() -> None:
            while not is_over.is_set():
                at_s = time.monotonic()
                assert other.exists("beside")
                waits.append(time.monotonic() - at_s)
                is_over.wait(0.01)

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        begin_s = time.monotonic()
        assert client.remove_prefix("object/") == NUM_OBJECTS
        removed_s = time.monotonic() - begin_s
        is_over.set()
        looking.join(60)
        waits.sort()
        print(
            f"known_again_s={known_s:.1f} removed_s={removed_s:.1f} others: n={len(waits)} "
            f"median_ms={waits[len(waits) // 2] * 1e3:.1f} slowest_ms={waits[-1] * 1e3:.0f}"
        )
        assert client.status().num_objects == 1
    finally:
        cluster.close()
