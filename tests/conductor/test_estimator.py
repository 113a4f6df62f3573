"""Goal: costs of steps are found from the steps alone, whatever the machine and its bad moments."""

import msgspec
import numpy as np
import pytest

from tandem.conductor.conductor import Conductor
from tandem.conductor.estimator import DEFAULT_COSTS, StepEstimator
from tandem.conductor.fleet import DEFAULT_TOKENS_PER_S, InstanceFacts, Load
from tandem.conductor.policies.policy import Question
from tandem.conductor.policies.table import make_policy
from tandem.conductor.routes import InstanceRef, Place
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


@pytest.mark.parametrize("factor", [30, 1000])
def test_a_slow_first_prompt_is_forgotten_while_others_decode(factor):
    """No step shows the cost of a prompt meanwhile; its ratio to the other costs is assumed."""
    estimator = StepEstimator()
    prompt = StepRecord(512, 512 * 256.0, 0, 0, 0.05)
    estimator.note_step(msgspec.structs.replace(prompt, seconds=0.05 * factor))
    for number in range(5000):
        estimator.note_step(StepRecord(0, 0.0, 1, 500 + number, 2.1e-3))
    assert estimator.predict(prompt) < 0.1


def test_an_idle_instance_that_looked_slow_gets_requests_again_and_shows_its_speed():
    """Its speed approaches that of the others; that of one that works is what it shows."""
    conductor = Conductor(make_policy("mooncake"))
    facts = InstanceFacts(num_blocks=1000, block_size=16, max_model_len=9000, max_batch_tokens=512)
    place = Place(False, frozenset(), None, True, False)
    steps = [StepRecord(512, 512 * 256.0, 0, 0, 0.05), StepRecord(0, 0.0, 1, 600, 2e-3)]

    def choose(now_s):
        decision = conductor.place(place, Question("r", 512, 4), now_s)
        return decision.chosen.instance

    def predict(name):
        return conductor.fleet.costs[:, conductor.fleet.find(name)] @ (1, 512, 512 * 256, 0, 0)

    for name, factor in (("a", 1), ("b", 100)):
        conductor.join(name, "unified")
        conductor.serve(InstanceRef(name, 0), facts)
        conductor.note_steps(
            name, [msgspec.structs.replace(each, seconds=factor * each.seconds) for each in steps]
        )
    conductor.set_load_speed("b", 1.0)
    busy = Load(queued_tokens=1000, queued_context=5e5, num_requests=2, num_decoding=2)
    conductor.set_load("a", busy)
    assert choose(0.0) == "a"
    for now_s in range(1, 400):
        if choose(float(now_s)) == "b":
            break
    assert 60 < now_s < 400
    assert predict("b") < 4 * predict("a")
    # A request there shows what it costs: the slow one is slow at once, for another while.
    conductor.note_steps("b", [msgspec.structs.replace(steps[0], seconds=5.0)] * 8)
    assert choose(now_s + 2.0) == "a"
    conductor.note_steps("b", steps * 40)
    assert choose(now_s + 4.0) == "b"
    for later_s in range(1000):
        conductor.set_load_speed("b", 1.0)  # What it reports with each load, news only once.
        choose(now_s + 5.0 + later_s)
    assert conductor.fleet.load_tokens_per_s[conductor.fleet.find("b")] > 0.9 * DEFAULT_TOKENS_PER_S
    assert predict("a") == pytest.approx(0.05, rel=0.1), "one that works does not age"
