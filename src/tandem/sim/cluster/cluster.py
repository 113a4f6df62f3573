"""A simulated cluster: the product's request state machine drives simulated instances.

Every request is a ``RequestStates``, as in the server's dispatcher. Here its actions take no time,
and fail only if the scheduler of an instance refuses them. Only this module handles requests that
use several instances.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from tandem.conductor.conductor import Decision as Placed
from tandem.conductor.role_balance import ROLE_LOOK_S
from tandem.conductor.routes import Alone, NoRoute, Pair, Place
from tandem.core.errors import TandemError
from tandem.core.loads.records import RequestRecord
from tandem.core.loads.traces import BLOCK_TOKENS, TraceRow
from tandem.core.wire import AddRequest, FinishReason, RequestOutput
from tandem.engine.cluster.placing import add_expected
from tandem.engine.cluster.request_states import (
    Action,
    Cancel,
    Continue,
    Continued,
    Deliver,
    DropLeg,
    Fail,
    Input,
    LegFailed,
    LegOutput,
    Limits,
    Note,
    ReleaseLeg,
    RequestStates,
    Submit,
)
from tandem.sim.cluster.events import Events
from tandem.sim.cluster.instance import SimInstance
from tandem.sim.cluster.placing import Placing
from tandem.sim.cluster.requests import FIRST_OUTPUT_ID, KeyCache, make_request
from tandem.sim.cluster.store import SimStore

__all__ = ["Decision", "RoleSwitch", "SimCluster"]


class Decision(msgspec.Struct, frozen=True, gc=False):
    """A line of the decision log: the instances chosen for a request."""

    at_s: float
    request: int
    kind: str
    """Kind of placement: pair, late_pair, decode, alone or none."""
    prefill: str = ""
    decode: str = ""
    """The decoding instance; without a pair, the one that serves the whole request."""


class RoleSwitch(msgspec.Struct, frozen=True, gc=False):
    """A change of an instance's role (prefill, decode, unified) that the conductor, the router of
    requests, has asked for.
    """

    at_s: float
    instance: str
    role: str


@dataclass(slots=True, eq=False)
class _Live:
    row: TraceRow
    states: RequestStates
    record: RequestRecord
    keys: list[bytes]
    is_accepted: bool = False
    decision: Placed | None = None
    timer_s: float = math.inf


class SimCluster:
    """Runs requests on instances.

    Args:
       instances: instances by name.
       placing: chooses the instances of a request.
       events: the clock.
       limits: retry limits of each request.
       timeout_s: longest time of a request; None for no limit.
       store: the instances' KV store, if they have one.
       block_tokens: tokens per hash of the trace.
       request_s: seconds of a request outside of its steps.
       on_done: called with each completed record.
       is_balanced: True if instances change roles with the load.
    """

    def __init__(
        self,
        instances: dict[str, SimInstance],
        placing: Placing,
        events: Events,
        limits: Limits,
        *,
        timeout_s: float | None = None,
        store: SimStore | None = None,
        block_tokens: int = BLOCK_TOKENS,
        request_s: float = 0.0,
        on_done: Callable[[RequestRecord], None] | None = None,
        is_balanced: bool = False,
    ) -> None:
        self._is_balanced = is_balanced
        self.role_changes: list[RoleSwitch] = []
        self.instances, self.placing, self.events = instances, placing, events
        self.store = store
        self._limits, self._timeout_s, self._on_done = limits, timeout_s, on_done
        first = next(iter(instances.values()))
        size = first.setup.engine.block_size
        self._block_tokens, self._request_s = block_tokens, request_s
        self._keys = KeyCache(size, first.index.make_root_key(""), block_tokens)
        self.records: list[RequestRecord] = []
        self.decisions: list[Decision] = []
        self.fallbacks: dict[str, int] = {}
        self.num_live = 0

    def run(self, rows: Iterable[TraceRow]) -> None:
        """Serve the requests of a trace, given in order of arrival, until all have ended."""
        self._arrivals = iter(rows)
        self._has_more = True
        self._expect_next()
        if self._is_balanced:
            self.events.call_at(ROLE_LOOK_S, self._balance)
        self.events.run()
        assert self.num_live == 0, f"{self.num_live} requests never end"

    # The methods from here to `_balance` are about arrivals of requests and switches of roles.

    def _expect_next(self) -> None:
        row = next(self._arrivals, None)
        self._has_more = row is not None
        if row is not None:
            self.events.call_at(row.timestamp / 1e3 + self._request_s, self._arrive, row)

    def _arrive(self, row: TraceRow) -> None:
        number = len(self.records)
        now_s = self.events.now_s
        request = make_request(row, number, self._timeout_s, self._block_tokens)
        record = RequestRecord(
            index=number,
            input_length=row.input_length,
            output_length=row.output_length,
            due_s=now_s - self._request_s,
            sent_s=now_s - self._request_s,
        )
        self.records.append(record)
        states = RequestStates(request, self._limits, now_s)
        keys = self._keys.find(row, request.prompt_ids)
        live = _Live(row, states, record, keys)
        self.num_live += 1
        self._run(live, states.start(now_s))
        self._expect_next()

    def _balance(self) -> None:
        now_s = self.events.now_s
        change = self.placing.balance(now_s)
        if change is not None:
            self.role_changes.append(RoleSwitch(now_s, change.instance, change.role))
        if self._has_more or self.num_live:
            self.events.call_at(now_s + ROLE_LOOK_S, self._balance)

    # The methods below advance the conductor's state machine of each request and execute its
    # actions.

    def _feed(self, live: _Live, message: Input) -> None:
        self._run(live, live.states.take(message, self.events.now_s))

    def _run(self, live: _Live, actions: Iterable[Action]) -> None:
        todo = list(actions)
        while todo:
            todo[:1] = self._execute(live, todo[0])
        states = live.states
        if states.is_over:
            self._forget(live)
        elif states.deadline_s != live.timer_s:
            live.timer_s = states.deadline_s
            if live.timer_s < math.inf:
                self.events.call_at(live.timer_s, self._tick, live, live.timer_s)

    def _tick(self, live: _Live, when_s: float) -> None:
        if live.timer_s == when_s and not live.states.is_over:
            live.timer_s = math.inf
            self._run(live, live.states.tick(self.events.now_s))

    def _forget(self, live: _Live) -> None:
        if live.timer_s == -math.inf:
            return
        live.timer_s = -math.inf
        self.num_live -= 1
        self.placing.conductor.note_end(
            live.states.request.request_id,
            live.states.num_delivered,
            self.events.now_s,
            is_whole=not live.record.error,
        )
        live.record.done_s = self.events.now_s
        if self._on_done is not None:
            self._on_done(live.record)

    def _execute(self, live: _Live, action: Action) -> list[Action]:
        """Perform one action; return the actions that follow from it immediately."""
        states, now_s = live.states, self.events.now_s
        match action:
            case Place():
                decision = self.placing.decide(
                    action, states.request, live.keys, now_s, is_new=not live.is_accepted
                )
                if decision.rejection is not None:
                    live.record.error = f"overloaded: {decision.rejection.reason}"
                    return states.take(Cancel(), now_s)
                live.is_accepted = True
                live.decision = decision
                self._log(live, decision.route)
                return states.take(decision.route or NoRoute(), now_s)
            case Submit(leg=leg, request=request):
                try:
                    self._submit(live, leg.leg_id, leg.instance.name, request)
                except TandemError as error:
                    return states.take(LegFailed(leg.leg_id, error), now_s)
            case Continue(leg=leg, message=message):
                if self.placing.is_refused_late(leg.instance.name, states.request):
                    live.record.error = "overloaded: tpot, after the prefill"
                    return states.take(Cancel(), now_s)
                is_taken = self.instances[leg.instance.name].continue_request(message)
                return states.take(Continued(leg.leg_id, is_taken), now_s)
            case DropLeg(leg=leg):
                self.instances[leg.instance.name].cancel(leg.leg_id)
            case ReleaseLeg(leg=leg):
                self.instances[leg.instance.name].release_hold(leg.leg_id)
            case Deliver(output=output):
                if not live.record.output_tokens and output.token_ids:
                    self.placing.conductor.note_first_token(states.request.request_id, now_s)
                _take_output(live.record, output)
            case Fail(error=error):
                live.record.error = f"{error.code}: {error.what}"
            case Note(reason=reason):
                self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        return []

    def _submit(self, live: _Live, leg_id: str, name: str, request: AddRequest) -> None:
        def put(output: RequestOutput) -> None:
            self._feed(live, LegOutput(leg_id, output))

        token = FIRST_OUTPUT_ID + live.record.index
        request = add_expected(request, name, live.decision)
        self.instances[name].add(request, live.record, put, token, live.keys)

    def _log(self, live: _Live, route: Pair | Alone | NoRoute | None) -> None:
        kind, prefill, decode = "none", "", ""
        match route:
            case Pair(prefill=None, decode=chosen):
                kind, decode = "decode", "" if chosen is None else chosen.name
            case Pair(prefill=chosen, decode=None):
                kind, prefill = "late_pair", "" if chosen is None else chosen.name
            case Pair(prefill=first, decode=second):
                assert first is not None
                assert second is not None
                kind, prefill, decode = "pair", first.name, second.name
            case Alone(instance=chosen):
                kind, decode = "alone", chosen.name
            case _:
                pass
        at_s = self.events.now_s
        self.decisions.append(Decision(at_s, live.record.index, kind, prefill, decode))


def _take_output(record: RequestRecord, output: RequestOutput) -> None:
    record.output_tokens += len(output.token_ids)
    if output.prompt_len:
        record.cached_tokens = output.cached_len
    is_good = output.finish_reason in (None, FinishReason.LENGTH, FinishReason.STOP)
    if not is_good and not record.error:
        record.error = str(output.finish_reason)
