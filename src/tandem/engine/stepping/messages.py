"""Messages between the engine and the runner of its steps: plain values, msgpack when they travel.

A ``StepInput`` is one step: the tokens to compute, the blocks that hold their KV, and the rows of
logits to sample from. A ``StepResult`` has the tokens that each sequence got, none or several. The
runner keeps what must survive between the steps of a sequence, its sampling state, from the
``SequenceStart`` that comes with the sequence's first sample to the step that lists its id in
``ends``. Neither message refers to a ``Request``, so a step can be sent to another process.
"""

from array import array
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import msgspec

from tandem.core.spec import NO_OUTPUT
from tandem.core.state_layout import NO_SLOT
from tandem.core.wire import Pooling, SamplingParams, TokenLogprob
from tandem.engine.scheduling.blocks import BlockCopy

__all__ = [
    "Logits",
    "Phase",
    "PooledRows",
    "SampledToken",
    "SamplingRow",
    "SequenceResult",
    "SequenceStart",
    "StateCopy",
    "StepInput",
    "StepResult",
    "StepSequence",
    "pack_block_ids",
    "select_sequences",
]


class Phase(IntEnum):
    """The kind of work that a step does for a sequence."""

    PREFILL = 0
    """Tokens of the prompt, or tokens computed again after a preemption or a hand-over."""
    DECODE = 1
    """The one token that the last step sampled."""
    VERIFY = 2
    """The last sampled token and drafts after it; every row of logits is sampled from."""


class Logits(IntEnum):
    """The rows of logits that a step computes for a sequence."""

    NONE = 0
    LAST = 1
    ALL = 2


class SamplingRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Draws the token after a sequence's last row (after every row in ``Phase.VERIFY``)."""

    position: int
    """Index of the first drawn token in the output; selects the place in the random stream."""


class PooledRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Makes one vector of a sequence's rows, which are hidden states where ``kind`` says so."""

    kind: Pooling
    is_end: bool
    """The step computes the last token."""


class StateCopy(NamedTuple):
    """Copy the state in a slot to another slot."""

    source: int
    target: int


class StepSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of one sequence that a step computes."""

    sequence_id: int
    """Unique among the sequences of an instance since its start."""
    phase: Phase
    start: int
    """Position of the first of ``token_ids``; the KV of all earlier positions is in the blocks."""
    token_ids: list[int]
    block_table: bytes
    """Block ids by position // block_size as little-endian int32; covers the last token."""
    logits: Logits
    sampling: SamplingRow | None = None
    adapter: str = ""
    """Digest of the LoRA adapter that computes the tokens; empty for the model alone."""
    scored_ids: list[int] = []
    """Tokens of the prompt whose log-probability the first rows give, one a row."""
    num_top: int = 0
    """Likeliest tokens reported beside each of ``scored_ids``."""
    state_slot: int = NO_SLOT
    """Holds the state before ``start`` and, after the step, that after the last token. A sequence
    that starts at 0 begins with zeros, whatever the slot holds."""
    prompt_len: int = NO_OUTPUT
    """Position from which tokens are output; those may defer experts."""
    pooled: PooledRows | None = None
    window_first: int = 0
    """Position of the first of ``window_blocks``, in blocks."""
    window_blocks: bytes = b""
    """The same as ``block_table``, of the layers with a window: the blocks that the tokens see."""


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """Sampling state of a sequence before its first sample on this runner."""

    sequence_id: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    """Ids that end the sequence; masked before ``min_tokens``."""
    prompt_ids: list[int]
    """The prompt where a repetition penalty counts it, else empty."""
    output_ids: list[int]
    """Tokens generated so far where penalties or a grammar count them, else empty."""


class StepInput(msgspec.Struct, frozen=True, array_like=True):
    """One step: do the copies, compute the sequences, sample."""

    sequences: list[StepSequence]
    copies: list[BlockCopy] = []
    starts: list[SequenceStart] = []
    ends: list[int] = []
    """Sequences that have ended since the last step; their sampling state is dropped."""
    state_loads: list[StateCopy] = []
    """Snapshots to slots of sequences, before anything is computed, in this order."""
    state_saves: list[StateCopy] = []
    """Slots of sequences to snapshots, after all is computed, in this order."""
    window_copies: list[BlockCopy] = []
    """The same as ``copies``, of blocks of the layers with a window."""
    unused_slots: list[int] = []
    """Slots of states whose content is dropped, before any other is written."""


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """A drawn token; ``BROKEN_ROW`` as id where the logits are no distribution."""

    token_id: int
    logprob: TokenLogprob | None = None


class SequenceResult(msgspec.Struct, array_like=True):
    """The outcome of a step for one sequence."""

    sequence_id: int
    tokens: list[SampledToken] = []
    """None while the prefill goes on; one for a decode; one or more for a verified draft."""
    prompt_logprobs: list[TokenLogprob] = []
    """Prompt logprobs of ``StepSequence.scored_ids``."""
    pooled: bytes = b""
    """The vector of ``StepSequence.pooled``, with its last token."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a step: one entry a sequence, in the order of the ``StepInput``."""

    sequences: list[SequenceResult]


def pack_block_ids(block_ids: Iterable[int]) -> bytes:
    """Return block ids as ``StepSequence.block_table`` holds them."""
    return array("i", block_ids).tobytes()


def select_sequences(step: StepInput, sequences: list[StepSequence]) -> StepInput:
    """Return a step of some of another's sequences, with what belongs to them."""
    ids = {sequence.sequence_id for sequence in sequences}
    blocks = {block_id for s in sequences for block_id in array("i", s.block_table)}
    # Keep only copies into these sequences' blocks: a copy clears the rest of its block, so
    # repeating one would erase KV that others have computed since.
    copies = [copy for copy in step.copies if copy.dst_block_id in blocks]
    starts = [start for start in step.starts if start.sequence_id in ids]
    windows = {block_id for s in sequences for block_id in array("i", s.window_blocks)}
    window_copies = [copy for copy in step.window_copies if copy.dst_block_id in windows]
    slots = {sequence.state_slot for sequence in sequences}
    loads = [copy for copy in step.state_loads if copy.target in slots]
    saves = [copy for copy in step.state_saves if copy.source in slots]
    return StepInput(sequences, copies, starts, step.ends, loads, saves, window_copies)
