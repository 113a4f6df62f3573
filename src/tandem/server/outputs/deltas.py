"""The parts of an answer as they come, in no API's own form.

Joined in order, the deltas of a generation do not depend on how its text was cut into pieces.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

__all__ = [
    "ArgumentsDelta",
    "CallStart",
    "Delta",
    "OutputParser",
    "ReasoningDelta",
    "TextDelta",
    "join_deltas",
    "read_arguments",
]


class TextDelta(NamedTuple):
    """Text of the answer."""

    text: str


class ReasoningDelta(NamedTuple):
    """Text that the model wrote before its answer."""

    text: str


class CallStart(NamedTuple):
    """The beginning of a tool call."""

    call: int
    """Number of the call in the answer, from 0."""
    name: str
    id: str | None = None
    """The same as the model wrote it; None if its format has no ids."""


class ArgumentsDelta(NamedTuple):
    """Text of the arguments of a call, which are a JSON object when they are complete."""

    call: int
    text: str


Delta = TextDelta | ReasoningDelta | CallStart | ArgumentsDelta


class OutputParser(Protocol):
    """Reads the text of one generation."""

    def feed(self, text: str) -> list[Delta]:
        """Add text; returns what is now certain."""
        ...

    def flush(self) -> list[Delta]:
        """End the text; returns what was held back. Nothing of the text is lost."""
        ...


def join_deltas(deltas: Sequence[Delta]) -> list[Delta]:
    """Return the same parts, neighbours of one kind as one and empty ones left out."""
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


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; of one that broke off, its text under "partial_json"."""
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"partial_json": text}
