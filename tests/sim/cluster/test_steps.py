"""Goal: a step takes what the planner says, or what a live instance has learnt.

Method: decodes alone and whole prompts are compared with the planner's own functions at contexts
between the knots; a mixed step must cost more than each of its halves and less than both together.
"""

import pytest

from tandem.placement.catalog import find_hardware, find_model
from tandem.placement.costs import Placement, decode_time, prefill_time
from tandem.placement.fitting import read_efficiencies
from tandem.placement.shape import read_shape
from tandem.sim.cluster.steps import Calibration, LearntSteps, PlannedSteps, StepWork

SPEC = find_hardware("8xa800")
SHAPE = read_shape(find_model("llama3-70b").config, "llama3-70b")
PLACE = Placement(expert_format="bf16", dense_format="bf16", accelerators=8)
EFF = read_efficiencies()


@pytest.fixture
def steps():
    return PlannedSteps(SPEC, SHAPE, PLACE, EFF, overhead_s=0.002)


@pytest.mark.parametrize(("users", "context"), [(1, 100), (7, 3000), (64, 9_000), (3, 100_000)])
def test_decodes_are_the_planners(steps, users, context):
    planned = decode_time(SPEC, SHAPE, PLACE, EFF, users=users, context=context).seconds
    ours = steps.predict_s(StepWork(0, 0.0, users, users * context))
    assert ours == pytest.approx(planned + 0.002, rel=1e-3)


@pytest.mark.parametrize("tokens", [8192, 40_000, 100_000])
def test_chunks_of_a_prompt_sum_up_to_the_planners_prefill(steps, tokens):
    planned = prefill_time(SPEC, SHAPE, PLACE, EFF, tokens=tokens).seconds
    ours, start = 0.0, 0
    while start < tokens:
        chunk = min(PLACE.chunk_tokens, tokens - start)
        ours += steps.predict_s(StepWork(chunk, chunk * (start + chunk / 2), 0, 0)) - 0.002
        start += chunk
    assert ours == pytest.approx(planned, rel=0.02)


def test_a_mixed_step_shares_the_weights(steps):
    prefill, decode = StepWork(512, 512 * 256.0, 0, 0), StepWork(0, 0.0, 40, 40 * 8000)
    mixed = steps.predict_s(StepWork(512, 512 * 256.0, 40, 40 * 8000))
    alone = steps.predict_s(prefill), steps.predict_s(decode)
    assert max(alone) < mixed < sum(alone)


def test_learnt_costs_are_a_sum():
    costs = Calibration(
        step_s=1e-3,
        prefill_token_s=1e-5,
        prefill_context_s=1e-9,
        decode_s=1e-4,
        decode_token_s=1e-8,
    )
    seconds = LearntSteps(costs).predict_s(StepWork(100, 5000.0, 3, 700))
    assert seconds == pytest.approx(1e-3 + 1e-3 + 5e-6 + 3e-4 + 7e-6)
