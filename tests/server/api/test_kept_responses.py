"""The memory of responses is bounded by bytes and time, for each client on its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import NotFoundError
from tandem.server.api.kept_responses import KeptResponse, KeptResponses

ANN, BOB = b"ann", b"bob"
SIZE = KeptResponse("x", None, b"", b"").size_bytes


def keep(memory, owner, name, parent=None, size=0, now_s=0.0):
    found = None if parent is None else memory.find(owner, parent, now_s)
    memory.add(owner, KeptResponse(name, found, b"d" * size, name.encode()), now_s)


def has(memory, owner, name, now_s=0.0):
    try:
        memory.find(owner, name, now_s)
    except NotFoundError:
        return False
    return True


def test_conversations_are_chains_and_keys_see_their_own():
    memory = KeptResponses(100 * SIZE, 60.0)
    keep(memory, ANN, "1")
    keep(memory, ANN, "2", "1")
    keep(memory, ANN, "3", "1")
    assert memory.find(ANN, "2", 0.0).list_messages() == [b"1", b"2"]
    assert memory.find(ANN, "3", 0.0).list_messages() == [b"1", b"3"]
    assert not has(memory, BOB, "1")
    with pytest.raises(NotFoundError, match="not kept"):
        memory.remove(BOB, "1", 0.0)


def test_the_least_recently_used_conversation_goes_first():
    memory = KeptResponses(5 * SIZE, 60.0)
    keep(memory, ANN, "1")
    keep(memory, ANN, "2", "1")
    keep(memory, ANN, "a")
    keep(memory, BOB, "b")
    assert has(memory, ANN, "1")
    keep(memory, ANN, "c", size=SIZE)
    assert [has(memory, ANN, name) for name in ("a", "1", "2", "c")] == [False, True, True, True]
    assert has(memory, BOB, "b")
    keep(memory, ANN, "huge", size=9 * SIZE)
    assert not has(memory, ANN, "huge")
    assert memory.measure(ANN) == 0


def test_conversations_expire_by_their_last_use():
    memory = KeptResponses(100 * SIZE, 60.0)
    keep(memory, ANN, "1")
    keep(memory, ANN, "2", "1", now_s=50.0)
    keep(memory, ANN, "a")
    assert has(memory, ANN, "1", 100.0)
    assert not has(memory, ANN, "a", 100.0)
    assert has(memory, ANN, "2", 160.0)
    assert not has(memory, ANN, "2", 221.0)
    assert memory.measure(ANN) == 0


def test_a_deleted_response_leaves_the_conversation_of_others():
    memory = KeptResponses(100 * SIZE, 60.0)
    keep(memory, ANN, "1")
    keep(memory, ANN, "2", "1")
    memory.remove(ANN, "1", 0.0)
    assert not has(memory, ANN, "1")
    assert memory.find(ANN, "2", 0.0).list_messages() == [b"1", b"2"]
    memory.remove(ANN, "2", 0.0)
    assert memory.measure(ANN) == 0


def test_a_response_whose_conversation_is_forgotten_is_not_kept():
    memory = KeptResponses(100 * SIZE, 60.0)
    keep(memory, ANN, "1")
    late = KeptResponse("2", memory.find(ANN, "1", 0.0), b"", b"")
    memory.remove(ANN, "1", 0.0)
    memory.add(ANN, late, 0.0)
    assert not has(memory, ANN, "2")
    assert memory.measure(ANN) == 0


def test_all_clients_together_are_bounded_and_the_largest_gives_way():
    """A flood under many keys takes no more than the whole may, and nothing of small clients."""
    memory = KeptResponses(10 * SIZE, 60.0, max_total_bytes=30 * SIZE)
    keep(memory, ANN, "small")
    keep(memory, BOB, "old", size=SIZE)
    owners = [b"key%d" % number for number in range(50)]
    for owner in owners:
        for name in "abc":
            keep(memory, owner, name, size=2 * SIZE)
            assert memory.num_bytes <= 30 * SIZE
    assert has(memory, ANN, "small") and has(memory, BOB, "old")
    # The last to come is served, too.
    assert has(memory, owners[-1], "c")
    assert memory.num_bytes == sum(map(memory.measure, [ANN, BOB, *owners]))


def test_clients_that_left_nothing_take_no_memory():
    """Whatever a client kept expires, and then it is not known any more."""
    memory = KeptResponses(10 * SIZE, 60.0)
    for number in range(1000):
        keep(memory, b"key%d" % number, "1", now_s=float(number))
    assert memory.num_clients == 61
    memory.remove(b"key999", "1", 999.0)
    assert memory.num_clients == 60
    keep(memory, ANN, "1", now_s=2000.0)
    assert (memory.num_clients, memory.num_bytes) == (1, memory.measure(ANN))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "update", "remove", "find", "wait"]),
            st.integers(0, 9),
            st.integers(0, 9),
            st.integers(0, 3 * SIZE),
        ),
        max_size=60,
    )
)
def test_bytes_are_those_of_what_is_kept(steps):
    """Whatever happens, the bound holds, and a memory without responses is empty."""
    memory = KeptResponses(8 * SIZE, 60.0)
    now_s, made = 0.0, 0
    for verb, first, second, size in steps:
        known = [name for name in map(str, range(made)) if has(memory, ANN, name, now_s)]
        chosen = known[first % len(known)] if known else None
        if verb == "add":
            parent = chosen if second % 2 else None
            keep(memory, ANN, str(made), parent, size, now_s)
            made += 1
        elif verb == "update" and chosen is not None:
            memory.update(ANN, memory.find(ANN, chosen, now_s), b"d" * size, b"m")
        elif verb == "remove" and chosen is not None:
            memory.remove(ANN, chosen, now_s)
        elif verb == "wait":
            now_s += 10.0 * second
        assert memory.measure(ANN) <= memory.max_bytes
    for name in map(str, range(made)):
        if has(memory, ANN, name, now_s):
            memory.remove(ANN, name, now_s)
    assert memory.measure(ANN) == 0
