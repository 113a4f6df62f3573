"""The rules by which a plan takes one of several values, here and on machines that are elsewhere.

Each takes predicted rates and returns a value, so that `tandem serve` and `tandem plan --hardware`
cannot come to decide differently.
"""

from collections.abc import Mapping, Sequence

import msgspec

__all__ = ["CHUNKS", "MIN_IMMEDIATE", "Choice", "choose_chunk", "choose_deferral"]

CHUNKS = (512, 1024, 2048, 4096, 8192, 16384)
"""Tokens of a step among which a plan chooses."""
NEAR = 0.98
"""Share of the best rate that a smaller chunk must reach: it delays decodes less."""
MIN_IMMEDIATE = 2
"""Experts of a token that are never deferred: KTransformers' rule for accuracy."""
SATURATED = 0.01
"""A step that is so little above the shortest counts as it."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice, or one alternative that was rejected, and why."""

    what: str
    value: str
    reason: str


def choose_chunk(rates: Mapping[int, float]) -> int:
    """Return the tokens of a step: the fewest that are within 2 % of the fastest.

    Args:
        rates: tokens of a prompt a second by tokens of a step; there is one.
    """
    best = max(rates.values())
    return min(chunk for chunk, rate in rates.items() if rate >= NEAR * best)


def choose_deferral(rates: Sequence[float]) -> int:
    """Return how many experts of a token to defer: the fewest that saturate the CPU.

    Args:
        rates: tokens a second in decode by deferred experts, from none on.
    """
    best = (1 - SATURATED) * max(rates)
    return next(count for count, rate in enumerate(rates) if rate >= best)
