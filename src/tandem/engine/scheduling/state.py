"""State that the parts of the scheduler share: the queues, the blocks and their promised uses.

Owns the waiting queue, the loading list and the running set, each kept in order, and the plans in
flight. Counts blocks; decides nothing. Pure and single-threaded.
"""

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable

from tandem.core.instance_status import Statistics
from tandem.engine.config import EngineConfig
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
"""Waiting requests looked at per step; with more, arrival order alone decides (as in SGLang):
ordering a long queue costs more than the hits it finds."""


class SchedulerState:
    """Requests by state, and blocks by use.

    Args:
        config: with ``max_model_len`` resolved.
        pool: of the same number of blocks as the runner's memory.
        index: over that pool.
        tiers: decides what is loaded from lower tiers; None: nothing is.
        states: slots of the runner's memory, and what is kept; None: the model has no state.
        windows: blocks of layers with a window; None: these have none of their own.
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
        """Slots of the states of requests; None: the model has none."""
        self.windows = (
            None
            if windows is None
            else WindowReuse(
                windows, index, config.block_size, counters, is_ahead=config.overlap == "on"
            )
        )
        """Blocks of the layers with a window; None: they are part of the others."""
        self.prefix = PrefixReuse(
            index,
            config.block_size,
            is_enabled=is_enabled,
            states=self.states,
            windows=self.windows,
        )
        self.tiers = tiers if is_enabled else None
        self.loads = BlockLoads(
            pool, index, self.prefix, config.block_size, counters, self.states, self.windows
        )
        self.holds = BlockHolds(pool, index, self.states, self.windows)
        # The last generated token needs no KV, but the last token of a prompt that is only scored
        # does.
        self.max_len = min(config.max_model_len, pool.num_blocks * config.block_size)
        self.requests: dict[str, Request] = {}
        self.shares = ClientShares()
        """Shares of the live requests."""
        self.waiting: list[Request] = []
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.in_flight: deque[StepPlan] = deque()
        """Plans that have not completed, the oldest first."""
        self.evicted: list[KeyedBlock] = []
        """Full blocks given up since the last plan."""
        self.wake_s = math.inf
        """Time at which there is work to plan; see ``Scheduler.wake_s``."""
        self.counters = counters

    # ---------------------------------------------------------------- queues

    def enqueue(self, request: Request) -> None:
        """Put a request into the waiting queue; preempted ones go to the front of their class."""
        is_preempted = request.queue.num_preemptions > 0
        request.state = RequestState.PREEMPTED if is_preempted else RequestState.WAITING
        insort(self.waiting, request, key=_queue_order)

    def leave_waiting(self, request: Request) -> None:
        """Take a request out of the waiting queue."""
        _remove_sorted(self.waiting, request, _queue_order)

    def enter_running(self, request: Request) -> None:
        """Put a request that has its blocks into the running set."""
        request.state = RequestState.RUNNING
        request.queue.is_prefilling = True
        insort(self.running, request, key=_urgency)

    def leave_running(self, request: Request, *, is_sound: bool = True) -> None:
        """Take a request out of the running set; what it computed stays matchable.

        Args:
            request: in no plan in flight.
            is_sound: False: its last step has failed, so its state may be anything.
        """
        _remove_sorted(self.running, request, _urgency)
        num_computed = request.num_computed_tokens
        self.prefix.detach(request)
        if self.states is not None and request.request_id not in self.holds:
            self.states.release(request, num_computed, is_sound=is_sound)
        request.queue.is_prefilling = False

    def limit_chunk(self, request: Request, num_tokens: int) -> int:
        """Return how many of its next tokens a step computes.

        It ends where a state is kept, and where blocks of its window are lacking.
        """
        if self.states is not None:
            num_tokens = self.states.limit(request, num_tokens)
        if self.windows is not None:
            num_tokens = self.windows.limit(request, num_tokens, self.running)
        return num_tokens

    def end_loading(self, request: Request) -> None:
        """Put a request that has nothing more to wait for back into the waiting queue."""
        if request.state is RequestState.LOADING and not request.awaits_continuation:
            self.loading.remove(request)
            self.enqueue(request)

    def emit(self, plan: StepPlan, request: Request, num_tokens: int) -> None:
        """Add the next ``num_tokens`` of a request to a plan; its blocks cover them."""
        queue, start = request.queue, request.num_planned_tokens
        if self.windows is not None:
            self.windows.extend(request, start + num_tokens)
        is_last = num_tokens == request.num_unplanned_tokens
        wants_sample = is_last and request.sampling.max_tokens > 0
        is_decode = num_tokens == 1 and start >= len(request.prompt_ids)
        phase = Phase.DECODE if is_decode else Phase.PREFILL
        plan.sequences.append(
            ScheduledSequence(
                request,
                start,
                num_tokens,
                request.block_table,
                wants_sample,
                phase,
                window=request.window_notes.table,
            )
        )
        if self.states is not None:
            self.states.plan_save(plan, request, start + num_tokens)
        plan.num_tokens += num_tokens
        queue.num_plans += 1
        queue.num_tokens_in_flight += num_tokens
        queue.num_samples_in_flight += wants_sample

    # ---------------------------------------------------------------- blocks

    def count_blocks(self, num_tokens: int) -> int:
        """Return the blocks that so many tokens take."""
        return -(-num_tokens // self.config.block_size)

    def count_available(self, num_wanted: int = 0) -> int:
        """Return the blocks that can be allocated, evicting cached ones.

        Memory is reserved for ``num_wanted`` of them, or all that are free.
        """
        self.pool.reserve(num_wanted)
        return self.pool.num_free + self.pool.num_cached

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Take blocks, evicting cached ones if too few are free; the caller has checked the
        count.
        """
        pool = self.pool
        if num_blocks > pool.num_free:
            num_evicted = num_blocks - pool.num_free
            self.evicted += self.index.evict(num_evicted)
            self.counters.evicted_tokens += num_evicted * self.config.block_size
        return tuple([pool.allocate() for _ in range(num_blocks)])

    def count_outstanding(self, request: Request) -> int:
        """Return the blocks that a running request still needs, one block of growth included."""
        return self.count_lookahead(request) - len(request.block_table)

    def count_lookahead(self, request: Request) -> int:
        """Return the blocks of a request's known tokens and one block of growth."""
        num_tokens = request.num_expected_tokens
        limit = request.queue.max_total_tokens - 1
        growth_end = min(num_tokens + self.config.block_size, limit)
        return self.count_blocks(max(num_tokens, growth_end))

    def count_full_length(self, request: Request) -> int:
        """Return the blocks of a request that reaches its full length."""
        return self.count_blocks(request.queue.max_total_tokens)

    def count_largest(self) -> int:
        """Return the blocks of the longest decoding request at its full length."""
        return max(
            (self.count_full_length(r) for r in self.running if r.prefill_lease_s is None),
            default=0,
        )

    def count_committed(self) -> int:
        """Return the number of blocks that preemption cannot free: in loads, in holds and in
        future holds.
        """
        to_come = sum(
            self.count_full_length(r) for r in self.running if r.prefill_lease_s is not None
        )
        return self.loads.num_pinned + self.holds.num_pinned + to_come

    # ---------------------------------------------------------------- checks

    def check(self) -> None:
        """Assert that every reference in the pool has its owner. O(blocks), for tests."""
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
            elsewhere = [*self.loads.list_window_blocks(), *self.holds.list_window_blocks()]
            self.windows.check(self.running, self.in_flight, elsewhere)
        if self.states is not None:
            in_use = [r.state_notes.slot for r in self.running]
            in_use += [save.slot for plan in self.in_flight for save in plan.state_saves]
            self.states.check([*in_use, *self.holds.list_slots(), *self.loads.list_slots()])
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
    """Key of the running set."""
    return (request.priority, request.sequence_id)


def _queue_order(request: Request) -> tuple[int, bool, int]:
    """Key of the waiting queue: preempted requests stand at the front of their class."""
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
