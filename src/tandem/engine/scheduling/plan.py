"""The scheduler's plan of a step for the runner. Plain data."""

from typing import NamedTuple

import msgspec

from tandem.core.wire import KvSource
from tandem.engine.groups.snapshots import Snapshot
from tandem.engine.scheduling.blocks import BlockCopy, KeyedBlock
from tandem.engine.scheduling.request import NO_WINDOW, Request, WindowTable
from tandem.engine.stepping.messages import Phase, StateCopy

__all__ = ["BlockLoad", "ScheduledSequence", "StateSave", "StepPlan"]


class ScheduledSequence(NamedTuple):
    """Tokens ``start`` to ``start + num_tokens`` of a request, to be computed in this step."""

    request: Request
    start: int
    num_tokens: int
    block_table: tuple[int, ...]
    """Covers all positions up to the last of this step, no more; a snapshot, which
    ``Scheduler.settle`` renews where the plan was made while another step ran."""
    wants_sample: bool
    """True if the last token is the last known one, so that its logits give the next token."""
    phase: Phase
    """The kind of work: a decode computes the token sampled last, a prefill known tokens."""
    num_drafts: int = 0
    """Number of draft tokens at the end of ``num_tokens``."""
    window: WindowTable = NO_WINDOW
    """Table of the request's window blocks; see ``block_table``."""


class BlockLoad(NamedTuple):
    """Fill a block, in all layers, from a lower tier or from another instance.

    The block belongs to the transfer, even if the request ends, until the caller reports
    its end by ``Scheduler.load_done`` or ``load_failed``: a late write never meets a new owner.
    """

    request: Request
    position: int
    """Position of the block in the prompt."""
    key: bytes
    """Key of the block; empty for the tail of a prompt, which only another instance may hold."""
    block_id: int
    """Or ``make_state_id`` of the slot that the state at the end of the load goes to, or
    ``make_window_id`` of the block that what the layers with a window hold goes to."""
    source: KvSource


class StateSave(NamedTuple):
    """Copy the state of a request, which the step brings to ``position``, to a slot."""

    request: Request
    position: int
    slot: int


class StepPlan(msgspec.Struct, eq=False):
    """The plan of one step: do the copies, run the forward pass, sample, then call ``complete``.

    What concerns lower tiers is read before the step writes, and in this order: ``filled`` and
    ``evicted``, whose memory the step or a load may reuse; then ``dropped``; then ``loads``, which
    go on beside this step and those that follow.
    """

    sequences: list[ScheduledSequence] = []
    copies: list[BlockCopy] = []
    window_copies: list[BlockCopy] = []
    """Copies between blocks of window layers, made together with ``copies``."""
    state_loads: list[StateCopy] = []
    """Copies of snapshots to the slots of requests that start from them, before the step."""
    state_saves: list[StateSave] = []
    """States to save as snapshots, after the step."""
    unused_slots: list[int] = []
    """Slots whose state nobody needs any more."""
    pinned: list[Snapshot] = []
    """The sources of ``state_loads``."""
    preempted: list[Request] = []
    """Requests moved back to the queue without blocks; they keep their generated tokens."""
    expired: list[Request] = []
    """Finished with ``FinishReason.DEADLINE``, blocks released."""
    starved: list[Request] = []
    """Finished with ``FinishReason.ERROR``: the machine has had no memory for their blocks."""
    loads: list[BlockLoad] = []
    """Loads to start; those of one request are in the order of its tokens."""
    dropped: list[BlockLoad] = []
    """Loads in progress that are no longer wanted. They may be stopped; their end is still
    reported."""
    filled: list[KeyedBlock] = []
    """Blocks that steps have filled since the last plan, generated tokens included; each content
    once, however many requests computed it. Then their window blocks. Then states that are kept
    where a block ends: whoever finds one of them elsewhere finds the blocks before it, which were
    stored first."""
    evicted: list[KeyedBlock] = []
    """Full blocks whose content this plan gives up."""
    num_tokens: int = 0
    is_stalled: bool = False
    """A request lacks blocks that only the step in flight can give back: none less urgent than it
    is in this plan."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compute; such a plan is not completed, but may have loads."""
        return not self.sequences
