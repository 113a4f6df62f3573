"""The lease decides by the times it is given; no clock, no waiting."""

import itertools

from tandem.rpc.lease import Lease


def test_expires_only_after_the_whole_lease_in_silence():
    lease = Lease(lease_s=10.0, beat_s=1.0, now_s=100.0)
    assert not lease.is_expired(110.0)
    assert lease.is_expired(110.01)


def test_anything_heard_renews():
    lease = Lease(lease_s=10.0, beat_s=1.0, now_s=0.0)
    lease.note_heard(9.0)
    assert not lease.is_expired(19.0)
    assert lease.silence_s(12.0) == 3.0
    assert lease.is_expired(19.5)


def test_a_beat_is_due_half_an_interval_after_the_last_word():
    lease = Lease(lease_s=10.0, beat_s=1.0, now_s=0.0)
    assert lease.check_interval_s == 0.5
    assert not lease.is_beat_due(0.4)
    assert lease.is_beat_due(0.5)
    lease.note_said(0.5)
    assert not lease.is_beat_due(0.9)


def test_saying_does_not_count_as_hearing():
    lease = Lease(lease_s=10.0, beat_s=1.0, now_s=0.0)
    lease.note_said(9.9)
    assert lease.is_expired(10.1)


def test_checked_in_time_no_silence_of_ours_reaches_the_interval():
    # A check every half interval, however they fall, leaves less than one interval of silence.
    lease = Lease(lease_s=10.0, beat_s=1.0, now_s=0.0)
    said = [0.0]
    for step in range(1, 40):
        now_s = step * lease.check_interval_s
        if step % 7 == 3:
            lease.note_said(now_s - 0.2)
            said.append(now_s - 0.2)
        if lease.is_beat_due(now_s):
            lease.note_said(now_s)
            said.append(now_s)
    assert max(b - a for a, b in itertools.pairwise(said)) < lease.beat_s


def test_time_that_we_slept_through_is_nobodys_silence():
    lease = Lease(lease_s=10.0, beat_s=1.0, now_s=0.0)
    lease.note_look(0.5)
    lease.note_look(70.0)  # The whole machine stood still, it may be.
    assert lease.silence_s(70.0) == 1.0
    for now_s in range(71, 80):
        lease.note_look(float(now_s))
    assert not lease.is_expired(79.0)
    assert lease.is_expired(79.1)


def test_looks_that_come_late_do_not_keep_a_peer_alive():
    lease = Lease(lease_s=10.0, beat_s=1.0, now_s=0.0)
    for now_s in (5.0, 10.0):
        lease.note_look(now_s)
    assert lease.silence_s(10.0) == 10.0
    # A lease is slept through between any two looks: it takes longer, not for ever.
    lease.note_heard(10.0)
    for step in range(1, 22):
        assert not lease.is_expired(10.0 * step)
        lease.note_look(10.0 + 10.0 * step)
    assert lease.is_expired(220.0)


def test_what_was_heard_after_a_sleep_is_not_heard_in_the_future():
    lease = Lease(lease_s=10.0, beat_s=1.0, now_s=0.0)
    lease.note_heard(69.0)
    lease.note_look(70.0)
    assert lease.silence_s(70.0) == 0.0
