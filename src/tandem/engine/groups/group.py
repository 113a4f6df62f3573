"""The groups of a model's memory, and the names by which transfers know their blocks.

Layers that keep the same of a sequence share a group (docs/design/engine/kv_groups.md). Within a
group a block is known by its number; whatever passes between the scheduler, tiers and instances
names the group too.
"""

from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Group", "GroupBlock", "GroupMemory"]


class Group(StrEnum):
    """A group of layers."""

    FULL = ""
    """Layers that attend to all tokens: blocks of KV. In a store, their objects name no group."""
    WINDOW = "window"
    """Layers with a window: blocks of KV, of which a request keeps what it still sees."""
    STATE = "state"
    """Layers with a state: slots, each with the states of a sequence."""


class GroupBlock(NamedTuple):
    """A block of KV or a slot of states, by its number within its group."""

    group: Group
    number: int


class GroupMemory(NamedTuple):
    """The memory of a group in which lower tiers read and write blocks."""

    memory: npt.NDArray[np.uint8]
    """Bytes of all blocks, one after the other."""
    block_bytes: int
    num_needed: int = 0
    """Number of blocks before a place in the prompt that a request needs to go on there; 0: all."""
