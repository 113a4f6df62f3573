"""Mooncake's format of traces: JSON lines of arrivals, lengths and hashes of blocks, without text.

``tandem bench serve`` and the simulator use this reader. Lines are read one by one, so that a trace
of any length needs little memory.
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

NonNegativeInt = Annotated[int, Meta(ge=0)]


class TraceRow(msgspec.Struct, frozen=True, gc=False):
    """A request of a trace."""

    timestamp: Annotated[float, Meta(ge=0)]
    """Arrival in milliseconds from the start of the trace."""
    input_length: Annotated[int, Meta(ge=1)]
    output_length: NonNegativeInt
    hash_ids: Annotated[list[NonNegativeInt], Meta(min_length=1)]
    """One id for each ``BLOCK_TOKENS`` tokens of the prompt. Equal ids mean that all tokens up to
    there are equal."""


_DECODER = msgspec.json.Decoder(TraceRow)


def read_rows(path: Path) -> Iterator[TraceRow]:
    """Yield the requests of a trace, in the order of the file.

    Raises: NotFoundError (the file cannot be read); ConfigError (a line is no row of a trace).
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield _DECODER.decode(line)
                except msgspec.DecodeError as error:
                    what = f"{path}, line {number}: no row of a trace: {error}"
                    raise ConfigError("loads.read_trace", what) from error
    except OSError as error:
        what = f"cannot read {path}: {error.strerror}: give the path of a trace"
        raise NotFoundError("loads.read_trace", what) from error


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
