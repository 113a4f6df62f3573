"""The load of an instance (queued tokens, blocks needed), computed from its scheduler's state.
Pure.
"""

from tandem.core.wire import GROWTH_BLOCKS, InstanceLoad
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.scheduling.state import SchedulerState

__all__ = ["measure_load"]


def measure_load(state: SchedulerState) -> InstanceLoad:
    """Return the load that live requests put on the instance: the tokens and blocks that they still
    need. O(live requests).

    An upper bound: a block that several requests share is counted once for each.
    """
    queued_tokens = num_decoding = decode_tokens = largest_blocks = 0
    queued_context = 0.0
    num_needed = state.holds.num_pinned
    for request in state.requests.values():
        num_queued = _count_queued(state, request)
        queued_tokens += num_queued
        queued_context += num_queued * (request.num_tokens - 0.5 * num_queued)
        if request.prefill_lease_s is None:
            num_decoding += 1
            decode_tokens += request.num_tokens
            num_needed += state.count_blocks(request.num_tokens) + GROWTH_BLOCKS
            largest_blocks = max(largest_blocks, state.count_full_length(request))
        else:
            num_needed += state.count_full_length(request)
    return InstanceLoad(
        queued_tokens=queued_tokens,
        num_decoding=num_decoding,
        free_blocks=state.pool.num_blocks - num_needed,
        largest_blocks=largest_blocks,
        queued_context=queued_context,
        decode_tokens=decode_tokens,
        num_requests=len(state.requests),
    )


def _count_queued(state: SchedulerState, request: Request) -> int:
    """Return the number of a request's tokens that are to be computed before it decodes."""
    if request.state is RequestState.RUNNING:
        return request.num_remaining_tokens if request.queue.is_prefilling else 0
    if request.prefill_kv is not None:
        return 0  # All its blocks are read from the instance that computes them.
    if request.state is RequestState.LOADING:
        return max(request.num_tokens - state.loads.count_tokens(request), 0)
    # Use the server's estimate of the cached tokens (``expected_len``): how many are cached is
    # known only at admission.
    return max(request.num_remaining_tokens - request.expected_len, 0)
