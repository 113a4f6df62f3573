"""Groups of layers that keep the same of a sequence, and what each needs to go on at a token.

Layers of one kind share a group: blocks of all tokens (*full*; latents are such a group as well),
blocks of the last tokens (*window*), or one state at one token (*state*). Sizes of groups are
independent of each other. Going on at token p means: p tokens are known, the next one computed is
at position p.

Pure: no torch, no files.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["FullGroup", "GroupSpec", "StateGroup", "WindowGroup", "list_needed", "list_released"]

PositiveInt = Annotated[int, Meta(ge=1)]


class _Group(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    layers: tuple[int, ...]
    """Indices of the layers, ascending; of those that share one KV, the one that writes it."""


class _Blocks(_Group, frozen=True, kw_only=True):
    block_size: PositiveInt
    """Tokens of a block."""
    bytes_per_block: PositiveInt


class FullGroup(_Blocks, frozen=True, kw_only=True, tag="full"):
    """Blocks of all tokens."""


class WindowGroup(_Blocks, frozen=True, kw_only=True, tag="window"):
    """Blocks of the tokens that the next one still sees."""

    window: PositiveInt
    """A token sees itself and ``window - 1`` before it."""


class StateGroup(_Group, frozen=True, kw_only=True, tag="state"):
    """One state, a function of the tokens so far."""

    bytes_per_state: PositiveInt


GroupSpec = FullGroup | WindowGroup | StateGroup


def list_needed(group: FullGroup | WindowGroup, position: int) -> range:
    """Return the indices of the blocks that hold what is needed to go on at ``position``.

    The last one may be filled in part: the next token's KV goes behind.
    """
    end = -(-position // group.block_size)
    if isinstance(group, FullGroup):
        return range(end)
    first_seen = max(position - (group.window - 1), 0)
    return range(first_seen // group.block_size if first_seen < position else end, end)


def list_released(group: WindowGroup, before: int, position: int) -> range:
    """Return the blocks that a sequence no longer sees when it has got from ``before`` on."""
    size, reach = group.block_size, group.window - 1
    return range(max(before - reach, 0) // size, max(position - reach, 0) // size)
