"""A WRITE that failed never lands on what the same process wrote later.

Goal: once a WRITE has ended, in whatever way, its bytes touch nothing that a later operation of the
process was acknowledged for, over reopened segments, other engines and other transports. Method:
first a proxy that holds the old bytes back (the same in every run), then a process that is stopped
in mid-write or merely slow, over all pairs of transports, lanes and reopenings. The decider alone
is proved on a clock of its own in ``test_fences_props.py``.
"""

import contextlib
import dataclasses
import time

import numpy as np
import pytest
from late_writes import FarProcess, all_cases, run_case
from tests_transfer_world import Op, Transfer, move
from transfer_faults import FaultProxy

from tandem._native import RailState
from tandem.core.errors import CancelledError, DeadlineError, TandemError

MIB = 1 << 20


def wait_until(condition, limit_s=60.0):
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "did not come true in time"
        time.sleep(0.002)


@contextlib.contextmanager
def held_write(world, end, transports=("tcp",)):
    """A WRITE of ones whose bytes a proxy holds while it ends; yields what a second one needs."""
    with FaultProxy(3) as proxy:
        giver = world.engine(name="giver", advertise=(proxy.address,))
        proxy.target = giver.address
        # Long: the rail must not be left for its silence before the test ends the batch.
        how = {"stall_ms": 60_000, "lease_ms": 60_000}
        taker = world.engine(transports=transports, **how)
        remote = giver.allocate(MIB)
        segment = taker.open(giver.address)
        wait_until(lambda: all(r.state == RailState.HEALTHY for r in segment.rails))
        local = taker.register(np.full(MIB, 1, np.uint8))
        proxy.hold()
        transfer = Transfer(Op.WRITE, local, segment, remote.offset, MIB)
        batch = taker.submit([transfer], transport="tcp", deadline_s=60)
        match end:
            case "cancel":
                batch.cancel()
                with pytest.raises(CancelledError):
                    batch.wait(60)
            case "deadline":
                with pytest.raises(DeadlineError):
                    batch.wait(0)
            case "close":
                segment.close()
                with pytest.raises(CancelledError):
                    batch.wait(60)
        yield giver, taker, segment, remote, proxy, how
        # The peer has left the old path, so what the proxy held reaches nothing.
        assert proxy.num_held_open == 0
        proxy.release()
        wait_until(lambda: not proxy.held and len(proxy.pairs) < 6)
        other = world.engine(transports=("tcp",))
        back = np.zeros(MIB, np.uint8)
        move(other, other.open(giver.address), Op.READ, other.register(back), remote.offset, MIB)
        assert (back == 2).all()
        assert (remote.array == 2).all()


@pytest.mark.parametrize("transport", ["tcp", "shm", "cma"])
@pytest.mark.parametrize(
    ("end", "reopening"),
    [
        (end, reopening)
        for end in ("cancel", "deadline", "close")
        for reopening in ("same", "again", "other engine")
        if (end, reopening) != ("close", "same")  # A segment that was closed is not the same.
    ],
)
def test_what_a_failed_write_left_on_its_way_is_fenced(world, end, reopening, transport):
    with held_write(world, end, ("shm", "cma", "tcp")) as (_, taker, segment, remote, _, how):
        if reopening == "other engine":
            taker = world.engine(transports=("shm", "cma", "tcp"), **how)
        if reopening != "same":
            if end != "close" and reopening == "again":
                segment.close()
            segment = taker.open(segment.address)
        local = taker.register(np.full(MIB, 2, np.uint8))
        move(taker, segment, Op.WRITE, local, remote.offset, MIB, transport=transport)


def test_own_segment_is_fenced_too(world):
    """An engine that reached itself over tcp writes to its own memory directly."""
    with FaultProxy(3) as proxy:
        engine = world.engine(transports=("tcp",), stall_ms=60_000, advertise=(proxy.address,))
        address = f"127.0.0.1:{engine.address.rsplit(':', 1)[1]}"
        proxy.target = address
        remote = engine.allocate(MIB)
        segment = engine.open(address)
        wait_until(lambda: all(r.state == RailState.HEALTHY for r in segment.rails))
        old = engine.register(np.full(MIB, 1, np.uint8))
        proxy.hold()
        batch = engine.submit([Transfer(Op.WRITE, old, segment, remote.offset, MIB)])
        batch.cancel()
        new = engine.register(np.full(MIB, 2, np.uint8))
        move(engine, engine.local_segment, Op.WRITE, new, remote.offset, MIB)
        assert proxy.num_held_open == 0
        assert (remote.array == 2).all()


def test_copies_wait_for_nothing_without_a_debt(world):
    """What ended well, or was only read, leaves nothing to be fenced: copies need no answer."""
    with FaultProxy(1) as proxy:
        giver = world.engine()
        proxy.target = giver.address
        remote = giver.allocate(MIB)
        taker = world.engine(transports=("shm", "tcp"), lease_ms=60_000, stall_ms=60_000)
        local = taker.register(np.full(MIB, 2, np.uint8))
        first = taker.open(proxy.address)
        move(taker, first, Op.WRITE, local, remote.offset, MIB, transport="tcp")
        move(taker, first, Op.WRITE, local, remote.offset, MIB)
        reading = taker.submit(
            [Transfer(Op.READ, local, first, remote.offset, MIB)], transport="tcp"
        )
        reading.cancel()
        proxy.hold()  # From now on no answer comes.
        move(taker, first, Op.WRITE, local, remote.offset, MIB, deadline_s=5)
        proxy.release()
        taker.close(deadline_s=5)


def test_a_copy_that_waits_for_a_fence_ends_by_its_deadline(world):
    """The peer cannot answer: the copy does not overtake, and the batch ends in time."""
    with held_write(world, "cancel", ("shm", "tcp")) as (giver, taker, segment, remote, _, how):
        with FaultProxy(2) as control:
            control.target = giver.address
            other = world.engine(transports=("shm",), **how)
            path = other.open(control.address)
            local = other.register(np.full(MIB, 3, np.uint8))
            control.hold()
            with pytest.raises(DeadlineError):
                move(other, path, Op.WRITE, local, remote.offset, MIB, deadline_s=0.2)
            assert not (remote.array == 3).any()
            control.release()
            other.close(deadline_s=5)
            wait_until(lambda: not control.pairs)  # Its good-bye has gone through.
        new = taker.register(np.full(MIB, 2, np.uint8))
        move(taker, segment, Op.WRITE, new, remote.offset, MIB, transport="shm")


def test_unread_bytes_of_a_writer_that_hung_up_are_dropped():
    """A writer that died fences itself: what its connection still holds is not applied."""
    with FarProcess() as far, far.make_engine(("shm", "tcp")) as engine:
        segment = engine.open(far.address)
        local = engine.register(np.full(8 * MIB, 2, np.uint8))
        move(engine, segment, Op.WRITE, local, far.offset, 1, transport="shm")
        with far.writer_of_another_process(far.offset, 8 * MIB) as writer:
            far.stop()
            writer.begin()
            writer.kill()
            move(engine, segment, Op.WRITE, local, far.offset, 8 * MIB, transport="shm")
            far.go_on()
        far.settle()
        assert far.count(far.offset, 8 * MIB, 2) == 8 * MIB


QUICK = [case for number, case in enumerate(all_cases()) if number % 5 == 0]


def test_late_writes_of_a_stopped_process():
    """Every fifth combination; the long form runs them all."""
    with FarProcess() as far:
        wrong = [case for number, case in enumerate(QUICK) if not run_case(far, case, number)]
        far.check_all(len(QUICK))
    assert not wrong


@pytest.mark.slow
def test_late_writes_of_a_stopped_process_in_all_combinations():
    cases = list(all_cases()) * 3
    with FarProcess() as far:
        wrong = [case for number, case in enumerate(cases) if not run_case(far, case, number)]
        far.check_all(len(cases))
    print(f"{len(cases)} rounds, {len(wrong)} with old bytes")
    assert not wrong


SLOW = [case for case in all_cases() if case.end != "lost" and case.reopening != "same"]


@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.slow), 9], ids=["all combinations", "every ninth"]
)
def test_late_writes_of_a_slow_process(step):
    """It is not stopped, and reads what the first WRITE left behind beside the second one."""
    cases = [dataclasses.replace(case, is_stopped=False) for case in SLOW[::step]]
    with FarProcess() as far, far.slowed_down():
        wrong = [case for number, case in enumerate(cases) if not run_case(far, case, number)]
        far.check_all(len(cases))
    print(f"{len(cases)} rounds, {len(wrong)} with old bytes")
    assert not wrong


def test_calls_that_were_given_up_do_not_follow_those_of_a_later_segment(world):
    """A call that ended unanswered is executed before later ones or not at all."""
    seen: list[bytes] = []

    def handler(calls):
        seen.extend(call.payload for call in calls)
        return [b""] * len(calls)

    with FaultProxy(5) as proxy:
        giver = world.engine()
        proxy.target = giver.address
        giver.serve_calls(handler)
        taker = world.engine(lease_ms=60_000)
        first = taker.open(proxy.address)
        taker.call(first, b"warm")
        proxy.hold()
        pending = taker.begin_call(first, b"old")
        first.close()
        with contextlib.suppress(TandemError):
            pending.wait(1)
        second = taker.open(proxy.address)
        taker.call(second, b"new")
        assert proxy.num_held_open <= 1  # The control connection, which carries no calls.
        proxy.release()
        taker.call(second, b"newer")
        assert seen == [b"warm", b"new", b"newer"]
