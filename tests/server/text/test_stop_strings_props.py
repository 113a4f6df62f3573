"""Stop strings end a text at the same place however it is cut.

Method: the oracle reads the whole text character by character and asks of every prefix whether it
ends in a stop string; the matcher gets the same text in arbitrary portions.
"""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tandem.server.text.stop_strings import StopMatcher, StopStrings

# Few letters, so that stop strings overlap themselves and each other.
texts = st.text("ab\n", max_size=30)
stops = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=5)


def oracle(text: str, strings: list[str], *, keep: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [s for s in strings if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if keep else end - len(longest)], longest
    return text, None


def run(portions: list[str], strings: list[str], *, keep: bool) -> tuple[list[str], StopMatcher]:
    matcher = StopMatcher(StopStrings(strings), keep_match=keep)
    pieces = []
    for portion in portions:
        pieces.append(matcher.feed(portion))
        if matcher.matched is not None:
            return pieces, matcher
    pieces.append(matcher.flush())
    return pieces, matcher


@given(texts, stops, st.lists(st.integers(0, 30), max_size=30), st.booleans())
def test_any_cut_gives_the_oracles_text(text, strings, cuts, keep):
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    portions = [text[a:b] for a, b in pairwise(bounds)]
    pieces, matcher = run(portions, strings, keep=keep)
    assert ("".join(pieces), matcher.matched) == oracle(text, strings, keep=keep)


@given(texts, stops)
def test_nothing_is_held_longer_than_it_can_matter(text, strings):
    matcher = StopMatcher(StopStrings(strings), keep_match=False)
    ready = matcher.feed(text)
    if matcher.matched is None:
        held = text[len(ready) :]
        could_match = [k for s in strings for k in range(len(s)) if text.endswith(s[:k])]
        assert len(held) == max(could_match)


def test_a_stop_string_across_pieces_is_not_emitted():
    pieces, matcher = run(["Hello ST", "O", "P there"], ["STOP"], keep=False)
    assert pieces == ["Hello ", "", ""]
    assert matcher.matched == "STOP"


def test_what_only_looked_like_a_stop_string_comes_out():
    pieces, matcher = run(["Hello ST", "ONE"], ["STOP"], keep=False)
    assert pieces == ["Hello ", "STONE", ""]
    assert matcher.matched is None
