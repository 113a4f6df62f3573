"""The election's decider, and the class that carries it out, against a model of a backend.

Goal: never two leaders at a time, whatever the backend and the clocks do within their bounds; and
always one again when they behave. Method: virtual time, clocks of different rates, answers that
are late, lost, or lost after they were carried out; every rule is also taken away once.
"""

import asyncio
import itertools
import random

import pytest

from tandem.core.errors import DeadlineError, PeerLostError
from tandem.sim import run_virtual
from tandem.store.election import election as election_module
from tandem.store.election.campaign import Campaign, Claim
from tandem.store.election.election import Election, Holder, Question

TTL_S = 3


class ModelLock:
    """What etcd is for an election: one holder, for a time, and a count."""

    def __init__(self) -> None:
        self.holder: Holder | None = None
        self.owner: object = None
        self.until_s = 0.0
        self.count = 0

    def look(self) -> Holder | None:
        if asyncio.get_running_loop().time() >= self.until_s:
            self.holder = self.owner = None
        return self.holder


class ModelBackend:
    """One candidate's way to the lock; ``chance`` decides what becomes of each message."""

    def __init__(self, lock: ModelLock, chance: random.Random, faults: float) -> None:
        self.lock, self.chance, self.faults = lock, chance, faults
        self.is_cut = False
        self.back_delay_s = 0.0
        self.cut_after = -1
        """Answers that give or prolong a term; then it is cut off."""
        self.lease: object = None

    async def _travel(self, *, back: bool = False) -> None:
        delay_s = self.chance.expovariate(1 / 0.01) + (self.back_delay_s if back else 0.0)
        if self.chance.random() < self.faults:
            delay_s += self.chance.uniform(0.4, 1.1) if back else self.chance.uniform(0, 0.1)
        await asyncio.sleep(delay_s)
        if self.is_cut or self.chance.random() < self.faults / 4:
            await asyncio.sleep(100)
            raise PeerLostError("model", "lost")

    async def observe(self, timeout_s):
        await self._travel()
        found = self.lock.look()
        await self._travel(back=True)
        return found

    async def acquire(self, address, *, ttl_s, min_epoch, timeout_s):
        await self._travel()
        lock = self.lock
        if lock.look() is None:
            lock.count = max(lock.count, min_epoch) + 1
            lock.holder = Holder(address, lock.count)
            lock.owner = self.lease = object()
            lock.until_s = asyncio.get_running_loop().time() + ttl_s
        claim = Claim(lock.holder, lock.owner is self.lease)
        await self._travel(back=True)
        self._count_answer()
        return claim

    async def renew(self, timeout_s):
        await self._travel()
        lock = self.lock
        is_alive = lock.look() is not None and lock.owner is self.lease
        if is_alive:
            lock.until_s = asyncio.get_running_loop().time() + TTL_S
        await self._travel(back=True)
        self._count_answer()
        return is_alive

    def _count_answer(self) -> None:
        self.cut_after -= 1
        if self.cut_after == 0:
            self.is_cut = True

    async def release(self, timeout_s):
        lease, self.lease = self.lease, None
        await self._travel()
        if self.lock.look() is not None and self.lock.owner is lease:
            self.lock.holder = self.lock.owner = None


class RateClock:
    """Runs at a rate of its own, from an origin of its own."""

    def __init__(self, rate: float, origin_s: float) -> None:
        self.rate, self.origin_s = rate, origin_s

    def now_s(self) -> float:
        return self.origin_s + self.rate * asyncio.get_running_loop().time()


class Contest:
    """Some candidates under faults; records who led when."""

    def __init__(self, seed: int, faults: float) -> None:
        self.chance = random.Random(seed)
        self.lock = ModelLock()
        self.terms: list[tuple[int, int]] = []
        self.num_deposed = 0
        self.violations: list[str] = []
        self.backends = [
            ModelBackend(self.lock, self.chance, self.chance.choice((0.0, faults)))
            for _ in range(3)
        ]
        self.campaigns = [
            Campaign(
                backend,
                clock=RateClock(self.chance.uniform(0.9, 1.1), self.chance.uniform(0, 1e6)),
                address=f"m{i}",
                ttl_s=TTL_S,
                timeout_s=1.0,
                on_elected=lambda epoch, i=i: self.terms.append((i, epoch)),
                on_deposed=self.note_deposed,
            )
            for i, backend in enumerate(self.backends)
        ]

    def note_deposed(self) -> None:
        self.num_deposed += 1

    @property
    def leaders(self) -> list[int]:
        return [i for i, campaign in enumerate(self.campaigns) if campaign.holds()]

    async def watch(self) -> None:
        while True:
            if len(self.leaders) > 1:
                self.violations.append(
                    f"{self.leaders} lead at {asyncio.get_running_loop().time()}"
                )
            await asyncio.sleep(0.02)

    async def run(self) -> None:
        tasks = [asyncio.ensure_future(campaign.run()) for campaign in self.campaigns]
        tasks.append(asyncio.ensure_future(self.watch()))
        for _ in range(20):
            await asyncio.sleep(self.chance.uniform(0, 6))
            led = self.chance.choice(self.leaders) if self.leaders else 0
            backend = self.backends[self.chance.choice((led, self.chance.randrange(3)))]
            backend.is_cut = not backend.is_cut and self.chance.random() < 0.8
            if self.chance.random() < 0.1 and self.leaders:
                self.campaigns[self.leaders[0]].resign(min_epoch=self.lock.count + 5)
        for backend in self.backends:
            backend.is_cut, backend.faults = False, 0.0
        await asyncio.sleep(4 * TTL_S)
        if len(self.leaders) != 1:
            self.violations.append(f"{self.leaders} lead in the end")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.leaders or (self.lock.look() is not None):
            self.violations.append("a candidate that ends does not give the leadership up")
        epochs = [epoch for _, epoch in self.terms]
        if epochs != sorted(set(epochs)):
            self.violations.append(f"epochs {epochs} do not rise")


def play_slow_answer(*, num_renewals: int) -> None:
    """The leader's last answer takes most of a second, then it is cut off; its clock is slow."""
    violations: list[str] = []

    async def main() -> None:
        contest = Contest(0, 0.0)
        slow, backend = contest.campaigns[0], contest.backends[0]
        slow._clock.rate = 0.9
        backend.back_delay_s, backend.cut_after = 0.9, 1 + num_renewals
        tasks = [asyncio.ensure_future(slow.run()), asyncio.ensure_future(contest.watch())]
        while not backend.is_cut:
            await asyncio.sleep(0.01)
        tasks += [asyncio.ensure_future(campaign.run()) for campaign in contest.campaigns[1:]]
        await asyncio.sleep(2 * TTL_S)
        assert contest.leaders
        assert contest.leaders != [0]
        violations.extend(contest.violations)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_virtual(main)
    assert not violations, violations[:3]


def play_all(num_seeds: int) -> None:
    for num_renewals in (0, 1, 3):
        play_slow_answer(num_renewals=num_renewals)
    for seed in range(num_seeds):
        play(seed)


def play(seed: int) -> Contest:
    contest: Contest | None = None

    async def main() -> None:
        nonlocal contest
        contest = Contest(seed, (0.0, 0.2, 0.6)[seed % 3])
        await contest.run()

    run_virtual(main)
    assert contest is not None
    assert not contest.violations, f"seed {seed}: {contest.violations[:3]}"
    return contest


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 40), marks=pytest.mark.slow)])
def test_never_two_leaders_and_always_one_again(seeds):
    terms = deposed = 0
    for seed in seeds:
        contest = play(seed)
        terms += len(contest.terms)
        deposed += contest.num_deposed
    assert terms > 2 * len(seeds)
    assert deposed > len(seeds)


def count_from_the_answer(election, holder, *, is_ours, sent_s, now_s):
    ORIGINAL["acquired"](election, holder, is_ours=is_ours, sent_s=now_s, now_s=now_s)


def renew_from_the_answer(election, *, is_alive, sent_s, now_s):
    ORIGINAL["renewed"](election, is_alive=is_alive, sent_s=now_s, now_s=now_s)


def believe_silence(election, now_s):
    election.note_observed(None, now_s)
    election.serve_until_s = now_s + TTL_S if election.epoch else now_s


ORIGINAL = {"acquired": Election.note_acquired, "renewed": Election.note_renewed}
MUTANTS = {
    "a lease is served to its end by a slow clock": (election_module, "SERVE_SHARE", 1.0),
    "a term counts from the answer": (Election, "note_acquired", count_from_the_answer),
    "a renewal counts from the answer": (Election, "note_renewed", renew_from_the_answer),
    "a leader that hears nothing goes on": (Election, "note_failed", believe_silence),
    "a term never lapses": (Election, "serve_until_s", property(lambda _: 1e9, lambda *_: None)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, monkeypatch):
    monkeypatch.setattr(*MUTANTS[name], raising=False)
    with pytest.raises(AssertionError, match="lead at"):
        play_all(40)


def test_a_leader_with_slow_answers_and_a_slow_clock_stops_in_time():
    play_all(0)


def make_leader(now_s: float = 10.0) -> Election:
    election = Election(TTL_S, now_s)
    election.note_observed(None, now_s)
    assert election.next_step is Question.ACQUIRE
    election.note_acquired(Holder("us", 4), is_ours=True, sent_s=now_s, now_s=now_s + 0.1)
    return election


def test_a_term_counts_from_the_question_and_ends_before_the_lease():
    election = make_leader()
    assert election.holds(10.1)
    assert election.holds(10.0 + 0.79 * TTL_S)
    assert not election.holds(10.0 + 0.8 * TTL_S)
    assert election.is_lapsed(10.0 + 0.8 * TTL_S)
    assert election.next_step is Question.RENEW
    assert election.next_at_s < 10.0 + 0.5 * TTL_S


def test_a_term_that_lapsed_is_not_taken_up_by_a_late_answer():
    election = make_leader()
    election.note_renewed(is_alive=True, sent_s=10.5, now_s=12.5)
    assert not election.holds(12.5)
    election.end_term(12.5)
    assert election.epoch == 0
    assert election.next_step is Question.OBSERVE
    assert election.next_at_s > 12.5


def test_a_renewal_never_shortens_a_term():
    election = make_leader()
    until_s = election.serve_until_s
    election.note_renewed(is_alive=True, sent_s=9.0, now_s=10.2)
    assert election.serve_until_s == until_s


def test_a_lost_lease_ends_the_term_at_once():
    election = make_leader()
    election.note_renewed(is_alive=False, sent_s=10.5, now_s=10.6)
    assert not election.holds(10.6)
    assert election.is_lapsed(10.6)


def test_a_leader_leaves_a_step_no_more_time_than_its_term_has():
    election = make_leader()
    assert election.timeout_s(5.0, 10.0 + 0.7 * TTL_S) == pytest.approx(0.1 * TTL_S)
    assert election.timeout_s(5.0, 20.0) == 0.0
    assert Election(TTL_S, 0.0).timeout_s(5.0, 0.0) == 5.0


def test_silence_is_no_proof_that_nobody_leads():
    election = Election(TTL_S, 0.0)
    election.note_observed(Holder("other", 3), 0.0)
    election.note_failed(1.0)
    assert election.next_step is Question.OBSERVE
    assert election.leader is None


def test_a_host_with_a_higher_epoch_has_the_leader_elected_anew_above_it():
    """As after a loss of etcd's data: the count begins anew, the hosts remember."""
    contest: Contest | None = None

    async def main() -> None:
        nonlocal contest
        contest = Contest(0, 0.0)
        tasks = [asyncio.ensure_future(campaign.run()) for campaign in contest.campaigns]
        await asyncio.sleep(1)
        contest.campaigns[contest.leaders[0]].resign(min_epoch=900)
        assert not contest.leaders
        await asyncio.sleep(4 * TTL_S)
        first = contest.campaigns[contest.leaders[0]]
        # Another may lead by now, which learns of it from the host as the first one did.
        first.resign(min_epoch=900)
        await asyncio.sleep(4 * TTL_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_virtual(main)
    epochs = [epoch for _, epoch in contest.terms]
    assert epochs == sorted(set(epochs))
    assert epochs[0] == 1
    assert epochs[-1] > 900


def test_what_a_backend_raises_is_survived():
    class Broken(ModelBackend):
        calls = itertools.count()

        async def observe(self, timeout_s):
            if next(self.calls) < 3:
                raise DeadlineError("model", "late")
            return await super().observe(timeout_s)

    async def main() -> list[int]:
        elected: list[int] = []
        backend = Broken(ModelLock(), random.Random(1), 0.0)
        campaign = Campaign(
            backend,
            clock=RateClock(1.0, 0.0),
            address="m",
            ttl_s=TTL_S,
            timeout_s=1.0,
            on_elected=elected.append,
            on_deposed=lambda: None,
        )
        task = asyncio.ensure_future(campaign.run())
        await asyncio.sleep(5)
        assert campaign.holds()
        assert campaign.leader == Holder("m", 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not campaign.holds()
        return elected

    assert run_virtual(main) == [1]
