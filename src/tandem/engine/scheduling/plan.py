"""The plan of one step, which the scheduler makes and the engine carries out. Plain data."""

from typing import NamedTuple

import msgspec

from tandem.core.wire import KvSource
from tandem.engine.groups.group import GroupBlock
from tandem.engine.groups.snapshots import Snapshot
from tandem.engine.scheduling.blocks import BlockCopy, KeyedBlock
from tandem.engine.scheduling.request import NO_WINDOW, Request, WindowTable
from tandem.engine.stepping.messages import Phase, StateCopy

__all__ = ["BlockLoad", "ScheduledSequence", "StateSave", "StepPlan"]


class ScheduledSequence(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Tokens ``start`` to ``start + num_tokens`` of a request, to be computed in this step."""

    request: Request
    start: int
    num_tokens: int
    block_table: tuple[int, ...]
    """Ids of the blocks of all positions up to the last one of this step. A copy: if the plan was
    made while another step ran, ``Scheduler.settle`` replaces it.
    """
    wants_sample: bool
    """True if the step computes the last known token, whose logits give the next token."""
    phase: Phase
    """``DECODE`` if the step computes the token that was sampled last, ``PREFILL`` for other known
    tokens.
    """
    num_drafts: int = 0
    """Number of draft tokens, the last ones of ``num_tokens``."""
    window: WindowTable = NO_WINDOW
    """Ids of the request's window blocks; a copy, like ``block_table``."""


class BlockLoad(NamedTuple):
    """A transfer that fills one block, in all layers, from the store or from another instance.

    Even if the request ends, the block is not given to another one until the caller reports the end
    of the transfer by ``Scheduler.load_done`` or ``load_failed``.
    """

    request: Request
    position: int
    """Index of the block in the prompt."""
    key: bytes
    """Key of the block; empty for the prompt's partial last block, which only another instance can
    have.
    """
    block: GroupBlock
    """Destination: a full block, a window block, or the slot for the state at the end of the load.
    """
    source: KvSource


class StateSave(NamedTuple):
    """A copy, after the step, of a request's recurrent state to a snapshot's slot; the state then
    covers the tokens up to ``position``.
    """

    request: Request
    position: int
    slot: int


class StepPlan(msgspec.Struct, eq=False):
    """The plan of one step: do the copies, run the forward pass, sample, then call ``complete``.

    The fields for lower tiers are to be handled before the step writes, in this order: ``filled``
    and ``evicted``, whose memory the step or a load may overwrite; then ``dropped``; then
    ``loads``, which run beside this step and later ones.
    """

    sequences: list[ScheduledSequence] = []
    copies: list[BlockCopy] = []
    window_copies: list[BlockCopy] = []
    """Copies between window blocks, made at the same time as ``copies``."""
    state_loads: list[StateCopy] = []
    """Copies from snapshots to the state slots of requests that start from them, made before the
    step.
    """
    state_saves: list[StateSave] = []
    """States to save as snapshots, after the step."""
    unused_slots: list[int] = []
    """State slots whose content is no longer needed."""
    pinned: list[Snapshot] = []
    """Snapshots that ``state_loads`` copy from; not evicted before the step is completed."""
    preempted: list[Request] = []
    """Requests moved back to the queue: they lost their blocks and keep their generated tokens."""
    expired: list[Request] = []
    """Requests ended with ``FinishReason.DEADLINE``; their blocks are released."""
    starved: list[Request] = []
    """Requests ended with ``FinishReason.ERROR``, because the machine had no memory for their
    blocks.
    """
    loads: list[BlockLoad] = []
    """Loads to start; those of one request are in the order of its tokens."""
    dropped: list[BlockLoad] = []
    """Loads in progress that are no longer wanted. The executor may stop them; it reports their end
    in any case.
    """
    filled: list[KeyedBlock] = []
    """Blocks that steps have filled since the last plan, with prompt or generated tokens, each
    content once; then their window blocks; then states at the end of a full block. The order is
    that of storing, so that a state in the store has its blocks there already.
    """
    evicted: list[KeyedBlock] = []
    """Cached full blocks that this plan evicts."""
    num_tokens: int = 0
    is_stalled: bool = False
    """True if a request lacks blocks that only the end of the step in flight can free. No request
    less urgent than it is in this plan.
    """

    @property
    def is_empty(self) -> bool:
        """True if there are no tokens to compute. Such a plan needs no ``Scheduler.complete``; it
        may still have loads.
        """
        return not self.sequences
