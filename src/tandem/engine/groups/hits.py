"""The longest prefix at which every group has what it needs. Pure.

A group's holdings are those of one chain of tokens: which of its blocks, by index, are there whole,
and at which tokens there is a state. A position counts only where *every* group can go on exactly
there; half a point is a miss.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tandem.engine.groups.specs import FullGroup, GroupSpec, StateGroup, WindowGroup, list_needed

__all__ = ["Hit", "Holdings", "find_hit"]


@dataclass(frozen=True, slots=True)
class Holdings:
    """What is there of one group along one chain of tokens."""

    group: GroupSpec
    present: Collection[int]
    """Indices of whole blocks; of a state group, the tokens at which there is a state."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Where a prefix may be taken up, and which group kept it from being longer."""

    position: int
    """Tokens that need not be computed."""
    limiting: int | None
    """Index of a group that lacks something at the next position; None: all is there."""


def find_hit(holdings: Sequence[Holdings], max_tokens: int, step: int) -> Hit:
    """Return the longest prefix of at most ``max_tokens`` that all groups hold.

    Without a state group, prefixes end at multiples of ``step``; with one, where states are.

    Args:
        holdings: of all groups of the model.
        max_tokens: the last token is computed in any case.
        step: divides the block sizes that prefixes should end with.
    """
    states = [held for held in holdings if isinstance(held.group, StateGroup)]
    if states:
        common = set(states[0].present).intersection(*(held.present for held in states[1:]))
        positions = sorted((p for p in common if p <= max_tokens), reverse=True)
    else:
        positions = list(range(max_tokens // step * step, 0, -step))
    lacking: int | None = None
    if states and max_tokens > 0 and (not positions or positions[0] < max_tokens):
        # Of several with states, one that has none there.
        lacking = next(
            i
            for i, held in enumerate(holdings)
            if isinstance(held.group, StateGroup) and max_tokens not in held.present
        )
    for position in positions:
        missing = _find_missing(holdings, position)
        if missing is None:
            return Hit(position, lacking)
        # The longest one names the group: what shorter ones lack matters less.
        lacking = missing if lacking is None else lacking
    return Hit(0, lacking)


def _find_missing(holdings: Sequence[Holdings], position: int) -> int | None:
    """Return the index of the first group that cannot go on at ``position``."""
    for index, held in enumerate(holdings):
        match held.group:
            case StateGroup():
                if position not in held.present:
                    return index
            case FullGroup() | WindowGroup() as group:
                if any(block not in held.present for block in list_needed(group, position)):
                    return index
    return None
