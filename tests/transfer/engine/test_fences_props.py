"""The ledger of fence debts over many seeded schedules, against a toy peer on a clock of its own.

Goal: no byte of an operation that has ended is applied after a later one on the same range was
acknowledged, whatever session or transport the two take; and without debts nothing is sent or
waited for. Method: a discrete-event world whose peer reads each connection as late as a seed says;
every schedule is a seed. Mutants that leave out a part of the rule must be caught.
"""

import heapq
import random

import pytest

from tandem._native import FenceLedger

EPOCH = 7
US = 1_000


class ToyPeer:
    """Memory behind connections that are each read in order, and late."""

    def __init__(self, world: "ToyWorld") -> None:
        self.world = world
        self.memory: dict[int, int] = {}
        self.queues: dict[tuple[str, int], list[tuple]] = {}
        self.closed: set[tuple[str, int]] = set()

    def receive(self, connection: tuple[str, int], frame: tuple) -> None:
        """Queue a frame; the connection is read at some later time."""
        self.queues.setdefault(connection, []).append(frame)
        self.world.at(self.world.rng.randrange(1, 2000) * US, self.read, connection)

    def read(self, connection: tuple[str, int]) -> None:
        """Act on the next frame of a connection."""
        queue = self.queues.get(connection, [])
        if not queue or connection in self.closed:
            return
        kind, *rest = queue.pop(0)
        if kind == "write":
            place, operation = rest
            self.world.check(place, operation)
            self.memory[place] = operation
            self.world.at(10 * US, self.world.on_written, connection, operation)
        elif kind == "fence":
            self.closed.update(rest[0])
            self.world.at(10 * US, self.world.on_fenced, connection, rest[0])


class ToyWorld:
    """A process with several sessions to one peer, which obeys the ledger."""

    def __init__(self, seed: int, mutant: str = "") -> None:
        self.rng = random.Random(seed)
        self.mutant = mutant
        self.ledger = FenceLedger()
        self.peer = ToyPeer(self)
        self.now_ns = 0
        self.events: list[tuple] = []
        self.num_events = 0
        self.num_operations = 0
        self.num_connections = 0
        self.acknowledged: dict[int, int] = {}
        self.places: dict[int, int] = {}  # By operation.
        self.begun_after: dict[int, int] = {}
        self.live: dict[tuple[str, int], dict[int, int]] = {}  # Unconfirmed writes.
        self.carriers: dict[tuple[str, int], int] = {}
        self.held: list[tuple[int, int]] = []  # Copies that wait: place, operation.
        self.num_fences = self.num_held = 0

    def at(self, delay_ns: int, call, *args) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (self.now_ns + delay_ns, self.num_events, call, args))

    def check(self, place: int, operation: int) -> None:
        """An operation may be applied only if none that began after its end was acknowledged."""
        last = self.acknowledged.get(place, 0)
        assert operation >= last or operation not in self.ended, "an old WRITE over a later one"

    ended: set[int]

    def connect(self, session: str) -> tuple[str, int]:
        self.num_connections += 1
        connection = (session, self.num_connections)
        self.live[connection] = {}
        self.carriers[connection] = self.ledger.next_carrier()
        return connection

    def send_fences(self, connection: tuple[str, int]) -> bool:
        may_write, debts = self.ledger.take_due(EPOCH, self.carriers[connection])
        if self.mutant == "own session only":
            debts = [debt for debt in debts if debt[0] == connection[0].encode().ljust(16)]
        if debts:
            self.num_fences += 1
            closed = [(session.rstrip().decode(), number) for session, number in debts]
            self.peer.receive(connection, ("fence", closed))
        return may_write

    def begin(self, place: int) -> int:
        self.num_operations += 1
        self.places[self.num_operations] = place
        return self.num_operations

    def write(self, connection: tuple[str, int], place: int) -> None:
        operation = self.begin(place)
        if self.mutant != "no fences":
            self.send_fences(connection)
        self.live[connection][operation] = place
        self.peer.receive(connection, ("write", place, operation))

    def copy(self, connection: tuple[str, int], place: int) -> None:
        operation = self.begin(place)
        if self.send_fences(connection) and self.mutant != "copies do not wait":
            self.num_held += 1
            self.held.append((place, operation))
        else:
            self.apply_copy(place, operation)

    def apply_copy(self, place: int, operation: int) -> None:
        self.check(place, operation)
        self.peer.memory[place] = operation
        self.acknowledge(place, operation)

    def acknowledge(self, place: int, operation: int) -> None:
        self.acknowledged[place] = max(operation, self.acknowledged.get(place, 0))
        self.ended.add(operation)

    def on_written(self, connection: tuple[str, int], operation: int) -> None:
        if self.live.get(connection, {}).pop(operation, None) is not None:
            self.acknowledge(self.places[operation], operation)

    def on_fenced(self, connection: tuple[str, int], closed: list[tuple[str, int]]) -> None:
        if connection not in self.live:
            return
        self.ledger.settle(EPOCH, [(s.encode().ljust(16), n) for s, n in closed])
        held, self.held = self.held, []
        for place, operation in held:
            if self.send_fences(connection):
                self.held.append((place, operation))
            else:
                self.apply_copy(place, operation)

    def give_up(self, connection: tuple[str, int]) -> None:
        """Close it; its unconfirmed operations have failed."""
        lost = self.live.pop(connection)
        if lost and self.mutant != "no debts":
            self.ledger.add(EPOCH, connection[0].encode().ljust(16), connection[1])
        self.ended.update(lost)

    def run(self, num_steps: int) -> None:
        """Let operations of one range follow each other, one at a time, over random paths."""
        self.ended = set()
        connections = [self.connect(session) for session in "abc" for _ in range(2)]
        for _ in range(num_steps):
            number = self.rng.randrange(len(connections))
            connection = connections[number]
            place = self.rng.randrange(2)
            if self.rng.random() < 0.3:
                self.copy(connection, place)
            else:
                self.write(connection, place)
            operation = self.num_operations
            until_ns = self.now_ns + self.rng.randrange(4000) * US
            while self.events and self.events[0][0] <= until_ns and operation not in self.ended:
                self.step()
            if operation in self.ended:
                continue
            if any(operation == waiting for _, waiting in self.held):
                self.held = [one for one in self.held if one[1] != operation]
                self.ended.add(operation)  # By its deadline: nothing was copied.
                continue
            self.give_up(connection)
            session = connection[0] if self.rng.random() < 0.5 else f"s{self.num_connections}"
            connections[number] = self.connect(session)
        while self.events:
            self.step()

    def step(self) -> None:
        self.now_ns, _, call, args = heapq.heappop(self.events)
        call(*args)


def test_no_old_write_over_a_later_one_in_many_schedules():
    num_fences = num_held = 0
    for seed in range(2000):
        world = ToyWorld(seed)
        world.run(12)
        num_fences += world.num_fences
        num_held += world.num_held
    assert num_fences > 2000
    assert num_held > 500


@pytest.mark.parametrize(
    "mutant", ["no debts", "no fences", "own session only", "copies do not wait"]
)
def test_a_rule_that_lacks_a_part_is_caught(mutant):
    with pytest.raises(AssertionError, match="an old WRITE"):
        for seed in range(300):
            ToyWorld(seed, mutant).run(12)


def test_without_a_debt_nothing_is_sent_or_waits():
    for seed in range(200):
        world = ToyWorld(seed)
        world.give_up = lambda connection, world=world: world.live.pop(connection)
        world.check = lambda place, operation: None
        world.run(12)
        assert world.num_fences == world.num_held == 0


def test_ledger_counts_by_epoch_and_settles_once():
    ledger = FenceLedger()
    one, other = b"a" * 16, b"b" * 16
    carrier = ledger.next_carrier()
    assert ledger.take_due(1, carrier) == (False, [])
    ledger.add(1, one, 4)
    ledger.add(1, one, 4)
    ledger.add(2, other, 5, may_write=False)
    assert len(ledger) == 2
    assert ledger.owes(1)
    assert not ledger.owes(2)  # Copies need not wait for it.
    assert ledger.take_due(1, carrier) == (True, [(one, 4)])
    assert ledger.take_due(1, carrier) == (True, [])  # Sent, not confirmed.
    assert ledger.take_due(1, ledger.next_carrier()) == (True, [(one, 4)])
    assert ledger.take_due(2, carrier) == (False, [(other, 5)])
    ledger.settle(1, [(one, 4), (one, 9)])
    ledger.settle(1, [(one, 4)])
    assert ledger.take_due(1, ledger.next_carrier()) == (False, [])
    assert len(ledger) == 1
    ledger.add(2, other, 5)
    assert ledger.owes(2)
