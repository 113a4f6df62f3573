"""The interface of routing policies, and the description of a request that they get."""

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
    """A request for which instances are to be chosen.

    Attributes:
        request_id: unique id.
        prompt_len: number of tokens of the prompt.
        max_tokens: largest number of tokens to generate.
        chains: block keys of its prompt, one chain for each KV identity that serves.
        client: name of the sender.
        weight: weight of the client's share.
        priority: a lower number is more urgent; above 0, it is less urgent than usual.
        slo: its latency objectives.
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
    """A rule that chooses among instances, each a row of the fleet. Pure: equal calls in equal
    order give equal choices.

    ``rows`` are the rows to choose from, at least one. ``hits`` has an entry for every row of the
    fleet: the number of the prompt's tokens whose KV that instance is known to have. Neither may be
    kept.
    """

    threshold: float
    """Factor by which the prefix in the store must be longer than an instance's own, for its time
    to be predicted as if it loaded that prefix; infinite: loads are not considered."""

    def choose_prefill(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn, parts: TtftParts
    ) -> int:
        """Return the row of the instance that computes the prompt; a unified instance then decodes
        too.

        ``parts`` has the predicted times of every row, with loads considered according to
        ``threshold``.
        """
        ...

    def choose_decode(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn
    ) -> int:
        """Return the row of the instance that decodes after another instance's prefill."""
        ...

    def note_placed(self, question: Question, row: int) -> None:
        """Record that a request's prompt was sent to the instance in a row."""
        ...

    def forget(self, row: int) -> None:
        """Drop what is remembered of a row of the fleet, because its instance has restarted or
        left.
        """
        ...
