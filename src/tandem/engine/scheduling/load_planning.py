"""Planning of loads: which KV blocks to fetch from the store or another instance, and when. Pure.

A load may take a block only if neither a running request nor a request ahead in the queue needs it
next, and only if every running request can still reach its full length. So a load delays no decode.
"""

from collections.abc import Sequence

from tandem.core.state_layout import NO_SLOT
from tandem.core.wire import TierKv
from tandem.engine.groups.group import Group, GroupBlock
from tandem.engine.scheduling.admission import Admission, awaits_prefill
from tandem.engine.scheduling.loads import GroupLoad
from tandem.engine.scheduling.plan import BlockLoad, StepPlan
from tandem.engine.scheduling.prefix_index import PrefixMatch
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.scheduling.state import MAX_CANDIDATES, SchedulerState

__all__ = ["LoadPlanning"]

LOADING_SHARE = 4
"""Divisor: loads from lower tiers may occupy at most 1/4 of the pool's blocks at a time."""


class LoadPlanning:
    """The part of the scheduler that starts loads of KV for waiting requests.

    Args:
        state: the scheduler's state, shared with its other parts.
        admission: gives the order of the queue; not owned.
    """

    def __init__(self, state: SchedulerState, admission: Admission) -> None:
        self._state = state
        self._admission = admission

    def plan_loads(self, plan: StepPlan, now_s: float) -> None:
        """Add loads for waiting requests to the plan, in order of the queue, as far as blocks
        allow.

        First, requests whose wait for a load is over go back to the waiting queue.
        """
        state = self._state
        for request in [r for r in state.loading if r.load.wait_until_s <= now_s]:
            request.awaits_continuation = False
            state.end_loading(request)
        if not state.waiting or not state.config.prefix_cache:
            return
        if state.tiers is None and not any(r.prefill_kv for r in state.waiting[:MAX_CANDIDATES]):
            return
        reserved = sum(map(state.count_outstanding, state.running))
        largest = state.count_largest()
        for request in self._admission.order_waiting(now_s):
            if not request.load.has_loaded and request.can_reuse_prefix:
                match = state.prefix.find_blocks(request)
                # The load will pin the matched blocks, so those of them that are evictable now do
                # not count as room.
                room = min(
                    state.count_available() - state.index.count_evictable(match) - reserved,
                    state.pool.num_blocks - state.count_committed() - len(match.nodes) - largest,
                )
                if room > 0:
                    plan.loads += self._start_load(request, match, room, now_s)
            if request.state is not RequestState.LOADING:
                reserved += state.count_lookahead(request)
                largest = max(largest, state.count_full_length(request))

    def _start_load(
        self, request: Request, match: PrefixMatch, room: int, now_s: float
    ) -> list[BlockLoad]:
        """Start a load of at most ``room`` blocks for a waiting request that has loaded none;
        return the transfers (one for each block) that it consists of.

        Returns an empty list if no load is possible, or if the planner prefers to compute.
        """
        state, beside = self._state, list[GroupLoad]()
        if awaits_prefill(state, request, now_s):
            keys = state.prefix.list_prompt_keys(request, len(match.nodes))
            if len(keys) > room:
                # Do not load fewer blocks: another instance has computed all of them, so wait for
                # room.
                return []
            if state.states is not None:
                # The request cannot start without this state, so its slot may evict any snapshot.
                slot = state.states.take_for_load(None)
                if slot == NO_SLOT:
                    return []
                end = len(match.nodes) + len(keys)
                beside.append(GroupLoad(end, b"", GroupBlock(Group.STATE, slot)))
            if state.windows is not None:
                # List the window blocks that cover the end of the prompt. The prompt's partial last
                # block has no key.
                lacking = state.windows.list_lacking(match.nodes, request.prompt_len)
                blocks = state.windows.take_for_load(len(lacking), state.running)
                if blocks is None:
                    return []
                first = len(match.nodes)
                named = {first + i: key for i, key in enumerate(keys)}
                named |= {i: node.key or b"" for i, node in enumerate(match.nodes)}
                beside += [
                    GroupLoad(i, named[i], GroupBlock(Group.WINDOW, block_id))
                    for i, block_id in zip(lacking, blocks, strict=True)
                ]
        elif state.states is not None:
            choice = self._choose_with_state(request, match, room, now_s)
            if choice is None:
                return []
            match, keys, beside = choice
        elif state.windows is not None:
            chosen = self._choose_with_windows(request, match, room, now_s)
            if chosen is None:
                return []
            match, keys, beside = chosen
        else:
            keys = self._choose_from_tiers(request, match, room, now_s)
            if not keys:
                return []
        was_short = state.pool.is_short
        state.pool.reserve(len(keys))
        if state.pool.is_short and not was_short:
            # Give all blocks back: memory ran short after the room was counted. The next plan
            # counts again.
            state.loads.free(each.block for each in beside)
            return []
        state.index.acquire(match)
        fresh = state.allocate(len(keys))
        loads = state.loads.start(request, match, keys, fresh, beside)
        if not loads:
            state.loads.give_up(request)
        if request.load.wait_until_s > now_s and (loads or request.awaits_continuation):
            state.leave_waiting(request)
            request.state = RequestState.LOADING
            state.loading.append(request)
        return loads

    def _choose_from_tiers(
        self, request: Request, match: PrefixMatch, room: int, now_s: float
    ) -> Sequence[bytes]:
        """Return the keys of the blocks to load from lower tiers, for a model without states or
        windows.

        Empty if nothing is to be loaded. Sets how long the request waits for the load.
        """
        state = self._state
        room = min(room, state.pool.num_blocks // LOADING_SHARE - state.loads.num_in_transfer)
        if state.tiers is None or not isinstance(request.kv_source, TierKv) or room <= 0:
            return []
        if state.prefix.find_provider(request) is not None:
            return []
        keys = state.prefix.list_missing_keys(request, len(match.nodes))
        if not keys:
            return []
        decision = state.tiers.choose_load(request, keys, len(match.nodes), now_s)
        chosen = keys[: max(min(decision.num_blocks, room), 0)]
        if chosen:
            request.load.wait_until_s = now_s + decision.wait_s
        return chosen

    def _choose_with_state(
        self, request: Request, match: PrefixMatch, room: int, now_s: float
    ) -> tuple[PrefixMatch, Sequence[bytes], list[GroupLoad]] | None:
        """Choose blocks to load together with the state at their end, for a model with states.

        A state is useless without all blocks before it, so either everything is loaded or nothing.

        Returns: the match of blocks that the device has already, the keys of the blocks to load,
            and the state with a slot reserved for it; None: load nothing.
        """
        state = self._state
        if state.loads.num_in_transfer:
            room = min(room, state.pool.num_blocks // LOADING_SHARE - state.loads.num_in_transfer)
        if state.tiers is None or state.states is None:
            return None
        if not isinstance(request.kv_source, TierKv):
            return None
        num_reused = len(state.prefix.find(request, at_blocks=True).nodes)
        keys = state.prefix.list_missing_keys(request, 0)
        if len(keys) <= num_reused or state.prefix.is_expected(request, state.running):
            return None
        decision = state.tiers.choose_load(request, keys[num_reused:], num_reused, now_s)
        end = min(num_reused + decision.num_blocks, len(keys))
        lacking = keys[len(match.nodes) : end]
        if decision.num_blocks <= 0 or len(lacking) > room:
            return None
        slot = state.states.take_for_load((end - num_reused) * state.config.block_size)
        if slot == NO_SLOT:
            return None
        request.load.wait_until_s = now_s + decision.wait_s
        nodes = match.nodes[:end]
        match = PrefixMatch(nodes, len(nodes) * state.config.block_size)
        loaded = GroupLoad(end, keys[end - 1], GroupBlock(Group.STATE, slot))
        return match, lacking, [loaded]

    def _choose_with_windows(
        self, request: Request, match: PrefixMatch, room: int, now_s: float
    ) -> tuple[PrefixMatch, Sequence[bytes], list[GroupLoad]] | None:
        """Choose blocks to load together with the window blocks at their end, for a model with
        windows.

        Returns: the match of blocks that the device has already, the keys of the blocks to load,
            and the window blocks that the device lacks for the window at their end, each with a
            block reserved for it; None: load nothing.
        """
        state = self._state
        room = min(room, state.pool.num_blocks // LOADING_SHARE - state.loads.num_in_transfer)
        if state.tiers is None or state.windows is None or room <= 0:
            return None
        if not isinstance(request.kv_source, TierKv):
            return None
        if state.prefix.find_provider(request) is not None:
            return None
        num_reused = len(state.prefix.find(request, at_blocks=True).nodes)
        keys = state.prefix.list_missing_keys(request, 0)
        if len(keys) <= num_reused:
            return None
        decision = state.tiers.choose_load(request, keys[num_reused:], num_reused, now_s)
        end = min(num_reused + decision.num_blocks, len(keys), len(match.nodes) + room)
        if end <= num_reused:
            return None
        lacking = state.windows.list_lacking(match.nodes, end * state.config.block_size)
        blocks = state.windows.take_for_load(len(lacking), state.running)
        if blocks is None:
            return None
        request.load.wait_until_s = now_s + decision.wait_s
        nodes = match.nodes[:end]
        windows = [
            GroupLoad(i, keys[i], GroupBlock(Group.WINDOW, block_id))
            for i, block_id in zip(lacking, blocks, strict=True)
        ]
        match = PrefixMatch(nodes, len(nodes) * state.config.block_size)
        return match, keys[len(nodes) : end], windows
