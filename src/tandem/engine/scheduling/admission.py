"""Admission: which waiting requests start in a step, and in which order. Pure.

A waiting request never takes blocks from a running one. It is admitted when the free and evictable
blocks suffice for its known tokens and one more block of growth, and for the same of every running
request. Clients get shares of the running set in proportion to their weights, and at most
``MAX_OVERTAKEN`` later requests of the same client are admitted before a request.
"""

from collections import Counter
from collections.abc import Sequence

from tandem.engine.scheduling.blocks import BlockCopy
from tandem.engine.scheduling.plan import StepPlan
from tandem.engine.scheduling.prefix_index import PrefixMatch
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.scheduling.state import MAX_CANDIDATES, SchedulerState

__all__ = ["MAX_OVERTAKEN", "Admission", "awaits_prefill"]

MAX_OVERTAKEN = 16
"""Largest number of later requests of a client that may be admitted before a waiting one.
Requests whose KV is being loaded do not hold others back."""


class Admission:
    """The part of the scheduler that moves waiting requests to the running set.

    Args:
        state: the scheduler's state, shared with its other parts.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def admit_waiting(self, plan: StepPlan, now_s: float) -> None:
        """Admit waiting requests and add their first tokens to the plan.

        Stops at the step's token budget, at ``max_running`` requests, or at a request that lacks
        blocks.
        """
        state = self._state
        if not state.waiting or len(state.running) >= state.config.max_running:
            return
        reserved = sum(map(state.count_outstanding, state.running))
        for request in self.order_waiting(now_s):
            budget = state.config.step_tokens - plan.num_tokens
            if budget == 0 or len(state.running) >= state.config.max_running:
                return
            is_bypassed = request.queue.num_overtaken >= MAX_OVERTAKEN
            if not is_bypassed and state.prefix.is_expected(request, state.running):
                request.queue.num_deferrals += 1
                continue
            if _is_held(state, request, now_s) or self._is_barred(request, now_s):
                continue
            # Stop here if this request lacks blocks: if later requests could overtake it, large
            # requests would never start.
            if not self._admit(plan, request, budget, reserved, now_s):
                return
            reserved += state.count_outstanding(request)

    def order_waiting(self, now_s: float) -> list[Request]:
        """Return the waiting requests that this step considers, in order of admission.

        Sorted by priority; then preempted requests, by arrival; then by client, the one with the
        fewest running requests for its weight first. Among requests of one client, those that have
        waited ``max_passover_s`` or were overtaken ``MAX_OVERTAKEN`` times come first, by arrival;
        the others follow, the longest cached prefix first.
        """
        state, waiting = self._state, self._state.waiting
        if state.config.prefix_cache and len(waiting) <= MAX_CANDIDATES:
            arrived_by = now_s - state.config.max_passover_s

            def order(request: Request) -> tuple[int, int, int, int]:
                if request.state is RequestState.PREEMPTED:
                    return (request.priority, 0, 0, request.sequence_id)
                is_bypassed = request.queue.num_overtaken >= MAX_OVERTAKEN
                if request.arrival_s <= arrived_by or is_bypassed:
                    return (request.priority, 1, 0, request.sequence_id)
                num_cached = state.prefix.count_cached_blocks(request)
                return (request.priority, 2, -num_cached, request.sequence_id)

            waiting = sorted(waiting, key=order)
        if state.shares.num_clients > 1:
            waiting = self._share_out(waiting)
        return waiting[:MAX_CANDIDATES]

    def _share_out(self, waiting: Sequence[Request]) -> list[Request]:
        """Order requests so that each client's number of running requests follows its weight.

        Method (D'Hondt): the next place goes to the client for which running requests divided by
        weight, counted with this request, is smallest.
        """
        shares = Counter(request.client for request in self._state.running)
        keyed: list[tuple[int, bool, float, int, Request]] = []
        for request in waiting:
            is_new = request.state is not RequestState.PREEMPTED
            shares[request.client] += 1
            share = shares[request.client] / request.weight
            # If shares (requests divided by weight) are equal, the request that arrived first goes
            # first.
            order = request.sequence_id
            keyed.append((request.priority, is_new, share if is_new else 0.0, order, request))
        keyed.sort(key=lambda entry: entry[:4])
        return [entry[4] for entry in keyed]

    def _is_barred(self, request: Request, now_s: float) -> bool:
        """Return True if a request must wait because an earlier one of the same client and priority
        was overtaken too often.
        """
        return any(
            other.queue.num_overtaken >= MAX_OVERTAKEN
            and other.sequence_id < request.sequence_id
            and (other.priority, other.client) == (request.priority, request.client)
            and not _is_held(self._state, other, now_s)
            for other in self._state.waiting
        )

    def _note_overtaken(self, admitted: Request) -> None:
        """Count, for each earlier request of the same client and priority that still waits, that
        the admitted request has overtaken it.
        """
        for request in self._state.waiting:
            if (request.priority, request.client) == (admitted.priority, admitted.client):
                request.queue.num_overtaken += request.sequence_id < admitted.sequence_id

    def _admit(
        self, plan: StepPlan, request: Request, budget: int, reserved: int, now_s: float
    ) -> bool:
        """Start a waiting request if its blocks fit; return True if it was started."""
        match = self._state.prefix.find(request)
        if self._fits(request, match, budget, reserved):
            self._start(plan, request, match, budget, now_s)
            return True
        # Retry without copying part of a block: a copy needs two blocks (source and destination),
        # while computing the same tokens needs one.
        match = self._state.prefix.find(request, at_blocks=True)
        if self._fits(request, match, budget, reserved):
            self._start(plan, request, match, budget, now_s)
            return True
        return False

    def _fits(self, request: Request, match: PrefixMatch, budget: int, reserved: int) -> bool:
        state = self._state
        if state.states is not None and not state.states.can_start():
            return False
        if state.windows is not None and not state.windows.can_start(request, match, state.running):
            return False
        # Preemption cannot free blocks of holds (kept for decode instances to read) and of loads,
        # so running requests must be able to reach full length without them.
        committed = state.count_committed() - state.loads.count_releasable(request)
        if request.prefill_lease_s is not None:
            committed += state.count_largest()
        if committed and committed + state.count_full_length(request) > state.pool.num_blocks:
            return False
        if state.running:
            needed = state.count_lookahead(request) + reserved
        else:
            # A request that runs alone can have every block, so only its first chunk must fit now;
            # it cannot wait forever.
            needed = state.count_blocks(min(match.num_tokens + budget, request.num_tokens))
        # The request's own load, if it has one, is given up before its blocks are allocated.
        needed -= len(match.nodes) + state.loads.count_done(request)
        return needed <= state.count_available(needed) - state.index.count_evictable(match)

    def _start(
        self, plan: StepPlan, request: Request, match: PrefixMatch, budget: int, now_s: float
    ) -> None:
        """Move a waiting request to the running set and schedule its first chunk."""
        state = self._state
        state.leave_waiting(request)
        start = match.num_tokens
        num_tokens = min(request.num_tokens - start, budget)
        if request.report.first_scheduled_s is None:
            self._note_overtaken(request)
            self._report_start(request, match, now_s)
        if state.states is not None:
            state.states.start(plan, request, match, state.waiting[:MAX_CANDIDATES])
        shared = state.prefix.attach(request, match)
        if state.windows is not None:
            state.windows.start(plan, request, match)
        num_tokens = state.limit_chunk(request, num_tokens)
        # Give up loads still in progress: the request starts now and computes those tokens itself.
        state.loads.give_up(request)
        fresh = state.allocate(state.count_blocks(start + num_tokens) - len(shared))
        if match.source is not None:
            plan.copies.append(BlockCopy(match.source.block_id, fresh[0], match.num_source_tokens))
        request.set_blocks(shared + fresh)
        state.enter_running(request)
        state.emit(plan, request, num_tokens)

    def _report_start(self, request: Request, match: PrefixMatch, now_s: float) -> None:
        """Record a request's first admission: its time, its cached tokens and why not more were
        cached.
        """
        state, report, counters = self._state, request.report, self._state.counters
        report.first_scheduled_s = now_s
        report.num_cached_tokens = match.num_tokens
        report.miss = state.prefix.explain_miss(request)
        loaded = request.load.loaded_blocks
        num_loaded = max(min(loaded.stop, len(match.nodes)) - loaded.start, 0)
        report.num_loaded_tokens = num_loaded * state.config.block_size
        # Count a prefix lookup only on the first instance of a request: if another instance
        # continues it, tokens computed by the first one are no cache hits for the client.
        if request.prefill_kv is None and not request.output_ids:
            counters.num_prefix_queries += 1
            counters.prefix_query_tokens += request.prompt_len
            counters.prefix_hit_tokens += match.num_tokens
            num_lost = max(match.num_kv_tokens - match.num_tokens, 0)
            if state.windows is None:
                counters.stateless_tokens += num_lost
            else:
                counters.windowless_tokens += num_lost
            counters.store_hit_tokens += report.num_loaded_tokens


def _is_held(state: SchedulerState, request: Request, now_s: float) -> bool:
    """Return True if a request waits for something else than memory and its turn."""
    return request.queue.awaits_mask or awaits_prefill(state, request, now_s)


def awaits_prefill(state: SchedulerState, request: Request, now_s: float) -> bool:
    """Return True if a request is to load KV from a prefill instance and has not begun to."""
    return (
        request.prefill_kv is not None
        and not request.load.has_loaded
        and request.load.wait_until_s > now_s
        and state.config.prefix_cache
        and request.can_reuse_prefix
    )
