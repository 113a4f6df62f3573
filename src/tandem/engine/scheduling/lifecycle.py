"""The lifecycle of requests: they are queued, get the results of their steps, and end. Pure.

Nothing else changes a request's tokens, state or finish reason. Time is an argument.
"""

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import msgspec

from tandem.core.errors import CapacityError, ConfigError, ConflictError
from tandem.core.wire import FinishReason
from tandem.engine.scheduling.plan import ScheduledSequence, StepPlan
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.scheduling.state import MAX_CANDIDATES, SchedulerState

__all__ = ["NOT_FINISHED", "Lifecycle"]

NO_TOKENS: Sequence[int] = ()
NOT_FINISHED: Mapping[str, FinishReason] = MappingProxyType({})


class Lifecycle:
    """The part of the scheduler that adds requests, records their steps, and ends them.

    Args:
        state: the scheduler's state, shared with its other parts.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._deadlines: list[tuple[float, int, Request]] = []
        self._num_added = 0

    @property
    def next_deadline_s(self) -> float:
        """Earliest deadline, in monotonic seconds; it may belong to a request that has ended
        already.
        """
        return self._deadlines[0][0] if self._deadlines else math.inf

    def add(self, request: Request) -> None:
        """Queue a request; see ``Scheduler.add``."""
        state = self._state
        self._check_prompt(request)
        if request.request_id in state.requests:
            raise ConflictError(
                "engine.add", f"request {request.request_id!r} is live: choose another id"
            )
        if request.request_id in state.holds:
            raise ConflictError(
                "engine.add", f"blocks of a request {request.request_id!r} are held: release them"
            )
        # Free slots of the running set count as room, because the next step admits requests to them
        # at once.
        limit = state.config.max_running + state.config.max_queue
        num_blocks = state.count_blocks(request.num_tokens)
        if num_blocks > state.pool.num_blocks:
            raise CapacityError(
                "engine.add",
                f"the prompt takes {num_blocks} blocks, and the machine has memory for "
                f"{state.pool.num_blocks} now: try again later",
            )
        if not state.shares.has_room(request.client, limit, request.weight):
            raise CapacityError(
                "engine.add",
                f"{len(state.running)} requests running and {len(state.waiting)} waiting of "
                f"{limit}: try again later",
            )
        self._num_added += 1
        request.sequence_id = self._num_added
        state.prefix.open(request)
        if state.states is not None and state.prefix.is_enabled:
            state.prefix.extend_keys(request)
            state.states.note_arrival(request, state.running)
        queue = request.queue
        queue.max_total_tokens = min(
            request.prompt_len + request.sampling.max_tokens, state.max_len
        )
        if request.prefill_lease_s is not None:
            if queue.max_total_tokens > request.prompt_len + 1:
                queue.max_total_tokens = request.prompt_len + 1
            else:
                # A request limited to one token ends with the prefill anyway, so its blocks need
                # not be held.
                request.prefill_lease_s = None
        if request.prefill_kv is not None:
            # Stop waiting for the prefill's blocks when the lease on them ends.
            request.load.wait_until_s = request.arrival_s + request.prefill_kv.handle.lease_s
        state.requests[request.request_id] = request
        state.shares.add(request.client, request.weight)
        state.enqueue(request)
        if request.deadline_s is not None:
            self._add_deadline(request, request.deadline_s)

    def cancel(self, request_id: str) -> bool:
        """End a request with ``FinishReason.CANCELLED``; return False if it is not live. See
        ``Scheduler.cancel``.
        """
        request = self._state.requests.get(request_id)
        if request is None:
            return False
        if request.is_scheduled:
            request.queue.is_cancelled = True
        else:
            self.finish(request, FinishReason.CANCELLED, None)
        return True

    def continue_request(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Append the tokens that another instance has generated; return False if the request does
        not wait for them. See ``Scheduler.continue_request``.
        """
        request = self._state.requests.get(request_id)
        if request is None or not request.awaits_continuation:
            return False
        limit = request.queue.max_total_tokens
        if request.num_tokens + len(token_ids) >= limit:
            raise ConfigError(
                "engine.continue",
                f"{len(token_ids)} tokens after {request.num_tokens} leave none to generate of "
                f"{limit}",
                field="continuation",
            )
        request.output_ids += token_ids
        request.awaits_continuation = False
        if not self._state.loads.has_load(request):
            self._state.end_loading(request)
        return True

    def expire(self, now_s: float) -> list[Request]:
        """End the requests whose deadline has passed, and those that were cancelled in a plan from
        which ``settle`` has removed them; return them.

        A request that is in a plan in flight is not ended here: ``complete`` ends it, also with
        ``FinishReason.DEADLINE``.
        """
        expired: list[Request] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            request = heapq.heappop(self._deadlines)[2]
            if not request.is_finished and not request.is_scheduled:
                is_cancelled = request.queue.is_cancelled
                reason = FinishReason.CANCELLED if is_cancelled else FinishReason.DEADLINE
                self.finish(request, reason, now_s)
                expired.append(request)
        return expired

    def complete(
        self,
        plan: StepPlan,
        sampled: Mapping[str, Sequence[int]],
        now_s: float,
        finished: Mapping[str, FinishReason],
        late: Collection[str] = (),
    ) -> list[Request]:
        """Record the outcome of the oldest plan in flight, whose step has ended; return the
        requests that it ended. See ``Scheduler.complete``.
        """
        state = self._state
        if not state.in_flight or plan is not state.in_flight[0]:
            raise ConflictError("engine.complete", "not the oldest plan in flight")
        given = [
            sampled.get(s.request.request_id, NO_TOKENS) if s.wants_sample else NO_TOKENS
            for s in plan.sequences
        ]
        if not all(given):
            missing = [
                s.request.request_id
                for s, token_ids in zip(plan.sequences, given, strict=True)
                if s.wants_sample
                and not token_ids
                and finished.get(s.request.request_id) is not FinishReason.ERROR
                and s.request.request_id not in late
            ]
            if missing:
                raise ConflictError("engine.complete", f"no token sampled for requests {missing}")
        state.in_flight.popleft()
        # Release the source blocks of copies before the requests' own blocks. Copy sources are
        # deeper in the prefix tree, and blocks released first are evicted first; a child must be
        # evicted before its parent.
        for copy in plan.copies:
            state.prefix.release_copied(copy.src_block_id)
        if state.windows is not None:
            state.windows.end_copies(plan)
        copied = {copy.dst_block_id: copy.num_tokens for copy in plan.copies}
        ended: list[Request] = []
        block_size, windows = state.config.block_size, state.windows
        for sequence, token_ids in zip(plan.sequences, given, strict=True):
            request = sequence.request
            queue = request.queue
            queue.num_tokens_in_flight -= sequence.num_tokens
            queue.num_samples_in_flight -= sequence.wants_sample
            reason = finished.get(request.request_id) if finished else None
            is_late = request.request_id in late
            if reason is FinishReason.ERROR:
                # What failed may be the copy: its tokens may not come to the index.
                block_id = sequence.block_table[sequence.start // block_size]
                request.num_computed_tokens -= copied.get(block_id, 0)
            else:
                # The last token of a late request is computed again, with the step that samples.
                request.num_computed_tokens += sequence.num_tokens - sequence.num_drafts - is_late
                # A decode changes the index only if it has filled a block.
                if queue.is_prefilling or request.num_computed_tokens % block_size == 0:
                    self._index_computed(request)
                if windows is not None:
                    windows.advance(request)
                reason = self._take_tokens(request, sequence, token_ids, reason, now_s)
            if reason is not None:
                self.finish(request, reason, now_s, is_sound=not is_late)
                ended.append(request)
            elif is_late and not request.is_scheduled:
                self._restore_state(request)
        if state.states is not None:
            for save in plan.state_saves:
                # Also index the partial last block of the request: a snapshot can be used only if
                # the KV before it can be found.
                state.prefix.index_tail(save.request)
            failed = {name for name, reason in finished.items() if reason is FinishReason.ERROR}
            state.states.end_saves(plan, failed.union(late))
        return ended

    def settle(self, plan: StepPlan) -> bool:
        """Remove from a plan that was made while a step ran the requests that have ended or must
        not run yet, and renew the block tables of the others; return False if nothing is left.
        """
        state = self._state
        if not state.in_flight or plan is not state.in_flight[0]:
            raise ConflictError("engine.settle", "not the oldest plan in flight")
        kept: list[ScheduledSequence] = []
        for sequence in plan.sequences:
            request = sequence.request
            table, window = request.block_table, request.window_notes.table
            if request.is_finished:
                plan.num_tokens -= sequence.num_tokens
            elif request.queue.awaits_mask or sequence.start != request.num_computed_tokens:
                plan.num_tokens -= sequence.num_tokens
                self._take_back(sequence)
            elif sequence.block_table is table and sequence.window is window:
                kept.append(sequence)
            else:
                # The index may have replaced a block of the plan by an equal one, so renew the
                # block tables.
                kept.append(msgspec.structs.replace(sequence, block_table=table, window=window))
        plan.sequences = kept
        if state.states is not None:
            state.states.drop_saves(plan)
        if plan.is_empty:
            state.in_flight.popleft()
            if state.windows is not None:
                state.windows.end_copies(plan)
            if state.states is not None:
                state.states.end_saves(plan, ())
        return not plan.is_empty

    def _take_back(self, sequence: ScheduledSequence) -> None:
        """Remove a live request from a plan that does not run: the mask of its next token is not
        computed, or the step before has sampled none.
        """
        request = sequence.request
        request.queue.num_tokens_in_flight -= sequence.num_tokens
        request.queue.num_samples_in_flight -= sequence.wants_sample
        if request.queue.is_cancelled:
            self._add_deadline(request, -math.inf)  # The plan would have ended it.
        if sequence.start != request.num_computed_tokens:
            self._restore_state(request)
        self._state.wake_s = -math.inf

    def _restore_state(self, request: Request) -> None:
        """Preempt a request whose last token is to be computed again, if its model has a recurrent
        state: the state covers that token already.
        """
        if self._state.states is not None:
            self._state.preempt(request, is_sound=False)

    def _index_computed(self, request: Request) -> None:
        """Put the blocks that a step has filled into the prefix index, and note if it has computed
        the last known token of a prefill.
        """
        is_prompt_end = request.queue.is_prefilling and request.num_remaining_tokens == 0
        self._state.prefix.index_computed(request, is_prompt_end=is_prompt_end)
        if is_prompt_end:
            request.queue.is_prefilling = False

    def _take_tokens(
        self,
        request: Request,
        sequence: ScheduledSequence,
        token_ids: Sequence[int],
        reason: FinishReason | None,
        now_s: float,
    ) -> FinishReason | None:
        """Append the tokens that a step has given for a sequence to its request; return why the
        request ends, None if it goes on.
        """
        queue = request.queue
        if queue.is_cancelled:
            return FinishReason.CANCELLED
        num_missing = queue.max_total_tokens - len(request.prompt_ids) - len(request.output_ids)
        if token_ids:
            taken = token_ids if len(token_ids) <= num_missing else token_ids[:num_missing]
            request.output_ids += taken
            num_missing -= len(taken)
            if len(taken) > 1:
                # Several new tokens are verified draft tokens; this step has computed the KV of all
                # but the last.
                request.num_computed_tokens += len(taken) - 1
                self._state.prefix.index_computed(request, is_prompt_end=False)
                if self._state.windows is not None:
                    self._state.windows.advance(request)
            if request.report.first_token_s is None:
                request.report.first_token_s = now_s
        if reason is not None:
            return reason
        # A request that only scores its prompt ends when the whole prompt is computed; it samples
        # no token.
        if num_missing <= 0 and (sequence.wants_sample or request.num_remaining_tokens == 0):
            is_prefill = request.prefill_lease_s is not None
            return FinishReason.PREFILLED if is_prefill else FinishReason.LENGTH
        if request.deadline_s is not None and request.deadline_s <= now_s:
            return FinishReason.DEADLINE
        return None

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        now_s: float | None,
        *,
        is_sound: bool = True,
    ) -> None:
        """End a live request, which must be in no plan in flight (plan of a step not recorded yet),
        and release its blocks; see ``SchedulerState.leave_running`` for ``is_sound``.
        """
        state = self._state
        if reason is FinishReason.PREFILLED:
            assert now_s is not None, f"request {request.request_id} is prefilled between steps"
            assert request.prefill_lease_s is not None, f"{request.request_id} does not prefill"
            request.held_blocks = request.block_table
            state.holds.hold(request, now_s + request.prefill_lease_s)
        if request.state is RequestState.RUNNING:
            is_sound = is_sound and reason is not FinishReason.ERROR
            state.leave_running(request, is_sound=is_sound)
        elif request.state is RequestState.LOADING:
            state.loading.remove(request)
        else:
            state.leave_waiting(request)
        state.loads.give_up(request)
        state.wake_s = -math.inf
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.report.finished_s = now_s
        del state.requests[request.request_id]
        state.shares.remove(request.client)

    def _add_deadline(self, request: Request, deadline_s: float) -> None:
        heapq.heappush(self._deadlines, (deadline_s, request.sequence_id, request))
        # Rebuild the list without ended requests: most requests end long before their deadline, so
        # the list would grow without bound.
        if len(self._deadlines) > 2 * len(self._state.requests) + MAX_CANDIDATES:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].is_finished]
            heapq.heapify(self._deadlines)

    def _check_prompt(self, request: Request) -> None:
        state, prompt_len = self._state, request.prompt_len
        if prompt_len == 0:
            raise ConfigError("engine.add", "the prompt has no tokens: send one", field="prompt")
        # Reserve room for one output token, unless the prompt is only scored.
        needed = request.num_tokens + min(request.sampling.max_tokens, 1)
        if needed > state.max_len:
            limit = (
                f"max_model_len {state.config.max_model_len}"
                if state.max_len == state.config.max_model_len
                else f"the KV cache of {state.pool.num_blocks} blocks of {state.config.block_size}"
            )
            raise ConfigError(
                "engine.add",
                f"the prompt has {prompt_len} tokens, {needed} with its output, more than {limit}: "
                "shorten it",
                field="prompt",
            )
