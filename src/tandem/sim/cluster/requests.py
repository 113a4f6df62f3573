"""Requests of a run, made from the rows of a trace as they arrive, so that they need no memory
before.

All tokens of a block are its hash id: equal hash ids give equal tokens, which is sufficient for a
prefix index.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from tandem.core.loads.traces import BLOCK_TOKENS, TraceRow
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.groups.chain import hash_block, pack_tokens

__all__ = [
    "FIRST_OUTPUT_ID",
    "KeyCache",
    "make_request",
    "make_tokens",
    "repeat_rows",
    "scale_rows",
]

FIRST_OUTPUT_ID = 1 << 30
"""First token id used for simulated answers, above all hash ids, which prompts use."""


def make_tokens(row: TraceRow, block_tokens: int = BLOCK_TOKENS) -> list[int]:
    """Return the prompt tokens of a row (one request) of a trace."""
    tokens: list[int] = []
    for hash_id in row.hash_ids:
        tokens += [hash_id] * block_tokens
    del tokens[row.input_length :]
    return tokens


def make_request(
    row: TraceRow, number: int, timeout_s: float | None, block_tokens: int = BLOCK_TOKENS
) -> AddRequest:
    """Return the request that a row of a trace describes.

    Args:
       row: row of the trace.
       number: number of the request in the run.
       timeout_s: seconds from its arrival.
       block_tokens: tokens per hash of the trace.
    """
    # The request generates exactly the trace's output length; a row without output generates one
    # token, so that its prompt is computed.
    sampling = SamplingParams(max_tokens=max(row.output_length, 1), ignore_eos=True, seed=number)
    return AddRequest(
        request_id=str(number),
        prompt_ids=make_tokens(row, block_tokens),
        sampling=sampling,
        timeout_s=timeout_s,
    )


@dataclass(slots=True)
class KeyCache:
    """Keys of a trace's blocks by hash id, computed once for all instances.

    A hash id identifies all tokens up to the end of its block, so its chain of keys is always the
    same.

    Attributes:
       block_size: tokens of an instance's block; divides ``block_tokens``.
       root_key: root key of the instances' prefix index.
       block_tokens: tokens per hash of the trace.
    """

    block_size: int
    root_key: bytes
    block_tokens: int = BLOCK_TOKENS
    _keys: dict[int, tuple[bytes, ...]] = field(default_factory=dict[int, tuple[bytes, ...]])

    def find(self, row: TraceRow, prompt: Sequence[int]) -> list[bytes]:
        """Return the keys of a prompt's full blocks."""
        size, known = self.block_size, self._keys
        keys: list[bytes] = []
        parent = self.root_key
        for position, hash_id in enumerate(row.hash_ids):
            if (position + 1) * self.block_tokens > len(prompt):
                break
            chain = known.get(hash_id)
            if chain is None:
                made: list[bytes] = []
                tokens = pack_tokens([hash_id] * size)
                for _ in range(self.block_tokens // size):
                    parent = hash_block(parent, tokens)
                    made.append(parent)
                chain = known[hash_id] = tuple(made)
            keys += chain
            parent = chain[-1]
        return keys


def scale_rows(rows: Iterable[TraceRow], factor: float) -> Iterator[TraceRow]:
    """Yield rows with the request rate multiplied by ``factor``."""
    for row in rows:
        yield msgspec.structs.replace(row, timestamp=row.timestamp / factor)


def repeat_rows(rows: Sequence[TraceRow], times: int) -> Iterator[TraceRow]:
    """Yield a trace ``times`` times in sequence, each with new hash ids and shifted in time."""
    if not rows:
        return
    num_hashes = 1 + max(hash_id for row in rows for hash_id in row.hash_ids)
    # The gap between two repetitions is the mean gap between requests.
    length_ms = rows[-1].timestamp * (1 + 1 / len(rows))
    for number in range(times):
        for row in rows:
            yield TraceRow(
                row.timestamp + number * length_ms,
                row.input_length,
                row.output_length,
                [hash_id + number * num_hashes for hash_id in row.hash_ids],
            )
