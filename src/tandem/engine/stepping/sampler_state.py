"""A request's state of sampling, and its random stream; neither torch nor the extension.

The draw of a request is a function of its seed and of the position alone, so the same seed gives
the same tokens after a preemption, on another instance, and in a replay.
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
    """A request's parameters as the sampler applies them; it counts the request's tokens."""

    def note_token(self, token_id: int) -> None:
        """Count a chosen token."""
        ...


@dataclass(slots=True)
class SamplerState:
    """The state of sampling of one request.

    ``seed`` is concrete: a request without one gets a fresh seed when it is admitted.
    """

    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the request once ``min_tokens`` are out: the model's own, unless the request
    ignores them, and the request's."""
    prompt_ids: Sequence[int] = ()
    output_ids: list[int] = field(default_factory=list[int])
    """Tokens noted, where penalties or a grammar need them."""
    rule: TokenRule | None = None
    """Made by the sampler at the first step, of all that stands here, and kept up to date since."""

    @classmethod
    def create(cls, start: SequenceStart) -> "SamplerState":
        """Make the state of a sequence that begins to sample here."""
        return cls(
            start.params,
            start.seed,
            frozenset(start.stop_ids),
            start.prompt_ids,
            list(start.output_ids),
        )

    def note_token(self, token_id: int) -> None:
        """Count a generated token; penalties and grammars alone need it."""
        if self.params.has_penalties or self.params.grammar:
            self.output_ids.append(token_id)
        if self.params.has_penalties and self.rule is not None:
            self.rule.note_token(token_id)


def draw_uniform(seed: int, position: int) -> float:
    """Return the draw in [0, 1) of ``seed`` at ``position``, the index of the output token.

    A keyed hash instead of a generator object: there is no state to carry over a preemption, a
    retry on another instance, or a replay.
    """
    message = seed.to_bytes(8, "little", signed=True) + position.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8, person=b"tandem-sample").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
