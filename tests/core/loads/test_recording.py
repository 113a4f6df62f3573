"""Goal: a trace of live requests tells which prefixes are shared, and nothing of what they say."""

from tandem.core.loads.recording import TraceHasher


def test_prompts_share_hashes_as_far_as_their_blocks_are_equal():
    hasher = TraceHasher(b"secret", 4)
    first = hasher.make_row(0.0, list(range(10)), 3)
    longer = hasher.make_row(1.5, [*range(10), 10, 11, 12], 0)
    other = hasher.make_row(2.0, [9, *range(1, 10)], 1)
    assert first.hash_ids == [0, 1, 2]
    # The third block of the first has two tokens: of the second, it has four.
    assert longer.hash_ids == [0, 1, 3, 4]
    assert not set(other.hash_ids) & {0, 1, 2, 3, 4}, "equal blocks after unequal ones"
    assert (longer.timestamp, longer.input_length, longer.output_length) == (1500.0, 13, 0)
    assert hasher.make_row(3.0, list(range(10)), 3).hash_ids == first.hash_ids


def test_realms_share_nothing():
    hasher = TraceHasher(b"secret", 4)
    ids = [hasher.make_row(0.0, [1, 2, 3, 4], 1, realm).hash_ids for realm in ("", "a", "b", "a")]
    assert ids == [[0], [1], [2], [1]]
