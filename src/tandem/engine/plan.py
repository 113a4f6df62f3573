"""What the scheduler hands to a runner each step, and what it tells the metrics. Plain data."""

from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.engine.blocks import BlockCopy
from tandem.engine.request import Request

__all__ = ["ScheduledSequence", "SchedulerStats", "StepPlan"]


class ScheduledSequence(NamedTuple):
    """Tokens ``start`` to ``start + num_tokens`` of a request, to be computed in this step."""

    request: Request
    start: int
    num_tokens: int
    block_table: tuple[int, ...]
    """Covers all positions up to the last of this step, no more; a snapshot."""
    wants_sample: bool
    """The last token is the last known one: its logits choose the next."""


@dataclass(slots=True)
class StepPlan:
    """One step. Do the copies, then the forward pass, then sample, then ``complete``."""

    sequences: list[ScheduledSequence] = field(default_factory=list[ScheduledSequence])
    copies: list[BlockCopy] = field(default_factory=list[BlockCopy])
    preempted: list[Request] = field(default_factory=list[Request])
    """Back in the queue without blocks; what they generated is kept."""
    expired: list[Request] = field(default_factory=list[Request])
    """Finished with ``FinishReason.DEADLINE``, blocks released."""
    num_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        """Nothing to compute; such a plan is not completed."""
        return not self.sequences


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot for the metrics; counters since start, gauges of now."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    num_evicted_blocks: int
    num_prefix_queries: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
