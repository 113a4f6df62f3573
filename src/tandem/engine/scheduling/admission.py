"""Admission: which waiting requests start in a step, and in which order. Pure.

Waiting requests never take blocks from running ones. One is admitted when its prompt, and a
block's worth of growth for everybody, fits beside what the running ones still need.
"""

from tandem.engine.scheduling.blocks import BlockCopy
from tandem.engine.scheduling.plan import StepPlan
from tandem.engine.scheduling.prefix_index import PrefixMatch
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.scheduling.state import MAX_CANDIDATES, SchedulerState

__all__ = ["Admission", "awaits_prefill"]


class Admission:
    """Moves waiting requests to the running set.

    Args:
        state: of the scheduler; shared.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def admit_waiting(self, plan: StepPlan, now_s: float) -> None:
        """Start waiting requests, as far as budget, slots and blocks go."""
        state = self._state
        if not state.waiting or len(state.running) >= state.config.max_running:
            return
        reserved = sum(map(state.count_outstanding, state.running))
        for request in self.order_waiting(now_s):
            budget = state.config.max_batch_tokens - plan.num_tokens
            if budget == 0 or len(state.running) >= state.config.max_running:
                return
            if state.prefix.is_expected(request):
                request.queue.num_deferrals += 1
                continue
            if awaits_prefill(state, request, now_s):
                continue
            # No request overtakes one that lacks blocks, or large ones would starve.
            if not self._admit(plan, request, budget, reserved, now_s):
                return
            reserved += state.count_outstanding(request)

    def order_waiting(self, now_s: float) -> list[Request]:
        """Return the candidates of this step, the one to admit first in front.

        By priority; then preempted ones, then those passed over for ``max_passover_s``, both in
        order of arrival; then the longest cached prefix first.
        """
        state = self._state
        candidates = state.waiting[:MAX_CANDIDATES]
        if len(state.waiting) > MAX_CANDIDATES or not state.config.prefix_cache:
            return candidates
        arrived_by = now_s - state.config.max_passover_s

        def order(request: Request) -> tuple[int, int, int, int]:
            if request.state is RequestState.PREEMPTED:
                return (request.priority, 0, 0, request.sequence_id)
            if request.arrival_s <= arrived_by:
                return (request.priority, 1, 0, request.sequence_id)
            num_cached = state.prefix.count_cached_blocks(request)
            return (request.priority, 2, -num_cached, request.sequence_id)

        candidates.sort(key=order)
        return candidates

    def _admit(
        self, plan: StepPlan, request: Request, budget: int, reserved: int, now_s: float
    ) -> bool:
        """Start a waiting request if its blocks fit; False if they do not."""
        match = self._state.prefix.find(request)
        if self._fits(request, match, budget, reserved):
            self._start(plan, request, match, budget, now_s)
            return True
        # A copy pins its source beside the destination; computing those tokens does not.
        match = match.without_copy()
        if self._fits(request, match, budget, reserved):
            self._start(plan, request, match, budget, now_s)
            return True
        return False

    def _fits(self, request: Request, match: PrefixMatch, budget: int, reserved: int) -> bool:
        state = self._state
        # No preemption frees committed blocks: running requests must reach full length without it.
        committed = state.count_committed() - state.loads.count_releasable(request)
        if request.prefill_lease_s is not None:
            committed += state.count_largest()
        if committed and committed + state.count_full_length(request) > state.pool.num_blocks:
            return False
        if state.running:
            needed = state.count_lookahead(request) + reserved
        else:
            # Alone it can have every block, so its first chunk decides: no endless wait.
            needed = state.count_blocks(min(match.num_tokens + budget, request.num_tokens))
        needed -= len(match.nodes)
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
            self._report_start(request, match, now_s)
        shared = state.prefix.attach(request, match)
        # Loads still in progress come too late.
        state.loads.give_up(request)
        fresh = state.allocate(state.count_blocks(start + num_tokens) - len(shared))
        if match.source is not None:
            plan.copies.append(BlockCopy(match.source.block_id, fresh[0], match.num_source_tokens))
        request.set_blocks(shared + fresh)
        state.enter_running(request)
        state.emit(plan, request, num_tokens)

    def _report_start(self, request: Request, match: PrefixMatch, now_s: float) -> None:
        """Record what the first admission of a request found."""
        state, report, stats = self._state, request.report, self._state.index.stats
        report.first_scheduled_s = now_s
        report.num_cached_tokens = match.num_tokens
        report.miss = state.prefix.explain_miss(request)
        stats.num_queries += 1
        stats.num_query_tokens += request.prompt_len
        stats.num_hit_tokens += match.num_tokens
        loaded = request.load.loaded_blocks
        num_loaded = max(min(loaded.stop, len(match.nodes)) - loaded.start, 0)
        report.num_loaded_tokens = num_loaded * state.config.block_size
        if request.prefill_kv is None:
            stats.num_store_hit_tokens += report.num_loaded_tokens
        else:
            stats.num_prefill_hit_tokens += report.num_loaded_tokens


def awaits_prefill(state: SchedulerState, request: Request, now_s: float) -> bool:
    """Return True if blocks of a prefill instance are there and have not been loaded."""
    return (
        request.prefill_kv is not None
        and not request.load.has_loaded
        and request.load.wait_until_s > now_s
        and state.config.prefix_cache
        and request.can_reuse_prefix
    )
