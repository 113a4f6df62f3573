"""The interface of policies, and what all of them are told of a request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.conductor.directory import Chain
from tandem.conductor.fleet import Fleet, IntColumn
from tandem.conductor.prediction import TtftParts
from tandem.core.wire import NO_SLO, Slo

__all__ = ["Policy", "Question"]


@dataclass(frozen=True, slots=True)
class Question:
    """A request that is to be placed.

    Attributes:
        request_id: unique.
        prompt_len: tokens.
        max_tokens: to be generated at most.
        chains: the keys of its prompt, one chain for each KV identity that serves.
        client: who sent it.
        weight: of the client's share.
        priority: lower is more urgent; above 0 it is less so than others.
        slo: its objectives.
    """

    request_id: str
    prompt_len: int
    max_tokens: int
    chains: Sequence[Chain] = ()
    client: str = ""
    weight: float = 1.0
    priority: int = 0
    slo: Slo = NO_SLO


class Policy(Protocol):
    """Chooses among instances. Pure: the same calls in the same order choose the same.

    ``rows`` are never empty; ``hits`` has an entry for every row of the fleet: the tokens of the
    prompt whose KV that instance holds, as far as the directory knows. Both are borrowed.
    """

    threshold: float
    """Factor by which the prefix that the store holds must exceed an instance's own for the
    instance to be counted as if it loaded that; infinite: the policy counts on no load."""

    def choose_prefill(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn, parts: TtftParts
    ) -> int:
        """Return the row that computes the prompt; a unified instance then decodes as well.

        ``parts`` has the predicted times of every row, with what the store holds counted as
        ``threshold`` says.
        """
        ...

    def choose_decode(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn
    ) -> int:
        """Return the row that decodes after a prefill elsewhere."""
        ...

    def note_placed(self, question: Question, row: int) -> None:
        """Record that a request's prompt was sent to a row."""
        ...

    def forget(self, row: int) -> None:
        """Forget what a row held: the instance has restarted or left."""
        ...
