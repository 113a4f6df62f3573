"""State that the parts of the scheduler share: queues, plans in flight, counts of blocks.

Owns the waiting queue, the list of requests that wait for a load and the running set, each sorted,
and the plans in flight. Counts blocks that are available, needed or committed; decides nothing.
Pure and single-threaded.
"""

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable

from tandem.core.instance_status import Statistics
from tandem.engine.config import EngineConfig
from tandem.engine.groups.group import Group
from tandem.engine.groups.reuse import StatePolicy, StateReuse
from tandem.engine.groups.windows import WindowPolicy, WindowReuse
from tandem.engine.scheduling.blocks import BlockPool, KeyedBlock
from tandem.engine.scheduling.holds import BlockHolds
from tandem.engine.scheduling.loads import BlockLoads, TierPlanner
from tandem.engine.scheduling.plan import ScheduledSequence, StepPlan
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.prefix_reuse import PrefixReuse
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.scheduling.shares import ClientShares
from tandem.engine.stepping.messages import Phase

__all__ = ["MAX_CANDIDATES", "SchedulerState"]

MAX_CANDIDATES = 128
"""Number of waiting requests considered in a step. If more wait, they are ordered by arrival and
not by cached prefix (as in SGLang), because sorting a long queue costs more than its hits save."""


class SchedulerState:
    """The requests of a scheduler by state, and its blocks by use.

    Args:
        config: the engine's configuration, with ``max_model_len`` resolved to a number.
        pool: the block pool; it has as many blocks as the runner has memory for.
        index: the prefix index over that pool.
        tiers: decides which blocks are loaded from lower tiers; None: none are.
        states: the slots for states and the policy that keeps snapshots; None: the model has no
            state.
        windows: the pool of window blocks; None: sliding-window layers have no blocks of their own.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        index: PrefixIndex,
        tiers: TierPlanner | None,
        states: StatePolicy | None = None,
        windows: WindowPolicy | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.index = index
        counters, is_enabled = Statistics(), config.prefix_cache
        self.states = (
            None
            if states is None
            else StateReuse(states, index, config.block_size, counters, is_enabled=is_enabled)
        )
        """State slots of requests, and snapshots; None: the model has no state."""
        self.windows = (
            None
            if windows is None
            else WindowReuse(
                windows, index, config.block_size, counters, is_ahead=config.overlap == "on"
            )
        )
        """Blocks of the sliding-window layers; None: these layers use the full blocks."""
        self.prefix = PrefixReuse(
            index,
            config.block_size,
            is_enabled=is_enabled,
            states=self.states,
            windows=self.windows,
        )
        self.tiers = tiers if is_enabled else None
        self.groups: dict[Group, StateReuse | WindowReuse] = {}
        """The groups beside the full blocks that the model has."""
        if self.states is not None:
            self.groups[Group.STATE] = self.states
        if self.windows is not None:
            self.groups[Group.WINDOW] = self.windows
        self.loads = BlockLoads(pool, index, self.prefix, config.block_size, counters, self.groups)
        self.holds = BlockHolds(pool, index, self.states, self.windows)
        # The last generated token needs no KV, but the last token of a prompt that is only scored
        # does.
        self.max_len = min(config.max_model_len, pool.num_blocks * config.block_size)
        self.requests: dict[str, Request] = {}
        self.shares = ClientShares()
        """Number of live requests of each client."""
        self.waiting: list[Request] = []
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.in_flight: deque[StepPlan] = deque()
        """Planned steps that have not completed, the oldest first."""
        self.evicted: list[KeyedBlock] = []
        """Full blocks evicted since the last plan."""
        self.wake_s = math.inf
        """Monotonic time at which the scheduler should be called even if nothing happens; see
        ``Scheduler.wake_s``.
        """
        self.counters = counters

    # The methods below move requests between the queues.

    def enqueue(self, request: Request) -> None:
        """Put a request into the waiting queue. Preempted requests stand before the others of
        their priority, in order of arrival.
        """
        is_preempted = request.queue.num_preemptions > 0
        request.state = RequestState.PREEMPTED if is_preempted else RequestState.WAITING
        insort(self.waiting, request, key=_queue_order)

    def leave_waiting(self, request: Request) -> None:
        """Take a request out of the waiting queue."""
        _remove_sorted(self.waiting, request, _queue_order)

    def enter_running(self, request: Request) -> None:
        """Put a request into the running set; its blocks are allocated already."""
        request.state = RequestState.RUNNING
        request.queue.is_prefilling = True
        insort(self.running, request, key=_urgency)

    def leave_running(self, request: Request, *, is_sound: bool = True) -> None:
        """Take a request out of the running set and release its blocks; their tokens can still be
        matched.

        Args:
            request: a request that is in no plan in flight.
            is_sound: False if its recurrent state must not be kept, as its last step failed or its
                last token is computed again.
        """
        _remove_sorted(self.running, request, _urgency)
        num_computed = request.num_computed_tokens
        self.prefix.detach(request)
        if self.states is not None and request.request_id not in self.holds:
            self.states.release(request, num_computed, is_sound=is_sound)
        request.queue.is_prefilling = False

    def preempt(self, request: Request, *, is_sound: bool = True) -> None:
        """Move a running request back to the queue, without its blocks; see ``leave_running``."""
        self.leave_running(request, is_sound=is_sound)
        request.queue.num_preemptions += 1
        request.queue.num_deferrals = 0
        request.load.has_loaded = False
        self.counters.num_preemptions += 1
        self.enqueue(request)

    def limit_chunk(self, request: Request, num_tokens: int) -> int:
        """Return how many of a request's next ``num_tokens`` tokens one step may compute.

        A chunk ends where a snapshot of the state is to be saved, and where window blocks run out.
        """
        if self.states is not None:
            num_tokens = self.states.limit(request, num_tokens)
        if self.windows is not None:
            num_tokens = self.windows.limit(request, num_tokens, self.running)
        return num_tokens

    def end_loading(self, request: Request) -> None:
        """Move a request whose load has ended back to the waiting queue. One that awaits another
        instance's tokens (``awaits_continuation``) stays.
        """
        if request.state is RequestState.LOADING and not request.awaits_continuation:
            self.loading.remove(request)
            self.enqueue(request)

    def emit(self, plan: StepPlan, request: Request, num_tokens: int) -> None:
        """Add the next ``num_tokens`` tokens of a request to a plan. The caller ensures that its
        blocks cover them.
        """
        # The request's properties are written out for speed, as this runs for each decoded token.
        queue, prompt_len = request.queue, len(request.prompt_ids)
        start = request.num_computed_tokens + queue.num_tokens_in_flight
        end = start + num_tokens
        if self.windows is not None:
            self.windows.extend(request, end)
        is_last = end == prompt_len + len(request.output_ids) + queue.num_samples_in_flight
        wants_sample = is_last and request.sampling.max_tokens > 0
        is_decode = num_tokens == 1 and start >= prompt_len
        plan.sequences.append(
            ScheduledSequence(
                request,
                start,
                num_tokens,
                request.block_table,
                wants_sample,
                Phase.DECODE if is_decode else Phase.PREFILL,
                0,
                request.window_notes.table,
            )
        )
        if self.states is not None:
            self.states.plan_save(plan, request, end)
        plan.num_tokens += num_tokens
        queue.num_tokens_in_flight += num_tokens
        queue.num_samples_in_flight += wants_sample

    # The methods below count and allocate blocks.

    def count_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.config.block_size)

    def count_available(self, num_wanted: int = 0) -> int:
        """Return the number of blocks that ``allocate`` can give: free ones and cached ones.

        First tries to reserve memory for ``num_wanted`` of the free ones.
        """
        self.pool.reserve(num_wanted)
        return self.pool.num_free + self.pool.num_cached

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Allocate blocks, evicting cached ones if too few are free; return their ids.

        The caller has checked ``count_available``.
        """
        pool = self.pool
        if num_blocks > pool.num_free:
            num_evicted = num_blocks - pool.num_free
            self.evicted += self.index.evict(num_evicted)
            self.counters.evicted_tokens += num_evicted * self.config.block_size
        return tuple([pool.allocate() for _ in range(num_blocks)])

    def count_outstanding(self, request: Request) -> int:
        """Return the number of blocks that a running request lacks for the tokens it knows and for
        one more block to grow into.
        """
        return max(self.count_lookahead(request) - len(request.block_table), 0)

    def count_lookahead(self, request: Request) -> int:
        """Return the number of blocks for a request's known tokens and one more to grow into."""
        num_tokens = request.num_expected_tokens
        limit = request.queue.max_total_tokens - 1
        growth_end = min(num_tokens + self.config.block_size, limit)
        return self.count_blocks(max(num_tokens, growth_end))

    def count_full_length(self, request: Request) -> int:
        """Return the number of blocks of a request with ``max_total_tokens`` tokens."""
        return self.count_blocks(request.queue.max_total_tokens)

    def count_largest(self) -> int:
        """Return the largest number of blocks that a running, decoding request can come to need."""
        return max(
            (self.count_full_length(r) for r in self.running if r.prefill_lease_s is None),
            default=0,
        )

    def count_committed(self) -> int:
        """Return the number of KV blocks that preempting requests cannot free.

        These are blocks of loads, of holds, and of running prefills, which will be held.
        """
        to_come = sum(
            self.count_full_length(r) for r in self.running if r.prefill_lease_s is not None
        )
        return self.loads.num_pinned + self.holds.num_pinned + to_come

    # The method below checks the whole state, for tests.

    def check(self) -> None:
        """Assert that every reference to a block is owned by a request, a load, a hold (blocks kept
        for a decode instance) or a plan. O(blocks), for tests.
        """
        self.pool.check()
        self.index.check()
        owners: Counter[int] = Counter()
        for request in self.running:
            owners.update(request.block_table)
        owners.update(self.loads.list_references())
        owners.update(self.holds.list_references())
        for plan in self.in_flight:
            owners.update(copy.src_block_id for copy in plan.copies)
        for block_id in range(self.pool.num_blocks):
            num_refs = self.pool.get_num_refs(block_id)
            assert owners[block_id] == num_refs, (
                f"block {block_id}: {num_refs} references, {owners[block_id]} owners"
            )
        if self.windows is not None:
            elsewhere = [*self.loads.list_taken(Group.WINDOW), *self.holds.list_window_blocks()]
            self.windows.check(self.running, self.in_flight, elsewhere)
        if self.states is not None:
            in_use = [r.state_notes.slot for r in self.running]
            in_use += [save.slot for plan in self.in_flight for save in plan.state_saves]
            self.states.check(
                [*in_use, *self.holds.list_slots(), *self.loads.list_taken(Group.STATE)]
            )
        num_listed = len(self.running) + len(self.loading) + len(self.waiting)
        assert num_listed == len(self.requests), (
            f"{len(self.running)} running, {len(self.loading)} loading and "
            f"{len(self.waiting)} waiting of {len(self.requests)} requests"
        )
        for request in self.loading:
            assert request.state is RequestState.LOADING, f"{request.request_id} does not load"
            has_reason = self.loads.has_load(request) or request.awaits_continuation
            assert has_reason, f"request {request.request_id} waits for nothing"
        _check_sorted(self.running, _urgency)
        _check_sorted(self.waiting, _queue_order)


def _urgency(request: Request) -> tuple[int, int]:
    """Return the sort key of the running set: priority, then arrival."""
    return (request.priority, request.sequence_id)


def _queue_order(request: Request) -> tuple[int, bool, int]:
    """Return the sort key of the waiting queue: priority, preempted requests first, then
    arrival.
    """
    return (request.priority, request.state is not RequestState.PREEMPTED, request.sequence_id)


def _remove_sorted(
    requests: list[Request], request: Request, key: Callable[[Request], tuple[int, ...]]
) -> None:
    position = bisect_left(requests, key(request), key=key)
    assert requests[position] is request, f"request {request.request_id} is out of order"
    del requests[position]


def _check_sorted(requests: list[Request], key: Callable[[Request], tuple[int, ...]]) -> None:
    keys = [key(request) for request in requests]
    assert keys == sorted(keys), f"requests out of order: {keys}"
