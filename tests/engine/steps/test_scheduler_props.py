"""Goal: the deciders never let a request read KV that is not its own, and every request ends.

Method: random traffic over ``scheduler_world.World``, which checks every step, with and without a
lower tier. Mutants at the end show that its runner does notice what it is there to notice.
"""

import random
from itertools import product

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduler_world import (
    BLOCK_SIZE,
    ORDERS,
    SALTS,
    VOCABULARY,
    Impatient,
    ToyRunner,
    ToyTier,
    World,
    WrongKvError,
    drive,
)

from quick import rest_slow
from tandem.core.errors import CapacityError, ConflictError
from tandem.core.wire import FinishReason
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.loads import BlockLoads
from tandem.engine.scheduling.prefix_index import PrefixIndex, PrefixMatch
from tandem.engine.scheduling.scheduler import Scheduler

tokens = st.integers(0, VOCABULARY - 1)


class SchedulerMachine(RuleBasedStateMachine):
    """Random traffic, one call at a time, over a World that checks itself."""

    @initialize(
        num_blocks=st.integers(1, 24),
        order=st.sampled_from(ORDERS),
        max_batch_tokens=st.integers(1, 24),
        max_running=st.integers(1, 6),
        max_model_len=st.integers(8, 80),
        prefix_cache=st.sampled_from([True, True, True, False]),
        overlap=st.booleans(),
        is_impatient=st.booleans(),
        has_tier=st.booleans(),
        num_slots=st.sampled_from([0, 0, 1, 3, 12]),
        every=st.sampled_from([0, 3, 8]),
        seed=st.integers(0, 1000),
    )
    def start(self, is_impatient, has_tier, seed, **kwargs):
        self.world = World(
            scheduler_class=Impatient if is_impatient else Scheduler,
            tier=ToyTier(random.Random(seed)) if has_tier else None,
            seed=seed,
            **kwargs,
        )

    @rule(
        prompt_ids=st.lists(tokens, max_size=30),
        max_tokens=st.integers(0, 40),
        priority=st.integers(0, 2),
        salt=st.sampled_from(SALTS),
        timeout_s=st.sampled_from([None, None, None, 0.3, 2.0]),
        lease_s=st.sampled_from([None, None, None, 0.3, 2.0]),
        copies=st.integers(1, 3),
    )
    def add(self, copies, **kwargs):
        for _ in range(copies):
            self.world.add(**kwargs)

    @rule(prompt_ids=st.lists(tokens, max_size=30), lease_s=st.sampled_from([0.2, 3.0]))
    def add_with_prefill_elsewhere(self, prompt_ids, lease_s):
        self.world.add(prompt_ids, peer=lease_s)

    @rule(choice=st.integers(0, 50), extra=st.lists(tokens, max_size=8))
    def continue_conversation(self, choice, extra):
        self.world.add_continuation(choice, extra)

    @rule(choice=st.integers(0, 50))
    def cancel(self, choice):
        self.world.cancel(choice)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.world.step()

    @rule(
        cancel=st.lists(st.integers(0, 50), max_size=3),
        flush=st.booleans(),
        lost=st.lists(st.integers(0, 12), max_size=2),
        prompt_ids=st.lists(tokens, max_size=12),
    )
    def step_with_calls_in_flight(self, cancel, flush, lost, prompt_ids):
        calls = [lambda c=c: self.world.cancel(c) for c in cancel]
        calls += [self.world.scheduler.flush_cache] if flush else []
        if self.world.tier is None:  # Latents in a file go to no other tier.
            calls.append(lambda: self.world.lose(lost))
        calls.append(lambda: self.world.add(prompt_ids))
        self.world.step(calls)

    @rule(chance=st.sampled_from([0.2, 1.0]))
    def move_between_steps(self, chance):
        if self.world.tier is not None:
            self.world.move_some(chance)

    @rule()
    def flush(self):
        self.world.scheduler.flush_cache()
        assert self.world.pool.num_cached == 0

    @rule(block_ids=st.lists(st.integers(0, 12), max_size=3))
    def forget(self, block_ids):
        self.world.scheduler.forget_blocks(block_ids)

    @rule(choices=st.lists(st.integers(0, 50), max_size=3))
    def lose(self, choices):
        if self.world.tier is None:
            self.world.lose(choices)

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds):
        self.world.now_s += seconds

    @invariant()
    def is_sound(self):
        if hasattr(self, "world"):
            self.world.scheduler.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
class TestSchedulerMachineAtLength(SchedulerMachine.TestCase):
    """The same machine with many more and longer examples."""

    settings = settings(
        max_examples=1000,
        stateful_step_count=80,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize(
    ("order", "overlap"),
    rest_slow(
        [("chunked", True), ("prefill_first", False)],
        product(ORDERS, [False, True]),
    ),
)
def test_long_traffic_in_a_small_pool_is_sound_and_exercises_everything(order, overlap):
    """Not vacuous: hits, copies, preemptions and evictions all happen, under every order."""
    settings = {"num_blocks": 14, "seed": 7, "order": order, "max_running": 5, "overlap": overlap}
    impatient = World(**settings, scheduler_class=Impatient)
    drive(impatient, 500)
    patient = World(**settings)
    drive(patient, 500)
    assert (impatient.num_ahead > 300) == overlap
    stats = impatient.scheduler.get_stats()
    assert stats.num_preemptions > 15
    assert stats.evicted_tokens > 200 * BLOCK_SIZE
    assert stats.prefix_hit_tokens > 150
    # Room for growth is what keeps admission from thrashing.
    assert patient.scheduler.get_stats().num_preemptions < stats.num_preemptions
    reasons = {r.finish_reason for r in impatient.ended}
    assert reasons == set(FinishReason) - {FinishReason.DEADLINE, FinishReason.PREFILLED}


@pytest.mark.parametrize("overlap", [False, True])
def test_long_traffic_whose_kv_a_disk_loses_is_sound(overlap):
    """Not vacuous: blocks are lost that others would take up, whole and for their first tokens."""
    world = World(24, 8, max_running=5, lose_chance=0.2, overlap=overlap)
    drive(world, 400)
    assert world.num_forgotten > 30
    assert world.scheduler.get_stats().prefix_hit_tokens > 150


def test_long_traffic_over_a_tier_is_sound_and_exercises_everything():
    """Not vacuous: loads come, fail, come too late and are stored too late."""
    tier = ToyTier(random.Random(5))
    world = World(num_blocks=24, seed=5, max_running=5, scheduler_class=Impatient, tier=tier)
    drive(world, 800)
    stats = world.scheduler.get_stats()
    assert stats.num_loaded_blocks > 100
    assert stats.num_failed_loads > 50
    assert stats.num_preemptions > 15
    assert tier.num_dropped > 20
    assert tier.num_stale > 20
    assert any(0 < r.report.num_loaded_tokens < r.report.num_cached_tokens for r in world.ended)


@pytest.mark.parametrize(
    ("order", "seed"),
    rest_slow(
        [("decode_first", 6), ("chunked", 9)], [*((order, 6) for order in ORDERS), ("chunked", 9)]
    ),
)
def test_traffic_with_prefills_that_are_held_and_decodes_from_elsewhere_is_sound(order, seed):
    """With the last seed a request starts while blocks of its load have arrived behind one that has
    not: they make room for a copy, else tokens that the index has are computed again.
    """
    tier = ToyTier(random.Random(seed))
    overlap = order != "prefill_first"
    world = World(30, seed, order=order, tier=tier, handover_chance=0.3, overlap=overlap)
    drive(world, 400)
    assert world.num_held_checked > 20
    reasons = [r.finish_reason for r in world.ended]
    assert reasons.count(FinishReason.PREFILLED) > 10
    assert sum(r.report.num_loaded_tokens > 0 and r.prefill_kv is not None for r in world.ended) > 3


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["plain", "states", "windows"])
def test_traffic_in_which_masks_are_late_is_sound(kind, overlap):
    """A sequence that could not sample computes its last token again, and the others go on."""
    sizes = {"states": {"num_slots": 8}, "windows": {"window": 6, "num_window_blocks": 14}}
    for seed in range(5):
        # Preempted requests load states that lie behind their prompt.
        tier = ToyTier(random.Random(seed)) if kind == "states" and seed != 1 else None
        num_blocks = 14 if tier is None else 40
        sized = sizes.get(kind, {}) | {"tier": tier}
        world = World(num_blocks, seed, max_running=5, overlap=overlap, **sized)
        world.late_chance = 0.15
        drive(world, 150)
        assert world.num_late > 20


def test_state_from_a_prefill_elsewhere_takes_the_slot_of_any_snapshot():
    """A request whose state comes from elsewhere does not sit out its lease before a full pool."""
    world = World(1, max_running=1, num_slots=1, tier=ToyTier(random.Random(0), fail_chance=1.0))
    assert world.add([0], peer=0.2)
    for _ in range(9):
        world.step(stop_chance=0.0, fail_chance=0.0)
    assert not world.live
    assert world.scheduler.get_stats().num_snapshots == 1
    assert world.add([0], peer=0.2)
    assert world.plan().loads


def test_outputs_do_not_depend_on_cache_order_or_pool():
    """The same requests give the same tokens whatever is reused, preempted or chunked."""

    def run(**kwargs):
        world = World(max_queue=40, **kwargs)
        rng = random.Random(3)
        shared = rng.choices(range(VOCABULARY), k=10)
        for i in range(20):
            own = rng.choices(range(VOCABULARY), k=rng.randrange(12))
            world.add(shared[: i % 11] + own + [0], 10, salt=SALTS[i % 2])
        while world.live:
            world.step(stop_chance=0.0, fail_chance=0.0)
        return {r.request_id: r.output_ids for r in world.ended}, world.runner.num_computed

    tier = ToyTier(random.Random(4))
    expected, num_computed_alone = run(num_blocks=200, prefix_cache=False, max_running=1)
    assert len(expected) == 20
    for order in ORDERS:
        outputs, num_computed = run(num_blocks=200, order=order)
        assert outputs == expected
        assert num_computed < num_computed_alone
        assert run(num_blocks=9, order=order)[0] == expected
        assert run(num_blocks=9, order=order, overlap=True)[0] == expected
        # Another instance, and what those before it have stored.
        assert run(num_blocks=16, order=order, tier=tier)[0] == expected
    assert tier.stored
    outputs, num_computed = run(num_blocks=200, tier=tier)
    assert outputs == expected
    assert num_computed < num_computed_alone


# ------------------------------------------------------------------------------- mutants


class OneTokenTooMany(PrefixIndex):
    """Claims one more token than the source block shares with the prompt."""

    def match(self, root_key, keys, token_ids, max_tokens):
        found = super().match(root_key, keys, token_ids, max_tokens)
        if found.source is None or found.num_tokens >= max_tokens:
            return found
        shared = found.num_source_tokens + 1
        return PrefixMatch(found.nodes, found.num_tokens + 1, found.source, shared)


class BlindToSalt(PrefixIndex):
    """Gives all users the same root."""

    def make_root_key(self, salt, adapter=""):
        return super().make_root_key("", adapter)


class FindsTheEvicted(PrefixIndex):
    """Evicts without forgetting: the block is free, and still found."""

    def _unlink(self, node):
        parent, key = node.parent, node.key
        super()._unlink(node)
        if key is not None:
            self._by_key[key] = node
            node.parent = parent


class EagerIndexing(Scheduler):
    """Makes blocks matchable when they are planned, not when they are computed."""

    def __init__(self, *args):
        super().__init__(*args)
        state, emit = self._state, self._state.emit

        def emit_and_index(plan, request, num_tokens):
            emit(plan, request, num_tokens)
            request.num_computed_tokens += num_tokens
            state.prefix.index_computed(request, is_prompt_end=True)
            request.num_computed_tokens -= num_tokens

        state.emit = emit_and_index


class StaleTables(Scheduler):
    """Runs a plan that was made ahead with the blocks that it had then."""

    def settle(self, plan):
        before = {s.request.request_id: s.block_table for s in plan.sequences}
        is_left = super().settle(plan)
        plan.sequences = [
            msgspec.structs.replace(s, block_table=before[s.request.request_id])
            for s in plan.sequences
        ]
        return is_left


class GivesTwice(BlockPool):
    """Leaves every seventh block it hands out in the free list."""

    num_given = 0

    def allocate(self):
        block_id = super().allocate()
        self.num_given += 1
        if self.num_given % 7 == 0:
            self._free.append(block_id)
        return block_id


class LateCopies(ToyRunner):
    """Copies after the forward pass."""

    def execute(self, plan, failed=frozenset()):
        copies, plan.copies = plan.copies, []
        sampled = super().execute(plan, failed)
        plan.copies = copies
        self.copy(plan)
        return sampled


class FreesEarly(BlockLoads):
    """Gives blocks back when a load is given up, not when the transfer into them has ended."""

    def _cut(self, request, load, position):
        cut = [p for p in load.pending[position:] if p.block in self._in_transfer]
        super()._cut(request, load, position)
        for pending in cut:
            super()._release((pending.block,))
            del self._in_transfer[pending.block]

    def _end_transfers(self, request, block_ids):
        known = [b for b in block_ids if b in self._in_transfer]
        return super()._end_transfers(request, known) if known else None


class TrustsFailures(BlockLoads):
    """Takes whatever a failed load left in the block for its content."""

    def note_failed(self, request, block_ids):
        return self.note_done(request, block_ids)


def with_loads(loads_class):
    """A scheduler with another class of loads."""

    class Mutant(Scheduler):
        def __init__(self, config, pool, index, tiers):
            super().__init__(config, pool, index, tiers)
            prefix, counters = self._state.prefix, self._state.counters
            self._state.loads = loads_class(pool, index, prefix, config.block_size, counters)

    Mutant.__name__ = loads_class.__name__
    return Mutant


class StoresStale(ToyTier):
    """Does not ask whether a block still is what it copied."""

    def is_stale(self, scheduler, block):
        return False


def name_mutant(mutant) -> str:
    return "+".join(getattr(c, "__name__", "overlap") for c in mutant.values()) or "control"


@pytest.mark.parametrize(
    "mutant",
    [
        {},
        {"index_class": OneTokenTooMany},
        {"index_class": BlindToSalt},
        {"index_class": FindsTheEvicted},
        {"scheduler_class": EagerIndexing},
        {"pool_class": GivesTwice},
        {"runner_class": LateCopies},
        {"overlap": True},
    ],
    ids=name_mutant,
)
def test_runner_notices_a_broken_decider(mutant):
    """The content check alone, with all bookkeeping checks off, finds each of these bugs."""
    num_found, is_mutant = 0, bool(mutant.keys() - {"overlap"})
    for seed in range(8):
        world = World(num_blocks=14, seed=seed, max_running=5, checks=False, **mutant)
        try:
            drive(world, 150)
        except WrongKvError:
            num_found += 1
            if num_found == 3:
                break
        except (AssertionError, CapacityError, ConflictError, KeyError):
            assert is_mutant, "the unchanged deciders are sound"
    assert num_found >= 3 if is_mutant else num_found == 0


@pytest.mark.parametrize(
    "mutant",
    [
        {},
        {"scheduler_class": with_loads(FreesEarly)},
        {"scheduler_class": with_loads(TrustsFailures)},
        {"tier_class": StoresStale},
        {"scheduler_class": StaleTables, "overlap": True},
        pytest.param({"overlap": True}, marks=pytest.mark.slow),
    ],
    ids=name_mutant,
)
def test_runner_notices_a_broken_load(mutant):
    """The same with a tier: a wrong block is read, whatever the bookkeeping says."""
    num_found, is_mutant = 0, bool(mutant.keys() - {"overlap"})
    classes = dict(mutant)
    tier_class = classes.pop("tier_class", ToyTier)
    for seed in range(8):
        tier = tier_class(random.Random(seed))
        world = World(num_blocks=20, seed=seed, max_running=5, checks=False, tier=tier, **classes)
        try:
            drive(world, 150)
        except WrongKvError:
            num_found += 1
            if num_found == 3:
                break
        except (AssertionError, CapacityError, ConflictError, KeyError):
            assert is_mutant, "the unchanged deciders are sound"
    assert num_found >= 3 if is_mutant else num_found == 0
