"""Caches of routed experts: which of a layer's experts stay in the fast memory. Pure decisions.

One policy a layer. The caller moves the weights: it asks ``touch`` once a step with the experts
that the step computes, and obeys.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

__all__ = ["EXPERT_POLICIES", "CachePolicy", "GuessGate", "Insertion", "LruPolicy"]

MIN_RIGHT = 0.6
"""Share of guesses that must be right before experts are read for them. A right one is read while
the layer before computes; a wrong one costs the disk an expert, and another one its slot."""
REMEMBERED = 0.97
"""Weight of what was known before a step, of some tens of steps together."""
MIN_GUESSES = 32
"""Guesses that are compared before the first is acted on."""


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


class GuessGate:
    """Decides whether guesses of a layer's experts pay, by how often they were right."""

    def __init__(self) -> None:
        self.num_guessed = 0.0
        """Guesses of experts that were not held, older ones counting less."""
        self.num_right = 0.0

    def note(self, guessed: Sequence[int], chosen: Sequence[int]) -> None:
        """Compare the guesses of a step with its choices, whether or not they were acted on."""
        right = set(chosen)
        self.num_guessed = REMEMBERED * self.num_guessed + len(guessed)
        self.num_right = REMEMBERED * self.num_right + sum(e in right for e in guessed)

    @property
    def is_open(self) -> bool:
        """True if experts should be read before they are asked for."""
        return self.num_guessed >= MIN_GUESSES and self.num_right >= MIN_RIGHT * self.num_guessed


EXPERT_POLICIES: Mapping[str, Callable[[int], CachePolicy]] = MappingProxyType({"lru": LruPolicy})
"""By name; each takes the slots of a layer."""
