"""The distribution of lengths of answers for each client, learnt from those that have ended. Pure.

An answer that was cut off, or reached ``max_tokens``, says only that it would have been at least
that long. So what is learnt is the hazard: of the answers that got as far as some number of tokens,
the share that ended there. Hazards are kept for ranges of lengths that grow by a quarter of an
octave, with weights that fall with each further answer, in constant memory. A client with few
answers is taken to be like all others.
"""

import math
from collections import OrderedDict

import numpy as np

from tandem.conductor.fleet import FloatColumn

__all__ = ["AnswerLengths"]

STEPS = 4
"""Number of ranges in an octave of lengths."""
NUM_RANGES = 24 * STEPS
MAX_LENGTH = 1 << 23
"""Largest number of tokens of an answer that is told apart from larger ones."""
MAX_CLIENTS = 256
"""Largest number of clients with a distribution of their own."""
MEMORY = 0.998
"""Factor by which each new answer reduces the weight of older ones; about 500 answers count."""
PRIOR_WEIGHT = 10.0
"""Number of answers that the distribution of all clients counts as in that of one, and that the
distribution assumed at first counts as in that of all."""
PRIOR_HAZARD = 0.005
"""Share of answers that are assumed at first to end in each range of lengths."""
MAX_HAZARD = 0.999
FIRST_RISK = 0.05
MIN_RISK, MAX_RISK = 0.01, 0.5
BROKEN_SHARE = 0.005
"""Share of promises that answers of unforeseen length may break."""
RISK_STEP = 0.7
"""Change of the logarithm of the risk with a promise that was broken; a kept one changes it by
``BROKEN_SHARE`` of that, upwards."""
_PLACES: FloatColumn = np.arange(NUM_RANGES + 1, dtype=np.float64)


class AnswerLengths:
    """The distributions of the lengths of answers, in tokens."""

    def __init__(self) -> None:
        self.risk = FIRST_RISK
        """Probability to end before the smaller, and after the larger of the lengths that are told;
        it follows the promises that were kept and broken."""
        shape = (MAX_CLIENTS + 1, NUM_RANGES)
        # Row 0 has the answers of all clients.
        self._reached: FloatColumn = np.zeros(shape)
        self._ended: FloatColumn = np.zeros(shape)
        self._rows: OrderedDict[str, int] = OrderedDict()
        """Row of each client; those whose answers ended last come last."""
        self._overall: FloatColumn = np.full(NUM_RANGES, PRIOR_HAZARD)
        self._limits: FloatColumn = np.tile(self._find_limits(self._overall), MAX_CLIENTS + 1)
        """The two lengths of answers that have got to the beginning of each range."""

    def find_place(self, client: str) -> int:
        """Return the place of a client's distribution among all, for ``find_limits``."""
        return self._rows.get(client, 0) * NUM_RANGES

    def note_end(self, client: str, num_tokens: int, *, is_natural: bool) -> None:
        """Learn from the length of an answer.

        Args:
            client: name of the client that got it.
            num_tokens: its length.
            is_natural: False if it was cut off, by the client or by ``max_tokens``.
        """
        if num_tokens < 1:
            return
        row = self._rows.get(client)
        if row is None:
            if len(self._rows) < MAX_CLIENTS:
                row = len(self._rows) + 1
            else:
                _, row = self._rows.popitem(last=False)
                self._reached[row] = self._ended[row] = 0.0
            self._rows[client] = row
        self._rows.move_to_end(client)
        last = int(STEPS * math.log2(min(num_tokens, MAX_LENGTH)))
        for each in (0, row):
            reached, ended = self._reached[each], self._ended[each]
            reached *= MEMORY
            ended *= MEMORY
            reached[: last + is_natural] += 1.0
            if is_natural:
                ended[last] += 1.0
        prior = PRIOR_WEIGHT * PRIOR_HAZARD
        self._overall = (self._ended[0] + prior) / (self._reached[0] + PRIOR_WEIGHT)
        own = self._ended[row] + PRIOR_WEIGHT * self._overall
        own /= self._reached[row] + PRIOR_WEIGHT
        for each, hazards in ((0, self._overall), (row, own)):
            first = each * NUM_RANGES
            self._limits[:, first : first + NUM_RANGES] = self._find_limits(hazards)

    def find_limits(self, places: FloatColumn, num_tokens: FloatColumn) -> FloatColumn:
        """Return two lengths of answers that go on: a share of ``risk`` ends before the first,
        and as many exceed the second.

        Args:
            places: return values of ``find_place`` for their clients; shape [n].
            num_tokens: number of tokens that they have, 1 to ``MAX_LENGTH``; shape [n].

        Returns: lengths in tokens, new, not rounded; shape [2, n].
        """
        found = np.log2(num_tokens)
        found *= STEPS
        # The distance of places is whole, so the range is what rounding down gives.
        found += places
        return self._limits.take(found.astype(np.intp), axis=1)

    def _find_limits(self, hazards: FloatColumn) -> FloatColumn:
        """Return the two lengths of ``find_limits`` for answers that have got to the beginning of
        each range.
        """
        summed = np.zeros(NUM_RANGES + 1)
        np.cumsum(-np.log1p(-np.minimum(hazards, MAX_HAZARD)), out=summed[1:])
        # Hazards that answers have passed when these shares of them have ended.
        passed = np.array([[-math.log1p(-self.risk)], [-math.log(self.risk)]])
        return np.exp2(np.interp(summed[:-1] + passed, summed, _PLACES) / STEPS)

    def note_promise(self, *, is_kept: bool) -> None:
        """Adjust the risk that is taken, after an answer with a promise has ended."""
        change = RISK_STEP * (BROKEN_SHARE if is_kept else BROKEN_SHARE - 1.0)
        self.risk = min(max(self.risk * math.exp(change), MIN_RISK), MAX_RISK)
