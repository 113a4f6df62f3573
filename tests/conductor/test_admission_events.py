"""Goal: what admission remembers of a request ends with it, whatever happens, and refuses nobody
for ever.

Method: a conductor of a few instances, whose events the test sends; each test is a way in which
requests end, move or ask. The last one compares random sequences of events with a model that keeps
a list of all prompts that were ever sent.
"""

import math
import random

import numpy as np
import pytest

from tandem.conductor.admission import SHARE_MEMORY_S, Admission, Forecast
from tandem.conductor.conductor import Conductor
from tandem.conductor.crowds import RESERVE
from tandem.conductor.fleet import InstanceFacts, Load
from tandem.conductor.policies.policy import Question
from tandem.conductor.policies.table import make_policy
from tandem.conductor.prediction import Delays
from tandem.conductor.routes import Alone, InstanceRef, Pair, Place
from tandem.core.wire import Slo, StepRecord

FACTS = InstanceFacts(num_blocks=1000, block_size=16, max_model_len=9000, max_batch_tokens=512)
PLACE = Place(False, frozenset(), None, True, False)
BUSY = Load(num_decoding=1)
"""With the default costs, a step of two decodes takes 2.2 ms and a prompt token 0.1 ms."""


def make(*names, mode="early", load=BUSY):
    """Make a conductor that has seen a hundred answers, all as long as they might be."""
    conductor = Conductor(make_policy("mooncake"), Admission(mode))
    for _ in range(100):
        conductor.admission._lengths.note_end("", 10_000, is_natural=False)
    for name in names:
        conductor.join(name, {"p": "prefill", "d": "decode", "u": "unified"}[name[0]])
        conductor.serve(InstanceRef(name, 0), FACTS)
        conductor.set_load(name, load)
    for name in names:
        if name[0] == "d":
            conductor.set_sources(name, [each for each in names if each[0] == "p"])
    return conductor


def ask(
    conductor, name, prompt_len, max_tokens=4, now_s=0.0, *, ttft_s=90.0, tpot_s=0.02, **fields
):
    slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s)
    question = Question(name, prompt_len, max_tokens, slo=slo, **fields)
    return conductor.place(PLACE, question, now_s, is_new=True)


def go_on(conductor, name, lost, prompt_len, max_tokens=4, now_s=0.0):
    """Place an accepted request again after an instance was lost."""
    conductor.stop(lost)
    place = Place(False, frozenset({InstanceRef(lost, 0)}), None, True, False)
    question = Question(name, prompt_len, max_tokens, slo=Slo(ttft_s=90.0, tpot_s=0.02))
    route = conductor.place(place, question, now_s).route
    conductor.serve(InstanceRef(lost, 1), FACTS)
    conductor.set_load(lost, BUSY)
    return route


def test_a_cancelled_prompt_is_charged_to_nobody():
    conductor = make("u0")
    assert ask(conductor, "short", 100).route
    assert ask(conductor, "long", 400, 4000).route, "40 of the 53 ms that three gaps leave"
    assert ask(conductor, "next", 400, 4000).rejection.reason == "tpot"
    conductor.note_end("long", 0, 0.001, is_whole=False)
    assert ask(conductor, "next", 400, 4000, 0.001).route
    # One that ends when most of it is computed has delayed the others all the same.
    conductor.note_end("next", 0, 0.05, is_whole=False)
    assert ask(conductor, "last", 400, 4000, 0.05).rejection.reason == "tpot"


def test_a_request_that_goes_on_elsewhere_is_protected_there_and_nowhere_else():
    conductor = make("u0", "u1")
    conductor.set_load("u1", Load(num_decoding=1, queued_tokens=1))
    assert ask(conductor, "short", 100, ttft_s=0.05).route == Alone(InstanceRef("u0", 0))
    assert go_on(conductor, "short", "u0", 100) == Alone(InstanceRef("u1", 0))
    assert ask(conductor, "long", 4000, 4000).route == Alone(InstanceRef("u0", 1))
    conductor.stop("u0")
    refused = ask(conductor, "longer", 4000, 4000).rejection
    assert "one accepted before" in refused.what


def test_a_prompt_that_is_computed_again_elsewhere_is_charged_there():
    conductor = make("u0", "u1")
    conductor.set_load("u1", Load(num_decoding=1, queued_tokens=1))
    assert ask(conductor, "long", 400, 4000).route == Alone(InstanceRef("u0", 0))
    conductor.note_first_token("long", 0.05)
    conductor.set_load("u1", BUSY)
    conductor.set_load("u0", Load(num_decoding=1, queued_tokens=1))
    assert ask(conductor, "short", 100, now_s=0.05).route == Alone(InstanceRef("u1", 0))
    assert go_on(conductor, "long", "u0", 400, 4000, 0.05) == Alone(InstanceRef("u1", 0))
    conductor.stop("u0")
    assert ask(conductor, "next", 400, 4000, 0.05).rejection.reason == "tpot"


def test_an_id_that_comes_twice_leaves_nothing_behind():
    conductor = make("u0", "u1")
    for load in (BUSY, Load(num_decoding=1, queued_tokens=1)):
        conductor.set_load("u0", load)
        assert ask(conductor, "short", 100).route
    conductor.note_end("short", 0, 0.0)
    for name in ("next", "other"):
        assert ask(conductor, name, 4000, 4000).route
    assert not conductor.admission._live.keys() - {"next", "other"}
    for name in ("next", "other"):
        conductor.note_end(name, 0, 0.0)
    assert not conductor.admission._begun.any()
    assert not len(conductor.admission._crowds)


def test_answers_that_were_cut_off_say_nothing_about_lengths():
    """Else a client that hangs up after a token each would let all promises be broken."""
    conductor = make("u0")
    for number in range(50):
        assert ask(conductor, f"r{number}", 100, 400, float(number)).route
        conductor.note_first_token(f"r{number}", number + 0.1)
        conductor.note_end(f"r{number}", 1, number + 0.2, is_whole=False)
    assert ask(conductor, "long", 100, 400, 60.0).route
    conductor.note_first_token("long", 60.1)
    # 399 gaps of 19.4 ms (3 % is reserve), less 2.2 ms for a step, are 6.9 s for prompts of 0.4 s.
    accepted = [ask(conductor, f"s{i}", 4000, 4000, 60.2).route is not None for i in range(20)]
    assert accepted == [True] * 16 + [False] * 4


def test_a_first_token_that_is_late_already_refuses_nobody():
    conductor = make("u0")
    assert ask(conductor, "late", 100, 400, ttft_s=0.05).route
    assert ask(conductor, "next", 4000, 400).rejection.reason == "ttft"
    assert ask(conductor, "next", 4000, 400, 0.06).route


def test_one_answer_token_has_no_time_between_tokens():
    conductor = make("u0")
    assert ask(conductor, "r", 100, 1, tpot_s=1e-6).route
    assert ask(conductor, "s", 100, 2, tpot_s=1e-6).rejection.reason == "tpot"


def test_the_queue_before_a_prompt_is_not_between_the_tokens_of_its_answer():
    conductor = make("u0", load=Load(num_decoding=1, queued_tokens=5000))
    assert ask(conductor, "r", 100, 4).route


def test_crowded_pairs_are_not_replaced_by_single_instances():
    """A prefill instance would decode, beside the prompts of all others."""
    conductor = make("p0", "d0")
    conductor.set_load("d0", Load(num_decoding=20))
    assert ask(conductor, "strict", 100, 400, tpot_s=0.00415).route == Pair(
        InstanceRef("p0", 0), InstanceRef("d0", 0)
    )
    conductor.set_load("d0", Load(num_decoding=21))
    refused = ask(conductor, "next", 100, 400, tpot_s=1.0).rejection
    assert refused.crowded == "d0"
    conductor.stop("d0")
    assert ask(conductor, "last", 100, 400, tpot_s=1.0).route == Alone(InstanceRef("p0", 0))


@pytest.mark.parametrize("mode", ["early", "predicted"])
def test_an_idle_instance_takes_a_request_whatever_its_costs_say(mode):
    """Else costs that are wrong, assumed or learnt in a slow first step, are never corrected."""
    conductor = make("u0", load=Load(), mode=mode)
    assert ask(conductor, "r", 4000, ttft_s=0.1, tpot_s=0.001).route, "0.4 s by assumed costs"
    conductor.set_load("u0", Load(queued_tokens=4000, num_decoding=1, num_requests=1))
    assert ask(conductor, "s", 4000, 4000, ttft_s=0.1).rejection, "one at a time"
    conductor.note_steps("u0", [StepRecord(4000, 8e6, 0, 0, 10.0)])
    conductor.note_first_token("r", 10.0)
    conductor.note_end("r", 4, 10.1)
    assert conductor.admission.ttft.error == 0, "a guess says nothing about predictions"
    conductor.set_load("u0", BUSY)
    assert ask(conductor, "t", 4000, 400, 11.0, ttft_s=0.5, tpot_s=0.1).rejection
    # Idle again, it takes one, whose steps show what it can do.
    conductor.set_load("u0", Load())
    assert ask(conductor, "t", 4000, 400, 11.0, ttft_s=0.5, tpot_s=0.1).route
    conductor.note_steps("u0", [StepRecord(4000, 8e6, 0, 0, 0.01)])
    conductor.note_steps("u0", [StepRecord(0, 0, 1, 4000 + each, 0.002) for each in range(30)])
    conductor.note_first_token("t", 11.01)
    conductor.note_end("t", 31, 11.1)
    conductor.set_load("u0", BUSY)
    assert ask(conductor, "u", 4000, 400, 300.0, ttft_s=0.5, tpot_s=0.1).route


@pytest.mark.parametrize("weight", [0.1, 0.7, 1.1, 3.0])
def test_a_client_alone_has_no_excess(weight):
    """The share of the only client, times and divided by its weight, may come out below it."""
    admission, chance = Admission("early"), random.Random(1)
    for number in range(200):
        question = Question(f"r{number}", chance.randrange(1, 9999), 7, weight=weight)
        admission.note_accepted(question, Forecast(0.1, 0.01), chance.random())
        assert not admission._shares.has_excess("", weight, 1.0 + chance.random())


def test_a_client_that_has_had_its_share_still_gets_what_idle_instances_can_do():
    """Its prompt by itself takes 0.8 of the objective. Else it would be refused for ever."""
    conductor = make("u0")
    for client, number in (("a", 9), ("b", 1)):
        for each in range(number):
            ask(conductor, f"{client}{each}", 100, 400, client=client)
            conductor.note_end(f"{client}{each}", 400, 0.0)
    long = {"ttft_s": 0.49, "client": "a"}
    assert ask(conductor, "long", 4000, 400, **long).route
    conductor.note_end("long", 400, 0.0)
    assert ask(conductor, "low", 4000, 400, **(long | {"client": "c"}), priority=1).route
    conductor.note_end("low", 400, 0.0)
    conductor.set_load("u0", Load(num_decoding=1, queued_tokens=500))
    assert ask(conductor, "long", 4000, 400, **long).rejection.reason == "share"
    assert ask(conductor, "long", 4000, 400, **(long | {"client": "b"})).route


def test_clients_are_charged_for_what_they_got_and_forgotten():
    admission = Admission("early")
    for client, num_tokens in (("open", 10), ("exact", 300)):
        question = Question(client, 10, 100_000 if client == "open" else 300, client=client)
        admission.note_accepted(question, Forecast(0.1, 0.01), 0.0)
        admission.note_end(client, num_tokens, SHARE_MEMORY_S)
    assert not admission._shares.has_excess("open", 1.0, SHARE_MEMORY_S)
    assert admission._shares.has_excess("exact", 1.0, SHARE_MEMORY_S)
    for number in range(2000):
        question = Question(f"r{number}", 10, 10, client=f"c{number}")
        admission.note_accepted(question, Forecast(0.1, 0.01), 100.0 * number)
        admission.note_end(f"r{number}", 10, 100.0 * number)
    assert len(admission._shares) < 10


def test_no_load_or_step_makes_an_instance_the_best_or_the_conductor_fail():
    conductor = make("u0", "u1", mode="predicted")
    conductor.set_load("u1", Load(queued_tokens=1, num_decoding=1))
    conductor.set_load("u1", Load(queued_context=math.nan))
    conductor.note_steps("u1", [StepRecord(1, math.nan, 0, 0, 0.1), StepRecord(1, 1, 0, 0, -1.0)])
    assert ask(conductor, "r", 100).route == Alone(InstanceRef("u0", 0))
    for load in (Load(queued_tokens=10**15), Load(queued_context=1e300, num_decoding=10**9)):
        for name in ("u0", "u1"):
            conductor.set_load(name, load)
        assert ask(conductor, "s", 100, 400).rejection.retry_after_s == 60


class Model:
    """The memory of admission as a list of all prompts that were ever sent."""

    def __init__(self, lengths):
        self.lengths = lengths
        self.sent, self.live, self.number = [], {}, 0

    def send(self, request_id, now_s, decode, prefill, ttft_s, question, delays, first_s=None):
        self.number += 1
        self.sent.append([self.number, prefill, delays.prompt_s, request_id])
        self.live[request_id] = {
            "number": self.number, "prefill": prefill, "decode": decode, "ttft_s": ttft_s,
            "question": question, "accepted_s": now_s, "first_s": first_s, "full_s": delays.full_s,
            "prompt_s": delays.prompt_s, "place": float(self.lengths.find_place(question.client)),
        }  # fmt: skip

    def unsend(self, request_id, now_s):
        gone = self.live.pop(request_id)
        if gone["first_s"] is None:
            done_s = now_s - (gone["accepted_s"] + self.predict(gone) - gone["prompt_s"])
            done_s = min(max(done_s, 0.0), gone["prompt_s"])
            for each in self.sent:
                if each[0] == gone["number"]:
                    for other in self.live.values():
                        if other["prefill"] == gone["prefill"] and other["number"] > each[0]:
                            other["ttft_s"] = max(other["ttft_s"] - (each[2] - done_s), 0.0)
                    each[2] = done_s
        return gone

    def predict(self, live):
        return live["ttft_s"]

    def later(self, live):
        return math.fsum(
            each[2] for each in self.sent if each[0] > live["number"] and each[1] == live["prefill"]
        )

    def find_ttft(self, instance, prompt_s, factor, now_s):
        loads = [0.0]
        for live in self.live.values():
            limit_s, later_s = live["question"].slo.ttft_s, self.later(live)
            if live["prefill"] != instance or live["first_s"] is not None or limit_s is None:
                continue
            is_broken = live["ttft_s"] + later_s > limit_s or now_s - live["accepted_s"] > limit_s
            if later_s < live["full_s"] and not is_broken and prompt_s:
                time_s = live["ttft_s"] + min(later_s + prompt_s, live["full_s"])
                loads.append(time_s * factor / limit_s)
        return max(loads)

    def find_tpot(self, instance, delays, factor, lengths, now_s):
        loads = [0.0]
        for live in self.live.values():
            limit_s, max_tokens = live["question"].slo.tpot_s, live["question"].max_tokens
            if live["decode"] != instance or limit_s is None or max_tokens < 2:
                continue
            later_s = self.later(live) if live["prefill"] == instance else 0.0
            passed_s = done_s = past = 0.0
            pending_s = later_s
            if live["first_s"] is not None:
                passed_s = now_s - live["first_s"]
                done_s = min(max(later_s - delays.queue_s, 0.0), passed_s)
                pending_s = max(later_s - done_s, delays.queue_s)
                past = min((passed_s - done_s) / (delays.step_s * factor), max_tokens - 2)
            found = lengths.find_limits(np.array([live["place"]]), np.array([past + 1.0]))[:, 0]
            few, many = (
                min(max(length - past - 1, 1.0), max_tokens - 1 - past) for length in found.tolist()
            )
            queued_s = pending_s + delays.prompt_s
            full_s = max(delays.full_s * factor, 1e-9)
            worst = min(max(factor * queued_s / full_s, few), many)
            best_s = passed_s + many * factor * delays.step_s
            best_s += min(pending_s * factor, many * full_s)
            is_late = passed_s > (max_tokens - 1) * limit_s
            is_hopeless = best_s > (past + many) * limit_s and delays.step_s * factor <= limit_s
            for coming in (worst, many):
                time_s = passed_s + coming * factor * delays.step_s
                time_s += min(factor * queued_s, coming * full_s)
                load = time_s / (past + coming) / (RESERVE * limit_s)
                if factor * queued_s < factor * delays.step_s:
                    load = delays.step_s + (later_s + delays.prompt_s) / (max_tokens - 1)
                    load *= factor / limit_s
                # The best end matters only if the worst one breaks the promise.
                loads.append(0.0 if load > 1.0 and (is_hopeless or is_late) else load)
        return max(loads)


@pytest.mark.parametrize("seed", range(6))
def test_random_events_give_the_effects_that_a_list_of_all_prompts_gives(seed):
    admission, chance, now_s = Admission("predicted"), random.Random(seed), 0.0
    crowds, lengths = admission._crowds, admission._lengths
    model = Model(lengths)
    for number in range(150):
        now_s += chance.choice((0.0, 0.05, 0.5, 300.0 if chance.random() < 0.02 else 0.1))
        decode = chance.choice(("u0", "u1"))
        prefill = chance.choice((decode, "p0"))
        delays = Delays(0.01, 0.0, chance.choice((0.0, 0.03, 2.0)), 0.2)
        ttft_s = delays.prompt_s + chance.choice((0.0, 0.1, 5.0, 500.0))
        forecast = Forecast(ttft_s, 0.05, decode, prefill, delays)
        slo = Slo(ttft_s=chance.choice((None, 1.0, 9.0)), tpot_s=chance.choice((None, 0.1, 0.2)))
        question = Question(
            f"r{number}", 100, chance.choice((1, 2, 30)), slo=slo, client=chance.choice("ab")
        )
        event = chance.random()
        if event < 0.45:
            admission.note_accepted(question, forecast, now_s)
            model.send(question.request_id, now_s, decode, prefill, ttft_s, question, delays)
        elif model.live:
            name = chance.choice(list(model.live))
            live = model.live[name]
            if event < 0.6:
                admission.note_first_token(name, now_s)
                live["first_s"] = now_s if live["first_s"] is None else live["first_s"]
            elif event < 0.65:
                admission.note_moved(name, forecast, now_s)
                old = model.unsend(name, now_s)
                ttft_s += now_s - old["accepted_s"]
                facts = (decode, prefill, ttft_s, old["question"], delays, old["first_s"])
                model.send(name, old["accepted_s"], *facts)
            else:
                admission.note_end(name, 5, now_s, is_whole=chance.random() < 0.5)
                model.unsend(name, now_s)
        instance = chance.choice(("u0", "u1", "p0"))
        asked = Delays(0.02, *(chance.choice((0.0, 0.3, 1.0)) for _ in range(3)))
        got = crowds.find_ttft(instance, asked.prompt_s, 1.1, now_s)
        assert got.load == pytest.approx(model.find_ttft(instance, asked.prompt_s, 1.1, now_s))
        got = crowds.find_tpot(instance, asked, 1.1, lengths, now_s)
        assert got.load == pytest.approx(model.find_tpot(instance, asked, 1.1, lengths, now_s))
        assert admission._live.keys() == model.live.keys()
    for name in list(model.live):
        admission.note_end(name, 5, now_s)
    assert not admission._live
    assert not admission._begun.any()
    assert not len(crowds)
