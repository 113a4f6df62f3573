"""Goal: accepted requests keep their time between tokens, though predictions are too small.

Method: one instance that decodes in steps, requests that grow to twice as many as it can serve, and
an estimator whose costs are two thirds of the real ones. The real conductor decides.
"""

import random

import pytest

from tandem.conductor.admission import Admission
from tandem.conductor.conductor import Conductor
from tandem.conductor.estimator import DEFAULT_COSTS
from tandem.conductor.fleet import InstanceFacts, Load
from tandem.conductor.margin import Margin
from tandem.conductor.policies.policy import Question
from tandem.conductor.policies.table import make_policy
from tandem.conductor.routes import InstanceRef, Place
from tandem.core.wire import Slo

SLOWNESS = 1.5
TPOT_S = 0.006
NUM_TOKENS = 50
RAMP_S = 8.0
END_S = 16.0
PLACE = Place(False, frozenset(), None, True, False)
FACTS = InstanceFacts(num_blocks=10_000, block_size=16, max_model_len=9000, max_batch_tokens=512)


def measure_step(num_decoding):
    step_s, _, _, decode_s, _ = DEFAULT_COSTS
    return SLOWNESS * (step_s + decode_s * num_decoding)


def find_capacity():
    """Return the most requests a second that keep the objective."""
    most = max(count for count in range(1, 1000) if measure_step(count) <= TPOT_S)
    return most / (measure_step(most) * NUM_TOKENS)


def overload(mode):
    """Return (accepted requests, those that kept the objective, such ones a second since the load
    is twice the capacity, rejections by reason).
    """
    conductor = Conductor(make_policy("mooncake"), Admission(mode))
    conductor.join("u0", "unified")
    conductor.serve(InstanceRef("u0", 0), FACTS)
    chance, live, capacity = random.Random(3), {}, find_capacity()
    now_s = arrival_s = 0.0
    num_asked = num_accepted = num_kept = num_late = 0
    while live or now_s < END_S:
        while arrival_s <= now_s < END_S:
            arrival_s += chance.expovariate(min(0.5 + 1.5 * now_s / RAMP_S, 2.0) * capacity)
            num_asked += 1
            question = Question(f"r{num_asked}", 1, NUM_TOKENS, slo=Slo(tpot_s=TPOT_S))
            conductor.set_load("u0", Load(num_decoding=len(live)))
            if conductor.place(PLACE, question, now_s, is_new=True).rejection is None:
                num_accepted += 1
                live[question.request_id] = [0, now_s]
        now_s += measure_step(len(live))
        for name, state in list(live.items()):
            state[0] += 1
            if state[0] == 1:
                state[1] = now_s
                conductor.note_first_token(name, now_s)
            elif state[0] == NUM_TOKENS:
                is_kept = now_s - state[1] <= TPOT_S * (NUM_TOKENS - 1)
                num_kept += is_kept
                num_late += is_kept and RAMP_S < now_s <= END_S
                conductor.note_end(name, NUM_TOKENS, now_s)
                del live[name]
    goodput = num_late / (END_S - RAMP_S)
    return num_accepted, num_kept, goodput, conductor.admission.rejected


@pytest.mark.parametrize("mode", ["early", "predicted"])
def test_too_small_predictions_break_no_promises(mode):
    accepted, kept, goodput, rejected = overload(mode)
    assert kept >= 0.99 * accepted
    assert goodput >= 0.85 * find_capacity()
    assert set(rejected) == {"tpot"}


def test_without_the_margin_they_do(monkeypatch):
    monkeypatch.setattr(Margin, "get_factor", lambda margin, now_s: 1.0)
    accepted, kept, _, _ = overload("early")
    assert kept < 0.5 * accepted
