"""Goal: no exit of the table of states forgets what a request has at instances.

Method: the table is data, so each exit is summed up: what was held, less what ended with the event
and what the steps give back, plus what they submit, must be what the next state says is held.
"""

import pytest

from tandem.engine.cluster.table import (
    EFFECTS,
    ENDS,
    EVENTS,
    TABLE,
    Deadline,
    Effect,
    Event,
    Held,
    State,
)

SUBMITS = {
    Effect.SUBMIT_PREFILL: Held.PREFILL,
    Effect.SUBMIT_WAITING: Held.DECODE,
    Effect.SUBMIT_DECODE: Held.DECODE,
    Effect.SUBMIT_REJOINING: Held.DECODE,
    Effect.SUBMIT_ALONE: Held.DECODE,
}
GIVES_BACK = {
    Effect.DROP_PREFILL: Held.PREFILL,
    Effect.RELEASE: Held.HOLD,
    Effect.DROP_DECODE: Held.DECODE,
}
FINAL = {State.ENDED, State.FAILED}
EXITS = [
    pytest.param(state, event, id=f"{state}-{event}")
    for state in State
    for event in TABLE[state].exits
]


def sum_up(held, event, steps):
    """Return what is held after an exit."""
    held = set(held)
    if event in ENDS:
        assert ENDS[event] in held, f"{ENDS[event]} ends, which is not there"
        held.remove(ENDS[event])
    if event is Event.PREFILLED:
        held.add(Held.HOLD)
    for step in steps:
        if step in GIVES_BACK:
            assert GIVES_BACK[step] in held, f"{step} of what is not there"
            held.remove(GIVES_BACK[step])
        if step in SUBMITS:
            assert SUBMITS[step] not in held, f"{step} twice"
            held.add(SUBMITS[step])
    return held


@pytest.mark.parametrize(("state", "event"), EXITS)
def test_an_exit_gives_back_what_the_next_state_does_not_hold(state, event):
    way = TABLE[state].exits[event]
    assert sum_up(TABLE[state].held, event, way.effects) == set(TABLE[way.to].held)


@pytest.mark.parametrize(("state", "event"), EXITS)
def test_a_forgotten_release_would_be_seen(state, event):
    """The sum can fail: leaving out any step that gives something back changes it."""
    way = TABLE[state].exits[event]
    for step in way.effects:
        if step in GIVES_BACK or step in SUBMITS:
            rest = [other for other in way.effects if other is not step]
            assert sum_up(TABLE[state].held, event, rest) != set(TABLE[way.to].held)


def test_every_state_ends_by_its_deadline_and_by_a_cancel():
    for state in set(State) - FINAL:
        row = TABLE[state]
        assert row.deadline is not Deadline.NONE, state
        assert {Event.TIMEOUT, Event.CANCEL} <= row.exits.keys(), state
        if Held.PREFILL in row.held:
            assert Event.PREFILL_LOST in row.exits, state
        if Held.DECODE in row.held:
            assert Event.DECODE_LOST in row.exits, state
    for state in FINAL:
        assert not TABLE[state].exits
        assert not TABLE[state].held


def test_every_state_can_be_reached_and_left_for_an_end():
    reached, edge = {State.PLACING}, [State.PLACING]
    while edge:
        for way in TABLE[edge.pop()].exits.values():
            if way.to not in reached:
                reached.add(way.to)
                edge.append(way.to)
    assert reached == set(State)


def test_each_event_and_step_is_described_and_used():
    assert set(EVENTS) == set(Event) == {e for row in TABLE.values() for e in row.exits}
    steps = {s for row in TABLE.values() for way in row.exits.values() for s in way.effects}
    assert set(EFFECTS) == set(Effect) == steps
