"""Goal: prompts that part from each other share the state where they part, whenever they come."""

import random

import pytest
from scheduler_world import World


def make_world(max_batch_tokens=512, **kwargs) -> World:
    return World(
        400,
        max_model_len=400,
        num_slots=20,
        max_running=6,
        max_batch_tokens=max_batch_tokens,
        **kwargs,
    )


def add_all(world: World, prompts) -> None:
    for prompt in prompts:
        assert world.add(prompt, max_tokens=3)
        list(world.live.values())[-1].message_end = len(prompt) - 1


def run(world: World) -> int:
    """Steps until all have ended; the tokens computed."""
    before = world.runner.num_computed
    while world.live:
        world.step(stop_chance=0.0, fail_chance=0.0)
    return world.runner.num_computed - before


@pytest.fixture
def prompts():
    rng = random.Random(1)
    stem = rng.choices(range(3), k=101)
    # They differ from the first token after the stem on.
    return [[*stem, i, *rng.choices(range(3), k=15)] for i in range(4)]


OWN = 16 + 2  # The own tokens and the answer's, of which the last is not computed.


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_that_come_together_compute_what_they_share_once(prompts, overlap):
    world = make_world(overlap=overlap)
    add_all(world, prompts)
    # One is not sent: the first to be computed knows whom it parts from.
    assert run(world) == 101 + 4 * OWN


def test_a_prompt_in_progress_keeps_a_state_where_a_new_one_parts(prompts):
    world = make_world(max_batch_tokens=40)
    add_all(world, prompts[:1])
    world.step(stop_chance=0.0, fail_chance=0.0)
    add_all(world, prompts[1:])
    assert run(world) == 101 + 4 * OWN - 40


def test_of_prompts_that_part_where_no_state_is_one_pays(prompts):
    world = make_world()
    add_all(world, prompts[:1])
    run(world)
    add_all(world, prompts[1:])
    assert run(world) == 101 + 3 * OWN


def test_the_same_prompt_again_takes_up_its_last_message(prompts):
    world = make_world()
    add_all(world, prompts[:1])
    run(world)
    add_all(world, prompts[:1])
    assert run(world) == 1 + 2


def test_what_a_snapshot_needs_is_told_when_it_is_missed(prompts):
    world = make_world()
    add_all(world, prompts[:1])
    run(world)
    add_all(world, prompts[1:2])
    (request,) = world.live.values()
    run(world)
    assert request.report.miss.reason == "no_state"
    assert (request.report.miss.position, request.report.miss.detail) == (0, "101")
    assert world.scheduler.get_stats().stateless_tokens == 101
