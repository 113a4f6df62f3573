"""Generated traces: sessions of several turns over shared prefixes.

One process covers the usual loads. Sessions begin as a Poisson process, each with a system prompt
out of a few popular ones, and the prompt of each turn is the whole conversation so far and new
text. One turn without a shared prefix is a plain Poisson load; a long shared prefix and many short
turns are agents. The seed determines everything, and rows are yielded in order of arrival without
keeping the trace in memory.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from tandem.core.config import parse_yaml
from tandem.core.errors import NotFoundError
from tandem.core.loads.traces import BLOCK_TOKENS, TraceRow

__all__ = ["Generator", "find_generator", "generate_rows"]

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]


class Generator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Statistics of a load. Lengths are lognormal with these means and spreads."""

    requests: Annotated[int, Meta(ge=1)]
    rate: Positive
    """Mean number of requests per second."""
    burst_s: NonNegative = 0.0
    """Period of bursts in seconds: arrivals are moved to its next multiple; 0 leaves them Poisson.
    """
    new_tokens: Positive = 1000.0
    """Mean tokens that a prompt adds to its session's conversation."""
    new_spread: NonNegative = 1.0
    """Standard deviation of the logarithm of ``new_tokens``."""
    output_tokens: Positive = 200.0
    output_spread: NonNegative = 1.0
    max_tokens: Annotated[int, Meta(ge=1)] = 126_000
    """Most tokens of a prompt; a session ends before it would exceed them."""
    turns: Annotated[float, Meta(ge=1)] = 1.0
    """Mean number of turns in a session; geometrically distributed."""
    think_s: NonNegative = 60.0
    """Mean seconds between two turns of a session; exponentially distributed."""
    shared_prefixes: Annotated[int, Meta(ge=0)] = 0
    """Number of different system prompts; with 0 no session shares its beginning with another."""
    shared_tokens: NonNegative = 0.0
    """Mean tokens of a system prompt."""
    shared_spread: NonNegative = 0.5
    popularity: NonNegative = 1.0
    """Exponent of Zipf's law, by which system prompts are chosen."""
    seed: int = 1


@dataclass(slots=True)
class _Session:
    ids: list[int]
    """Hash ids of the session's full blocks."""
    num_tokens: int


def _draw(chance: np.random.Generator, mean: float, spread: float) -> int:
    """Return a random lognormal length with the given mean, at least 1."""
    log_mean = math.log(mean) - spread * spread / 2
    return max(round(chance.lognormal(log_mean, spread)), 1)


@cache
def _read_known() -> dict[str, Generator]:
    text = (resources.files("tandem.sim") / "data" / "loads.yaml").read_text("utf-8")
    return msgspec.convert(parse_yaml(text), dict[str, Generator])


def find_generator(name: str) -> Generator:
    """Return the built-in load of this name.

    Raises: NotFoundError (no load of this name).
    """
    known = _read_known()
    if name not in known:
        what = f"no load {name!r}: there is {', '.join(known)}"
        raise NotFoundError("sim.find_generator", what)
    return known[name]


def generate_rows(spec: Generator) -> Iterator[TraceRow]:
    """Yield the requests of a load, in order of arrival."""
    chance = np.random.default_rng(spec.seed)
    fresh = iter(range(1 << 29))
    prefixes: list[tuple[list[int], int]] = []
    for _ in range(spec.shared_prefixes):
        length = _draw(chance, spec.shared_tokens, spec.shared_spread) if spec.shared_tokens else 0
        prefixes.append(([next(fresh) for _ in range(length // BLOCK_TOKENS)], length))
    weights = np.arange(1, spec.shared_prefixes + 1) ** -spec.popularity
    weights /= max(weights.sum(), 1e-9)

    begin_s = 0.0
    # A heap of turns that are still to come: (time, number that keeps equal times in order,
    # session).
    turns: list[tuple[float, int, _Session]] = []
    num_pushed = 0

    def begin() -> _Session:
        if not prefixes:
            return _Session([], 0)
        ids, length = prefixes[chance.choice(len(prefixes), p=weights)]
        return _Session(list(ids), length)

    for _ in range(spec.requests):
        # New sessions are begun until the next one would begin after the earliest waiting turn, so
        # that turns are taken in order of time.
        while not turns or begin_s <= turns[0][0]:
            heapq.heappush(turns, (begin_s, num_pushed, begin()))
            num_pushed += 1
            begin_s += chance.exponential(spec.turns / spec.rate)
        when_s, _, session = heapq.heappop(turns)
        session.num_tokens += _draw(chance, spec.new_tokens, spec.new_spread)
        if session.num_tokens > spec.max_tokens:
            session.num_tokens = spec.max_tokens
            is_last = True
        else:
            is_last = chance.random() < 1 / spec.turns
        output = _draw(chance, spec.output_tokens, spec.output_spread)
        num_full, rest = divmod(session.num_tokens, BLOCK_TOKENS)
        session.ids += [next(fresh) for _ in range(num_full - len(session.ids))]
        hash_ids = list(session.ids[:num_full])
        if rest:
            hash_ids.append(next(fresh))
        shown_s = when_s
        if spec.burst_s:
            shown_s = np.ceil(when_s / spec.burst_s) * spec.burst_s
        yield TraceRow(round(float(shown_s) * 1e3), session.num_tokens, output, hash_ids)
        if not is_last:
            session.num_tokens += output
            when_s += chance.exponential(spec.think_s)
            heapq.heappush(turns, (when_s, num_pushed, session))
            num_pushed += 1
