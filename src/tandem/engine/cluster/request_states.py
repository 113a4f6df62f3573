"""The state machine of one request of a cluster: inputs in, actions out, by the rows of ``TABLE``.

Owns the data of the request: the tokens sent so far, the ids of its legs (the requests sent to
instances) and the number of failures. The prompt, the seed and the tokens so far are all that
another instance needs to continue with identical tokens, so the request survives the failure of an
instance.

Pure and single-threaded; time is an argument. The caller executes the actions in order and reports
each outcome as another input; inputs of a leg that has ended are ignored.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from tandem.conductor.routes import Alone, InstanceRef, NoRoute, Pair, Place
from tandem.core.errors import ERROR_CODES, PeerLostError, TandemError, make_error
from tandem.core.wire import (
    AddRequest,
    Continuation,
    ContinueRequest,
    FinishReason,
    KvHandle,
    PrefillKv,
    RequestOutput,
    SamplingParams,
)
from tandem.engine.cluster.table import ENDS, TABLE, Deadline, Effect, Event, Held, State

__all__ = [
    "Action",
    "Cancel",
    "Continue",
    "Continued",
    "Deliver",
    "DropLeg",
    "Fail",
    "Leg",
    "LegFailed",
    "LegOutput",
    "Limits",
    "Note",
    "ReleaseLeg",
    "RequestStates",
    "Submit",
]

MAX_LEASE_S = 3600.0
"""Longest lease on a prefill's blocks that the wire format allows, seconds."""
GRACE_S = 0.1
"""Seconds added to the time limit of a request before the cluster itself ends it. Normally the
instance ends the request first, between two steps; if a step takes long, the client still gets its
answer after this time.
"""


@dataclass(frozen=True, slots=True)
class Leg:
    """One request sent to an instance on behalf of a client's request, which may need several."""

    leg_id: str
    """Request id at the instance, unique over all legs of all requests."""
    instance: InstanceRef


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits and number of attempts of a request.

    Attributes:
        lease_s: seconds that the KV blocks of an ended prefill are held.
        recovery_s: seconds that a request waits for an instance to come back.
        max_attempts: failures after which a request is retried; the next failure ends it with an
            error.
    """

    lease_s: float = 30.0
    recovery_s: float = 60.0
    max_attempts: int = 3


# The classes below are the inputs: what has happened to a request or one of its legs.


@dataclass(frozen=True, slots=True)
class LegOutput:
    """The input that an instance has sent an output of a leg. An output with ``FinishReason.ERROR``
    is a failure, judged by its error code.
    """

    leg_id: str
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class LegFailed:
    """The input that a leg (a request sent to an instance) was refused, or could not be sent."""

    leg_id: str
    error: TandemError


@dataclass(frozen=True, slots=True)
class Continued:
    """The input that a continuation (the prefill's tokens) was sent: True if the decode instance
    accepted it; a failed call counts as False.
    """

    leg_id: str
    is_taken: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """The input that the client has left, or has aborted its request."""


Input = Pair | Alone | NoRoute | LegOutput | LegFailed | Continued | Cancel

# The classes below are the actions: what the caller is to do for a request.


@dataclass(frozen=True, slots=True)
class Submit:
    """The action to send a leg, one request on behalf of the client's, to an instance."""

    leg: Leg
    request: AddRequest


@dataclass(frozen=True, slots=True)
class Continue:
    """The action to send the prefill's tokens to the decode instance that waits for them; the
    outcome is returned as ``Continued``.
    """

    leg: Leg
    message: ContinueRequest


@dataclass(frozen=True, slots=True)
class DropLeg:
    """The action to cancel a leg, a request at an instance; its later outputs are ignored."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class ReleaseLeg:
    """The action to release the blocks that an instance holds for an ended prefill, if there are
    any.
    """

    leg: Leg


@dataclass(frozen=True, slots=True)
class Deliver:
    """The action to pass an output to the client; only the last output has a finish reason."""

    output: RequestOutput


@dataclass(frozen=True, slots=True)
class Fail:
    """The action to end the client's request with an error."""

    error: TandemError


@dataclass(frozen=True, slots=True)
class Note:
    """The action to count a fallback (a move to another instance) under its reason."""

    reason: str


Action = Place | Submit | Continue | DropLeg | ReleaseLeg | Deliver | Fail | Note


@dataclass(slots=True)
class _PromptFacts:
    """Facts about the prompt in the first output, repeated in the outputs of later instances."""

    prompt_len: int
    cached_len: int


@dataclass(slots=True)
class _Happened:
    """The input of the state machine that is being processed, with data for its effects."""

    route: Pair | Alone | None = None
    output: RequestOutput | None = None
    error: TandemError | None = None
    reason: str = ""
    source: InstanceRef | None = None
    """Instance from which the output comes."""
    actions: list[Action] = field(default_factory=list["Action"])


class RequestStates:
    """The state machine of one request of a cluster.

    Args:
        request: the server's request, with its seed already drawn; all outputs have its id.
        limits: time limits and attempts.
        now_s: time of arrival, seconds.
        tag: of the server; part of the ids of the legs.
    """

    def __init__(self, request: AddRequest, limits: Limits, now_s: float, tag: str = "") -> None:
        self._tag = tag
        assert request.sampling.seed is not None, "a retry must draw the same tokens"
        self._request = request
        self._limits = limits
        timeout_s = math.inf if request.timeout_s is None else request.timeout_s
        self._end_s = now_s + timeout_s
        self._entered_s = now_s
        self._hold_end_s = math.inf
        self._now_s = now_s
        self._num_legs = 0
        self._prefill: Leg | None = None
        """The request at the instance that computes its prompt; after the prompt's end, at the
        instance that holds its KV blocks under a lease.
        """
        self._decode: Leg | None = None
        self._last_prefill: InstanceRef | None = None
        self._handle: KvHandle | None = None
        self._tokens: list[int] = []
        """Tokens sent to the client so far."""
        self._identity: str | None = None
        """KV identity of the model that computed the tokens sent so far; None before the first."""
        self._facts: _PromptFacts | None = None
        self._kept: list[RequestOutput] = []
        self._avoid: set[InstanceRef] = set()
        self._error: TandemError | None = None
        self._happened = _Happened()
        self.state = State.PLACING
        self.num_fallbacks = 0
        self._steps: Mapping[Effect, Callable[[], None]] = {
            Effect.PLACE: lambda: self._place(is_held=False),
            Effect.PLACE_DECODE: lambda: self._place(is_held=True),
            Effect.SUBMIT_PREFILL: self._submit_prefill,
            Effect.SUBMIT_WAITING: lambda: self._submit_reader(awaits_continuation=True),
            Effect.SUBMIT_REJOINING: lambda: self._submit_reader(awaits_continuation=False),
            Effect.SUBMIT_DECODE: self._submit_decode,
            Effect.SUBMIT_ALONE: self._submit_alone,
            Effect.SEND_CONTINUATION: self._send_continuation,
            Effect.DELIVER: self._deliver,
            Effect.KEEP: self._keep,
            # Do nothing here: the output that was kept back while the continuation was under way is
            # processed when the next state has been entered.
            Effect.TAKE_KEPT: lambda: None,
            Effect.DISCARD_KEPT: self._discard_kept,
            Effect.DROP_PREFILL: self._drop_prefill,
            Effect.DROP_DECODE: self._drop_decode,
            Effect.RELEASE: self._release,
            Effect.COUNT: self._count,
            Effect.END_TIMEOUT: lambda: self._end(FinishReason.DEADLINE),
            Effect.END_CANCELLED: lambda: self._end(FinishReason.CANCELLED),
            Effect.FAIL: self._fail,
        }

    @property
    def request(self) -> AddRequest:
        """The client's request as the server has made it."""
        return self._request

    @property
    def is_over(self) -> bool:
        """True if the client has got its last output or an error."""
        return self.state in (State.ENDED, State.FAILED)

    @property
    def num_delivered(self) -> int:
        """Number of tokens sent to the client."""
        return len(self._tokens)

    @property
    def held(self) -> dict[Held, Leg]:
        """The legs (requests at instances) and the held blocks that the client's request has, by
        kind.
        """
        legs = {Held.PREFILL: self._prefill, Held.HOLD: self._prefill, Held.DECODE: self._decode}
        held: dict[Held, Leg] = {}
        for kind in TABLE[self.state].held:
            leg = legs[kind]
            assert leg is not None, f"{self._request.request_id} is {self.state} without {kind}"
            held[kind] = leg
        return held

    @property
    def deadline_s(self) -> float:
        """Time at which ``tick`` must be called, seconds; ``inf`` only if the request has ended or
        has no time limit.
        """
        match TABLE[self.state].deadline:
            case Deadline.REQUEST:
                return self._end_s + GRACE_S
            case Deadline.RECOVERY:
                return min(self._entered_s + self._limits.recovery_s, self._end_s)
            case Deadline.LEASE:
                return min(self._hold_end_s, self._end_s)
            case Deadline.NONE:
                return math.inf

    def start(self, now_s: float) -> list[Action]:
        """Return the first actions for a new request; call exactly once."""
        self._begin(now_s)
        self._place(is_held=False)
        return self._happened.actions

    def tick(self, now_s: float) -> list[Action]:
        """Process the passing of time, such as the end of a state's time limit; return the actions
        to execute.
        """
        self._begin(now_s)
        if now_s >= self.deadline_s:
            if now_s >= self._end_s:
                self._fire(Event.TIMEOUT)
            elif TABLE[self.state].deadline is Deadline.LEASE:
                self._happened.reason = "lease_ended"
                self._fire(Event.LEASE_ENDED)
            else:
                is_refused = self._error is not None and self._error.code != PeerLostError.code
                if self._identity is not None and not is_refused:
                    self._error = self._make_other_model_error()
                self._fire(Event.RECOVERY_ENDED)
        return self._happened.actions

    def take(self, message: Input, now_s: float) -> list[Action]:
        """Process an input; return the actions to execute, in this order."""
        self._begin(now_s)
        if not self.is_over:
            self._take(message)
        return self._happened.actions

    def _begin(self, now_s: float) -> None:
        self._now_s = now_s
        self._happened = _Happened()

    def _take(self, message: Input) -> None:
        match message:
            case Cancel():
                self._fire(Event.CANCEL)
            case Pair() | Alone():
                self._take_route(message)
            case NoRoute(is_foreign=is_foreign):
                self._happened.reason = "no_decode_instance"
                if self.state is State.HELD:
                    self._fire(Event.NO_ROUTE)
                elif self.state is State.PLACING:
                    if is_foreign:
                        self._error = self._make_other_model_error()
                    self._fire(Event.REFUSED)
            case LegOutput(leg_id=leg_id, output=output):
                self._take_output(leg_id, output)
            case LegFailed(leg_id=leg_id, error=error):
                self._take_failure(leg_id, error, is_refusal=True)
            case Continued(leg_id=leg_id, is_taken=is_taken):
                if self._is_decode(leg_id) and self.state is State.CONTINUING:
                    self._happened.reason = "decode_started_alone"
                    self._fire(Event.CONTINUED if is_taken else Event.NOT_CONTINUED)

    def _take_route(self, route: Pair | Alone) -> None:
        if self._identity is not None and any(
            ref.identity != self._identity for ref in _list_instances(route)
        ):
            # Refuse this choice even if the policy made it: one answer must not mix tokens of two
            # models.
            self._take(NoRoute(is_foreign=True))
            return
        self._happened.route = route
        if self.state is State.HELD and isinstance(route, Pair):
            self._fire(Event.DECODE)
        elif self.state is not State.PLACING:
            return
        elif isinstance(route, Alone):
            self._fire(Event.ALONE)
        elif self._tokens:
            self._fire(Event.REJOIN)
        else:
            # Choose both instances before the prefill only if they have one model: another model
            # could not continue from the first token.
            is_early = route.decode is not None and _has_one_model(route)
            self._fire(Event.PAIR if is_early else Event.LATE_PAIR)

    def _take_output(self, leg_id: str, output: RequestOutput) -> None:
        if output.finish_reason is FinishReason.ERROR:
            code = output.error_code if output.error_code is not None else "internal"
            text = output.error_text if output.error_text is not None else "the engine failed"
            self._happened.output = output
            self._take_failure(leg_id, make_error(code, "engine.run", text), is_refusal=False)
            return
        self._happened.output = output
        if self._is_prefill(leg_id):
            self._happened.source = self.held[Held.PREFILL].instance
            is_held = output.finish_reason is FinishReason.PREFILLED
            if output.finish_reason is None:
                return  # A prefill-only request has no output before its end.
            if is_held:
                self._handle = output.kv_handle
                self._hold_end_s = self._now_s + self._limits.lease_s
            self._happened.reason = f"prefill_{output.finish_reason}"
            self._fire(Event.PREFILLED if is_held else Event.PREFILL_ENDED)
        elif self._is_decode(leg_id):
            self._happened.source = self.held[Held.DECODE].instance
            is_last = output.finish_reason is not None and self.state is not State.CONTINUING
            self._happened.reason = "decode_started_alone"
            self._fire(Event.OUTPUT_ENDED if is_last else Event.OUTPUT)

    def _take_failure(self, leg_id: str, error: TandemError, *, is_refusal: bool) -> None:
        """Process the failure of a leg (a request at an instance): retry on another instance, or
        end the client's request.
        """
        is_retryable = ERROR_CODES.get(error.code, TandemError).retryable
        self._happened.error = error
        if self._is_prefill(leg_id):
            self._happened.reason = f"prefill_{error.code}"
            self._fire(Event.PREFILL_LOST if is_retryable else Event.PREFILL_ENDED)
        elif self._is_decode(leg_id):
            self._happened.reason = f"decode_{error.code}"
            # After a decode instance refused to read the blocks, another decode instance may still
            # read them.
            has_pair = is_refusal and self.state is not State.SERVING
            is_lost = is_retryable or has_pair or self.state is State.CONTINUING
            self._fire(Event.DECODE_LOST if is_lost else Event.OUTPUT_ENDED)

    def _is_prefill(self, leg_id: str) -> bool:
        return Held.PREFILL in TABLE[self.state].held and self.held[Held.PREFILL].leg_id == leg_id

    def _is_decode(self, leg_id: str) -> bool:
        return Held.DECODE in TABLE[self.state].held and self.held[Held.DECODE].leg_id == leg_id

    def _fire(self, event: Event) -> None:
        """Leave the current state by the exit that the table has for an event, with its effects."""
        way = TABLE[self.state].exits[event]
        if event is Event.PREFILL_LOST:
            self._blame(self._prefill)
        elif event is Event.DECODE_LOST:
            self._blame(self._decode)
        ended = ENDS.get(event)
        if ended is Held.DECODE:
            self._decode = None
        elif ended is not None and event is not Event.PREFILLED:
            self._prefill = None
        # Change the state before its effects run: outcomes of their actions belong to the next
        # state.
        self.state, self._entered_s = way.to, self._now_s
        if Effect.COUNT in way.effects and event is not Event.NO_ROUTE:
            # Do not count NO_ROUTE as a failure: the failure that caused it has been counted.
            self.num_fallbacks += 1
        for step in way.effects:
            self._steps[step]()
        if Effect.TAKE_KEPT in way.effects:
            kept, self._kept = self._kept, []
            leg = self._decode
            for output in kept:
                assert leg is not None
                self._take_output(leg.leg_id, output)

    def _blame(self, leg: Leg | None) -> None:
        assert leg is not None
        self._avoid.add(leg.instance)
        self._error = self._happened.error

    # The methods below execute the effects of leaving a state; most append actions for the caller.

    def _act(self, action: Action) -> None:
        self._happened.actions.append(action)

    def _place(self, *, is_held: bool) -> None:
        if self.num_fallbacks > self._limits.max_attempts:
            self._happened.reason = "too_many_attempts"
            self._fire(Event.NO_ROUTE if is_held else Event.REFUSED)
            return
        self._act(
            Place(
                is_held=is_held,
                avoid=frozenset(self._avoid),
                prefill=self._last_prefill,
                needs_decode=self._request.sampling.max_tokens > 1,
                is_resumed=bool(self._tokens),
                identity=self._identity,
            )
        )

    def _make_leg(self, kind: str, instance: InstanceRef) -> Leg:
        self._num_legs += 1
        return Leg(f"{self._request.request_id}-{self._tag}{self._num_legs}{kind}", instance)

    def _submit_prefill(self) -> None:
        route = self._happened.route
        assert isinstance(route, Pair), route
        assert route.prefill is not None, route
        if self._prefill is None:
            self._prefill = self._make_leg("p", route.prefill)
        self._last_prefill = route.prefill
        self._submit(
            self._prefill,
            prefill_lease_s=self._limits.lease_s,
            sampling=self._request.sampling if not self._tokens else self._decode_sampling(),
        )

    def _submit_reader(self, *, awaits_continuation: bool) -> None:
        """Send the decode request to an instance that reads the blocks while the prefill computes
        them.
        """
        route = self._happened.route
        assert isinstance(route, Pair), route
        assert route.prefill is not None, route
        assert route.decode is not None, route
        # Create the leg (the request to an instance) for the prefill first: the decode request
        # contains its id.
        self._prefill = self._make_leg("p", route.prefill)
        self._decode = self._make_leg("d", route.decode)
        wait_s = min(max(self._end_s - self._now_s, 1.0), MAX_LEASE_S)
        handle = KvHandle(
            request_id=self._prefill.leg_id,
            num_tokens=len(self._request.prompt_ids),
            lease_s=wait_s,
        )
        self._submit(
            self._decode,
            sampling=self._decode_sampling(),
            kv_source=PrefillKv(instance=route.prefill.name, handle=handle),
            awaits_continuation=awaits_continuation,
            continuation=None if awaits_continuation else self._make_continuation(),
        )

    def _submit_decode(self) -> None:
        route = self._happened.route
        assert isinstance(route, Pair), route
        assert route.decode is not None, route
        assert self._handle is not None
        assert self._prefill is not None
        self._decode = self._make_leg("d", route.decode)
        left_s = max(self._hold_end_s - self._now_s, 0.001)
        handle = msgspec.structs.replace(self._handle, lease_s=min(left_s, MAX_LEASE_S))
        self._submit(
            self._decode,
            sampling=self._decode_sampling(),
            kv_source=PrefillKv(instance=self._prefill.instance.name, handle=handle),
            continuation=self._make_continuation(),
        )

    def _submit_alone(self) -> None:
        route = self._happened.route
        assert isinstance(route, Alone), route
        self._decode = self._make_leg("a", route.instance)
        self._submit(
            self._decode,
            sampling=self._decode_sampling() if self._tokens else self._request.sampling,
            continuation=self._make_continuation() if self._tokens else None,
        )

    def _submit(self, leg: Leg, **fields: object) -> None:
        timeout_s = None
        if self._end_s < math.inf:
            timeout_s = max(self._end_s - self._now_s, 0.0)
        request = msgspec.structs.replace(
            self._request, request_id=leg.leg_id, timeout_s=timeout_s, **fields
        )
        self._act(Submit(leg, request))

    def _decode_sampling(self) -> SamplingParams:
        """Return sampling settings without scoring of the prompt: the prefill instance has
        scored it.
        """
        return msgspec.structs.replace(self._request.sampling, prompt_logprobs=None)

    def _make_continuation(self) -> Continuation:
        seed = self._request.sampling.seed
        assert seed is not None
        return Continuation(token_ids=list(self._tokens), seed=seed)

    def _send_continuation(self) -> None:
        assert self._decode is not None
        continuation = self._make_continuation()
        message = ContinueRequest(request_id=self._decode.leg_id, continuation=continuation)
        self._act(Continue(self._decode, message))

    def _deliver(self) -> None:
        output, error = self._happened.output, self._happened.error
        if error is not None:
            self._act(Fail(error))
            return
        assert output is not None
        if self._identity is None and output.token_ids:
            assert self._happened.source is not None, "tokens come from an instance"
            self._identity = self._happened.source.identity
        self._tokens += output.token_ids
        is_prefilled = output.finish_reason is FinishReason.PREFILLED
        changes: dict[str, object] = {"request_id": self._request.request_id}
        if is_prefilled:
            changes |= {"finish_reason": None, "kv_handle": None, "continuation": None}
        if output.prompt_len:
            if self._facts is None:
                self._facts = _PromptFacts(output.prompt_len, output.cached_len)
            else:
                # Deliver the counts of the first instance: for a later instance, tokens computed by
                # the first one would count as prompt or as cached.
                changes |= {
                    "prompt_len": self._facts.prompt_len,
                    "cached_len": self._facts.cached_len,
                    "queue_s": None,
                }
        self._act(Deliver(msgspec.structs.replace(output, **changes)))

    def _keep(self) -> None:
        assert self._happened.output is not None
        self._kept.append(self._happened.output)

    def _discard_kept(self) -> None:
        self._kept = []

    def _drop_prefill(self) -> None:
        assert self._prefill is not None
        self._act(DropLeg(self._prefill))
        self._release()

    def _drop_decode(self) -> None:
        assert self._decode is not None
        self._act(DropLeg(self._decode))
        self._decode = None

    def _release(self) -> None:
        assert self._prefill is not None
        self._act(ReleaseLeg(self._prefill))
        self._prefill = None

    def _count(self) -> None:
        self._act(Note(self._happened.reason))

    def _end(self, reason: FinishReason) -> None:
        output = RequestOutput(
            request_id=self._request.request_id, token_ids=[], finish_reason=reason
        )
        self._act(Deliver(output))

    def _make_other_model_error(self) -> TandemError:
        return PeerLostError(
            "engine.place",
            f"no instance serves the model that computed the {len(self._tokens)} tokens sent so "
            "far: send the request again",
        )

    def _fail(self) -> None:
        error = self._error
        if error is None:
            error = PeerLostError("engine.place", "no instance serves: try again in a moment")
        self._act(Fail(error))


def _list_instances(route: Pair | Alone) -> list[InstanceRef]:
    named = (route.prefill, route.decode) if isinstance(route, Pair) else (route.instance,)
    return [instance for instance in named if instance is not None]


def _has_one_model(pair: Pair) -> bool:
    return len({instance.identity for instance in _list_instances(pair)}) == 1
