"""Goal: no request sees KV in its window that is not that of its own tokens, and hits are used.

Method: random traffic over ``scheduler_world.World`` with window blocks, whose runner keeps a
second fingerprint of all tokens in them and reads the window of every token that is computed.
Mutants at the end show that it notices.
"""

import random
from functools import partial

import pytest
from scheduler_world import BLOCK_SIZE, Impatient, ToyTier, World, WrongKvError, drive

from tandem.core.errors import CapacityError, ConfigError, ConflictError
from tandem.core.wire import FinishReason
from tandem.engine.groups.windows import WindowReuse, count_window_blocks
from tandem.engine.scheduling.scheduler import Scheduler


@pytest.mark.parametrize(
    ("order", "overlap", "window"),
    [
        ("chunked", True, 6),
        ("prefill_first", False, 1),
        pytest.param("decode_first", True, 9, marks=pytest.mark.slow),
    ],
)
def test_long_traffic_with_few_window_blocks_is_sound_and_exercises_everything(
    order, overlap, window
):
    world = World(
        16,
        7,
        order,
        max_running=5,
        overlap=overlap,
        window=window,
        num_window_blocks=14,
        scheduler_class=Impatient,
    )
    drive(world, 400)
    stats = world.scheduler.get_stats()
    assert stats.num_preemptions > 5
    assert stats.prefix_hit_tokens > 30
    assert stats.num_evicted_window_blocks > 30
    assert stats.windowless_tokens > (0 if window == 1 else 30)
    reasons = {r.finish_reason for r in world.ended}
    assert reasons == set(FinishReason) - {FinishReason.DEADLINE, FinishReason.PREFILLED}


def test_tokens_do_not_depend_on_window_blocks():
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
    outputs, num_computed = run(num_blocks=200, window=7, num_window_blocks=100)
    assert outputs == expected
    assert num_computed < num_computed_alone
    for num_window_blocks in (5, 9):
        for overlap in (False, True):
            found, _ = run(
                num_blocks=9, window=7, num_window_blocks=num_window_blocks, overlap=overlap
            )
            assert found == expected


def test_memory_is_that_of_the_windows():
    """Long chats of one window each: as many as the pool has windows for run at once."""
    window, num_chats, length = 8, 8, 60
    seen = count_window_blocks(window, BLOCK_SIZE)
    world = World(
        num_chats * (2 * length // BLOCK_SIZE + 1),
        max_running=num_chats,
        max_queue=num_chats,
        window=window,
        max_batch_tokens=32,
        # Beside the windows a step's tokens, and the block that a turn copies its first from.
        num_window_blocks=num_chats * (seen + 1) + 8,
    )
    rng = random.Random(1)
    for _ in range(num_chats):
        assert world.add(rng.choices(range(3), k=length), length)
    most = 0
    while world.live:
        world.step(stop_chance=0.0, fail_chance=0.0)
        most = max(most, world.scheduler.get_stats().num_running)
    assert most == num_chats
    assert world.scheduler.get_stats().num_preemptions == 0
    # Each goes on from its end.
    for i in range(num_chats):
        assert world.add_continuation(i, [0], 2)
        while world.live:
            world.step(stop_chance=0.0, fail_chance=0.0)
    turns = world.ended[num_chats:]
    assert [r.report.num_cached_tokens for r in turns] == [2 * length - 1] * num_chats


def test_what_ends_of_messages_see_outlasts_what_was_passed():
    world = World(60, window=6, num_window_blocks=9, max_batch_tokens=8)
    stem = [i % 3 for i in range(40)]
    world.add(stem, 20)
    (request,) = world.live.values()
    request.message_end = 37
    while world.live:
        world.step(stop_chance=0.0, fail_chance=0.0)
    assert world.scheduler.get_stats().num_evicted_window_blocks > 0
    world.add([*stem[:37], 0, 0, 0], 2)
    (later,) = world.live.values()
    while world.live:
        world.step(stop_chance=0.0, fail_chance=0.0)
    assert later.report.num_cached_tokens == 37
    # In the middle nothing is kept: all of it is computed again, and told.
    world.add([*stem[:17], 0, 0, 0], 2)
    (edited,) = world.live.values()
    while world.live:
        world.step(stop_chance=0.0, fail_chance=0.0)
    assert edited.report.num_cached_tokens < 17
    assert (edited.report.miss.reason, edited.report.miss.detail) == ("no_window", "17")


def test_windows_come_from_a_tier_with_the_blocks_before_them_or_not_at_all():
    """Not vacuous: windows are loaded, come too late, fail, and are stored too late."""
    tier = ToyTier(random.Random(5))
    sizes = {"window": 7, "num_window_blocks": 22}
    world = World(40, 5, max_running=5, scheduler_class=Impatient, tier=tier, **sizes)
    drive(world, 600)
    stats = world.scheduler.get_stats()
    assert len(tier.windows) > 30
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
    # It waits for the load, however long that takes.
    choose = tier.choose_load
    tier.choose_load = lambda *args: choose(*args)._replace(wait_s=100.0)
    other = World(40, 6, tier=tier, **sizes)
    other.add(tokens, 4)
    (request,) = other.live.values()
    for _ in range(60):
        other.step([other.move_some], stop_chance=0.0, fail_chance=0.0)
    assert request.is_finished
    assert request.report.num_loaded_tokens > 0


def test_windows_are_held_for_other_instances_and_come_from_them():
    tier = ToyTier(random.Random(5))
    sizes = {"window": 7, "num_window_blocks": 26, "handover_chance": 0.4}
    world = World(40, 5, max_running=5, overlap=True, tier=tier, **sizes)
    drive(world, 400)
    assert world.num_held_checked > 20
    assert sum(r.report.num_loaded_tokens > 0 for r in world.ended) > 4


def test_too_few_blocks_for_one_request_are_refused():
    with pytest.raises(ConfigError, match="one request takes 4"):
        World(9, window=8, num_window_blocks=3)


# ------------------------------------------------------------------------------- mutants


class GoesOnBehind(WindowReuse):
    """Takes a prefix up where the other layers have it, whatever is there of the window."""

    def cut(self, match):
        return match.cut(match.num_tokens, self._block_size)

    def start(self, plan, request, match):
        nodes = match.nodes if match.source is None else [*match.nodes, match.source]
        for node in nodes[self._find_first(match.num_tokens) :]:
            if node.window_block_id < 0:
                node.window_block_id = block_id = self._allocate()
                self._by_block[block_id] = node
                self.pool.hold(block_id)
                self._release(block_id, self._kept)
        super().start(plan, request, match)


class GivesUpEarly(WindowReuse):
    """Gives up one block that the next token still sees."""

    def _find_first(self, position):
        return super()._find_first(position + BLOCK_SIZE)


class GivesUpThePlanned(WindowReuse):
    """Gives up what the step that is planned ahead still sees."""

    def advance(self, request):
        computed = request.num_computed_tokens
        request.num_computed_tokens += request.queue.num_tokens_in_flight + BLOCK_SIZE
        super().advance(request)
        request.num_computed_tokens = computed


class ForgetsToCopy(WindowReuse):
    """Goes on within a block without what stands before in it."""

    def start(self, plan, request, match):
        super().start(plan, request, match)
        self.end_copies(plan)


def with_windows(windows_class):
    """A scheduler with another class of windows."""

    class Mutant(Scheduler):
        def __init__(self, *args):
            super().__init__(*args)
            self._state.windows.__class__ = windows_class

    return Mutant


@pytest.mark.parametrize(
    "mutant",
    [WindowReuse, GoesOnBehind, GivesUpEarly, GivesUpThePlanned, ForgetsToCopy],
    ids=lambda mutant: mutant.__name__,
)
def test_runner_notices_a_broken_rule(mutant):
    """The content check alone finds each of these bugs, with all bookkeeping checks off."""
    num_found, is_mutant = 0, mutant is not WindowReuse
    for seed in range(6):
        world = World(
            16,
            seed,
            max_running=5,
            window=9,
            num_window_blocks=16,
            checks=False,
            overlap=seed % 2 == 1,
            scheduler_class=with_windows(mutant),
        )
        world.step = partial(world.step, fail_chance=0.1)
        try:
            drive(world, 120)
        except WrongKvError:
            num_found += 1
            if num_found == 3:
                break
        except (AssertionError, CapacityError, ConflictError, KeyError):
            assert is_mutant, "the unchanged rules are sound"
    assert num_found >= 3 if is_mutant else num_found == 0
