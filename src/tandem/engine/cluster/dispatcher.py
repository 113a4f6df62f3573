"""Runs the state machines of all live requests: executes their actions on instances and feeds the
outcomes back.

Owns the live requests, their timers and the calls under way. Instances are ``Port``s, not
processes, so the same code runs in the simulator. All code runs on one event loop, whose time is
the only clock.
"""

import asyncio
import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from tandem.conductor.conductor import Conductor, Decision
from tandem.conductor.load_count import LoadCount
from tandem.conductor.policies.policy import Question
from tandem.conductor.routes import InstanceRef, NoRoute, Place
from tandem.core.errors import (
    ConflictError,
    InternalError,
    OverloadError,
    PeerLostError,
    TandemError,
)
from tandem.core.wire import AddRequest, ContinueRequest, FinishReason, InstanceInfo, RequestOutput
from tandem.engine.cluster.placing import Placing, add_expected
from tandem.engine.cluster.request_states import (
    Action,
    Cancel,
    Continue,
    Continued,
    Deliver,
    DropLeg,
    Fail,
    Input,
    Leg,
    LegFailed,
    LegOutput,
    Limits,
    Note,
    ReleaseLeg,
    RequestStates,
    Submit,
)
from tandem.engine.cluster.table import State
from tandem.engine.process.methods import CONTINUE, InstanceMethod
from tandem.engine.process.output_stream import OutputStream

__all__ = ["Choice", "Dispatcher", "LegRecord", "Port"]

Req = TypeVar("Req")
Res = TypeVar("Res")

logger = logging.getLogger(__name__)


class Port(Protocol):
    """An instance as the dispatcher uses it; the object stays the same over restarts."""

    @property
    def ref(self) -> InstanceRef:
        """Name and run (one process between two restarts) of the instance."""
        ...

    @property
    def role(self) -> Literal["unified", "prefill", "decode"]:
        """The role of the instance."""
        ...

    @property
    def info(self) -> InstanceInfo | None:
        """The facts of the running instance; None while it does not serve."""
        ...

    @property
    def load(self) -> LoadCount:
        """The load of the instance's present process; read only while it serves."""
        ...

    @property
    def sources(self) -> frozenset[str]:
        """Names of the prefill instances whose KV blocks this instance can read now."""
        ...

    async def submit(self, request: AddRequest, put: Callable[[RequestOutput], None]) -> None:
        """Queue a request; see ``InstanceSession.submit``."""
        ...

    async def call(self, method: InstanceMethod[Req, Res], request: Req) -> Res:
        """Call a method of the instance; see ``InstanceSession.call``."""
        ...

    def cancel(self, request_id: str) -> None:
        """Cancel a request; do nothing if its id is not known."""
        ...

    def release_hold(self, request_id: str) -> None:
        """Release the KV blocks held for an ended prefill; do nothing if there are none."""
        ...


@dataclass(frozen=True, slots=True)
class LegRecord:
    """An instance to which a request was sent, and the time of sending."""

    instance: str
    leg_id: str
    sent_s: float
    """Seconds from the submission of the request to the dispatcher until it is sent to the
    instance."""


@dataclass(slots=True, eq=False)
class Choice:
    """The first placement decision for a request, and how long its first token took."""

    decision: Decision
    at_s: float
    first_token_s: float | None = None
    """Seconds from the decision to the first token; None while there is none."""


class _Past(NamedTuple):
    """The memory of an ended request: the instances it was sent to, and the first placement
    decision.
    """

    legs: list[LegRecord]
    choice: Choice | None


@dataclass(slots=True, eq=False)
class _Live:
    states: RequestStates
    stream: OutputStream
    begin_s: float
    accepted: "asyncio.Future[None]"
    state: State | None = None
    """State of the request that was last written to the log."""
    legs: list[LegRecord] = field(default_factory=list[LegRecord])
    tasks: dict[str, "asyncio.Task[None]"] = field(default_factory=dict[str, "asyncio.Task[None]"])
    """Calls in progress that submit the request to an instance, by id of the leg (the request at
    one instance).
    """
    counts: dict[str, tuple[LoadCount, int]] = field(
        default_factory=dict[str, tuple[LoadCount, int]]
    )
    """By id of the leg (the request at one instance): the load count of that instance, and the
    number of the request in it.
    """
    question: Question | None = None
    """Question to the conductor (which instances should serve the request?), made for the first
    decision and reused for later ones.
    """
    decision: Decision | None = None
    """Latest decision of the conductor: the instances that it chose for the request."""
    choice: "Choice | None" = None
    is_whole: bool = False
    """True if the answer has reached its end, and was not cancelled and has not failed."""
    timer: asyncio.TimerHandle | None = None
    timer_s: float = math.inf

    @property
    def request(self) -> AddRequest:
        return self.states.request


class Dispatcher:
    """The dispatcher of requests to several instances.

    Args:
        ports: all instances of the cluster; not owned.
        conductor: chooses among the serving instances; it must not know of any instance yet.
        limits: time limits and attempts of each request.
        max_history: largest number of ended requests whose legs are remembered.
        tag: identifies this server where several servers share instances. It is part of the request
            ids sent to instances, so that requests of two servers with the same client id do not
            collide.
    """

    def __init__(
        self,
        ports: Sequence[Port],
        conductor: Conductor,
        limits: Limits,
        *,
        max_history: int = 1024,
        tag: str = "",
    ) -> None:
        self._tag = tag
        self._ports = {port.ref.name: port for port in ports}
        self._placing = Placing(conductor)
        for port in ports:
            self._placing.sync(port)
        self._limits = limits
        self._max_history = max_history
        self._live: dict[str, _Live] = {}
        self._unplaced: dict[str, tuple[_Live, Place]] = {}
        """Requests without an instance, by request id, in the order in which they began to wait."""
        self._history: OrderedDict[str, _Past] = OrderedDict()
        self._calls: set[asyncio.Task[None]] = set()
        self.on_end: Callable[[AddRequest], None] | None = None
        """Callback for each request that has ended."""
        self._outage_begin_s: float | None = None
        """Time since which no instance serves, seconds; None while one serves, or before all have
        served once.
        """
        self.fallbacks: dict[str, int] = {}
        """Number of times since start that requests moved to another instance, by reason."""

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended."""
        return len(self._live)

    def count_live(self, adapter: str) -> int:
        """Return how many requests of an adapter, by its digest, have not ended."""
        return sum(live.request.adapter == adapter for live in self._live.values())

    async def submit(self, request: AddRequest) -> OutputStream:
        """Serve a request; return its output stream when an instance has accepted it.

        Raises: ConflictError (a request with this id has not ended); errors of
            ``tandem.server.engine.EngineClient.submit``.
        """
        request_id = request.request_id
        if request_id in self._live:
            raise ConflictError("engine.submit", f"request {request_id!r} is live")
        if request.sampling.seed is None:
            # Draw the seed here, so that another instance can continue the random stream after a
            # failure.
            sampling = msgspec.structs.replace(request.sampling, seed=secrets.randbits(63))
            request = msgspec.structs.replace(request, sampling=sampling)
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        states = RequestStates(request, self._limits, now_s, self._tag)
        stream = OutputStream(request_id, self._cancel)
        live = self._live[request_id] = _Live(states, stream, now_s, loop.create_future())
        self._run(live, states.start(now_s))
        try:
            await live.accepted
        except asyncio.CancelledError:
            self._cancel(request_id)
            raise
        return live.stream

    def note_change(self) -> None:
        """Retry the placement of waiting requests, after instances have started, stopped, or become
        able to read each other's KV.
        """
        for port in self._ports.values():
            self._placing.sync(port)
        if self._placing.num_serving:
            self._outage_begin_s = None
        elif self._outage_begin_s is None:
            self._outage_begin_s = asyncio.get_running_loop().time()
        waiting, self._unplaced = self._unplaced, {}
        for live, place in waiting.values():
            self._run(live, [place])

    def add_port(self, port: Port) -> None:
        """Add an instance to which requests may be sent."""
        self._ports[port.ref.name] = port
        self.note_change()

    def remove_port(self, name: str) -> None:
        """Remove an instance. The caller ensures that no request has a leg (a request sent for a
        client's request) or held blocks there.
        """
        assert not self.count_at(name), f"{name} has requests"
        del self._ports[name]
        self._placing.forget(name)

    def set_draining(self, name: str, *, is_draining: bool) -> None:
        """Stop sending new requests to an instance or, if not ``is_draining``, resume."""
        self.conductor.set_draining(name, is_draining=is_draining)
        self.note_change()

    def count_at(self, name: str) -> int:
        """Return the number of clients' requests that an instance works on or holds blocks for."""
        return sum(
            any(leg.instance.name == name for leg in live.states.held.values())
            for live in self._live.values()
        )

    def list_legs(self, request_id: str) -> list[LegRecord]:
        """Return the instances that a request was sent to, in order; empty if the request is no
        longer remembered.
        """
        live = self._live.get(request_id)
        past = self._history.get(request_id) if live is None else live
        return [] if past is None else list(past.legs)

    def find_choice(self, request_id: str) -> Choice | None:
        """Return the first placement decision for a request; None if there was none or the request
        is no longer remembered.
        """
        live = self._live.get(request_id)
        past = self._history.get(request_id) if live is None else live
        return None if past is None else past.choice

    async def close(self) -> None:
        """End every request with an error, and cancel every call in progress."""
        for live in list(self._live.values()):
            self._run(live, live.states.take(Cancel(), asyncio.get_running_loop().time()))
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    @property
    def conductor(self) -> Conductor:
        """The conductor, which chooses instances for requests."""
        return self._placing.conductor

    # The methods below pass events to a request's states and execute the resulting actions.

    def _cancel(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is not None:
            self._feed(live, Cancel())

    def _feed(self, live: _Live, message: Input) -> None:
        self._run(live, live.states.take(message, asyncio.get_running_loop().time()))

    def _run(self, live: _Live, actions: Sequence[Action]) -> None:
        """Execute actions for a request, and the further actions that their outcomes call for."""
        todo = list(actions)
        while todo:
            todo[:1] = self._execute(live, todo[0])
        states = live.states
        if states.state is not live.state:
            live.state = states.state
            logger.debug("event=request_state request=%s state=%s", live.request.request_id,
                         states.state)  # fmt: skip
        if states.is_over:
            self._forget(live)
        elif states.deadline_s != live.timer_s:
            self._set_timer(live, states.deadline_s)

    def _set_timer(self, live: _Live, when_s: float) -> None:
        if live.timer is not None:
            live.timer.cancel()
            live.timer = None
        live.timer_s = when_s
        if when_s < math.inf:
            loop = asyncio.get_running_loop()
            live.timer = loop.call_at(when_s, self._tick, live)

    def _tick(self, live: _Live) -> None:
        live.timer, live.timer_s = None, math.inf
        now_s = asyncio.get_running_loop().time()
        # Clamp to the deadline: a loop may call a timer early by up to its clock's resolution.
        self._run(live, live.states.tick(max(now_s, live.states.deadline_s)))

    def _forget(self, live: _Live) -> None:
        request_id = live.request.request_id
        if self._live.pop(request_id, None) is None:
            return
        self._set_timer(live, math.inf)
        for leg_id in list(live.counts):
            _uncount(live, leg_id)
        self._unplaced.pop(request_id, None)
        now_s = asyncio.get_running_loop().time()
        self.conductor.note_end(
            request_id, live.states.num_delivered, now_s, is_whole=live.is_whole
        )
        self._history[request_id] = _Past(live.legs, live.choice)
        while len(self._history) > self._max_history:
            self._history.popitem(last=False)
        if not live.accepted.done():
            live.accepted.set_result(None)
        if self.on_end is not None:
            self.on_end(live.request)

    # The methods below execute the actions.

    def _execute(self, live: _Live, action: Action) -> list[Action]:
        """Execute one action; return the actions that its outcome calls for at once."""
        match action:
            case Place():
                return self._place(live, action)
            case Submit(leg=leg, request=request):
                sent_s = asyncio.get_running_loop().time() - live.begin_s
                live.legs.append(LegRecord(leg.instance.name, leg.leg_id, sent_s))
                port = self._find(leg)
                if port is not None:
                    # Count the request before it is sent: the next request may be placed in this
                    # same iteration of the event loop.
                    request = port.load.note_sent(
                        add_expected(request, leg.instance.name, live.decision)
                    )
                    live.counts[leg.leg_id] = (port.load, request.number)
                live.tasks[leg.leg_id] = self._call(self._submit(live, leg, request))
            case Continue(leg=leg, message=message):
                self._call(self._continue(live, leg, message))
            case DropLeg(leg=leg):
                _uncount(live, leg.leg_id)
                submitting = live.tasks.pop(leg.leg_id, None)
                if submitting is not None:
                    submitting.cancel()
                port = self._find(leg)
                if port is not None:
                    port.cancel(leg.leg_id)
            case ReleaseLeg(leg=leg):
                port = self._find(leg)
                if port is not None:
                    port.release_hold(leg.leg_id)
            case Deliver(output=output):
                self._accept(live)
                if output.token_ids:
                    self._note_token(live)
                live.is_whole = output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                live.stream.put(output)
            case Fail(error=error):
                self._fail(live, error)
            case Note(reason=reason):
                self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
                logger.info(
                    "event=request_fallback request=%s reason=%s state=%s",
                    live.request.request_id,
                    reason,
                    live.states.state,
                )
        return []

    def _place(self, live: _Live, place: Place) -> list[Action]:
        now_s = asyncio.get_running_loop().time()
        is_down = self._placing.num_serving < len(self._ports)
        if place.identity is not None:
            is_served = self._placing.serves(place.identity)
            if not (is_served or is_down or place.is_held):
                # Refuse at once: all instances are up and none serves this model, so waiting would
                # not help.
                return live.states.take(NoRoute(is_foreign=True), now_s)
        is_accepted = live.accepted.done()
        if not is_accepted and self._is_long_outage(now_s):
            return live.states.take(NoRoute(), now_s)
        if live.question is None:
            live.question = self._placing.describe(live.request)
        is_new = not is_accepted and live.decision is None
        live.decision = self._placing.place(place, live.question, now_s, is_new=is_new)
        rejection, route = live.decision.rejection, live.decision.route
        if rejection is not None:
            live.accepted.set_exception(
                OverloadError(
                    "engine.submit", rejection.what, retry_after_s=rejection.retry_after_s
                )
            )
            return live.states.take(Cancel(), now_s)
        if route is None and is_new:
            # No instance can take the request now. Forget that it was tried, so that the next try
            # still counts as new, and admission may then reject it.
            live.decision = None
        elif live.choice is None and live.decision.chosen is not None:
            live.choice = Choice(live.decision, now_s)
        if isinstance(route, NoRoute) and is_accepted and is_down and not place.is_held:
            # Wait instead of failing: all running instances refused the request, but an instance
            # that is starting may accept it.
            route = None
        if route is None:
            self._unplaced[live.request.request_id] = (live, place)
            return []
        return live.states.take(route, now_s)

    def _note_token(self, live: _Live) -> None:
        choice = live.choice
        if choice is not None and choice.first_token_s is None:
            now_s = asyncio.get_running_loop().time()
            choice.first_token_s = now_s - choice.at_s
            self.conductor.note_first_token(live.request.request_id, now_s)

    def _is_long_outage(self, now_s: float) -> bool:
        """Return True if no instance has served for longer than ``recovery_s``, the time that
        requests wait for one.
        """
        begin_s = self._outage_begin_s
        return begin_s is not None and now_s - begin_s >= self._limits.recovery_s

    def _fail(self, live: _Live, error: TandemError) -> None:
        if not live.accepted.done():
            live.accepted.set_exception(error)
            return
        live.stream.put(
            RequestOutput(
                request_id=live.request.request_id,
                token_ids=[],
                finish_reason=FinishReason.ERROR,
                error_code=error.code,
                error_text=error.what,
            )
        )

    def _accept(self, live: _Live) -> None:
        if not live.accepted.done():
            live.accepted.set_result(None)

    def _find(self, leg: Leg) -> Port | None:
        """Return the instance to which a leg (a request on behalf of a client's) was sent; None if
        it has restarted since, or does not serve.
        """
        port = self._ports[leg.instance.name]
        return port if port.ref == leg.instance and port.info is not None else None

    def _sync(self, leg: Leg) -> None:
        """Tell the conductor (which chooses instances) the current facts of a leg's instance, which
        may just have stopped serving.
        """
        self._placing.sync(self._ports[leg.instance.name])

    def _require(self, leg: Leg) -> Port:
        port = self._find(leg)
        if port is None:
            raise PeerLostError("engine.call", f"{leg.instance.name} is gone: try again")
        return port

    # The methods below call instances, each call as a task of its own.

    def _call(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _submit(self, live: _Live, leg: Leg, request: AddRequest) -> None:
        def put(output: RequestOutput) -> None:
            if output.finish_reason is FinishReason.ERROR:
                self._sync(leg)
            self._feed(live, LegOutput(leg.leg_id, output))

        try:
            await self._require(leg).submit(request, put)
        except TandemError as error:
            _uncount(live, leg.leg_id)
            self._sync(leg)
            self._feed(live, LegFailed(leg.leg_id, error))
        # Boundary of a task: the request must get an end after any error.
        except Exception as error:
            logger.exception("request %s cannot be sent", leg.leg_id)
            failure = InternalError("engine.submit", f"the request cannot be sent: {error}")
            _uncount(live, leg.leg_id)
            self._feed(live, LegFailed(leg.leg_id, failure))
        else:
            # A decode request that waits for a prefill elsewhere counts as accepted only when the
            # prefill is accepted.
            if not request.awaits_continuation:
                self._accept(live)
        finally:
            live.tasks.pop(leg.leg_id, None)

    async def _continue(self, live: _Live, leg: Leg, message: ContinueRequest) -> None:
        is_taken = False
        try:
            is_taken = await self._require(leg).call(CONTINUE, message)
        except TandemError as error:
            logger.debug("event=continue_failed request=%s error=%s", leg.leg_id, error)
        except Exception:  # Boundary of a task: the request must get an end after any error.
            logger.exception("request %s cannot be continued", leg.leg_id)
        self._feed(live, Continued(leg.leg_id, is_taken))


def _uncount(live: _Live, leg_id: str) -> None:
    """Remove a leg (a request sent to an instance) that was refused or has ended from the
    instance's load count.
    """
    load, number = live.counts.pop(leg_id, (None, 0))
    if load is not None:
        load.note_over(number)
