"""The loads of ``tandem bench serve``: prompts, their order and their arrival times.

A load is a list of conversations; a conversation of one turn is a plain request. Prompts are token
ids if their length has to be exact, and text if a file gives it. The same seed gives the same load.
"""

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tandem.core.errors import ConfigError, NotFoundError
from tandem.core.loads.traces import (
    BLOCK_TOKENS,
    TraceRow,
    check_divisor,
    read_rows,
    shrink_rows,
)

__all__ = [
    "Conversation",
    "IdRange",
    "Turn",
    "draw_arrivals",
    "make_multi_turn",
    "make_random",
    "make_shared_prefix",
    "make_trace",
    "read_sharegpt",
    "read_trace",
]

WORDS = ("time", "way", "year", "work", "day", "life", "world", "house", "place", "group", "point")


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: its prompt, and the number of tokens to ask for."""

    prompt: list[int] | str
    """Token ids, or the text of the user's message in this turn."""
    output_length: int


@dataclass(slots=True)
class Conversation:
    """Requests of which each is sent after the answer to the one before."""

    turns: list[Turn]
    arrival_s: float | None = None
    """Seconds from the start of the run at which the first turn is due; None leaves it to the
    request rate.
    """
    history: list[dict[str, str]] = field(default_factory=list)
    """Messages before the first turn, for conversations in text."""


@dataclass(frozen=True, slots=True)
class IdRange:
    """The range of token ids that prompts are drawn from: ordinary tokens of the model's
    vocabulary.
    """

    first: int = 300
    last: int = 999

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """Return ``count`` random ids of the range."""
        return generator.integers(self.first, self.last + 1, count).tolist()


def _draw_length(generator: np.random.Generator, most: int, ratio: float) -> int:
    """Return a random length between ``ratio * most`` and ``most``."""
    return int(generator.integers(max(1, int(most * ratio)), most + 1))


def make_random(
    count: int, input_length: int, output_length: int, *, ratio: float, ids: IdRange, seed: int
) -> list[Conversation]:
    """Return requests with prompts of random tokens.

    Args:
       count: number of requests.
       input_length: longest prompt, in tokens.
       output_length: longest answer, in tokens.
       ratio: lengths are drawn between this share of the longest and the longest; 1 fixes them.
       ids: token ids to draw from.
       seed: seed of all random choices.
    """
    generator = np.random.default_rng(seed)
    return [
        Conversation(
            [
                Turn(
                    ids.draw(generator, _draw_length(generator, input_length, ratio)),
                    _draw_length(generator, output_length, ratio),
                )
            ]
        )
        for _ in range(count)
    ]


def make_shared_prefix(
    groups: int,
    per_group: int,
    *,
    prefix_length: int,
    question_length: int,
    output_length: int,
    ids: IdRange,
    seed: int,
) -> list[Conversation]:
    """Return requests of several groups in random order; requests of a group share a prefix."""
    generator = np.random.default_rng(seed)
    made: list[Conversation] = []
    for _ in range(groups):
        prefix = ids.draw(generator, prefix_length)
        for _ in range(per_group):
            prompt = prefix + ids.draw(generator, question_length)
            made.append(Conversation([Turn(prompt, output_length)]))
    return [made[i] for i in generator.permutation(len(made))]


def make_multi_turn(
    conversations: int, turns: int, *, question_length: int, output_length: int, seed: int
) -> list[Conversation]:
    """Return chats whose prompts are random plain words, in which each message is sent after the
    answer before it.
    """
    generator = np.random.default_rng(seed)
    return [
        Conversation(
            [
                Turn(" ".join(generator.choice(WORDS, question_length)), output_length)
                for _ in range(turns)
            ]
        )
        for _ in range(conversations)
    ]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise NotFoundError("bench.read_load", f"cannot read {path}: {error}") from error
    except ValueError as error:
        raise ConfigError("bench.read_load", f"{path} is not JSON: {error}") from error


def read_sharegpt(path: Path, count: int, *, output_length: int, seed: int) -> list[Conversation]:
    """Return the first questions of a ShareGPT file's conversations, in random order, none twice.

    Args:
       path: a JSON list of objects with ``conversations``, or ``conversation``, each a list of
           ``{"from", "value"}``.
       count: most requests to return.
       output_length: tokens to ask for.
       seed: seed of the order.

    Raises: NotFoundError (no such file); ConfigError (no row has a question).
    """
    rows = _read_json(path)
    texts = [text for row in rows if (text := _find_question(row))] if type(rows) is list else []
    if not texts:
        what = f"{path} has no rows of ShareGPT: a list of objects with `conversations`"
        raise ConfigError("bench.read_load", what)
    order = np.random.default_rng(seed).permutation(len(texts))[:count]
    return [Conversation([Turn(texts[i], output_length)]) for i in order]


def _find_question(row: Any) -> str:
    if not isinstance(row, dict):
        return ""
    parts = row.get("conversations", row.get("conversation"))
    if not isinstance(parts, list) or len(parts) < 2 or not isinstance(parts[0], dict):
        return ""
    value = parts[0].get("value")
    return value.strip() if isinstance(value, str) else ""


def read_trace(
    path: Path,
    count: int | None,
    *,
    ids: IdRange,
    length_divisor: int = 1,
    slowdown: float = 1.0,
    seed: int,
) -> list[Conversation]:
    """Return the requests of a Mooncake trace: equal hash ids become equal tokens.

    Args:
        path: JSON lines of ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``.
        count: most requests to return; None returns all.
        ids: token ids to draw from.
        length_divisor: divides all lengths, for a small model; 512 has to be a multiple of it.
        slowdown: multiplies the times between arrivals.
        seed: seed from which, with a hash id, the tokens of a block are drawn.

    Raises: NotFoundError (the file cannot be read); ConfigError (a line is no row of a trace).
    """
    block = check_divisor(length_divisor)
    rows = itertools.islice(shrink_rows(read_rows(path), length_divisor), count)
    return make_trace(rows, ids=ids, block_tokens=block, slowdown=slowdown, seed=seed)


def make_trace(
    rows: Iterable[TraceRow],
    *,
    ids: IdRange,
    block_tokens: int = BLOCK_TOKENS,
    slowdown: float = 1.0,
    seed: int,
) -> list[Conversation]:
    """Return the requests of a trace's rows: equal hash ids become equal tokens.

    Args:
        rows: rows in order of arrival.
        ids: token ids to draw from.
        block_tokens: number of tokens that a hash id stands for.
        slowdown: multiplies the times between arrivals.
        seed: seed from which, with a hash id, the tokens of a block are drawn.
    """
    made: list[Conversation] = []
    for row in rows:
        prompt = [
            token
            for hash_id in row.hash_ids
            for token in ids.draw(np.random.default_rng([seed, hash_id]), block_tokens)
        ][: row.input_length]
        turn = Turn(prompt, max(row.output_length, 1))
        made.append(Conversation([turn], row.timestamp / 1000 * slowdown))
    return made


def draw_arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """Return the start of each conversation in seconds: a Poisson process, or all 0 without a rate.

    Args:
       count: number of conversations.
       rate: conversations per second; None starts all at once.
       seed: seed of the process.
    """
    if rate is None:
        return [0.0] * count
    generator = np.random.default_rng(seed)
    times: list[float] = []
    now = 0.0
    for _ in range(count):
        times.append(now)
        now += generator.exponential(1 / rate)
    return times
