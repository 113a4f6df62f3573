"""Goal: accepted requests keep their objectives, and what is scarce is shared by weight."""

import random

import pytest

from tandem.conductor.admission import Admission, Forecast
from tandem.conductor.conductor import Conductor
from tandem.conductor.fleet import InstanceFacts, Load
from tandem.conductor.margin import HALF_LIFE_S, MAX_MARGIN, Margin
from tandem.conductor.policies.policy import Question
from tandem.conductor.policies.table import make_policy
from tandem.conductor.prediction import Delays
from tandem.conductor.routes import Alone, InstanceRef, Place
from tandem.core.wire import Slo

FACTS = InstanceFacts(num_blocks=100, block_size=16, max_model_len=9000, max_batch_tokens=512)
PLACE = Place(False, frozenset(), None, True, False)


def ask(name="r", prompt_len=100, ttft_s=1.0, tpot_s=0.1, **fields):
    return Question(name, prompt_len, 10, slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s), **fields)


def make(mode, **load):
    """Make a conductor that has seen a hundred answers, all as long as they might be."""
    conductor = Conductor(make_policy("mooncake"), Admission(mode))
    for _ in range(100):
        conductor.admission._lengths.note_end("", 10_000, is_natural=False)
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
            admission.note_accepted(ask(f"r{number}"), Forecast(1.0, 0.05), 100.0)
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
        forecast = Forecast(1.0 if number < 10 else 3.0, 0.05)
        conductor.admission.note_accepted(ask(f"r{number}"), forecast, 100.0)
        if number < 10:
            conductor.admission.note_first_token(f"r{number}", 101.0)
    conductor.set_load("u0", Load(num_decoding=20, decode_tokens=2000, queued_tokens=30_000))

    def decide(tpot_s):
        question = ask(ttft_s=90.0, tpot_s=tpot_s)
        return conductor.place(PLACE, question, 102.0, is_new=True).route

    # A step of 21 decodes takes 4.1 ms, one of twice as many 6.2.
    assert decide(0.0045) is not None
    assert decide(0.0039) is None


def draw_outcomes(margin, **options):
    """Tell a margin of times up to half longer and up to half shorter than predicted."""
    chance = random.Random(1)
    for number in range(2000):
        margin.note(0.2, 0.2 * chance.uniform(0.5, 1.5), 0.1 * number, **options)
    return margin.get_factor(200.0)


def test_promises_that_were_broken_make_it_careful():
    margin = Margin()
    assert 1.35 < draw_outcomes(margin) < 1.75
    assert 0.15 < margin.error < 0.45
    for number in range(200):
        margin.note(0.2, 50.0, 200.0 + number)
    assert margin.get_factor(399.0) == pytest.approx(MAX_MARGIN)


def test_times_that_endanger_nothing_or_weigh_nothing_do_not():
    assert draw_outcomes(Margin(), safe_s=0.31) == 1.0
    assert draw_outcomes(Margin(), weight=0.0) == 1.0
    assert 1.35 < draw_outcomes(Margin(), safe_s=0.2, weight=0.5) < 1.75


def test_a_margin_that_nothing_tests_fades():
    """Else one that refuses everything would do so for ever."""
    margin = Margin()
    for number in range(100):
        margin.note(0.2, 50.0, 10.0 + 0.1 * number)
    ended_s = 10.0 + 0.1 * 99
    assert margin.get_factor(ended_s + HALF_LIFE_S) == pytest.approx(MAX_MARGIN**0.5)
    assert margin.get_factor(ended_s + 10 * HALF_LIFE_S) < 1.01


def test_both_margins_learn_from_what_came():
    admission = Admission("early")
    for number in range(100):
        name, now_s = f"r{number}", float(number)
        admission.note_accepted(ask(name), Forecast(0.5, 0.07), now_s)
        admission.note_first_token(name, now_s + 0.9)
        admission.note_end(name, 11, now_s + 0.9 + 10 * 0.095)
    # A margin swings between the ratio and one step above it.
    assert 0.99 * 0.9 / 0.5 <= admission.ttft.get_factor(100.0) < 1.11 * 0.9 / 0.5
    assert 0.99 * 0.095 / 0.07 <= admission.tpot.get_factor(100.0) < 1.11 * 0.095 / 0.07


def test_accepted_requests_keep_their_time_between_tokens():
    """A request that would keep its own objective, but not that of one that decodes already."""

    def decide(fleet_load, strict_s, name="new", prompt_len=100):
        conductor = make("early")
        assert conductor.place(PLACE, ask("old", tpot_s=strict_s), 5.0, is_new=True).route
        conductor.set_load("u0", fleet_load)
        question = ask(name, prompt_len, ttft_s=90.0, tpot_s=0.5)
        before = conductor.place(PLACE, question, 6.0, is_new=True).rejection
        conductor.note_first_token("old", 6.0)
        conductor.note_end("old", 2, 6.01)
        question = ask(name + "er", prompt_len, ttft_s=90.0, tpot_s=0.5)
        after = conductor.place(PLACE, question, 7.0, is_new=True).rejection
        assert after is None
        return before

    # With the default costs a step of 21 decodes takes 4.1 ms.
    many = Load(num_decoding=20)
    assert decide(many, 0.005, prompt_len=1) is None
    refused = decide(many, 0.004, prompt_len=1)
    assert refused.reason == "tpot"
    assert "accepted" in refused.what
    # A prompt of 200 tokens takes 20 ms, between some 10 tokens of the others.
    one = Load(num_decoding=1)
    assert decide(one, 0.004, prompt_len=1) is None
    assert decide(one, 0.004, prompt_len=200).reason == "tpot"


def ask_prompt(conductor, name, prompt_len, max_tokens=400, now_s=0.0, ttft_s=90.0):
    """Ask with 20 ms between tokens; the fleet is told what was accepted, as a server tells it."""
    slo = Slo(ttft_s=ttft_s, tpot_s=0.02)
    question = Question(name, prompt_len, max_tokens, slo=slo)
    return conductor.place(PLACE, question, now_s, is_new=True)


def test_prompts_are_charged_to_the_answers_that_they_delay():
    """Each fits by itself, but together they take longer than an answer of 400 tokens can wait."""
    conductor = make("early", num_decoding=1)
    assert ask_prompt(conductor, "r0", 100).route
    conductor.note_first_token("r0", 0.0)
    # 399 gaps of 19.4 ms (3 % is reserve), less 2.2 ms for a step, are 6.9 s for prompts of 0.4 s.
    accepted = [ask_prompt(conductor, f"s{i}", 4000, 4000).route is not None for i in range(20)]
    assert accepted == [True] * 16 + [False] * 4
    assert ask_prompt(conductor, "t", 1).route, "what takes no time is accepted"
    conductor.note_end("r0", 400, 7.9)
    assert ask_prompt(conductor, "u", 4000, 4000, 7.9).route


def test_short_answers_are_protected_and_refused_to_nobody():
    """The prompt of a short answer comes between few tokens of its own, but many of the others."""
    conductor = make("early", num_decoding=3)
    for number in range(3):
        assert ask_prompt(conductor, f"r{number}", 100).route
        conductor.note_first_token(f"r{number}", 0.0)
    assert ask_prompt(conductor, "short", 2000, 4).route
    # Three gaps of 20 ms leave no room for a prompt of 0.4 s that would come between them.
    refused = ask_prompt(conductor, "next", 4000).rejection
    assert refused.reason == "tpot"
    assert "one accepted before" in refused.what
    conductor.note_first_token("short", 0.3)
    conductor.note_end("short", 4, 0.4)
    assert ask_prompt(conductor, "next", 4000, now_s=0.4).route


def test_a_promise_that_one_instance_would_break_is_made_by_another():
    conductor = make("early")
    conductor.join("u1", "unified")
    conductor.serve(InstanceRef("u1", 0), FACTS)
    conductor.set_load("u1", Load(queued_tokens=600))
    assert ask_prompt(conductor, "short", 100, 4).route == Alone(InstanceRef("u0", 0))
    assert ask_prompt(conductor, "next", 4000).route == Alone(InstanceRef("u1", 0))
    assert not conductor.admission.rejected
    assert ask_prompt(conductor, "tight", 100, 4).route == Alone(InstanceRef("u0", 0))


def test_a_step_that_later_prompts_fill_up_is_foreseen():
    """A short prompt took 1.2 s instead of 0.1, since 8,000 tokens of others came into its step.
    The margin rose to four, and long prompts were refused at a quarter of their objective.
    """

    def learn(objective_s, real_s, prompt_s):
        admission = Admission("early")
        for number in range(100):
            name, now_s = f"r{number}", 2.0 * number
            for each in (name, name + "later"):
                delays = Delays(prompt_s=0.1 if each == name else prompt_s, full_s=1.1)
                forecast = Forecast(0.1, 0.05, "u0", "u0", delays)
                admission.note_accepted(ask(each, ttft_s=objective_s), forecast, now_s)
            admission.note_first_token(name, now_s + real_s)
            admission.note_end(name, 11, now_s + real_s + 0.5)
            admission.note_end(name + "later", 0, now_s + real_s + 0.5)
        return admission.ttft.get_factor(200.0)

    assert learn(1.5, 1.15, 9.0) == 1.0
    assert learn(1.5, 1.15, 0.1) > 3.0, "one that takes no longer than it says"
    assert learn(10.0, 1.15, 0.1) == 1.0, "an eighth of the objective says little"


def test_a_first_token_that_was_promised_is_not_delayed():
    """The rest of the step would be filled up by the next prompt: 512 tokens take 51 ms."""
    conductor = make("early")
    assert ask_prompt(conductor, "tight", 100, ttft_s=0.05).route
    refused = ask_prompt(conductor, "next", 4000).rejection
    assert refused.reason == "ttft"
    assert "one accepted before" in refused.what
    assert ask_prompt(conductor, "small", 100).route
    conductor.note_first_token("tight", 0.04)
    assert ask_prompt(conductor, "next", 4000).route


def test_under_pressure_clients_get_shares_by_weight():
    conductor = make("early", queued_tokens=7800)  # 0.81 of the objective.
    admission = conductor.admission
    for number in range(30):
        client, weight = ("a", 1.0) if number % 3 else ("b", 2.0)
        question = ask(f"r{number}", client=client, weight=weight)
        admission.note_accepted(question, Forecast(0.8, 0.05), 10.0)

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
