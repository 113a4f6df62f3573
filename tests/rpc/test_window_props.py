"""Sender's window and reader's ledger against plain sums.

Method: random sequences of sends, reads and (delayed, reordered) beats between one window and one
ledger; the toy model is a list of what is unread.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import CorruptionError
from tandem.rpc.window import ReadLedger, SendWindow

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 400)),
        st.tuples(st.just("read"), st.just(0)),
        st.tuples(st.just("deliver_beat"), st.integers(0, 5)),
    ),
    max_size=200,
)


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_unread_never_passes_the_bounds_and_never_leaks(steps):
    window, ledger = SendWindow(8, 1000), ReadLedger(8, 1000)
    wire: list[int] = []  # sent, not yet read
    beats: list[tuple[int, int]] = []
    unread: list[int] = []  # sent, not yet told as read
    told = 0
    for action, value in steps:
        if action == "send":
            fits = len(unread) < 8 and sum(unread) + value <= 1000
            assert window.admit(value) == fits
            if fits:
                wire.append(value)
                unread.append(value)
        elif action == "read" and wire:
            if ledger.note_read(wire.pop(0)):
                beats.append((ledger.messages, ledger.bytes))
                ledger.note_told()
        elif action == "deliver_beat" and beats:
            messages, size_bytes = beats.pop(value % len(beats))
            window.acknowledge(messages, size_bytes)
            newly_told = max(0, messages - told)
            del unread[:newly_told]
            told += newly_told
        assert window.unread_messages == len(unread)
        assert window.unread_bytes == sum(unread)
    # A reader who has read all and whose beats have all arrived leaves less than the telling
    # threshold untold, so a sender that waits is never stuck behind a reader that keeps up.
    for size in wire:
        if ledger.note_read(size):
            beats.append((ledger.messages, ledger.bytes))
            ledger.note_told()
    for beat in beats:
        window.acknowledge(*beat)
    assert window.unread_messages < ledger.every_messages
    assert window.unread_bytes < ledger.every_bytes


@pytest.mark.parametrize("claim", [(2, 10), (1, 11)])
def test_a_claim_beyond_what_was_sent_is_refused(claim):
    window = SendWindow(4, 100)
    assert window.admit(10)
    with pytest.raises(CorruptionError, match="claims"):
        window.acknowledge(*claim)
    assert window.unread_messages == 1
