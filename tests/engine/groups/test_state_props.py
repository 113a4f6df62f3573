"""Goal: no request goes on from a state that is not that of its own tokens, and hits are used.

Method: random traffic over ``scheduler_world.World`` with states, whose runner keeps in each slot
a fingerprint of all tokens that its state has seen. Mutants at the end show that it notices.
"""

import random
from functools import partial

import pytest
from scheduler_world import Impatient, ToyTier, World, WrongKvError, drive

from tandem.core.errors import CapacityError, ConflictError
from tandem.core.wire import FinishReason
from tandem.engine.groups.reuse import StateReuse
from tandem.engine.scheduling.scheduler import Scheduler


@pytest.mark.parametrize(
    ("order", "overlap"),
    [
        ("chunked", True),
        ("prefill_first", False),
        pytest.param("decode_first", True, marks=pytest.mark.slow),
    ],
)
def test_long_traffic_with_few_slots_is_sound_and_exercises_everything(order, overlap):
    world = World(
        14, 7, order, max_running=5, overlap=overlap, num_slots=9, scheduler_class=Impatient
    )
    drive(world, 500)
    stats = world.scheduler.get_stats()
    assert stats.num_preemptions > 15
    assert stats.prefix_hit_tokens > 30
    assert stats.num_evicted_snapshots > 30
    assert stats.stateless_tokens > 30
    assert stats.num_used_state_slots == 0
    reasons = {r.finish_reason for r in world.ended}
    assert reasons == set(FinishReason) - {FinishReason.DEADLINE, FinishReason.PREFILLED}


def test_tokens_do_not_depend_on_slots_or_snapshots():
    def run(**kwargs):
        world = World(max_queue=40, **kwargs)
        rng = random.Random(3)
        shared = rng.choices(range(3), k=10)
        for i in range(20):
            own = rng.choices(range(3), k=rng.randrange(12))
            world.add(shared[: i % 11] + own + [0], 10)
        while world.live:
            world.step(stop_chance=0.0, fail_chance=0.0)
        return {r.request_id: r.output_ids for r in world.ended}, world.runner.num_computed

    expected, num_computed_alone = run(num_blocks=200, prefix_cache=False, max_running=1)
    outputs, num_computed = run(num_blocks=200, num_slots=100)
    assert outputs == expected
    assert num_computed < num_computed_alone
    for num_slots in (1, 3, 5):
        for overlap in (False, True):
            found, _ = run(num_blocks=9, num_slots=num_slots, overlap=overlap, every=4)
            assert found == expected


def test_states_come_from_a_tier_with_the_blocks_before_them_or_not_at_all():
    """Not vacuous: states are loaded, come too late, fail, and are stored too late."""
    tier = ToyTier(random.Random(5))
    world = World(40, 5, max_running=5, scheduler_class=Impatient, tier=tier, num_slots=7, every=4)
    drive(world, 800)
    stats = world.scheduler.get_stats()
    assert len(tier.states) > 30
    assert tier.num_stale > 5
    assert stats.num_failed_loads > 20
    assert sum(r.report.num_loaded_tokens > 0 for r in world.ended) > 4
    # Another instance goes on from what this one has stored.
    tokens = next(
        r.prompt_ids + r.output_ids
        for r in world.ended
        if r.report.num_loaded_tokens > 0 and len(r.output_ids) > 1
    )
    tier.fail_chance = 0.0
    tier.choose_load = partial(wait_for_load, tier.choose_load)
    other = World(40, 6, tier=tier, num_slots=2)
    other.add(tokens, 4)
    (request,) = other.live.values()
    for _ in range(60):
        other.step([other.move_some], stop_chance=0.0, fail_chance=0.0)
    assert request.is_finished
    assert request.report.num_loaded_tokens > 0


def test_a_prefix_of_most_of_the_memory_is_loaded():
    """A quarter of it may be in transfer, and part of a prefix is of no use: it goes alone."""
    tier = ToyTier(random.Random(1), fail_chance=0.0)
    prompt = [i % 3 for i in range(32)]
    for seed in (1, 2):
        world = World(12, seed, tier=tier, num_slots=3)
        tier.choose_load, choose = partial(wait_for_load, tier.choose_load), tier.choose_load
        world.add(prompt, 4)
        (request,) = world.live.values()
        for _ in range(60):
            world.step([world.move_some], stop_chance=0.0, fail_chance=0.0)
        tier.choose_load = choose
        assert request.is_finished
        tier.store_some(world.scheduler, world.runner, 1.0)
    assert request.report.num_loaded_tokens > 32 // 2


def wait_for_load(choose, *args):
    """It waits for the load, however long that takes."""
    return choose(*args)._replace(wait_s=100.0)


# ------------------------------------------------------------------------------- mutants


class GoesOnBehind(StateReuse):
    """Takes a prefix up where its KV ends, with the last state before."""

    def cut(self, notes, token_ids, match, *, at_blocks=False):
        cut = super().cut(notes, token_ids, match, at_blocks=at_blocks)
        if cut.snapshot is None or at_blocks:
            return cut
        return type(match)(
            match.nodes, match.num_tokens, match.source, match.num_source_tokens, cut.snapshot
        )


class FindsEarly(StateReuse):
    """Lets a snapshot be found when it is planned."""

    def plan_save(self, plan, request, end):
        super().plan_save(plan, request, end)
        if plan.state_saves and plan.state_saves[-1].request is request:
            save = plan.state_saves.pop()
            self._index.has_prefix, has_prefix = (lambda *_: True), self._index.has_prefix
            self._keep(request, save.position, save.slot)
            self._index.has_prefix = has_prefix


class KeepsTheBroken(StateReuse):
    """Keeps the state of a step that failed."""

    def release(self, request, position, *, is_sound):
        super().release(request, position, is_sound=True)


class GivesAwayLoaded(StateReuse):
    """Takes a slot for a request without a look at who reads it."""

    def _take(self, worth):
        slot = super()._take(worth)
        if slot == -1 and worth is not None and len(self._table):
            return next(iter(self._table)).slot
        return slot


class ForgetsToLoad(StateReuse):
    """Begins with whatever the slot holds."""

    def start(self, plan, *args):
        super().start(plan, *args)
        plan.state_loads.clear()


def with_states(states_class):
    """A scheduler with another class of states."""

    class Mutant(Scheduler):
        def __init__(self, *args):
            super().__init__(*args)
            self._state.states.__class__ = states_class

    return Mutant


@pytest.mark.parametrize(
    "mutant",
    [StateReuse, GoesOnBehind, FindsEarly, KeepsTheBroken, GivesAwayLoaded, ForgetsToLoad],
    ids=lambda mutant: mutant.__name__,
)
def test_runner_notices_a_broken_rule(mutant):
    """The content check alone finds each of these bugs, with all bookkeeping checks off."""
    num_found, is_mutant = 0, mutant is not StateReuse
    for seed in range(8):
        world = World(
            14,
            seed,
            max_running=5,
            num_slots=8,
            checks=False,
            overlap=seed % 2 == 1,
            scheduler_class=with_states(mutant),
        )
        world.step = partial(world.step, fail_chance=0.1)
        try:
            drive(world, 150)
        except WrongKvError:
            num_found += 1
            if num_found == 3:
                break
        except (AssertionError, CapacityError, ConflictError, KeyError):
            assert is_mutant, "the unchanged rules are sound"
    assert num_found >= 3 if is_mutant else num_found == 0
