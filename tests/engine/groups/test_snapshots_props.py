"""Goal: the right states are kept and found. Method: Hypothesis, against a plain search."""

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given, settings

from tandem.engine.groups.chain import hash_block, pack_tokens
from tandem.engine.groups.snapshots import Snapshot, SnapshotTable, choose_snapshots


@given(
    st.integers(0, 99),
    st.integers(0, 99),
    st.lists(st.integers(-5, 120)),
    st.integers(0, 30),
    st.integers(1, 9),
)
def test_snapshots_are_where_they_are_wanted(start, end, marks, every, min_gain):
    chosen = choose_snapshots(start, end, marks, every, min_gain)
    assert chosen == sorted(set(chosen))
    assert all(start < position <= end for position in chosen)
    steps = [after - before for before, after in pairwise([start, *chosen])]
    assert all(step >= min_gain for step in steps)
    # What is not there is near what is.
    wanted = {end, *marks, *(range(0, end + 1, every) if every else ())}
    for position in wanted:
        if start + min_gain <= position <= end:
            assert min(abs(position - other) for other in chosen) < min_gain
    if min_gain == 1:
        assert {mark for mark in marks if start < mark <= end} <= set(chosen)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7)


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_the_table_finds_the_longest_and_gives_up_what_saves_least(data):
    """Prompts of two tokens, so that chains share much; blocks of three."""
    table, known, gone, pinned = SnapshotTable(3), {}, set(), []
    for slot in range(data.draw(st.integers(0, 25))):
        tokens = data.draw(TOKENS)
        keys = make_keys(tokens)
        match data.draw(st.sampled_from(["add", "add", "find", "pin", "unpin", "evict", "lose"])):
            case "add":
                parent_key = [b"root", *keys][len(tokens) // 3]
                tail = pack_tokens(tokens[len(tokens) // 3 * 3 :])
                assert (table.find_equal(parent_key, tail) is None) == (tuple(tokens) not in known)
                if tuple(tokens) not in known:
                    shorter = table.find(b"root", keys, tokens, len(tokens) - 1)
                    snapshot = Snapshot(parent_key, tail, len(tokens), slot, shorter)
                    table.add(snapshot)
                    known[tuple(tokens)] = snapshot
            case "find":
                limit = data.draw(st.integers(0, len(tokens)))
                at_blocks = data.draw(st.booleans())
                fitting = [
                    t
                    for t in known
                    if len(t) <= limit
                    and tuple(tokens[: len(t)]) == t
                    and not (at_blocks and len(t) % 3)
                ]
                found = table.find(b"root", keys, tokens, limit, at_blocks=at_blocks)
                assert found is known.get(max(fitting, key=len, default=()))
            case "pin" if known:
                pinned.append(data.draw(st.sampled_from(list(known.values()))))
                pinned[-1].num_pins += 1
                table.touch(pinned[-1])
            case "unpin" if pinned:
                pinned.pop().num_pins -= 1
            case "lose" if known:
                gone.add(data.draw(st.sampled_from(list(known.values()))))
            case "evict":
                worth = data.draw(st.one_of(st.none(), st.integers(1, 9)))
                victim = table.choose_victim(lambda s: s not in gone, worth)
                free = {s for s in known.values() if not s.num_pins}
                values = {s: s.level + table.count_worth(s) for s in free}
                if free & gone:
                    assert victim in gone
                elif worth is None and free:
                    assert values[victim] == min(values.values())
                elif victim is not None:
                    assert values[victim] == min(values.values()) < table._level + worth
                if victim is not None:
                    assert not victim.num_pins
                    table.remove(victim, is_evicted=True)
                    known = {t: s for t, s in known.items() if s is not victim}
        table.check()
        assert set(table) == set(known.values())


def make_keys(tokens):
    keys, parent = [], b"root"
    for start in range(0, len(tokens) - 2, 3):
        parent = hash_block(parent, pack_tokens(tokens[start : start + 3]))
        keys.append(parent)
    return keys


def test_what_nobody_asks_for_goes_in_the_end_however_long_it_is():
    table = SnapshotTable(4)
    old = Snapshot(b"old", b"", 900, 0)
    table.add(old)
    for slot in range(1, 50):
        table.add(Snapshot(b"%d" % slot, b"", 100, slot))
        if len(table) > 4:
            victim = table.choose_victim(lambda s: True)
            table.remove(victim, is_evicted=True)
    assert not old.is_kept
    kept = sorted(s.slot for s in table)
    assert kept == [46, 47, 48, 49]
