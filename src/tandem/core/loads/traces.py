"""Mooncake's format of traces: JSON lines of arrivals, lengths and hashes of blocks, without text.

``tandem bench serve`` and the simulator use this reader. Lines are read one by one: what stays in
memory is the hash ids.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.core.errors import ConfigError, NotFoundError

__all__ = ["BLOCK_TOKENS", "TraceRow", "check_divisor", "read_rows", "shrink_rows"]

BLOCK_TOKENS = 512
"""Number of tokens per hash id in published traces."""

MAX_TOKENS = 1 << 24
"""Longest prompt or answer that is read, above any context; a longer one is a mistake of units that
would be simulated for hours."""

NonNegativeInt = Annotated[int, Meta(ge=0)]
Length = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class TraceRow(msgspec.Struct, frozen=True, gc=False):
    """A request of a trace."""

    timestamp: Annotated[float, Meta(ge=0)]
    """Arrival in milliseconds from the start of the trace."""
    input_length: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    output_length: Length
    hash_ids: Annotated[list[NonNegativeInt], Meta(min_length=1)]
    """One id for each ``BLOCK_TOKENS`` tokens of the prompt. Equal ids mean that all tokens up to
    there are equal."""


_DECODER = msgspec.json.Decoder(TraceRow)


def read_rows(path: Path, block_tokens: int = BLOCK_TOKENS) -> Iterator[TraceRow]:
    """Yield the requests of a trace, in the order of the file, their hash ids numbered by first
    appearance from 0, as they are in published traces. Blank lines are passed over.

    Args:
        path: JSON lines.
        block_tokens: tokens per hash id.

    Raises: NotFoundError (the file cannot be read); ConfigError (a line is no row of a trace, or
        contradicts those before it; there is no request).
    """
    before = _RowsBefore(block_tokens)
    row = None
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                try:
                    row = before.add(_DECODER.decode(line))
                except (msgspec.DecodeError, ValueError) as error:
                    what = f"{path}, line {number}: no row of a trace: {error}"
                    raise ConfigError("loads.read_trace", what) from error
                yield row
    except OSError as error:
        what = f"cannot read {path}: {error.strerror}: give the path of a trace"
        raise NotFoundError("loads.read_trace", what) from error
    if row is None:
        raise ConfigError("loads.read_trace", f"{path} has no requests: give a trace")


class _RowsBefore:
    """The rows read so far: the last time, and the ids with their numbers.

    Args:
        block_tokens: tokens per hash id.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._last_ms = 0.0
        self._numbers: dict[int, int] = {}
        self._parents: list[int] = []
        """By number: the number that stands before it in a row; -1 for the first of a row."""

    def add(self, row: TraceRow) -> TraceRow:
        """Return the row with numbers instead of its ids.

        Raises: ValueError (it arrives before the last one; its ids do not fit the prompt's length;
            an id, which stands for all tokens up to its end, follows another id than before).
        """
        if row.timestamp < self._last_ms:
            what = f"timestamp {row.timestamp:g} is before {self._last_ms:g}: sort the lines"
            raise ValueError(what)
        self._last_ms = row.timestamp
        if len(row.hash_ids) != -(-row.input_length // self._block_tokens):
            raise ValueError(
                f"{len(row.hash_ids)} hash ids for {row.input_length} tokens: give one for each "
                f"{self._block_tokens} tokens begun"
            )
        parent, found = -1, list[int]()
        for hash_id in row.hash_ids:
            number = self._numbers.setdefault(hash_id, len(self._parents))
            if number == len(self._parents):
                self._parents.append(parent)
            elif self._parents[number] != parent:
                raise ValueError(
                    f"hash id {hash_id} follows another id than where it was first: an id stands "
                    f"for all tokens up to its end"
                )
            found.append(number)
            parent = number
        return TraceRow(row.timestamp, row.input_length, row.output_length, found)


def check_divisor(divisor: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Return the number of tokens per hash id (one for each prefix) in a trace whose lengths are
    divided by ``divisor``.

    Raises: ConfigError (``block_tokens`` is not a multiple of it).
    """
    if divisor < 1 or block_tokens % divisor:
        what = f"lengths divided by {divisor}: give a divisor of {block_tokens}"
        raise ConfigError("loads.shrink", what, field="length_divisor")
    return block_tokens // divisor


def shrink_rows(rows: Iterable[TraceRow], divisor: int) -> Iterator[TraceRow]:
    """Yield a trace's requests with their lengths in tokens divided by ``divisor``, to at least 1,
    for a small model.
    """
    for row in rows:
        if divisor == 1:
            yield row
            continue
        num_tokens = max(row.input_length // divisor, 1)
        yield TraceRow(
            row.timestamp, num_tokens, max(row.output_length // divisor, 1), row.hash_ids
        )
