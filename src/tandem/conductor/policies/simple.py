"""Policies that predict nothing: random, round robin, least loaded, and local-cache-aware."""

import math
from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from tandem.conductor.fleet import Fleet, IntColumn
from tandem.conductor.policies.policy import Question
from tandem.conductor.prediction import TtftParts

__all__ = ["LeastLoaded", "PrefixAware", "RandomChoice", "RoundRobin"]


class RandomChoice:
    """The policy that chooses a random instance, all with equal probability.

    Args:
        seed: seed of its own random numbers (splitmix64), so that a run can be repeated.
    """

    threshold = math.inf

    def __init__(self, seed: int = 0) -> None:
        self._state = seed

    def choose_prefill(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn, parts: TtftParts
    ) -> int:
        """Return a random one of ``rows``, each an instance's row in the fleet."""
        return int(rows[self._draw() % len(rows)])

    def choose_decode(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn
    ) -> int:
        """Return a random one of ``rows``, each an instance's row in the fleet."""
        return int(rows[self._draw() % len(rows)])

    def note_placed(self, question: Question, row: int) -> None:
        """Do nothing: the policy remembers no decisions."""

    def forget(self, row: int) -> None:
        """Do nothing: the policy remembers nothing of an instance."""

    def _draw(self) -> int:
        mask = (1 << 64) - 1
        self._state = (self._state + 0x9E3779B97F4A7C15) & mask
        mixed = self._state
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & mask
        return mixed ^ (mixed >> 31)


class RoundRobin:
    """The policy that chooses one instance after the other, in the order of rows; prefill and
    decode are counted separately.
    """

    threshold = math.inf

    def __init__(self) -> None:
        self._last_prefill = self._last_decode = -1

    def choose_prefill(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn, parts: TtftParts
    ) -> int:
        """Return the row of the instance whose turn it is to prefill."""
        self._last_prefill = _find_next(rows, self._last_prefill)
        return self._last_prefill

    def choose_decode(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn
    ) -> int:
        """Return the row of the instance whose turn it is to decode."""
        self._last_decode = _find_next(rows, self._last_decode)
        return self._last_decode

    def note_placed(self, question: Question, row: int) -> None:
        """Do nothing: ``choose_prefill`` has advanced the turn already."""

    def forget(self, row: int) -> None:
        """Do nothing: the policy remembers nothing of an instance."""


def _find_next(rows: IntColumn, last: int) -> int:
    position = bisect_right(rows, last)
    return int(rows[position % len(rows)])


class LeastLoaded:
    """The policy that chooses the instance with the fewest tokens to compute; for decode, the one
    with the fewest decoding requests.
    """

    threshold = math.inf

    def choose_prefill(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn, parts: TtftParts
    ) -> int:
        """Return the row of the instance with the fewest queued tokens."""
        return _find_least(rows, fleet.queued_tokens[rows], fleet.num_decoding[rows])

    def choose_decode(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn
    ) -> int:
        """Return the row of the instance with the fewest decoding requests."""
        return _find_least(rows, fleet.num_decoding[rows], fleet.used_blocks[rows])

    def note_placed(self, question: Question, row: int) -> None:
        """Do nothing: the policy remembers no decisions."""

    def forget(self, row: int) -> None:
        """Do nothing: the policy remembers nothing of an instance."""


class PrefixAware(LeastLoaded):
    """The policy that chooses the least loaded instance, where tokens whose KV it already has count
    as computed.

    A decode instance need not read blocks that it has, and they take no further room.
    """

    def choose_prefill(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn, parts: TtftParts
    ) -> int:
        """Return the row of the instance with the fewest tokens to compute, where the part of the
        prompt that it has cached does not count.
        """
        return _find_least(rows, fleet.queued_tokens[rows] - hits[rows], fleet.num_decoding[rows])

    def choose_decode(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn
    ) -> int:
        """Return the row of the instance with the fewest decoding requests; among equals, the one
        with the fewest used blocks, less the blocks of the prompt that it has already.
        """
        needed = fleet.used_blocks[rows] - hits[rows] // fleet.block_size[rows]
        return _find_least(rows, fleet.num_decoding[rows], needed)


def _find_least(
    rows: IntColumn, first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]
) -> int:
    """Return that of ``rows`` for which ``first`` is least; among equals, the one with the least
    ``second``, then the lowest row. Both arrays have one entry for each of ``rows``.
    """
    least = first.min()
    ties = np.flatnonzero(first == least)
    if len(ties) > 1:
        ties = ties[[int(np.argmin(second[ties]))]]
    return int(rows[ties[0]])
