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
    """Tokens of the prompt, or output tokens that are computed again after a preemption or on
    another instance."""
    DECODE = 1
    """The one token that was sampled last."""
    VERIFY = 2
    """The token sampled last and draft tokens after it; a token is sampled from every row of
    logits."""


class Logits(IntEnum):
    """The positions of a sequence for which a step computes logits."""

    NONE = 0
    LAST = 1
    ALL = 2


class SamplingRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request to draw a token from a sequence's last row of logits, or from every row in
    ``Phase.VERIFY``.
    """

    position: int
    """Index in the output of the first token to be drawn; it selects the draw in the random
    stream."""


class PooledRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request for one vector (an embedding or scores) made of a sequence's rows; ``kind`` says
    how, and whether the rows are logits or hidden states.
    """

    kind: Pooling
    is_end: bool
    """True if the step computes the sequence's last token."""


class StateCopy(NamedTuple):
    """A copy of the recurrent state in slot ``source`` to slot ``target``."""

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
    """Ids of the blocks as little-endian int32, by position // block_size, up to the last token."""
    logits: Logits
    sampling: SamplingRow | None = None
    adapter: str = ""
    """Digest of the LoRA adapter that computes the tokens; empty for the model alone."""
    scored_ids: list[int] = []
    """Prompt tokens whose log-probabilities are wanted: the first rows of logits predict them, in
    order."""
    num_top: int = 0
    """Number of likeliest tokens to report beside each of ``scored_ids``."""
    state_slot: int = NO_SLOT
    """Slot with the state before ``start``; after the step, with the state after the last token. If
    ``start`` is 0, the step begins with zeros and ignores the slot's content."""
    prompt_len: int = NO_OUTPUT
    """Position of the first output token. Output tokens may use deferred experts."""
    pooled: PooledRows | None = None
    window_first: int = 0
    """Index of the first of ``window_blocks`` in the sequence, counted in blocks."""
    window_blocks: bytes = b""
    """Ids of the blocks of the sliding-window layers, packed like ``block_table``, that the tokens
    attend to."""


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """Sampling state of a sequence, sent with the step before its first sample on this runner."""

    sequence_id: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    """Ids that end the sequence; none is sampled before ``min_tokens`` tokens are out."""
    prompt_ids: list[int]
    """The prompt, if a repetition penalty counts its tokens; otherwise empty."""
    output_ids: list[int]
    """Tokens generated so far, if penalties or a grammar need them; otherwise empty."""


class StepInput(msgspec.Struct, frozen=True, array_like=True):
    """One step: do the copies, compute the sequences, sample."""

    sequences: list[StepSequence]
    copies: list[BlockCopy] = []
    starts: list[SequenceStart] = []
    ends: list[int] = []
    """Ids of sequences that have ended since the last step; the runner drops their sampling
    state."""
    state_loads: list[StateCopy] = []
    """Copies from snapshots to sequences' slots, made in this order before anything is computed."""
    state_saves: list[StateCopy] = []
    """Copies from sequences' slots to snapshots, made in this order after everything is
    computed."""
    window_copies: list[BlockCopy] = []
    """Copies between blocks of the sliding-window layers, made together with ``copies``."""
    unused_slots: list[int] = []
    """State slots whose memory is freed, before any other slot is written."""


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """A sampled token, with log-probabilities if asked for; its id is ``BROKEN_ROW`` if the row of
    logits is no distribution.
    """

    token_id: int
    logprob: TokenLogprob | None = None


class SequenceResult(msgspec.Struct, array_like=True):
    """The outcome of a step for one sequence."""

    sequence_id: int
    tokens: list[SampledToken] = []
    """Sampled tokens: empty while the prefill goes on, one for a decode, one or more after drafts
    were verified."""
    prompt_logprobs: list[TokenLogprob] = []
    """Log-probabilities of ``StepSequence.scored_ids``."""
    pooled: bytes = b""
    """The vector that ``StepSequence.pooled`` asks for, given in the step of the last token."""
    is_late: bool = False
    """True if there is no token because the mask of the sequence's grammar was not computed in
    time; ``Grammars.await_mask`` tells when it is."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of a step: one entry for each sequence, in the order of the ``StepInput``."""

    sequences: list[SequenceResult]


def pack_block_ids(block_ids: Iterable[int]) -> bytes:
    """Return block ids as little-endian int32, the form of ``StepSequence.block_table``."""
    return array("i", block_ids).tobytes()


def select_sequences(step: StepInput, sequences: list[StepSequence]) -> StepInput:
    """Return a step that computes only some of another step's sequences, with the block and state
    copies that these need.
    """
    ids = {sequence.sequence_id for sequence in sequences}
    blocks = {block_id for s in sequences for block_id in array("i", s.block_table)}
    # Keep only copies into these sequences' blocks. A copy clears the rest of its block, so
    # repeating one would erase KV that other sequences have computed since.
    copies = [copy for copy in step.copies if copy.dst_block_id in blocks]
    starts = [start for start in step.starts if start.sequence_id in ids]
    windows = {block_id for s in sequences for block_id in array("i", s.window_blocks)}
    window_copies = [copy for copy in step.window_copies if copy.dst_block_id in windows]
    slots = {sequence.state_slot for sequence in sequences}
    loads = [copy for copy in step.state_loads if copy.target in slots]
    saves = [copy for copy in step.state_saves if copy.source in slots]
    return StepInput(sequences, copies, starts, step.ends, loads, saves, window_copies)
