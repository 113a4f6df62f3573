"""Rules by which a plan chooses a value from predicted rates. Pure.

`tandem serve` and `tandem plan --hardware` share these rules, so that they decide alike.
"""

from collections.abc import Mapping, Sequence

import msgspec

__all__ = ["CHUNKS", "MIN_IMMEDIATE", "Choice", "choose_chunk", "choose_deferral"]

CHUNKS = (512, 1024, 2048, 4096, 8192, 16384)
"""Chunk sizes, in tokens of a step, from which a plan chooses."""
NEAR = 0.98
"""Share of the best prefill rate from which a smaller chunk is preferred, because short steps delay
decodes less.
"""
MIN_IMMEDIATE = 2
"""Experts of a token that are never deferred: KTransformers' rule for accuracy."""
SATURATED = 0.01
"""Relative difference from the best rate below which two rates count as equal."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A decision of the planner, or an alternative that it rejected, with the reason."""

    what: str
    value: str
    reason: str


def choose_chunk(rates: Mapping[int, float]) -> int:
    """Return the chunk size: the smallest whose rate is within 2 % of the best.

    Args:
        rates: prompt tokens per second by tokens of a step; at least one.
    """
    best = max(rates.values())
    return min(chunk for chunk, rate in rates.items() if rate >= NEAR * best)


def choose_deferral(rates: Sequence[float]) -> int:
    """Return how many experts of a token to defer: the fewest that keep the CPU fully used.

    Args:
        rates: decoded tokens per second by number of deferred experts, from 0 on.
    """
    best = (1 - SATURATED) * max(rates)
    return next(count for count, rate in enumerate(rates) if rate >= best)
