"""Planning of the running requests: decodes, chunks of started prefills, blocks, preemption. Pure.

Requests are planned in order of urgency (priority, then arrival). A request that lacks a block
preempts less urgent ones, except those in a plan in flight, and only if that frees a block.
"""

from collections import Counter

from tandem.engine.scheduling.plan import StepPlan
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.state import SchedulerState

__all__ = ["RunningPlanner"]


class RunningPlanner:
    """The part of the scheduler that adds tokens of running requests to a plan.

    Args:
        state: the scheduler's state, shared with its other parts.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def plan_decodes(self, plan: StepPlan) -> None:
        """Plan one token of each running request that has only its last token left to compute."""
        state = self._state
        running, windows, emit = state.running, state.windows, state.emit
        block_size = state.config.block_size
        position = 0
        # Iterate by index: preemption removes requests behind this position from the list.
        while position < len(running):
            request = running[position]
            position += 1
            # The request's properties are written out for speed, as this runs for each token.
            queue = request.queue
            num_planned = request.num_computed_tokens + queue.num_tokens_in_flight
            num_known = len(request.prompt_ids) + len(request.output_ids)
            if num_known + queue.num_samples_in_flight - num_planned != 1:
                continue
            if queue.num_tokens_in_flight and (queue.is_mask_slow or not _is_plannable(request)):
                continue
            if queue.awaits_mask:
                continue
            if windows is not None and not windows.limit(request, 1, running):
                continue
            has_room = num_planned < len(request.block_table) * block_size
            if has_room or self._grow(plan, request, 1):
                emit(plan, request, 1)
            elif plan.is_stalled:
                return

    def plan_prefills(self, plan: StepPlan) -> None:
        """Plan the next tokens of started prefills, within the step's token budget."""
        running = self._state.running
        position = 0
        while position < len(running) and not plan.is_stalled:
            request = running[position]
            position += 1
            if not request.queue.is_prefilling or not _is_plannable(request):
                continue
            budget = self._state.config.step_tokens - plan.num_tokens
            if budget == 0:
                return
            remaining = request.num_unplanned_tokens
            if remaining > 1:
                wanted = self._state.limit_chunk(request, min(remaining, budget))
                num_tokens = self._grow(plan, request, wanted) if wanted else 0
                if num_tokens > 0:
                    self._state.emit(plan, request, num_tokens)

    def _grow(self, plan: StepPlan, request: Request, num_tokens: int) -> int:
        """Allocate blocks for a running request's next tokens; return for how many tokens they
        suffice.

        That is fewer than asked for if only some blocks are available. If none is, less urgent
        requests are preempted. If that cannot free a block, the result is 0: the request keeps its
        blocks and is not in this step. If only a plan in flight (a planned step not recorded yet)
        keeps the blocks, the plan is marked as stalled: no less urgent request is added, so that
        this one can take the blocks when that step has completed.
        """
        state = self._state
        num_held = len(request.block_table)
        end = request.num_planned_tokens + num_tokens
        if end <= num_held * state.config.block_size:
            return num_tokens
        num_blocks = state.count_blocks(end) - num_held
        available = state.count_available(num_blocks)
        if num_blocks > available:
            room = (num_held + available) * state.config.block_size - request.num_planned_tokens
            if room <= 0:
                victims = self._choose_victims(request)
                for victim in victims:
                    self._state.preempt(victim)
                plan.preempted += victims
                if victims:
                    return self._grow(plan, request, num_tokens)
                plan.is_stalled = bool(state.in_flight)
                return 0
            num_blocks, num_tokens = available, room
        request.add_blocks(state.allocate(num_blocks))
        return num_tokens

    def _choose_victims(self, request: Request) -> list[Request]:
        """Return the least urgent requests, as few as possible, whose preemption frees a block; or
        none.

        More than one may be needed, because requests share blocks.
        """
        pool = self._state.pool
        num_released: Counter[int] = Counter()
        candidates: list[Request] = []
        for victim in reversed(self._state.running):
            if victim is request:
                break
            if victim.is_scheduled:
                continue
            candidates.append(victim)
            num_released.update(victim.block_table)
            yielded = {b for b in victim.block_table if num_released[b] == pool.get_num_refs(b)}
            if yielded:
                # Preempt only requests that hold one of the freed blocks; the others keep running.
                return [v for v in candidates if not yielded.isdisjoint(v.block_table)]
        return []


def _is_plannable(request: Request) -> bool:
    """Return False if a plan in flight (a planned step not recorded yet) is certain to end the
    request.
    """
    queue = request.queue
    if not queue.num_tokens_in_flight:
        return True
    return not queue.is_cancelled and request.num_expected_tokens < queue.max_total_tokens
