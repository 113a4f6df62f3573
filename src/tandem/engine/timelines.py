"""The course of an instance's requests (loads, steps, preemptions), recorded for ``tandem
explain``.

A live request has a record of counters. When it ends, the record becomes a message in a ring of
those that ended last. Nothing here decides anything; recording costs two additions per token. Time
is an argument.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.timeline import (
    InstanceTimeline,
    KvLoadRecord,
    MissReason,
    PrefixMiss,
    StoreLookup,
)
from tandem.engine.groups.group import GroupBlock
from tandem.engine.scheduling.plan import BlockLoad, StepPlan
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.stepping.messages import Phase

__all__ = ["TimelineLog"]

MAX_EVENTS = 8
"""Largest number of loads and of preemptions listed in one record; further ones are only
counted."""
_FINAL = (MissReason.DISABLED, MissReason.NEEDS_LOGITS, MissReason.TOO_LATE)
"""Reasons for a missed prefix that hold whatever the store or another instance has."""

_DROPPED = "dropped"
"""Reason noted at first for a load that the scheduler dropped; ``_name_drop`` replaces it by the
actual reason.
"""


@dataclass(slots=True)
class _Load:
    message: KvLoadRecord
    pending: set[GroupBlock]
    """Ids of the blocks whose transfer has not ended yet."""


@dataclass(slots=True)
class _Record:
    """The timeline of a live request, as far as it is known."""

    request: Request
    lookup: StoreLookup | None
    arrival_s: float
    loads: list[_Load] = field(default_factory=list[_Load])
    preempted_s: list[float] = field(default_factory=list[float])
    num_prefill_steps: int = 0
    prefill_s: float = 0.0
    num_decode_steps: int = 0
    decode_s: float = 0.0


class TimelineLog:
    """The records of live requests and of those that ended last.

    Args:
        capacity: number of ended requests to remember.
        block_size: tokens per block.
        block_bytes: bytes of one block in all layers.
    """

    def __init__(self, capacity: int, *, block_size: int, block_bytes: int = 0) -> None:
        self._capacity = capacity
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._live: dict[str, _Record] = {}
        self._ended: OrderedDict[str, InstanceTimeline] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def open(self, request: Request, lookup: StoreLookup | None) -> None:
        """Begin the timeline of an accepted request; ``lookup`` tells what the store had of its
        prompt, if it was asked.
        """
        waited_s = 0.0 if lookup is None else lookup.seconds
        self._live[request.request_id] = _Record(request, lookup, request.arrival_s - waited_s)

    def note_plan(self, plan: StepPlan, now_s: float) -> None:
        """Record, in the requests' timelines, the loads that a plan starts or drops, and the
        preemptions.
        """
        for request in plan.preempted:
            record = self._live[request.request_id]
            if len(record.preempted_s) < MAX_EVENTS:
                record.preempted_s.append(now_s - record.arrival_s)
        for load in plan.dropped:
            self._end_load(load.request, [load.block], now_s, _DROPPED)
        begun: dict[str, list[BlockLoad]] = {}
        for load in plan.loads:
            begun.setdefault(load.request.request_id, []).append(load)
        for request_id, loads in begun.items():
            self._begin_load(request_id, loads, now_s)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Count a step and its seconds, as prefill or as decode, for each request in it."""
        for sequence in plan.sequences:
            record = self._live[sequence.request.request_id]
            if sequence.phase is Phase.PREFILL:
                record.num_prefill_steps += 1
                record.prefill_s += seconds
            else:
                record.num_decode_steps += 1
                record.decode_s += seconds

    def note_loaded(self, request: Request, blocks: Sequence[GroupBlock], now_s: float) -> None:
        """Record, in a request's timeline, KV blocks whose load has ended with success."""
        self._end_load(request, blocks, now_s, None)

    def note_load_failed(
        self, request: Request, blocks: Sequence[GroupBlock], reason: str, now_s: float
    ) -> None:
        """Record, in a request's timeline, KV blocks that could not be loaded, and why."""
        self._end_load(request, blocks, now_s, reason)

    def close(self, request: Request, now_s: float) -> None:
        """End the timeline of a request that has ended; it is remembered until newer ones displace
        it.
        """
        record = self._live.pop(request.request_id)
        self._ended[request.request_id] = self._describe(record, now_s)
        self._ended.move_to_end(request.request_id)
        while len(self._ended) > self._capacity:
            self._ended.popitem(last=False)

    def get(self, request_id: str, now_s: float) -> InstanceTimeline | None:
        """Return the timeline of a request; None if it is unknown or forgotten."""
        record = self._live.get(request_id)
        return self._ended.get(request_id) if record is None else self._describe(record, now_s)

    def _begin_load(self, request_id: str, loads: Sequence[BlockLoad], now_s: float) -> None:
        record = self._live[request_id]
        if len(record.loads) == MAX_EVENTS:
            return
        source = record.request.prefill_kv
        message = KvLoadRecord(
            source="store" if source is None else source.instance,
            begin_s=now_s - record.arrival_s,
            asked_blocks=len(loads),
            failures={},
        )
        record.loads.append(_Load(message, {load.block for load in loads}))

    def _end_load(
        self, request: Request, blocks: Sequence[GroupBlock], now_s: float, reason: str | None
    ) -> None:
        """Record that nothing writes into these blocks any more; ``reason`` tells why their load
        failed, None if they arrived.
        """
        record = self._live.get(request.request_id)
        if record is None or record.request is not request:
            return  # A transfer may end after its request has ended.
        for load in record.loads:
            ended = load.pending.intersection(blocks)
            if not ended:
                continue
            load.pending -= ended
            message = load.message
            if reason is None:
                message.loaded_blocks += len(ended)
                message.loaded_bytes += len(ended) * self._block_bytes
            else:
                name = _name_drop(request, message) if reason == _DROPPED else reason
                message.failures[name] = message.failures.get(name, 0) + len(ended)
            if not load.pending:
                message.end_s = now_s - record.arrival_s

    def _describe(self, record: _Record, now_s: float) -> InstanceTimeline:
        request = record.request
        zero_s = record.arrival_s
        report = request.report
        is_admitted = report.first_scheduled_s is not None
        reason = request.finish_reason
        return InstanceTimeline(
            request_id=request.request_id,
            state=str(request.state),
            age_s=now_s - zero_s,
            prompt_tokens=request.prompt_len,
            output_tokens=len(request.output_ids),
            lookup=record.lookup,
            admitted_s=_after(report.first_scheduled_s, zero_s),
            deferred_steps=request.queue.num_deferrals,
            loads=[_copy(load.message) for load in record.loads],
            device_tokens=report.num_cached_tokens - report.num_loaded_tokens,
            loaded_tokens=report.num_loaded_tokens,
            computed_tokens=request.prompt_len - report.num_cached_tokens if is_admitted else 0,
            miss=self._choose_miss(record),
            num_preemptions=request.queue.num_preemptions,
            preempted_s=list(record.preempted_s),
            num_prefill_steps=record.num_prefill_steps,
            prefill_s=record.prefill_s,
            num_decode_steps=record.num_decode_steps,
            decode_s=record.decode_s,
            first_token_s=_after(report.first_token_s, zero_s),
            end_s=now_s - zero_s if request.is_finished else None,
            finish_reason=None if reason is None else str(reason),
        )

    def _choose_miss(self, record: _Record) -> PrefixMiss | None:
        """Return why a request's cached prefix ended, considering lower tiers too; None if all of
        it was reused, or before admission.

        The index's reason stands, unless the store may have had the next block: then the reason is
        that its load failed, came too late, was not tried, or that the store did not answer.
        """
        request, report = record.request, record.request.report
        miss = report.miss
        if miss is None or report.first_scheduled_s is None or miss.reason in _FINAL:
            return miss
        admitted_s = report.first_scheduled_s - record.arrival_s
        loads = [load.message for load in record.loads if load.message.begin_s <= admitted_s]
        failures = {name for load in loads for name in load.failures} - {"after_gap"}
        reason, detail = miss.reason, miss.detail
        if "too_late" in failures:
            reason = MissReason.TOO_LATE
        elif failures:
            reason, detail = MissReason.LOAD_FAILED, ", ".join(sorted(failures))
        elif record.lookup is not None and not record.lookup.is_answered:
            reason = MissReason.NO_ANSWER
        elif not loads and request.num_stored_blocks > miss.position // self._block_size:
            reason = MissReason.NOT_LOADED
        return PrefixMiss(reason=reason, position=miss.position, detail=detail)


def _name_drop(request: Request, load: KvLoadRecord) -> str:
    """Return the name that timelines give to the reason for which a load was given up."""
    if load.failures.keys() - {"too_late"}:
        return "after_gap"
    return "too_late" if request.state is RequestState.RUNNING else "given_up"


def _after(moment_s: float | None, zero_s: float) -> float | None:
    return None if moment_s is None else moment_s - zero_s


def _copy(load: KvLoadRecord) -> KvLoadRecord:
    """Return a copy of a load record, unaffected by later changes of the original."""
    return KvLoadRecord(
        source=load.source,
        begin_s=load.begin_s,
        end_s=load.end_s,
        asked_blocks=load.asked_blocks,
        loaded_blocks=load.loaded_blocks,
        loaded_bytes=load.loaded_bytes,
        failures=dict(load.failures),
    )
