"""The baseline: an interpolated trigram with modified Kneser-Ney discounts, over the same tokens.

Owns counting and scoring; knows nothing of text. Counts are sorted arrays of packed keys: a trigram
of a 4096-token vocabulary is 36 bits.
Source: S. Chen, J. Goodman, "An empirical study of smoothing techniques", 1998, section 3.
"""

import numpy as np

MAX_DISCOUNTED_COUNT = 3
PLAIN_DISCOUNT = 0.5
MIN_DISCOUNT = 0.01  # Nothing held back would leave no probability for what was never seen.


class Trigram:
    """A trigram model fitted to one token stream."""

    def __init__(self, tokens: np.ndarray, vocab_size: int):
        self.vocab_size = vocab_size
        grams = _pack(tokens, 3, vocab_size)
        # The highest order uses plain counts; each lower one counts the distinct words before.
        trigrams = np.unique(grams, return_counts=True)
        bigrams = np.unique(trigrams[0] % vocab_size**2, return_counts=True)
        unigrams = np.unique(bigrams[0] % vocab_size, return_counts=True)
        self.orders = [_Order(*counts, vocab_size) for counts in (unigrams, bigrams, trigrams)]

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """Natural-log probability of each token but the first two, given the two before it."""
        grams = _pack(tokens, 3, self.vocab_size)
        probability = np.full(len(grams), 1 / self.vocab_size)
        for length, order in enumerate(self.orders, start=1):
            probability = order.interpolate(grams % self.vocab_size**length, probability)
        return np.log(probability)


class _Order:
    """The discounted counts of one n-gram length."""

    def __init__(self, keys: np.ndarray, counts: np.ndarray, vocab_size: int):
        self.keys, self.counts, self.vocab_size = keys, counts, vocab_size
        self.discounts = _estimate_discounts(counts)
        contexts = keys // vocab_size
        size = int(contexts.max()) + 1
        taken = self.discounts[np.minimum(counts, MAX_DISCOUNTED_COUNT)]
        self.totals = np.bincount(contexts, weights=counts, minlength=size)
        self.backoffs = np.bincount(contexts, weights=taken, minlength=size)

    def interpolate(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Mix this order's estimate with the lower order's, by the context's discounted mass."""
        places = np.minimum(np.searchsorted(self.keys, grams), len(self.keys) - 1)
        counts = np.where(self.keys[places] == grams, self.counts[places], 0)
        contexts = grams // self.vocab_size
        is_known = contexts < len(self.totals)
        contexts = np.where(is_known, contexts, 0)
        totals = np.where(is_known, self.totals[contexts], 0.0)
        backoffs = self.backoffs[contexts]
        kept = counts - self.discounts[np.minimum(counts, MAX_DISCOUNTED_COUNT)]
        mixed = (kept + backoffs * lower) / np.maximum(totals, 1.0)
        return np.where(totals > 0, mixed, lower)


def _estimate_discounts(counts: np.ndarray) -> np.ndarray:
    """How much to take from an n-gram seen 0, 1, 2, and 3 or more times."""
    levels = [float((counts == level).sum()) for level in range(1, MAX_DISCOUNTED_COUNT + 2)]
    if min(levels) == 0:
        # A tiny corpus lacks some count that the estimate divides by.
        return np.array([0.0] + [PLAIN_DISCOUNT] * MAX_DISCOUNTED_COUNT)
    shrink = levels[0] / (levels[0] + 2 * levels[1])
    discounts = [0.0]
    for level in range(1, MAX_DISCOUNTED_COUNT + 1):
        taken = level - (level + 1) * shrink * levels[level] / levels[level - 1]
        discounts.append(min(max(taken, MIN_DISCOUNT), level))
    return np.array(discounts)


def _pack(tokens: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
    """Key of each run of `length` tokens, the last one lowest."""
    wide = tokens.astype(np.int64)
    keys = np.zeros(len(wide) - length + 1, dtype=np.int64)
    for offset in range(length):
        keys = keys * vocab_size + wide[offset : len(wide) - length + 1 + offset]
    return keys
