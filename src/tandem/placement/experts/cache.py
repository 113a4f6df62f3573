"""Cache policies for routed experts: which of a layer's experts stay in fast memory.

Each layer has a policy. The caller moves the weights: it calls ``touch`` once a step with the
experts that the step computes, and carries out the result.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

__all__ = [
    "EXPERT_POLICIES",
    "CachePolicy",
    "FrequencyPolicy",
    "Insertion",
    "LruPolicy",
    "OraclePolicy",
    "SegmentedLruPolicy",
    "StaticPolicy",
]

DECAY = 0.99
"""Factor on an expert's earlier uses at each step of its layer; the weight halves in 69 steps."""
PROTECTED_SHARE = 0.8
"""Share of the slots, in a cache of two segments, for experts that were used more than once."""
LARGEST_UNIT = 1e100
NEVER = 1 << 62


class Insertion(NamedTuple):
    """A decision to put an expert into a slot (a place in fast memory), and which expert it
    evicts.
    """

    expert_id: int
    evicted: int
    """Expert that gives up the slot; -1: the slot was free."""


class CachePolicy(Protocol):
    """Decision which of a layer's routed experts hold its slots (places in fast memory); the caller
    moves the weights.
    """

    def touch(self, expert_ids: Sequence[int], max_insertions: int) -> list[Insertion]:
        """Note that a step computes these experts; return those that get slots.

        Experts of ``expert_ids`` that neither hold nor get a slot are used without being cached.
        None of ``expert_ids`` is evicted.

        Args:
            expert_ids: distinct, in any order.
            max_insertions: largest number of experts to return.
        """
        ...

    def guess(self, expert_ids: Sequence[int], max_insertions: int) -> list[Insertion]:
        """Return which of the experts expected in the next step get slots; likeliest come first.

        No use is counted; experts that hold slots keep them.
        """
        ...

    def forget(self, expert_id: int) -> None:
        """Note that an expert holds no slot after all, because its weights could not be moved."""
        ...


class LruPolicy:
    """Cache policy that keeps the most recently used experts.

    Args:
        num_slots: at least 1.
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 1, num_slots
        self._num_slots = num_slots
        self._held: OrderedDict[int, None] = OrderedDict()
        """Experts with slots, least recently used first."""

    def touch(self, expert_ids: Sequence[int], max_insertions: int) -> list[Insertion]:
        """Note the experts that a step computes as most recently used; return those to put into
        slots, with the experts that they evict.
        """
        for expert_id in expert_ids:
            if expert_id in self._held:
                self._held.move_to_end(expert_id)
        return self._insert(expert_ids, max_insertions)

    def guess(self, expert_ids: Sequence[int], max_insertions: int) -> list[Insertion]:
        """Return which of the experts expected in the next step to put into slots, with the experts
        that they evict.
        """
        return self._insert(expert_ids, max_insertions)

    def forget(self, expert_id: int) -> None:
        """Take note that an expert holds no slot after all, because its weights could not be
        moved.
        """
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


class _SlotPolicy(ABC):
    """Base of the policies other than LRU: the set of held experts, and insertion and eviction."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 1, num_slots
        self._num_slots = num_slots
        self._held: set[int] = set()

    def touch(self, expert_ids: Sequence[int], max_insertions: int) -> list[Insertion]:
        """Count the experts that a step computes; return those to put into slots, with the experts
        that they evict.
        """
        self._note_step(expert_ids)
        return self._insert(expert_ids, max_insertions)

    def guess(self, expert_ids: Sequence[int], max_insertions: int) -> list[Insertion]:
        """Return which of the experts expected in the next step to put into slots, with the experts
        that they evict.
        """
        return self._insert(expert_ids, max_insertions)

    def forget(self, expert_id: int) -> None:
        """Take note that an expert holds no slot after all, because its weights could not be
        moved.
        """
        if expert_id in self._held:
            self._held.remove(expert_id)
            self._drop(expert_id)

    def _insert(self, expert_ids: Sequence[int], max_insertions: int) -> list[Insertion]:
        wanted = set(expert_ids)
        insertions: list[Insertion] = []
        for expert_id in expert_ids:
            if len(insertions) == max_insertions:
                break
            if expert_id in self._held or not self._admits(expert_id):
                continue
            evicted = -1
            if len(self._held) == self._num_slots:
                evicted = self._choose_victim(expert_id, wanted)
                if evicted == -1:
                    continue
                self._held.remove(evicted)
                self._drop(evicted)
            self._held.add(expert_id)
            self._take(expert_id)
            insertions.append(Insertion(expert_id, evicted))
        return insertions

    @abstractmethod
    def _note_step(self, expert_ids: Sequence[int]) -> None:
        """Count the experts that a step computes, before any of them is given a slot."""

    def _admits(self, expert_id: int) -> bool:
        """Return True if an expert may hold a slot at all; a policy may bar rarely used ones."""
        del expert_id
        return True

    @abstractmethod
    def _choose_victim(self, expert_id: int, wanted: set[int]) -> int:
        """Return the held expert to evict in favour of ``expert_id``; -1: none. ``wanted`` are the
        experts of the step, which all policies but the oracle keep.
        """

    def _take(self, expert_id: int) -> None:
        """Take note that an expert now holds a slot; for a policy's own records."""
        del expert_id

    def _drop(self, expert_id: int) -> None:
        """Take note that an expert lost its slot; for a policy's own records."""
        del expert_id


class SegmentedLruPolicy(_SlotPolicy):
    """Cache policy with two LRU parts: experts used once are on probation, others protected.

    A series of experts that are each used once passes through probation and evicts no others.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._most_protected = int(num_slots * PROTECTED_SHARE)
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def _note_step(self, expert_ids: Sequence[int]) -> None:
        for expert_id in expert_ids:
            if expert_id in self._protected:
                self._protected.move_to_end(expert_id)
            elif expert_id in self._probation:
                self._promote(expert_id)

    def _promote(self, expert_id: int) -> None:
        if not self._most_protected:
            self._probation.move_to_end(expert_id)
            return
        del self._probation[expert_id]
        self._protected[expert_id] = None
        if len(self._protected) > self._most_protected:
            oldest, _ = self._protected.popitem(last=False)
            self._probation[oldest] = None

    def _choose_victim(self, expert_id: int, wanted: set[int]) -> int:
        del expert_id
        parts = (self._probation, self._protected)
        return next((held for part in parts for held in part if held not in wanted), -1)

    def _take(self, expert_id: int) -> None:
        self._probation[expert_id] = None

    def _drop(self, expert_id: int) -> None:
        self._probation.pop(expert_id, None)
        self._protected.pop(expert_id, None)


class FrequencyPolicy(_SlotPolicy):
    """Cache policy that keeps the experts with the largest decayed counts of uses.

    An expert gets a slot only if its count exceeds the victim's, so rarely used experts evict none.

    Args:
        num_slots: at least 1.
        decay: factor on earlier uses at each step; 1 counts all uses alike.
    """

    def __init__(self, num_slots: int, decay: float = DECAY) -> None:
        super().__init__(num_slots)
        assert 0 < decay <= 1, decay
        self._growth, self._unit = 1 / decay, 1.0
        self._scores: dict[int, float] = {}
        """Score of each expert: its past uses with decaying weights. Scores are counted in a unit
        that grows with each step, so that the step need not decay all of them.
        """

    def _note_step(self, expert_ids: Sequence[int]) -> None:
        self._unit *= self._growth
        for expert_id in expert_ids:
            self._scores[expert_id] = self._scores.get(expert_id, 0.0) + self._unit
        if self._unit > LARGEST_UNIT:
            unit, self._unit = self._unit, 1.0
            self._scores = {known: score / unit for known, score in self._scores.items()}

    def _choose_victim(self, expert_id: int, wanted: set[int]) -> int:
        scores = self._scores
        free = self._held - wanted
        if not free:
            return -1
        # Among experts of equal score the one with the lowest id is evicted, so that the result
        # does not depend on a set's order.
        victim = min(free, key=lambda held: (scores.get(held, 0.0), held))
        return victim if scores.get(victim, 0.0) < scores.get(expert_id, 0.0) else -1


class StaticPolicy(_SlotPolicy):
    """Cache policy that keeps the experts most often chosen in an earlier text, from their first
    use on.

    Args:
        num_slots: at least 1.
        counts: number of choices of each expert; of equal ones the lower id is kept.
    """

    def __init__(self, num_slots: int, counts: Sequence[int]) -> None:
        super().__init__(num_slots)
        order = sorted(range(len(counts)), key=lambda expert_id: (-counts[expert_id], expert_id))
        self._wanted = frozenset(order[:num_slots])

    def _note_step(self, expert_ids: Sequence[int]) -> None:
        del expert_ids

    def _admits(self, expert_id: int) -> bool:
        return expert_id in self._wanted

    def _choose_victim(self, expert_id: int, wanted: set[int]) -> int:
        del expert_id, wanted
        return -1


class OraclePolicy(_SlotPolicy):
    """Optimal cache policy for replays: evict the expert whose next use is farthest in the future.

    No policy has a higher hit rate. An expert whose next use is later than that of all held ones
    gets no slot; unlike in other policies, an expert of the same step may be evicted. Needs the
    future (Belady, IBM Systems Journal 5 (1966), with bypassing).

    Args:
        num_slots: at least 1.
        future: the experts of all coming steps, in order; ``touch`` must be called with these.
    """

    def __init__(self, num_slots: int, future: Sequence[Sequence[int]]) -> None:
        super().__init__(num_slots)
        self._uses: dict[int, list[int]] = {}
        for place in range(len(future) - 1, -1, -1):
            for expert_id in future[place]:
                self._uses.setdefault(expert_id, []).append(place)

    def _note_step(self, expert_ids: Sequence[int]) -> None:
        for expert_id in expert_ids:
            self._uses[expert_id].pop()

    def _find_next(self, expert_id: int) -> int:
        uses = self._uses.get(expert_id)
        return uses[-1] if uses else NEVER

    def _choose_victim(self, expert_id: int, wanted: set[int]) -> int:
        del wanted
        victim = max(self._held, key=lambda held: (self._find_next(held), held))
        return victim if self._find_next(victim) > self._find_next(expert_id) else -1


EXPERT_POLICIES: Mapping[str, Callable[[int], CachePolicy]] = MappingProxyType(
    {"lru": LruPolicy, "segmented-lru": SegmentedLruPolicy, "frequency": FrequencyPolicy}
)
"""Policies that learn while running, by name; each is made with a layer's number of slots."""
