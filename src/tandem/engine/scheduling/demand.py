"""The load of an instance, measured from its scheduler's state. Pure."""

from tandem.core.wire import GROWTH_BLOCKS, InstanceLoad
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.scheduling.state import SchedulerState

__all__ = ["measure_load"]


def measure_load(state: SchedulerState) -> InstanceLoad:
    """Return what the live requests need. O(live requests).

    Conservative: blocks that requests share are counted for each.
    """
    queued_tokens = num_decoding = largest_blocks = 0
    num_needed = state.holds.num_pinned
    for request in state.requests.values():
        queued_tokens += _count_queued(request)
        if request.prefill_lease_s is None:
            num_decoding += 1
            num_needed += state.count_blocks(request.num_tokens) + GROWTH_BLOCKS
            largest_blocks = max(largest_blocks, state.count_full_length(request))
        else:
            num_needed += state.count_full_length(request)
    return InstanceLoad(
        queued_tokens=queued_tokens,
        num_decoding=num_decoding,
        free_blocks=state.pool.num_blocks - num_needed,
        largest_blocks=largest_blocks,
    )


def _count_queued(request: Request) -> int:
    """Return the known tokens that a request has to compute before it decodes."""
    if request.state is RequestState.RUNNING:
        return request.num_remaining_tokens if request.queue.is_prefilling else 0
    if request.state is RequestState.LOADING or request.prefill_kv is not None:
        return 0  # They are read from where they were computed.
    return request.num_remaining_tokens
