"""Leaders that change under traffic, with all hosts alive: real processes on a real etcd.

Goal: no object that is there reads as absent, no put-if-absent says "created" twice, no answered
removal comes undone, and writes of new keys go on. Method: SIGSTOP and SIGKILL of one leader after
the other while threads write, remove and look; every answer is checked when it comes.
"""

import signal
import threading
import time

import pytest
from etcd_server import EtcdServer, needs_etcd
from test_store_election import TIMEOUT_S, Masters, make_masters

from tandem.core.errors import ConflictError, NotFoundError, TandemError
from tandem.store import PutOptions, PutResult

pytestmark = needs_etcd
NUM_CHANGES = 3
"""Of each kind."""
LOOKED_AT = 30
"""Keys that are looked at in each round."""


@pytest.fixture(scope="module")
def shared_etcd(tmp_path_factory):
    server = EtcdServer(tmp_path_factory.mktemp("etcd")).start()
    yield server
    server.kill()


@pytest.fixture
def masters(shared_etcd):
    yield from make_masters(shared_etcd)


class Traffic:
    """One thread that writes, removes and looks; knows what must be there."""

    def __init__(self, cluster: Masters, name: str) -> None:
        self._client, self._other = cluster.client(), cluster.client()
        self._name = name
        self.present: dict[str, bytes] = {}
        self.removed: list[str] = []
        self.num_rounds = 0
        self.num_errors = 0
        self.longest_s = 0.0
        """Of a put of a new key."""
        self.violations: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._round(f"{self._name}/{self.num_rounds}")
            except NotFoundError as error:
                self.violations.append(f"false NotFound: {error}")
            except TandemError as error:
                self.num_errors += 1
                if not error.retryable:
                    self.violations.append(repr(error))
            except Exception as error:
                self.violations.append(repr(error))
                return
            self.num_rounds += 1
            self._stop.wait(0.002)

    def _round(self, key: str) -> None:
        value = key.encode() * 50
        begin_s = time.monotonic()
        first = self._client.put(key, value, PutOptions(replicas=1 + self.num_rounds % 2))
        self.longest_s = max(self.longest_s, time.monotonic() - begin_s)
        if first is PutResult.REPLACED:
            self.violations.append(f"the first put of {key} says {first}")
        self.present[key] = value
        second = self._other.put(key, b"another")
        if second is not PutResult.EXISTS:
            self.violations.append(f"the second put of {key} says {second}")
        keys = list(self.present)[-LOOKED_AT:]
        for key, found in zip(keys, self._client.get_many(keys), strict=True):
            if isinstance(found, NotFoundError) or found == b"another":
                self.violations.append(f"get of {key}: {found!r}")
        if not all(self._other.exists_many(keys)):
            self.violations.append(f"false exists among {keys}")
        if self.num_rounds % 3 == 0:
            del self.present[keys[0]]
            self._client.remove(keys[0])
            self.removed.append(keys[0])
        self._look_at(self.removed[-LOOKED_AT:])

    def _look_at(self, removed: list[str]) -> None:
        found = self._other.exists_many(removed)
        self.violations += [
            f"{key} was removed and is there"
            for key, flag in zip(removed, found, strict=True)
            if flag
        ]

    def end(self) -> None:
        self._stop.set()
        self._thread.join(2 * TIMEOUT_S)
        assert not self._thread.is_alive()
        for begin in range(0, len(self.removed), 500):
            self._look_at(self.removed[begin : begin + 500])
        keys = list(self.present)
        for key, found in zip(keys, self._client.get_many(keys), strict=True):
            if found != self.present[key]:
                self.violations.append(f"{key} is {found!r} in the end")


@pytest.mark.parametrize("kind", [pytest.param("stop", marks=pytest.mark.slow), "kill"])
def test_leaders_that_change_make_nothing_absent_and_undo_no_removal(masters, kind):
    client = masters.client()
    masters.wait_hosts(client, 2)
    traffic = [Traffic(masters, name) for name in ("a", "b")]

    def wait_rounds() -> None:
        goals = [one.num_rounds + 15 for one in traffic]
        masters.wait_for(
            lambda: all(
                one.num_rounds >= goal or one.violations
                for one, goal in zip(traffic, goals, strict=True)
            ),
            "traffic to go on",
        )

    epochs = []
    for _ in range(NUM_CHANGES):
        wait_rounds()
        epochs.append(client.status().epoch)
        leader = masters.wait_leader()
        if kind == "stop":
            masters.masters[leader].signal(signal.SIGSTOP)
            others = [i for i in range(3) if i != leader]
            masters.wait_for(lambda others=others: masters.leaders(others), "another leader")
            wait_rounds()
            masters.masters[leader].signal(signal.SIGCONT)
        else:
            masters.masters[leader].kill()
            wait_rounds()
            masters.restart(leader)
    wait_rounds()
    for one in traffic:
        one.end()
    violations = [text for one in traffic for text in one.violations]
    print(f"longest put {max(one.longest_s for one in traffic):.2f} s")
    assert not violations, violations[:10]
    assert epochs == sorted(set(epochs))
    assert all(len(one.removed) > 20 for one in traffic)


def test_a_host_that_was_away_brings_nothing_back_and_can_be_retired(masters):
    """Over a change of the leader: the tombstones, and the host, are in etcd."""
    client = masters.client()
    masters.start("host", name="h3")
    masters.wait_hosts(client, 3)
    client.put("key", b"value", PutOptions(replicas=3))
    third = masters.children[-1]
    third.kill()

    def is_away() -> bool:
        return any(h.name == "h3" and h.stage.value == "lost" for h in client.status().hosts)

    masters.wait_for(is_away, "the host to be missed")
    assert client.remove("key")
    masters.masters[masters.wait_leader()].kill()
    masters.wait_hosts(client, 2)
    third = masters.start("host", name="h3")
    masters.wait_hosts(client, 3)
    assert not client.exists("key")
    assert client.put("key", b"anew") is PutResult.CREATED
    with pytest.raises(ConflictError, match="connected"):
        client.retire("h3")
    third.kill()
    masters.wait_for(is_away, "the host to be missed")
    client.retire("h3")
    assert {host.name for host in client.status().hosts} == {"h1", "h2"}


def test_a_host_without_a_name_leaves_when_it_ends(masters):
    """Its segment goes with it, so no later leader waits for it."""
    client = masters.client()
    masters.wait_hosts(client, 2)
    third = masters.start("host", name="")
    masters.wait_hosts(client, 3)
    third.ask_to_end()
    third.process.wait(TIMEOUT_S)
    assert {host.name for host in client.status().hosts} == {"h1", "h2"}
