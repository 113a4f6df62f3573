"""The sampling state of a request and its random stream; imports neither torch nor the extension.

A random draw is a function of the request's seed and the position alone, so the same seed gives the
same tokens after a preemption, on another instance, and in a replay.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.core.wire import SamplingParams
from tandem.engine.stepping.messages import SequenceStart

__all__ = ["BROKEN_ROW", "SamplerState", "draw_uniform"]

BROKEN_ROW = -1
"""Token id of a row without a distribution (a NaN, no finite largest logit): the request must end
with an error."""


class TokenRule(Protocol):
    """A request's parameters in the form that the sampler applies, with counts of the request's
    tokens.
    """

    def note_token(self, token_id: int) -> None:
        """Count a token that was chosen for the request, by which penalties lower its later
        logits.
        """
        ...


@dataclass(slots=True)
class SamplerState:
    """The sampling state of one request.

    ``seed`` is always a number: a request without a seed gets one when it is admitted.
    """

    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the request once ``min_tokens`` tokens are out: those of the request and, unless
    it ignores them, of the model."""
    prompt_ids: Sequence[int] = ()
    output_ids: list[int] = field(default_factory=list[int])
    """Tokens generated so far; kept only if penalties or a grammar need them."""
    rule: TokenRule | None = None
    """Native form of this state; the sampler builds it at the first step and updates it
    afterwards."""

    @classmethod
    def create(cls, start: SequenceStart) -> "SamplerState":
        """Make the sampling state of a sequence that gets its first sample on this runner."""
        return cls(
            start.params,
            start.seed,
            frozenset(start.stop_ids),
            start.prompt_ids,
            list(start.output_ids),
        )

    def note_token(self, token_id: int) -> None:
        """Record a generated token, if penalties or a grammar need it."""
        if self.params.has_penalties or self.params.grammar:
            self.output_ids.append(token_id)
        if self.params.has_penalties and self.rule is not None:
            self.rule.note_token(token_id)


def draw_uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) for ``seed`` and ``position``, the index of the output
    token.

    It is a keyed hash and not a generator, so there is no state to carry over a preemption, a retry
    on another instance, or a replay.
    """
    message = seed.to_bytes(8, "little", signed=True) + position.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8, person=b"tandem-sample").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
