"""Goal: accepted requests keep their objectives, and what is scarce is shared by weight."""

import random

import pytest

from tandem.conductor.admission import MAX_MARGIN, Admission
from tandem.conductor.conductor import Conductor
from tandem.conductor.fleet import InstanceFacts, Load
from tandem.conductor.policies.policy import Question
from tandem.conductor.policies.table import make_policy
from tandem.conductor.routes import Alone, InstanceRef, Place
from tandem.core.wire import Slo

FACTS = InstanceFacts(num_blocks=100, block_size=16, max_model_len=9000, max_batch_tokens=512)
PLACE = Place(False, frozenset(), None, True, False)


def ask(name="r", prompt_len=100, ttft_s=1.0, tpot_s=0.1, **fields):
    return Question(name, prompt_len, 10, slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s), **fields)


def make(mode, **load):
    conductor = Conductor(make_policy("mooncake"), Admission(mode))
    conductor.join("u0", "unified")
    conductor.serve(InstanceRef("u0", 0), FACTS)
    conductor.set_load("u0", Load(**load))
    return conductor


@pytest.mark.parametrize("mode", ["early", "predicted"])
def test_what_cannot_be_kept_is_refused_with_a_time(mode):
    idle, busy = make(mode), make(mode, queued_tokens=40_000)
    assert idle.place(PLACE, ask(), 5.0, is_new=True).route == Alone(InstanceRef("u0", 0))
    decision = busy.place(PLACE, ask(), 5.0, is_new=True)
    assert decision.route is None
    assert (decision.rejection.reason, decision.rejection.retry_after_s) == ("ttft", 4)
    assert "objective is 1.00 s" in decision.rejection.what
    assert busy.admission.rejected == {"ttft": 1}
    # What was accepted before, or asks for nothing, is served.
    assert busy.place(PLACE, ask(), 5.0).route is not None
    assert busy.place(PLACE, Question("r", 100, 10), 5.0, is_new=True).route is not None
    assert make("none", queued_tokens=40_000).place(PLACE, ask(), 5.0, is_new=True).route


def test_decodes_that_end_and_begin_meanwhile_are_foreseen():
    """Ten decodes run, and at the first token of the next one all of them will have ended."""

    def decide(mode, age_s):
        conductor = make(mode, num_decoding=0)
        admission = conductor.admission
        for number in range(10):
            admission.note_accepted(ask(f"r{number}"), 1.0, 100.0)
            admission.note_first_token(f"r{number}", 101.0)
        conductor.set_load("u0", Load(num_decoding=10, decode_tokens=1000, queued_tokens=9000))
        now_s = 101.0 + age_s
        return conductor.place(PLACE, ask(ttft_s=9.0, tpot_s=0.0027), now_s, is_new=True).route

    # One step of ten decodes takes 3 ms, with the default costs.
    assert decide("early", 9.5) is None
    assert decide("predicted", 9.5) is not None, "they decode for ten seconds"
    assert decide("predicted", 2.0) is None


def test_decodes_that_begin_meanwhile_are_counted_once():
    """An instance counts those whose prompts are being computed: they are no growth."""
    conductor = make("predicted")
    for number in range(20):
        conductor.admission.note_accepted(ask(f"r{number}"), 1.0 if number < 10 else 3.0, 100.0)
        if number < 10:
            conductor.admission.note_first_token(f"r{number}", 101.0)
    conductor.set_load("u0", Load(num_decoding=20, decode_tokens=2000, queued_tokens=30_000))

    def decide(tpot_s):
        question = ask(ttft_s=90.0, tpot_s=tpot_s)
        return conductor.place(PLACE, question, 102.0, is_new=True).route

    # A step of 21 decodes takes 4.1 ms, one of twice as many 6.2.
    assert decide(0.0045) is not None
    assert decide(0.0039) is None


def test_promises_that_were_broken_make_it_careful():
    admission, chance = Admission("early"), random.Random(1)
    for number in range(2000):
        name, now_s = f"r{number}", float(number)
        admission.note_accepted(ask(name), 0.2, now_s)
        admission.note_first_token(name, now_s + 0.2 * chance.uniform(0.5, 1.5))
        admission.note_end(name, now_s + 0.9)
    assert 1.35 < admission.margin < 1.75
    assert 0.15 < admission.ttft_error < 0.45
    for number in range(2000, 2200):
        admission.note_accepted(ask(f"r{number}"), 0.2, float(number))
        admission.note_first_token(f"r{number}", number + 50.0)
    assert admission.margin == MAX_MARGIN


def test_under_pressure_clients_get_shares_by_weight():
    conductor = make("early", queued_tokens=7800)  # 0.81 of the objective.
    admission = conductor.admission
    for number in range(30):
        client, weight = ("a", 1.0) if number % 3 else ("b", 2.0)
        admission.note_accepted(ask(f"r{number}", client=client, weight=weight), 0.8, 10.0)

    def decide(client, weight=1.0, priority=0):
        question = ask(client=client, weight=weight, priority=priority)
        return conductor.place(PLACE, question, 10.0, is_new=True).rejection

    assert decide("a").reason == "share"
    assert decide("b", 2.0) is None
    assert decide("c") is None, "it has had nothing"
    assert decide("a", priority=-1) is None
    assert decide("c", priority=1).reason == "share"
    conductor.set_load("u0", Load(queued_tokens=6000))
    assert decide("a") is None, "there is enough for all"


@pytest.mark.parametrize("seed", range(20))
def test_every_beginning_is_counted_out_again(seed):
    admission, chance = Admission("predicted"), random.Random(seed)
    live, now_s = [], 0.0
    for number in range(500):
        now_s += chance.choice((0.0, 0.05, 3.0, 300.0 if chance.random() < 0.02 else 0.1))
        admission.note_accepted(ask(f"r{number}"), chance.choice((0.1, 5.0, 500.0)), now_s)
        live.append(f"r{number}")
        if chance.random() < 0.7:
            admission.note_first_token(chance.choice(live), now_s)
        if chance.random() < 0.9:
            admission.note_end(live.pop(chance.randrange(len(live))), now_s)
    for name in live:
        admission.note_end(name, now_s)
    assert not admission._live
    assert not admission._begun.any()
