"""Goal: costs of steps are found from the steps alone, whatever the machine and its bad moments."""

import numpy as np
import pytest

from tandem.conductor.conductor import Conductor
from tandem.conductor.estimator import DEFAULT_COSTS, StepEstimator
from tandem.conductor.policies.table import make_policy
from tandem.core.wire import StepRecord


def make_steps(rng, costs, count, outliers=0.0):
    for _ in range(count):
        prefill = int(rng.integers(0, 2)) * int(rng.integers(1, 513))
        context = prefill * float(rng.integers(1, 8000))
        decodes = int(rng.integers(0 if prefill else 1, 33))
        tokens = decodes * int(rng.integers(10, 4000))
        seconds = float(np.dot(costs, (1, prefill, context, decodes, tokens)))
        seconds *= 1 + 0.03 * rng.standard_normal()
        if rng.random() < outliers:
            seconds *= float(rng.uniform(3, 20))
        yield StepRecord(prefill, context, decodes, tokens, seconds)


@pytest.mark.parametrize("speed", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_predictions_are_right_within_the_noise(speed, outliers):
    rng = np.random.default_rng(1)
    costs = np.array((5e-3, 3e-5, 4e-9, 4e-4, 2e-7)) * speed
    estimator = StepEstimator()
    for step in make_steps(rng, costs, 600, outliers):
        estimator.note_step(step)
    clean = list(make_steps(rng, costs, 200))
    errors = [abs(estimator.predict(step) / step.seconds - 1) for step in clean]
    assert np.mean(errors) < 0.05
    assert estimator.error < (0.05 if not outliers else 0.2)


def test_it_follows_a_machine_that_slows_down():
    rng = np.random.default_rng(2)
    costs = np.array((5e-3, 3e-5, 4e-9, 4e-4, 2e-7))
    estimator = StepEstimator()
    for step in [*make_steps(rng, costs, 500), *make_steps(rng, 3 * costs, 1500)]:
        estimator.note_step(step)
    errors = [abs(estimator.predict(s) / s.seconds - 1) for s in make_steps(rng, 3 * costs, 100)]
    assert np.mean(errors) < 0.06


def test_no_cost_is_negative_and_nonsense_is_ignored():
    estimator = StepEstimator()
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        assert not estimator.note_step(StepRecord(1, 1.0, 0, 0, seconds))
    assert tuple(estimator.costs) == DEFAULT_COSTS
    # More decodes take less time here, which no machine does.
    for decodes in range(1, 60):
        estimator.note_step(StepRecord(0, 0.0, decodes, decodes * 50, 0.1 / decodes))
    assert estimator.costs.min() >= 0


def test_unlike_machines_have_costs_of_their_own_and_a_new_one_begins_with_the_mean():
    conductor, rng = Conductor(make_policy("mooncake")), np.random.default_rng(3)
    costs = np.array((5e-3, 3e-5, 4e-9, 4e-4, 2e-7))
    for name, factor in (("fast", 1), ("slow", 5)):
        conductor.join(name, "unified")
        conductor.note_steps(name, make_steps(rng, factor * costs, 400))
    conductor.join("new", "unified")
    fast, slow, new = (conductor.fleet.costs[:, conductor.fleet.find(n)] @ (1, 256, 256e3, 4, 4e3)
                       for n in ("fast", "slow", "new"))  # fmt: skip
    assert 4.5 < slow / fast < 5.5
    assert new == pytest.approx((fast + slow) / 2)
    assert conductor.get_step_error("fast") < 0.1
