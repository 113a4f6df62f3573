"""Caches of routed experts: which of a layer's experts stay in the fast memory. Pure decisions.

One policy a layer. The caller moves the weights: it asks ``touch`` once a step with the experts
that the step computes, and obeys.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

__all__ = ["EXPERT_POLICIES", "CachePolicy", "Insertion", "LruPolicy"]


class Insertion(NamedTuple):
    """An expert that takes a slot."""

    expert_id: int
    evicted: int
    """The expert that gives up the slot; -1: a free one is taken."""


class CachePolicy(Protocol):
    """Decides about the slots of one layer."""

    def touch(self, expert_ids: Sequence[int], max_insertions: int) -> list[Insertion]:
        """Note that a step computes these experts; return which of them take slots.

        Experts of ``expert_ids`` that are not held and take no slot pass by the cache. None of
        ``expert_ids`` is evicted.

        Args:
            expert_ids: distinct, in any order.
            max_insertions: at most so many are returned.
        """
        ...

    def guess(self, expert_ids: Sequence[int], max_insertions: int) -> list[Insertion]:
        """Return which of the experts that a next step may compute take slots, likeliest first.

        No use is counted; an expert that is held is left where it is.
        """
        ...

    def forget(self, expert_id: int) -> None:
        """Note that an expert is not held after all: its weights could not be moved."""
        ...


class LruPolicy:
    """Hold the experts that were computed last.

    Args:
        num_slots: at least 1.
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 1, num_slots
        self._num_slots = num_slots
        self._held: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""

    def touch(self, expert_ids: Sequence[int], max_insertions: int) -> list[Insertion]:
        """See ``CachePolicy``."""
        for expert_id in expert_ids:
            if expert_id in self._held:
                self._held.move_to_end(expert_id)
        return self._insert(expert_ids, max_insertions)

    def guess(self, expert_ids: Sequence[int], max_insertions: int) -> list[Insertion]:
        """See ``CachePolicy``."""
        return self._insert(expert_ids, max_insertions)

    def forget(self, expert_id: int) -> None:
        """See ``CachePolicy``."""
        self._held.pop(expert_id, None)

    def _insert(self, expert_ids: Sequence[int], max_insertions: int) -> list[Insertion]:
        wanted = set(expert_ids)
        insertions: list[Insertion] = []
        for expert_id in expert_ids:
            if expert_id in self._held:
                continue
            evicted = -1
            if len(insertions) == max_insertions:
                break
            if len(self._held) == self._num_slots:
                evicted = next((held for held in self._held if held not in wanted), -1)
                if evicted == -1:
                    break
                del self._held[evicted]
            self._held[expert_id] = None
            insertions.append(Insertion(expert_id, evicted))
        return insertions


EXPERT_POLICIES: Mapping[str, Callable[[int], CachePolicy]] = MappingProxyType({"lru": LruPolicy})
"""By name; each takes the slots of a layer."""
