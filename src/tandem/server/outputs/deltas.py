"""The parts of an answer as they arrive, in a form independent of any API.

Joined in order, the deltas of a generation do not depend on how its text was cut into pieces.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = [
    "ArgumentsDelta",
    "CallStart",
    "Delta",
    "OutputParser",
    "ReasoningDelta",
    "TextDelta",
    "join_deltas",
]


class TextDelta(NamedTuple):
    """Text of the answer."""

    text: str


class ReasoningDelta(NamedTuple):
    """Text of the model's reasoning."""

    text: str


class CallStart(NamedTuple):
    """The beginning of a tool call."""

    call: int
    """Index of the call in the answer, from 0."""
    name: str
    id: str | None = None
    """Id that the model wrote; None if its format has no ids."""


class ArgumentsDelta(NamedTuple):
    """Text of a call's arguments; joined, these texts are a JSON object."""

    call: int
    text: str


Delta = TextDelta | ReasoningDelta | CallStart | ArgumentsDelta


class OutputParser(Protocol):
    """A parser that splits the text of one generation into answer, reasoning and tool calls."""

    def feed(self, text: str) -> list[Delta]:
        """Add text; return the parts of the answer that are now certain."""
        ...

    def flush(self, *, is_cut: bool) -> list[Delta]:
        """End the text; return the parts that were held back.

        Args:
            is_cut: True if the model had more to say, as when it reached ``max_tokens``: what has
                no end then is incomplete. Otherwise the model has left the end out.
        """
        ...


def join_deltas(deltas: Sequence[Delta]) -> list[Delta]:
    """Return deltas (parts of an answer) with neighbours of one kind joined and empty ones left
    out.
    """
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(delta, CallStart):
            joined.append(delta)
        elif not delta.text:
            continue
        elif isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            joined[-1] = TextDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            joined[-1] = ReasoningDelta(last.text + delta.text)
        elif (
            isinstance(delta, ArgumentsDelta)
            and isinstance(last, ArgumentsDelta)
            and last.call == delta.call
        ):
            joined[-1] = ArgumentsDelta(delta.call, last.text + delta.text)
        else:
            joined.append(delta)
    return joined
