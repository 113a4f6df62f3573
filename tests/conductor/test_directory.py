"""Goal: the directory tells how much of a prompt each row holds, and is bounded."""

import random

import numpy as np

from tandem.conductor.directory import Chain, PrefixDirectory, cut_to_group

SIZE = 4


def match(directory, keys, num_rows=200):
    hits = np.zeros(num_rows, np.int64)
    directory.match(Chain(keys, SIZE), hits)
    return {row: int(hits[row]) for row in np.flatnonzero(hits)}


def test_every_row_gets_the_length_that_it_holds():
    chance = random.Random(4)
    for _ in range(200):
        directory, keys = PrefixDirectory(), list(range(chance.randrange(1, 40)))
        lengths = {row: chance.randrange(len(keys) + 1) for row in chance.sample(range(200), 30)}
        for row, length in lengths.items():
            directory.note_stored(row, keys[:length])
        assert match(directory, keys) == {r: n * SIZE for r, n in lengths.items() if n}
        assert match(directory, [-1, *keys]) == {}


def test_what_is_removed_or_cleared_is_not_found():
    directory = PrefixDirectory()
    for row in (3, 5):
        directory.note_stored(row, range(10))
    directory.note_removed(3, range(6, 10))
    assert match(directory, range(10)) == {3: 24, 5: 40}
    directory.note_cleared(5)
    assert match(directory, range(10)) == {3: 24}
    directory.note_cleared(3)
    assert len(directory) == 0


def test_it_is_bounded():
    directory = PrefixDirectory(max_keys=100)
    for chain in range(50):
        directory.note_stored(1, range(chain * 100, chain * 100 + 60))
    assert len(directory) == 100
    assert match(directory, range(4900, 4960)) == {1: 60 * SIZE}


def test_a_group_cuts_each_row_to_its_longest_prefix_with_a_whole_end():
    chance = random.Random(6)
    for _ in range(200):
        depth, num_keys = chance.randrange(1, 6), chance.randrange(1, 30)
        group, rows = PrefixDirectory(), chance.sample(range(100), 20)
        hits, expected = np.zeros(100, np.int64), np.zeros(100, np.int64)
        has_group = np.zeros(100, np.bool_)
        for row in rows:
            length = chance.randrange(num_keys + 3)  # Of another chain, perhaps, and longer.
            held = {key for key in range(num_keys) if chance.random() < 0.8}
            group.note_stored(row, held)
            hits[row] = length * SIZE
            has_group[row] = chance.random() < 0.8
            whole = [
                end
                for end in range(1, min(length, num_keys) + 1)
                if held.issuperset(range(max(end - depth, 0), end))
            ]
            cut = max(whole, default=0) * SIZE
            expected[row] = cut if has_group[row] else hits[row]
        cut_to_group(Chain(range(num_keys), SIZE), group.find, depth, hits, has_group)
        assert hits.tolist() == expected.tolist()
