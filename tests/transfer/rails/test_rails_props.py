"""The spraying decider over many seeded schedules, against a toy network with its own clock.

Goal: no slice is lost or doubled, load follows the learnt bandwidth, a slow rail is avoided, a
failed one is left and a recovered one is used again. Method: a discrete-event world in which rails
are FIFO servers of rates that the decider does not know; every schedule is a seed.
"""

import heapq
import random

import pytest

from tandem._native import RailSet, RailState, split_capacity
from tandem.core.errors import ConfigError, NotFoundError

MS = 1_000_000
S = 1_000_000_000


class ToyNetwork:
    """Rails as FIFO servers. What the decider gives is served, lost with its rail, or refused."""

    def __init__(self, seed: int, rates: list[float], nominal: float = 1.25e9) -> None:
        self.rng = random.Random(seed)
        self.rails = RailSet()
        self.rates = list(rates)
        self.is_up = [True] * len(rates)
        self.free_ns = [0] * len(rates)
        self.now_ns = 0
        self.events: list[tuple[int, int, str, tuple]] = []
        self.num_events = 0
        self.flying: dict[int, tuple[int, int, int]] = {}  # ticket: rail, offset, length
        self.wakes: set[int] = set()
        self.carried = [0] * len(rates)
        self.error_rate = 0.0
        for index in range(len(rates)):
            self.rails.add_rail(nominal)
            self.rails.on_connect(index, 0)

    def at(self, when_ns: int, kind: str, *args: int) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (max(when_ns, self.now_ns), self.num_events, kind, args))

    def cut_rail(self, rail: int) -> None:
        self.is_up[rail] = False
        for ticket in self.rails.on_disconnect(rail, self.now_ns):
            _, offset, length = self.flying.pop(ticket)
            self.pending.append((offset, length))

    def send(self, ticket: int, rail: int, offset: int, length: int) -> None:
        begin = max(self.now_ns, self.free_ns[rail])
        jitter = 1 + 0.05 * self.rng.random()
        self.free_ns[rail] = begin + int(length / self.rates[rail] * S * jitter)
        self.flying[ticket] = (rail, offset, length)
        self.at(self.free_ns[rail] + 50_000, "done", ticket)

    def reconnect(self) -> None:
        for rail in range(len(self.rates)):
            if not self.rails.is_connect_due(rail, self.now_ns):
                continue
            self.rails.begin_connect(rail)
            if self.is_up[rail]:
                self.rails.on_connect(rail, self.now_ns)
            else:
                self.rails.on_disconnect(rail, self.now_ns)

    def dispatch(self) -> None:
        self.reconnect()
        while self.pending:
            offset, length = self.pending.pop()
            choice = self.rails.choose(self.now_ns, length, self.total)
            if choice is None:
                self.pending.append((offset, length))
                break
            assert 1 <= choice.num_bytes <= length
            if choice.num_bytes < length:
                self.pending.append((offset + choice.num_bytes, length - choice.num_bytes))
            self.send(choice.ticket, choice.rail, offset, choice.num_bytes)
        wake = self.rails.next_event_ns()
        if wake < 2**62 and wake not in self.wakes:
            self.wakes.add(wake)
            self.at(wake, "wake")

    def handle(self, kind: str, args: tuple) -> None:
        if kind == "done":
            slice_ = self.flying.pop(args[0], None)
            if slice_ is None:  # Lost with its rail; the path was fenced, so nothing arrives.
                return
            rail, offset, length = slice_
            if self.rng.random() < self.error_rate:
                self.rails.fail(args[0], self.now_ns)
                self.pending.append((offset, length))
                return
            self.rails.complete(args[0], self.now_ns)
            self.carried[rail] += length
            self.arrived.append((offset, length))
        elif kind == "cut":
            self.cut_rail(args[0])
        elif kind == "mend":
            self.is_up[args[0]] = True

    def transfer(self, total: int, limit_ns: int = 1000 * S) -> int:
        """Move ``total`` bytes; returns how long it took. Checks that each byte came once."""
        self.total = total
        self.pending = [(0, total)]
        self.arrived: list[tuple[int, int]] = []
        begin = self.now_ns
        self.dispatch()
        while self.pending or self.flying:
            assert self.events, "the decider waits for an event that never comes"
            self.now_ns, _, kind, args = heapq.heappop(self.events)
            assert self.now_ns - begin < limit_ns, "no end"
            self.handle(kind, args)
            self.dispatch()
        position = 0
        for offset, length in sorted(self.arrived):
            assert offset == position, "a slice is lost or doubled"
            position += length
        assert position == total
        for rail in range(len(self.rates)):
            assert self.rails.in_flight_bytes(rail) == 0
        return self.now_ns - begin


def test_no_slice_is_lost_or_doubled_in_ten_thousand_schedules():
    for seed in range(10_000):
        rng = random.Random(seed)
        rates = [rng.choice([2e6, 3e7, 1.25e8, 1.2e9]) for _ in range(rng.randint(1, 4))]
        world = ToyNetwork(seed, rates, nominal=rng.choice([1e7, 1e9]))
        world.error_rate = rng.choice([0, 0, 0.02, 0.3])
        for _ in range(rng.randint(0, 3)):
            rail = rng.randrange(len(rates))
            when = rng.randrange(20 * MS)
            world.at(when, "cut", rail)
            world.at(when + rng.randrange(400 * MS), "mend", rail)
        world.transfer(rng.randint(1, 3_000_000))


@pytest.mark.parametrize("rates", [[1e9, 1e9, 2.5e8, 2.5e8], [1.25e8] * 4, [3e8, 1e8]])
def test_load_follows_bandwidth(rates):
    world = ToyNetwork(1, rates)
    total = 1 << 30
    took_ns = world.transfer(total)
    # 5 % jitter costs 2.5 % on average; the rest of the margin is start and end.
    assert total / (took_ns / S) > 0.94 * sum(rates)
    for rail, rate in enumerate(rates):
        assert world.carried[rail] / total == pytest.approx(rate / sum(rates), rel=0.08)


@pytest.mark.parametrize("rates_mbit", [(200, 100, 50), (400, 100, 25), (200, 50, 10)])
@pytest.mark.parametrize("total", [8 << 20, 64 << 20])
def test_slow_rails_carry_their_part_beside_a_fast_one(rates_mbit, total):
    """The fast rail is full, and yet ends a slice sooner: the others do not wait for it."""
    rates = [mbit * 1e6 / 8 for mbit in rates_mbit]
    world = ToyNetwork(1, rates)
    world.transfer(total)
    # Of rates that vary by up to 5 %.
    shares = [total / (sum(rates) * world.transfer(total) / S) for _ in range(5)]
    assert min(shares) >= 0.9, shares


def test_beats_round_robin_on_unequal_rails():
    rates = [1.25e8, 1.25e8, 3.1e7, 3.1e7]
    total = 64 << 20
    took_ns = ToyNetwork(2, rates).transfer(total)
    round_robin_ns = total / 4 / min(rates) * S
    assert round_robin_ns / took_ns > 1.8


def test_slow_rail_is_avoided_once_known():
    world = ToyNetwork(3, [1e9, 2e5])
    world.transfer(8 << 20)
    world.carried = [0, 0]
    took_ns = world.transfer(64 << 20)
    assert world.carried[1] <= 2 * 65536
    assert (64 << 20) / (took_ns / S) > 0.15e9  # At most one probe slice of 64 KiB in its way.


def test_rail_that_slows_down_loses_its_share():
    world = ToyNetwork(4, [1e9, 1e9])
    world.transfer(256 << 20)
    world.rates[0] = 1e8
    world.transfer(64 << 20)
    world.carried = [0, 0]
    world.transfer(512 << 20)
    assert world.carried[0] / sum(world.carried) == pytest.approx(1 / 11, abs=0.04)


def test_recovered_rail_is_used_again():
    world = ToyNetwork(5, [1e9, 1e9])
    world.transfer(16 << 20)
    world.at(world.now_ns + MS, "cut", 0)
    world.at(world.now_ns + 50 * MS, "mend", 0)
    world.transfer(256 << 20)
    assert world.rails.state(0) == RailState.HEALTHY
    world.carried = [0, 0]
    world.transfer(256 << 20)
    assert world.carried[0] / sum(world.carried) == pytest.approx(0.5, abs=0.06)


def test_terminated_rail_is_never_used():
    world = ToyNetwork(6, [1e9, 1e9])
    world.rails.terminate(0)
    world.transfer(64 << 20)
    assert world.carried[0] == 0
    assert world.rails.state(0) == RailState.TERMINATED


def test_attempts_to_reconnect_are_impatient_at_first():
    rails = RailSet()
    rails.add_rail(1e9)
    assert rails.patience_ns(0) > 10 * S  # What was never reached may be far away.
    rails.begin_connect(0)
    rails.on_connect(0, 0, answer_ns=2 * MS)
    now_ns, limits, gaps = MS, [], []
    rails.on_disconnect(0, now_ns)
    while not limits or limits[-1] < S:
        begin_ns = now_ns
        while not rails.is_connect_due(0, now_ns):
            now_ns += MS
        gaps.append(now_ns - begin_ns)
        limits.append(rails.patience_ns(0))
        rails.begin_connect(0)
        now_ns += limits[-1]
        rails.on_disconnect(0, now_ns)
    # Half a second of silence costs no attempt that outlasts it by more than it lasted.
    assert limits[:4] == [50 * MS] * 4
    assert limits[4:8] == [100 * MS, 200 * MS, 400 * MS, 800 * MS]
    assert max(gaps) <= 200 * MS

    far = RailSet()
    far.add_rail(1e9)
    far.on_connect(0, 0, answer_ns=150 * MS)
    far.on_disconnect(0, MS)
    assert far.patience_ns(0) == 600 * MS


def test_silent_rail_is_found_by_its_deadline():
    rails = RailSet(stall_floor_ns=50 * MS)
    rails.add_rail(1e9)
    rails.on_connect(0, 0)
    assert rails.choose(0, 1 << 20, 1 << 20) is not None
    assert rails.next_event_ns() == 50 * MS
    assert not rails.is_stalled(0, 50 * MS - 1)
    assert rails.is_stalled(0, 50 * MS)
    assert len(rails.on_disconnect(0, 50 * MS)) == 1


def busy_rail(rate: float = 50e6, slice_bytes: int = 65536) -> tuple[RailSet, int, float]:
    """A known rail full of slices; with it the time, and what is predicted for its last one."""
    rails = RailSet(min_slice_bytes=slice_bytes, max_slice_bytes=slice_bytes)
    rails.add_rail(rate)
    rails.on_connect(0, 0)
    now, flying = 0, []
    for _ in range(200):
        while (choice := rails.choose(now, 1 << 30, 1 << 30)) is not None:
            flying.append(choice.ticket)
        now += int(slice_bytes / rate * S)
        rails.complete(flying.pop(0), now)
    while rails.choose(now, 1 << 30, 1 << 30) is not None:
        pass
    return rails, now, rails.in_flight_bytes(0) / rate * S


def test_known_rail_is_silent_after_thrice_its_prediction():
    """Regular completions: left at 3 x predicted, not before, and no sooner than 20 ms."""
    for rate, slice_bytes in ((25e6, 262144), (1e9, 1 << 20)):
        rails, now, _ = busy_rail(rate, slice_bytes)
        predicted_ns = rails.in_flight_bytes(0) / rails.effective_bandwidth(0) * S
        limit_ns = max(20 * MS, 3 * predicted_ns)
        assert not rails.is_stalled(0, now + int(0.95 * limit_ns))
        assert rails.is_stalled(0, now + int(1.15 * limit_ns))


def test_what_is_usual_is_no_silence():
    """A machine that stops for 60 ms now and then: such a gap does not cost the connection."""
    rails = RailSet(min_slice_bytes=65536, max_slice_bytes=65536)
    rails.add_rail(1e9)
    rails.on_connect(0, 0)
    now, flying = 0, []
    for step in range(200):
        while (choice := rails.choose(now, 1 << 30, 1 << 30)) is not None:
            flying.append(choice.ticket)
        now += 60 * MS if step % 20 == 19 else 100_000
        assert step < 20 or not rails.is_stalled(0, now)
        rails.complete(flying.pop(0), now)


def look_on(rails: RailSet, now: int, until: int, heard=None, owes: bool = True) -> int | None:
    """Let time pass and look when it is due; returns when the rail was stalled."""
    while now < until:
        if rails.is_look_due(0, now):
            rails.on_look(0, now, owes=owes, heard_ns=now if heard is None else heard)
        if rails.is_stalled(0, now):
            return now
        now += MS // 4
    return None


@pytest.mark.parametrize("rate", [5e6, 50e6])
def test_quiet_host_is_left_within_thrice_the_prediction(rate):
    """Not before 12 ms, though: a kernel may take that long."""
    rails, now, predicted_ns = busy_rail(rate)
    rails.on_look(0, now, owes=True, heard_ns=now)
    stalled = look_on(rails, now, now + S, heard=now)
    assert stalled is not None
    assert 12 * MS <= stalled - now <= max(3 * predicted_ns, 13 * MS)


def test_living_host_whose_process_waits_is_not_left_early():
    """Acknowledgements come, answers do not: that is a busy machine, until ``stall_floor_ns``."""
    rails, now, _ = busy_rail()
    rails.on_look(0, now, owes=True, heard_ns=now)
    stalled = look_on(rails, now, now + S)
    assert stalled is not None
    assert 199 * MS <= stalled - now <= 202 * MS


def test_host_that_owes_nothing_is_judged_by_its_answers():
    rails, now, predicted_ns = busy_rail()
    stalled = look_on(rails, now, now + S, owes=False)
    assert stalled is not None
    assert stalled - now == pytest.approx(max(20 * MS, 3 * predicted_ns), rel=0.15)


def test_late_look_is_no_silence():
    """The thread that looks got no core for 100 ms: the first look afterwards decides nothing."""
    rails, now, _ = busy_rail()
    rails.on_look(0, now, owes=True, heard_ns=now)
    late = now + 100 * MS
    rails.on_progress(0, late - 8 * MS)
    rails.on_look(0, late, owes=True, heard_ns=now)
    assert not rails.is_stalled(0, late)
    rails.on_look(0, late + MS, owes=True, heard_ns=late)
    assert not rails.is_stalled(0, late + MS)


@pytest.mark.parametrize("is_seen", [True, False])
def test_usual_quiet_is_no_silence(is_seen):
    """A host that lived through 15 ms without a word, or was back at once when left for it."""
    rails, now, predicted_ns = busy_rail(rate=400e6)
    assert predicted_ns < 13 * MS
    rails.on_look(0, now, owes=True, heard_ns=now)
    if is_seen:
        rails.on_look(0, now + 16 * MS, owes=True, heard_ns=now + 15 * MS)
        now += 16 * MS
    else:
        stalled = look_on(rails, now, now + S, heard=now)
        assert stalled is not None
        rails.on_disconnect(0, stalled)
        rails.begin_connect(0)
        now = stalled + 2 * MS
        rails.on_connect(0, now)
        assert rails.choose(now, 1 << 20, 1 << 20) is not None
        rails.on_look(0, now, owes=True, heard_ns=now)
    heard = now
    rails.on_progress(0, now)
    assert look_on(rails, now, now + 19 * MS, heard=heard) is None


def test_idle_time_is_no_usual_gap():
    """An hour without work says nothing of how long the rail is without progress at work."""
    rails, now, predicted_ns = busy_rail()
    tickets = rails.on_disconnect(0, now)
    assert tickets
    now += 3600 * S
    rails.begin_connect(0)
    rails.on_connect(0, now)
    rails.on_progress(0, now)
    choice = rails.choose(now, 65536, 65536)
    assert choice is not None
    rails.complete(choice.ticket, now + 2 * MS)
    now += 10 * S
    rails.on_progress(0, now)
    assert rails.choose(now, 65536, 65536) is not None
    assert rails.is_stalled(0, now + int(max(20 * MS, 3 * predicted_ns) * 1.2))


def test_rail_that_looked_slow_is_tried_again_by_short_transfers():
    """A probe is dear for each of them; after a second without work it is sent anyway."""
    rails = RailSet()
    for index in range(2):
        rails.add_rail(1e9)
        rails.on_connect(index, 0)
    now, used_ns = 0, [0, 0]
    for step in range(60_000):
        choice = rails.choose(now, 65536, 65536)
        assert choice is not None
        used_ns[choice.rail] = now
        # The second rail stalls at first.
        now += 50_000 if choice.rail == 0 or now > 100 * MS else 15 * MS
        rails.complete(choice.ticket, now)
        assert step < 1000 or now - used_ns[1] < S + 256 * 50_000


def test_dear_probe_waits_for_a_long_transfer():
    """A probe that would be the tail of a short transfer is put off, a second at most."""
    rails = RailSet(min_slice_bytes=65536, max_slice_bytes=65536)
    rails.add_rail(1e9)
    rails.add_rail(1e5)  # 0.65 s for the 64 KiB of a probe.
    rails.on_connect(1, 0)
    rails.fail(rails.choose(0, 65536, 65536).ticket, 0)
    rails.on_connect(0, 0)
    assert rails.state(1) == RailState.PAUSED
    now = 200 * MS  # The cool-down is over.
    assert rails.choose(now, 65536, 65536).rail == 0
    assert rails.next_event_ns() > now  # Nobody need look again at once.
    assert rails.choose(now, 1 << 30, 1 << 30).rail == 1  # A second's work: no tail.
    assert rails.choose(now, 65536, 65536).rail == 0

    rails = RailSet(min_slice_bytes=65536, max_slice_bytes=65536)
    rails.add_rail(1e9)
    rails.add_rail(1e5)
    rails.on_connect(1, 0)
    rails.fail(rails.choose(0, 65536, 65536).ticket, 0)
    rails.on_connect(0, 0)
    assert rails.choose(900 * MS, 65536, 65536).rail == 0
    assert rails.choose(1100 * MS, 65536, 65536).rail == 1


def test_misuse_is_named():
    rails = RailSet()
    with pytest.raises(NotFoundError, match="rail 0 of 0"):
        rails.on_connect(0, 0)
    with pytest.raises(NotFoundError, match="ticket 7"):
        rails.complete(7, 0)
    with pytest.raises(ConfigError):
        rails.choose(0, 2, 1)
    with pytest.raises(ConfigError):
        rails.add_rail(0.0)
    with pytest.raises(ConfigError):
        RailSet(min_slice_bytes=2, max_slice_bytes=1)


def test_shares_follow_weights_for_any_claims():
    rng = random.Random(7)
    for _ in range(2000):
        claims = [
            (rng.uniform(0.1, 10), rng.choice([0, rng.uniform(0, 50), 1e9]))
            for _ in range(rng.randint(1, 6))
        ]
        capacity = rng.uniform(0, 200)
        shares = split_capacity(capacity, claims)
        assert sum(shares) == pytest.approx(min(capacity, sum(d for _, d in claims)), abs=1e-6)
        level = max(share / weight for share, (weight, _) in zip(shares, claims, strict=True))
        for share, (weight, demand) in zip(shares, claims, strict=True):
            assert share <= demand + 1e-9
            # Max-min: who got less than it asked for stands at the water level.
            assert share >= demand - 1e-9 or share / weight == pytest.approx(level)
