"""The loads of ``tandem bench serve``: what is sent, in which order, and when.

A load is a list of conversations; one of one turn is a plain request. Prompts are token ids where
the length has to be exact, text where a file gives it. Everything follows from the seed.
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
    """One request."""

    prompt: list[int] | str
    """Token ids, or text that is said in this turn."""
    output_length: int


@dataclass(slots=True)
class Conversation:
    """Requests that follow each other."""

    turns: list[Turn]
    arrival_s: float | None = None
    """Seconds from the start at which the first is due; None is by the rate."""
    history: list[dict[str, str]] = field(default_factory=list)
    """Messages so far, of conversations in text."""


@dataclass(frozen=True, slots=True)
class IdRange:
    """The token ids that prompts are drawn from: ordinary ones of the model's vocabulary."""

    first: int = 300
    last: int = 999

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """Return ``count`` ids."""
        return generator.integers(self.first, self.last + 1, count).tolist()


def _draw_length(generator: np.random.Generator, most: int, ratio: float) -> int:
    """Return a length between ``ratio`` times the most and the most."""
    return int(generator.integers(max(1, int(most * ratio)), most + 1))


def make_random(
    count: int, input_length: int, output_length: int, *, ratio: float, ids: IdRange, seed: int
) -> list[Conversation]:
    """Return requests of random tokens.

    Args:
        count: of requests.
        input_length: tokens of a prompt at most.
        output_length: tokens of an answer at most.
        ratio: lengths are drawn between this share of the most and the most; 1 is always the most.
        ids: of the tokens.
        seed: of all that is drawn.
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
    """Return requests in groups that share a prefix, groups mixed."""
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
    """Return chats whose next message waits for the answer before; messages are plain words."""
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
    """Return the first questions of a ShareGPT file, drawn without repetition.

    Args:
        path: a JSON list of objects with ``conversations``, or ``conversation``, each a list of
            ``{"from", "value"}``.
        count: of requests at most.
        output_length: tokens to ask for.
        seed: of the order.

    Raises: NotFoundError; ConfigError (no such file, or none of its rows has a question).
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
        count: of requests at most; None is all.
        ids: of the tokens.
        length_divisor: divides all lengths, for a small model; 512 has to be a multiple of it.
        slowdown: multiplies the times between arrivals.
        seed: of the tokens that a hash id stands for.

    Raises: NotFoundError; ConfigError (a line is no row of a trace).
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
    """Return the requests of rows: equal hash ids become equal tokens.

    Args:
        rows: in order of arrival.
        ids: of the tokens.
        block_tokens: that a hash id stands for.
        slowdown: multiplies the times between arrivals.
        seed: of the tokens that a hash id stands for.
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
    """Return when each conversation begins: a Poisson process, or all at 0 where there is no rate.

    Args:
        count: of conversations.
        rate: a second.
        seed: of the process.
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
