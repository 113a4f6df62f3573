"""One generation as the engine sees it: its tokens, its progress, its blocks.

A ``Request`` is mutable. Its own fields are set by whoever adds it (the first group) and by the
scheduler's lifecycle (the second); each further group is a record with one writer: the queue's
notes (admission and planning), the prefix's (``PrefixReuse``), the state's (``StateReuse``), the
window's (``WindowReuse``), the load's (load planning and ``BlockLoads``) and the report's (times
and counts, for outputs and ``tandem explain``). Token ids alone: text is the server's business.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from tandem.core.state_layout import NO_SLOT
from tandem.core.timeline import PrefixMiss
from tandem.core.wire import FinishReason, KvSource, PrefillKv, SamplingParams, TierKv
from tandem.engine.stepping.messages import pack_block_ids

if TYPE_CHECKING:
    from tandem.engine.groups.snapshots import Snapshot
    from tandem.engine.scheduling.prefix_index import PrefixNode

__all__ = [
    "NO_WINDOW",
    "FinishReason",
    "PrefixNotes",
    "Request",
    "RequestState",
    "StateNotes",
    "WindowNotes",
    "WindowTable",
]


class RequestState(StrEnum):
    """The state of a request; only the scheduler moves it."""

    WAITING = "waiting"
    LOADING = "loading"
    """State while its load from a lower tier runs, until that ends or takes too long."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waiting again, without blocks, with the tokens it has generated."""
    FINISHED = "finished"


@dataclass(slots=True)
class QueueNotes:
    """The scheduler's notes on admission and planning of a request."""

    max_total_tokens: int = 0
    """Largest number of prompt and output tokens, from ``max_tokens`` and the context length."""
    num_deferrals: int = 0
    """Steps it was passed over because a running request computes a prefix that it shares."""
    num_overtaken: int = 0
    """Requests of its client and priority that came later and were admitted before it."""
    is_prefilling: bool = False
    """True from admission until all known tokens have been computed."""
    is_cancelled: bool = False
    """True if the request was cancelled in flight; it ends when the step completes."""
    num_preemptions: int = 0
    num_plans: int = 0
    """Number of plans in flight that contain the request."""
    num_tokens_in_flight: int = 0
    """Number of tokens in these plans; they follow the computed tokens."""
    num_samples_in_flight: int = 0
    """Tokens that these plans will sample."""


@dataclass(slots=True)
class PrefixNotes:
    """Place of a request in the prefix index."""

    root_key: bytes = b""
    block_keys: list[bytes] = field(default_factory=list[bytes])
    """Digests of its leading full blocks, as far as they were needed."""
    node: "PrefixNode | None" = None
    """Node of its last indexed block (or the root); None while it has no blocks."""
    num_indexed_blocks: int = 0
    """Leading blocks that are in the prefix index."""


@dataclass(slots=True)
class StateNotes:
    """The state of a request, for a model whose layers have one."""

    slot: int = NO_SLOT
    """State slot of the request while it runs."""
    points: list[int] = field(default_factory=list[int])
    """Tokens at which its prefill ends a chunk to keep a state, ascending."""
    last: "Snapshot | None" = None
    """Longest snapshot of the request's tokens that its prefill has passed."""


class WindowTable(NamedTuple):
    """The blocks of the layers with a window that a request still sees. Replaced, never changed."""

    first: int
    """Position of the first of them, in blocks."""
    blocks: tuple[int, ...]

    @property
    def end(self) -> int:
        """Position behind the last of them."""
        return self.first + len(self.blocks)


NO_WINDOW = WindowTable(0, ())


@dataclass(slots=True)
class WindowNotes:
    """The window of a request, for a model whose layers with one have blocks of their own."""

    table: WindowTable = NO_WINDOW
    marks: tuple[int, ...] = ()
    """Positions in tokens where a later prompt may continue; windows before them are kept
    longest."""


@dataclass(slots=True)
class LoadNotes:
    """State of a request's load from a lower tier or another instance."""

    has_loaded: bool = False
    """True if a load was started since the request became waiting; there is no second one."""
    wait_until_s: float = 0.0
    """Time before which the request waits for KV from elsewhere and is not admitted."""
    loaded_blocks: range = range(0)
    """Positions of the blocks that its last load brought."""


@dataclass(slots=True)
class ReportNotes:
    """Times and counts of a request, for its outputs and its timeline."""

    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix index when it was first admitted; usage reports them."""
    num_loaded_tokens: int = 0
    """Those of ``num_cached_tokens`` that a load from a lower tier had brought."""
    miss: PrefixMiss | None = None
    """The place and reason of the end of reuse when it was first admitted; for ``tandem explain``
    alone."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    """Time at which a step or its planning ended the request; None if cancelled between steps."""


@dataclass(slots=True, eq=False)
class Request:
    """State of one generation.

    Args:
        request_id: unique among the live requests of an instance.
        prompt_ids: at least one token id; not modified.
        sampling: shared, not copied.
        arrival_s: monotonic seconds, on the clock that ``Scheduler.schedule`` is given.
        priority: lower is served first.
        deadline_s: the request ends with ``FinishReason.DEADLINE`` once this moment has passed.
        client: who sent it; waiting requests of different clients get shares by their weights.
        weight: of its client's share.
        cache_salt: requests of different salts never share blocks.
        adapter: digest of the LoRA adapter that computes it; different ones never share blocks.
        kv_source: where KV may come from beside this instance's own blocks.
        prefill_lease_s: the request only prefills; its blocks are held so long. None: it decodes.
        awaits_continuation: it does not compute before ``Scheduler.continue_request``, or the end
            of the lease of its source.
        output_ids: of a generation that another instance began.
        message_end: tokens of the prompt up to the end of its last message, where a later prompt
            may go on differently; 0: unknown.
        num_stored_blocks: leading full blocks of the prompt that lower tiers or the device held
            when it arrived.
        expected_len: tokens of the prompt that need not be computed, as its sender believes.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    arrival_s: float
    priority: int = 0
    deadline_s: float | None = None
    client: str = ""
    weight: float = 1.0
    cache_salt: str = ""
    adapter: str = ""
    kv_source: KvSource = field(default_factory=TierKv)
    prefill_lease_s: float | None = None
    awaits_continuation: bool = False
    message_end: int = 0
    num_stored_blocks: int = 0
    expected_len: int = 0

    sequence_id: int = 0
    """Order of arrival, from 1; names the request in a ``StepInput``."""
    output_ids: list[int] = field(default_factory=list[int])
    """Tokens sampled so far, the one that ended the request included."""
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    """Leading tokens whose KV is in the blocks."""
    block_table: tuple[int, ...] = ()
    """Block ids by position: token ``i`` is in ``block_table[i // block_size]``. Replaced, never
    changed in place, so that a plan may keep it. Written by ``set_blocks`` and ``add_blocks``."""
    packed_table: bytes = b""
    """``block_table`` as a ``StepInput`` carries it; kept, as packing a long one takes longer than
    planning its decode."""
    held_blocks: tuple[int, ...] = ()
    """Its ``block_table`` at the end, if it ended with ``FinishReason.PREFILLED``."""
    held_window: WindowTable = NO_WINDOW
    """Window blocks of the request at its end; see ``held_blocks``."""

    queue: QueueNotes = field(default_factory=QueueNotes)
    prefix: PrefixNotes = field(default_factory=PrefixNotes)
    state_notes: StateNotes = field(default_factory=StateNotes)
    window_notes: WindowNotes = field(default_factory=WindowNotes)
    load: LoadNotes = field(default_factory=LoadNotes)
    report: ReportNotes = field(default_factory=ReportNotes)

    def set_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Replace the block table."""
        self.block_table = block_ids
        self.packed_table = pack_block_ids(block_ids)

    def add_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Append to the block table."""
        self.block_table += block_ids
        self.packed_table += pack_block_ids(block_ids)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.prompt_ids) + len(self.output_ids) - self.num_computed_tokens

    @property
    def num_planned_tokens(self) -> int:
        """Leading tokens that are computed or will be by the plans in flight."""
        return self.num_computed_tokens + self.queue.num_tokens_in_flight

    @property
    def num_expected_tokens(self) -> int:
        """Tokens known when the plans in flight have completed, unless they end the request."""
        return self.num_tokens + self.queue.num_samples_in_flight

    @property
    def num_unplanned_tokens(self) -> int:
        """Expected tokens that no plan in flight computes; 1 while decoding."""
        # The sum is written out for speed: this property is read several times for each token.
        queue, num_known = self.queue, len(self.prompt_ids) + len(self.output_ids)
        num_to_come = queue.num_samples_in_flight - queue.num_tokens_in_flight
        return num_known - self.num_computed_tokens + num_to_come

    @property
    def is_scheduled(self) -> bool:
        """True if a plan in flight contains the request."""
        return self.queue.num_plans > 0

    @property
    def prefill_kv(self) -> PrefillKv | None:
        """The prefill instance that its blocks come from, if one was named."""
        return self.kv_source if isinstance(self.kv_source, PrefillKv) else None

    @property
    def is_finished(self) -> bool:
        """True if it has left the scheduler."""
        return self.state is RequestState.FINISHED

    @property
    def can_reuse_prefix(self) -> bool:
        """False if every prompt token must be computed, for example for its log-probabilities."""
        return not self.sampling.needs_whole_prompt

    def get_tokens(self, start: int, end: int) -> list[int]:
        """Token ids of positions ``start`` to ``end``, prompt and output as one sequence."""
        prompt_len = len(self.prompt_ids)
        if end <= prompt_len:
            return self.prompt_ids[start:end]
        if start >= prompt_len:
            return self.output_ids[start - prompt_len : end - prompt_len]
        return self.prompt_ids[start:] + self.output_ids[: end - prompt_len]
