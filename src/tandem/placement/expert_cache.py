"""Which experts of a layer are kept in fast memory: cache policies, pure, one object a layer.

A step of the layer asks for the distinct experts that its tokens chose. What is held is a hit; for
each miss the policy says whether the expert is to be loaded, and in whose place. Only the oracle
gives up an expert that the same step uses. Replays of a trace and a live cache run these same
classes, so that a policy is chosen by what it will do. Callers serialize.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

__all__ = [
    "POLICIES",
    "CacheStep",
    "DecayingFrequencyCache",
    "ExpertCache",
    "ExpertLoad",
    "LruCache",
    "OracleCache",
    "SegmentedLruCache",
    "StaticCache",
]

DECAY = 0.99
"""Of a use, a step of its layer: half of it is forgotten after 69."""
PROTECTED_SHARE = 0.8
"""Of a segmented cache, for experts that were used again."""
LARGEST_SCORE = 1e100
NEVER = 1 << 62


class ExpertLoad(NamedTuple):
    """An expert to be loaded, and the one that gives up its place."""

    expert: int
    victim: int | None
    """None: a place is free."""


class CacheStep(NamedTuple):
    """The outcome of one step of a layer."""

    hits: list[int]
    misses: list[int]
    loads: list[ExpertLoad]
    """Of misses, those that are kept from now on, in order."""


class ExpertCache(ABC):
    """The experts of one layer that are held, at most so many.

    Args:
        capacity: experts; at least 1.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, capacity
        self.capacity = capacity

    @property
    @abstractmethod
    def held(self) -> Iterable[int]:
        """The experts that are held."""

    @abstractmethod
    def is_held(self, expert: int) -> bool:
        """Return whether an expert is held."""

    def step(self, chosen: Sequence[int]) -> CacheStep:
        """Take in the distinct experts that a step chose, and decide what is loaded."""
        self._begin_step(chosen)
        hits = [expert for expert in chosen if self.is_held(expert)]
        misses = [expert for expert in chosen if not self.is_held(expert)]
        for expert in hits:
            self._note_hit(expert)
        loads: list[ExpertLoad] = []
        in_use = set(chosen)
        for expert in misses:
            load = self._admit(expert, in_use)
            if load is not None:
                loads.append(load)
        return CacheStep(hits, misses, loads)

    def _begin_step(self, chosen: Sequence[int]) -> None:
        """Count a step and its choices, where a policy does."""
        del chosen

    def _note_hit(self, expert: int) -> None:
        """Take in the use of an expert that is held."""
        del expert

    @abstractmethod
    def _admit(self, expert: int, in_use: set[int]) -> ExpertLoad | None:
        """Hold a missed expert, if the policy wants to and a place can be had."""


class StaticCache(ExpertCache):
    """The experts that were chosen most in a part of a trace; none is ever exchanged.

    Args:
        capacity: experts.
        counts: of choices, by expert; of equals the lower id.
    """

    def __init__(self, capacity: int, counts: Sequence[int]) -> None:
        super().__init__(capacity)
        order = sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert))
        self._held = frozenset(order[:capacity])

    @property
    def held(self) -> Iterable[int]:
        """See ``ExpertCache``."""
        return self._held

    def is_held(self, expert: int) -> bool:
        """See ``ExpertCache``."""
        return expert in self._held

    def _admit(self, expert: int, in_use: set[int]) -> ExpertLoad | None:
        return None


class LruCache(ExpertCache):
    """Gives up the expert whose last use is the longest ago."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._held: OrderedDict[int, None] = OrderedDict()

    @property
    def held(self) -> Iterable[int]:
        """See ``ExpertCache``."""
        return self._held

    def is_held(self, expert: int) -> bool:
        """See ``ExpertCache``."""
        return expert in self._held

    def _note_hit(self, expert: int) -> None:
        self._held.move_to_end(expert)

    def _admit(self, expert: int, in_use: set[int]) -> ExpertLoad | None:
        victim = None
        if len(self._held) == self.capacity:
            victim = next((held for held in self._held if held not in in_use), None)
            if victim is None:
                return None
            del self._held[victim]
        self._held[expert] = None
        return ExpertLoad(expert, victim)


class SegmentedLruCache(ExpertCache):
    """LRU in two parts: a first use is on probation, a second one protects.

    A scan of experts that are used once passes through the probation and leaves the rest alone.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._most_protected = int(capacity * PROTECTED_SHARE)
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    @property
    def held(self) -> Iterable[int]:
        """See ``ExpertCache``."""
        return (*self._probation, *self._protected)

    def is_held(self, expert: int) -> bool:
        """See ``ExpertCache``."""
        return expert in self._probation or expert in self._protected

    def _note_hit(self, expert: int) -> None:
        if expert in self._protected:
            self._protected.move_to_end(expert)
        elif self._most_protected:
            del self._probation[expert]
            self._protected[expert] = None
            if len(self._protected) > self._most_protected:
                oldest, _ = self._protected.popitem(last=False)
                self._probation[oldest] = None
        else:
            self._probation.move_to_end(expert)

    def _admit(self, expert: int, in_use: set[int]) -> ExpertLoad | None:
        victim = None
        if len(self._probation) + len(self._protected) == self.capacity:
            parts = (self._probation, self._protected)
            found = next(((p, e) for p in parts for e in p if e not in in_use), None)
            if found is None:
                return None
            part, victim = found
            del part[victim]
        self._probation[expert] = None
        return ExpertLoad(expert, victim)


class DecayingFrequencyCache(ExpertCache):
    """Holds the experts with the largest sums of uses, of which each step forgets a part.

    A missed expert comes in where its sum is the larger one, so that a rare expert exchanges none.

    Args:
        capacity: experts.
        decay: of earlier uses, a step; 1 counts all alike.
    """

    def __init__(self, capacity: int, decay: float = DECAY) -> None:
        super().__init__(capacity)
        assert 0 < decay <= 1, decay
        self._growth, self._unit = 1 / decay, 1.0
        self._scores: dict[int, float] = {}
        """In units that grow, instead of all sums shrinking at each step."""
        self._held: set[int] = set()

    @property
    def held(self) -> Iterable[int]:
        """See ``ExpertCache``."""
        return self._held

    def is_held(self, expert: int) -> bool:
        """See ``ExpertCache``."""
        return expert in self._held

    def _begin_step(self, chosen: Sequence[int]) -> None:
        self._unit *= self._growth
        for expert in chosen:
            self._scores[expert] = self._scores.get(expert, 0.0) + self._unit
        if self._unit > LARGEST_SCORE:
            self._scores = {expert: score / self._unit for expert, score in self._scores.items()}
            self._unit = 1.0

    def _admit(self, expert: int, in_use: set[int]) -> ExpertLoad | None:
        victim, scores = None, self._scores
        if len(self._held) == self.capacity:
            free = self._held - in_use
            if not free:
                return None
            # Of equals the lower id, whatever the order of a set.
            victim = min(free, key=lambda held: (scores.get(held, 0.0), held))
            if scores.get(victim, 0.0) >= scores[expert]:
                return None
            self._held.remove(victim)
        self._held.add(expert)
        return ExpertLoad(expert, victim)


class OracleCache(ExpertCache):
    """Gives up the expert whose next use is the farthest; no policy can hit more.

    A missed expert that is used again later than all that are held passes by. Belady, IBM Systems
    Journal 5 (1966), with bypassing.

    Args:
        capacity: experts.
        future: the choices of all steps to come, in order; ``step`` must be called with these.
    """

    def __init__(self, capacity: int, future: Sequence[Sequence[int]]) -> None:
        super().__init__(capacity)
        self._uses: dict[int, list[int]] = {}
        for place in range(len(future) - 1, -1, -1):
            for expert in future[place]:
                self._uses.setdefault(expert, []).append(place)
        self._held: set[int] = set()

    @property
    def held(self) -> Iterable[int]:
        """See ``ExpertCache``."""
        return self._held

    def is_held(self, expert: int) -> bool:
        """See ``ExpertCache``."""
        return expert in self._held

    def _begin_step(self, chosen: Sequence[int]) -> None:
        for expert in chosen:
            self._uses[expert].pop()

    def _find_next(self, expert: int) -> int:
        uses = self._uses.get(expert)
        return uses[-1] if uses else NEVER

    def _admit(self, expert: int, in_use: set[int]) -> ExpertLoad | None:
        # The experts in use have been read already: holding one on is a choice like any other.
        del in_use
        victim = None
        if len(self._held) == self.capacity:
            victim = max(self._held, key=lambda held: (self._find_next(held), held))
            if self._find_next(victim) <= self._find_next(expert):
                return None
            self._held.remove(victim)
        self._held.add(expert)
        return ExpertLoad(expert, victim)


POLICIES: dict[str, Callable[[int], ExpertCache]] = {
    "lru": LruCache,
    "segmented lru": SegmentedLruCache,
    "frequency with decay": DecayingFrequencyCache,
}
"""Those that learn as they run, by name."""
