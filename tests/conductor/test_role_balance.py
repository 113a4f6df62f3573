"""Goal: an instance changes sides only when that helps, never the last one, and not at once again.

Method: a fleet whose loads and steps the test tells, looked at second by second.
"""

import pytest

from tandem.conductor.conductor import Conductor
from tandem.conductor.fleet import InstanceFacts, Load
from tandem.conductor.policies.policy import Question
from tandem.conductor.policies.table import make_policy
from tandem.conductor.role_balance import PAUSE_S
from tandem.conductor.routes import InstanceRef, Place
from tandem.core.wire import Slo, StepRecord

FACTS = InstanceFacts(num_blocks=1000, block_size=16, max_model_len=2048, max_batch_tokens=512)
ROLES = {"p": "prefill", "d": "decode", "u": "unified"}
WAITING = Load(queued_tokens=400_000)
"""At the costs of an instance that has told no step: 40 s."""
IDLE = Load()


def make(*names):
    conductor = Conductor(make_policy("load"))
    for name in names:
        conductor.join(name, ROLES[name[0]])
        conductor.serve(InstanceRef(name, 0), FACTS)
    for name in names:
        conductor.set_sources(name, [other for other in names if other[0] == "p"])
    return conductor


def watch(conductor, seconds, load=IDLE, tpot_s=0.0, begin_s=0.0):
    """Return the changes that are due, each made at once, with their seconds."""
    changes = []
    for second in range(seconds):
        for name in conductor.fleet.names:
            is_prefill = conductor.fleet.role_of(conductor.fleet.find(name)) == "prefill"
            conductor.set_load(name, load if is_prefill else IDLE)
            if tpot_s and not is_prefill:
                conductor.note_steps(name, [StepRecord(0, 0.0, 4, 1000, tpot_s)])
        change = conductor.find_role_change(begin_s + second)
        if change is not None:
            conductor.set_role(change.instance, change.role)
            changes.append((begin_s + second, change.instance, change.role))
    return changes


def test_a_side_that_waits_gets_instances_one_by_one_but_never_the_last():
    conductor = make("p0", "d0", "d1", "d2")
    changes = watch(conductor, 200, WAITING)
    assert [role for _, _, role in changes] == ["prefill", "prefill"]
    (first_s, *_), (second_s, *_) = changes
    assert second_s - first_s >= PAUSE_S
    assert watch(make("p0", "p1", "d0"), 100, WAITING) == []


def test_slow_decodes_get_an_instance_unless_prefill_needs_it():
    assert [role for _, _, role in watch(make("p0", "p1", "d0"), 60, tpot_s=0.5)] == ["decode"]
    assert watch(make("p0", "p1", "d0"), 60, WAITING, tpot_s=0.5) == []
    busy = make("p0", "p1", "d0")
    changes = []
    for second in range(60):
        for name in ("p0", "p1"):
            busy.note_steps(name, [StepRecord(512, 1e5, 0, 0, 0.6)])
        busy.note_steps("d0", [StepRecord(0, 0.0, 4, 1000, 0.5)])
        changes += [busy.find_role_change(float(second))]
    assert changes == [None] * 60, "one alone would be busy for 1.2 of the time"


def test_the_idlest_instance_changes():
    conductor = make("p0", "d0", "d1")
    conductor.set_load("p0", WAITING)
    conductor.set_load("d0", Load(num_decoding=2, decode_tokens=500))
    changes = [conductor.find_role_change(float(second)) for second in range(40)]
    assert {change.instance for change in changes if change is not None} == {"d1"}


@pytest.mark.parametrize("gone", ["d1", "draining"])
def test_an_instance_that_takes_no_requests_does_not_count(gone):
    conductor = make("p0", "d0", "d1")
    if gone == "d1":
        conductor.stop("d1")
    else:
        conductor.set_draining("d1", is_draining=True)
    assert watch(conductor, 60, WAITING) == []


def test_any_change_of_a_role_begins_a_pause():
    conductor = make("p0", "d0", "d1", "d2")
    watch(conductor, 1)
    conductor.set_role("d2", "unified")  # By command.
    changes = watch(conductor, 60, WAITING, begin_s=1.0)
    assert min(at_s for at_s, _, _ in changes) >= 1.0 + PAUSE_S


def test_objectives_are_those_of_requests():
    relaxed = make("p0", "d0", "d1")
    place = Place(False, frozenset(), None, needs_decode=True, is_resumed=False)
    question = Question("r", 100, 10, slo=Slo(ttft_s=100.0, tpot_s=1.0))
    relaxed.place(place, question, is_new=True)
    assert watch(relaxed, 60, WAITING) == [], "40 s are little of 100"
    assert watch(make("p0", "d0", "d1"), 60, WAITING) != []


def test_unified_instances_are_left_alone():
    assert watch(make("u0", "u1", "u2"), 60, WAITING, tpot_s=1.0) == []
