"""Caches of routed experts: which of a layer's experts stay in the fast memory. Pure decisions.

One policy a layer. The caller moves the weights: it asks ``touch`` once a step with the experts
that the step computes, and obeys.
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
"""The factor on the count of a use at each step of its layer: half is forgotten after 69."""
PROTECTED_SHARE = 0.8
"""The share of a segmented cache that is for experts which were used again."""
LARGEST_UNIT = 1e100
NEVER = 1 << 62


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


class _SlotPolicy(ABC):
    """The part of a ``CachePolicy`` that all but LRU share: who is held, and who comes in."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 1, num_slots
        self._num_slots = num_slots
        self._held: set[int] = set()

    def touch(self, expert_ids: Sequence[int], max_insertions: int) -> list[Insertion]:
        """See ``CachePolicy``."""
        self._note_step(expert_ids)
        return self._insert(expert_ids, max_insertions)

    def guess(self, expert_ids: Sequence[int], max_insertions: int) -> list[Insertion]:
        """See ``CachePolicy``."""
        return self._insert(expert_ids, max_insertions)

    def forget(self, expert_id: int) -> None:
        """See ``CachePolicy``."""
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
        """Count a step's uses, before anything comes in."""

    def _admits(self, expert_id: int) -> bool:
        """Return whether an expert may come in at all."""
        del expert_id
        return True

    @abstractmethod
    def _choose_victim(self, expert_id: int, wanted: set[int]) -> int:
        """Return who gives up its slot for ``expert_id``; -1: nobody."""

    def _take(self, expert_id: int) -> None:
        """Take in that an expert is held."""
        del expert_id

    def _drop(self, expert_id: int) -> None:
        """Take in that an expert is held no more."""
        del expert_id


class SegmentedLruPolicy(_SlotPolicy):
    """LRU in two parts: a first use is on probation, a second one protects.

    A scan of experts that are used once passes through the probation and leaves the rest alone.
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
    """Hold the experts with the largest sums of uses, of which each step forgets a part.

    An expert comes in where its sum is the larger one, so that a rare one exchanges none.

    Args:
        num_slots: at least 1.
        decay: of earlier uses, a step; 1 counts all alike.
    """

    def __init__(self, num_slots: int, decay: float = DECAY) -> None:
        super().__init__(num_slots)
        assert 0 < decay <= 1, decay
        self._growth, self._unit = 1 / decay, 1.0
        self._scores: dict[int, float] = {}
        """In units that grow, instead of all sums shrinking at each step."""

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
    """Hold the experts that were chosen most in some earlier text, from their first use on.

    Args:
        num_slots: at least 1.
        counts: of choices, by expert; of equals the lower id.
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
    """Give up the expert whose next use is the farthest: no policy can hit more.

    An expert that is used again later than all that are held passes by, and unlike what a
    ``CachePolicy`` does, one of the same step may be given up. For replays, as it must know the
    future. Belady, IBM Systems Journal 5 (1966), with bypassing.

    Args:
        num_slots: at least 1.
        future: the experts of all steps to come, in order; ``touch`` must be called with these.
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
"""Those that learn as they run, by name; each takes the slots of a layer."""
