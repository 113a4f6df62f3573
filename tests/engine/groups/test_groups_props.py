"""Goal: a prefix is taken up exactly where every group can go on, and the right states are kept.

Method: Hypothesis. A toy model holds, token by token, what attention and states read; a hit is
right if the toy model has all of it, and no longer one has. Snapshots against invariants, and
against an exhaustive count of what a set of them saves.
"""

import hypothesis.strategies as st
from hypothesis import given, settings

from tandem.engine.groups.hits import Holdings, find_hit
from tandem.engine.groups.snapshots import Snapshot, SnapshotTable, choose_snapshots
from tandem.engine.groups.specs import (
    FullGroup,
    StateGroup,
    WindowGroup,
    list_needed,
    list_released,
)

LENGTH = 48
STEP = 4

full_groups = st.builds(
    FullGroup,
    layers=st.just((0,)),
    block_size=st.sampled_from([4, 8, 12]),
    bytes_per_block=st.just(8),
)
window_groups = st.builds(
    WindowGroup,
    layers=st.just((1,)),
    block_size=st.sampled_from([4, 8]),
    bytes_per_block=st.just(8),
    window=st.integers(1, 20),
)
state_groups = st.builds(StateGroup, layers=st.just((2,)), bytes_per_state=st.just(64))
groups_of_models = st.lists(
    st.one_of(full_groups, window_groups, state_groups), min_size=1, max_size=4
)


@st.composite
def holdings_of_models(draw):
    """Mostly whole holdings, so that hits are long, with holes."""
    holdings = []
    for group in draw(groups_of_models):
        if isinstance(group, StateGroup):
            present = draw(st.sets(st.integers(1, LENGTH)))
        else:
            count = LENGTH // group.block_size
            holes = draw(st.sets(st.integers(0, count - 1), max_size=2))
            present = set(range(count)) - holes
        holdings.append(Holdings(group, present))
    return holdings


def can_go_on(held, position):
    """Whether each token that the next one reads is in a block that is there."""
    group = held.group
    if isinstance(group, StateGroup):
        return position in held.present
    reach = position if isinstance(group, FullGroup) else min(group.window - 1, position)
    return all(t // group.block_size in held.present for t in range(position - reach, position))


@given(holdings_of_models(), st.integers(0, LENGTH))
@settings(max_examples=400, deadline=None)
def test_a_hit_is_the_longest_at_which_all_groups_can_go_on(holdings, max_tokens):
    hit = find_hit(holdings, max_tokens, STEP)
    has_states = any(isinstance(held.group, StateGroup) for held in holdings)
    right = [
        p
        for p in range(1, max_tokens + 1)
        if (has_states or p % STEP == 0) and all(can_go_on(held, p) for held in holdings)
    ]
    assert hit.position == max(right, default=0)
    if hit.limiting is not None:
        # Something of that group is indeed not there for a longer prefix.
        held = holdings[hit.limiting]
        assert any(not can_go_on(held, p) for p in range(hit.position + 1, max_tokens + 1))


@given(window_groups, st.lists(st.integers(0, 9), max_size=12))
def test_a_window_keeps_what_it_needs_and_no_more(group, steps):
    """Blocks released on the way and blocks needed at the end are all that there were."""
    position, kept = 0, set()
    for count in steps:
        end = position + count
        kept |= set(range(-(-position // group.block_size), -(-end // group.block_size)))
        kept -= set(list_released(group, position, end))
        position = end
    needed = set(list_needed(group, position))
    assert needed <= kept
    # No more than the window, its two broken ends, and nothing that was never reached.
    assert len(kept) <= (group.window - 1) // group.block_size + 2


@given(st.integers(0, 99), st.integers(0, 99), st.lists(st.integers(-5, 120)), st.integers(0, 30))
def test_snapshots_are_where_they_are_wanted(start, end, marks, every):
    chosen = choose_snapshots(start, end, marks, every)
    assert chosen == sorted(set(chosen))
    assert all(start < position <= end for position in chosen)
    if end > start:
        assert chosen[-1] == end
        assert {mark for mark in marks if start < mark <= end} <= set(chosen)
        if every:
            gaps = zip([start, *chosen], chosen, strict=False)
            assert all(after - before <= every for before, after in gaps)


@given(st.data())
@settings(deadline=None)
def test_the_table_gives_up_what_saves_least(data):
    """Of a chain of states, any number of slots keeps the set of that size built by one rule."""
    table = SnapshotTable(data.draw(st.integers(1, 5)))
    chains, pinned = {0: []}, []
    for _ in range(data.draw(st.integers(0, 30))):
        chain = data.draw(st.sampled_from(sorted(chains)))
        path = chains[chain]
        match data.draw(st.sampled_from(["add", "branch", "use", "release"])):
            case "add":
                position = (path[-1].position if path else 0) + data.draw(st.integers(1, 50))
                parent = next((s.key for s in reversed(path) if s.key in table), None)
                snapshot = Snapshot(b"%d/%d" % (chain, position), position, parent)
                before = {key: table.count_worth(key) for key in table._kept}
                free = [w for key, w in before.items() if key not in table._pinned]
                gone = table.add(snapshot)
                if gone is None:
                    assert not free
                else:
                    path.append(snapshot)
                    assert all(before[s.key] == min(free) for s in gone)
            case "branch":
                chains[len(chains)] = list(path)
            case "use":
                here = [s for s in path if s.key in table]
                if here:
                    pinned.append(table.use(here[-1].key).key)
            case "release" if pinned:
                table.release(pinned.pop())
        table.check()
        assert all(key in table for key in pinned)
