"""Goal: whatever instances do, a request ends once, with the right tokens, and nothing is left.

Method: a toy cluster in which seeded chance chooses what happens next: outputs, refusals, deaths,
lost messages, time. Tokens are a function of the position, so a repeated, lost or reordered one
shows. The toy enforces what real instances do: it refuses a continuation that nobody awaits, and
loses its requests and holds when it dies.
"""

import math
import random
from dataclasses import dataclass

from tandem.conductor.routes import Alone, InstanceRef, NoRoute, Pair, Place
from tandem.core.errors import CapacityError, ConfigError, DeadlineError, PeerLostError
from tandem.core.wire import (
    AddRequest,
    Continuation,
    FinishReason,
    KvHandle,
    RequestOutput,
    SamplingParams,
)
from tandem.engine.cluster.request_states import (
    Cancel,
    Continue,
    Continued,
    Deliver,
    DropLeg,
    Fail,
    LegFailed,
    LegOutput,
    Limits,
    Note,
    ReleaseLeg,
    RequestStates,
    Submit,
)
from tandem.engine.cluster.table import TABLE, State

PROMPT = [1, 2, 3]
SEED = 7
LIMITS = Limits(lease_s=30.0, recovery_s=20.0, max_attempts=4)


def truth(position):
    return 100 + position


@dataclass
class ToyLeg:
    request: AddRequest
    instance: InstanceRef
    position: int
    awaits: bool
    is_live: bool = True
    is_held: bool = False
    held_until_s: float = 0.0


class RecordingStates(RequestStates):
    """Notes which exits it took."""

    def _fire(self, event):
        self.fired.add((self.state, event))
        super()._fire(event)


class World:
    """Instances, what they have, and the client."""

    def __init__(self, chance, max_tokens, timeout_s, stop_at=99, fired=None):
        self.chance = chance
        self.now_s = 0.0
        self.prefill, self.decode = ("p0", "p1"), ("d0", "d1")
        self.incarnations = dict.fromkeys((*self.prefill, *self.decode), 0)
        self.legs: dict[str, ToyLeg] = {}
        self.max_tokens, self.stop_at = max_tokens, stop_at
        self.tokens: list[int] = []
        self.end = None
        self.place: Place | None = None
        self.continues: list[Continue] = []
        self.num_notes = 0
        sampling = SamplingParams(max_tokens=max_tokens, seed=SEED, prompt_logprobs=0)
        request = AddRequest(
            request_id="r", prompt_ids=PROMPT, sampling=sampling, timeout_s=timeout_s
        )
        self.machine = RecordingStates(request, LIMITS, 0.0)
        self.machine.fired = set() if fired is None else fired
        self.execute(self.machine.start(0.0))

    def execute(self, actions):
        for action in actions:
            assert self.end is None or not isinstance(action, Submit | Continue | Place | Deliver)
            match action:
                case Place():
                    self.place = action
                case Submit(leg=leg, request=request):
                    assert leg.leg_id not in self.legs
                    assert request.request_id == leg.leg_id
                    known = request.continuation
                    assert (known.token_ids if known else []) == self.tokens[
                        : self.num_known(known)
                    ]
                    self.legs[leg.leg_id] = ToyLeg(
                        request, leg.instance, self.num_known(known), request.awaits_continuation
                    )
                    if self.incarnations[leg.instance.name] != leg.instance.incarnation:
                        self.legs[leg.leg_id].is_live = False
                case Continue():
                    assert action.message.continuation.token_ids == self.tokens
                    self.continues.append(action)
                case DropLeg(leg=leg):
                    self.legs[leg.leg_id].is_live = False
                case ReleaseLeg(leg=leg):
                    self.legs[leg.leg_id].is_held = False
                case Deliver(output=output):
                    assert output.request_id == "r"
                    assert output.finish_reason is not FinishReason.PREFILLED
                    self.tokens += output.token_ids
                    self.end = output.finish_reason
                case Fail(error=error):
                    assert self.end is None
                    self.end = error
                case Note():
                    self.num_notes += 1
        self.check()

    def num_known(self, continuation: Continuation | None):
        return 0 if continuation is None else len(continuation.token_ids)

    def check(self):
        assert self.tokens == [truth(i) for i in range(len(self.tokens))]
        machine = self.machine
        assert machine.is_over == (self.end is not None)
        # Blocks that nobody can take are given up for another reason, after a failure or once.
        assert self.num_notes <= 2 * (LIMITS.max_attempts + 1) + 1
        held = {leg.leg_id for leg in machine.held.values()}
        for leg_id, leg in self.legs.items():
            if leg.is_live or leg.is_held:
                assert leg_id in held, f"{leg_id} is forgotten in {machine.state}"
        if not machine.is_over:
            assert machine.deadline_s < math.inf

    def take(self, message):
        self.execute(self.machine.take(message, self.now_s))

    # What can happen.

    def answer_place(self):
        place, self.place = self.place, None

        def pick(names):
            refs = [InstanceRef(name, self.incarnations[name]) for name in names]
            refs = [ref for ref in refs if ref not in place.avoid]
            return self.chance.choice(refs) if refs else None

        prefill, decode = pick(self.prefill), pick(self.decode)
        if place.is_held:
            self.take(NoRoute() if decode is None else Pair(None, decode))
        elif prefill is not None and decode is not None and place.needs_decode:
            is_late = not place.is_resumed and self.chance.random() < 0.5
            self.take(Pair(prefill, None if is_late else decode))
        elif prefill is None and decode is None:
            self.take(NoRoute())
        else:
            self.take(Alone(prefill if prefill is not None else decode))

    def answer_continue(self):
        action = self.continues.pop(0)
        leg = self.legs[action.leg.leg_id]
        is_lost = self.chance.randint(0, 9) == 0
        is_taken = leg.is_live and leg.awaits and not is_lost
        if is_taken:
            leg.awaits, leg.position = False, len(action.message.continuation.token_ids)
        elif leg.is_live and is_lost and leg.awaits:
            # The call was carried out and its reply was lost.
            leg.awaits, leg.position = False, len(action.message.continuation.token_ids)
        if leg.is_live and not is_lost and self.chance.random() < 0.5 and not leg.awaits:
            self.advance(action.leg.leg_id)  # An output that overtakes the reply.
        self.take(Continued(action.leg.leg_id, is_taken))

    def advance(self, leg_id):
        leg = self.legs[leg_id]
        if not leg.is_live:
            return
        request, position = leg.request, leg.position
        facts = {"prompt_len": len(PROMPT), "cached_len": 1}
        if leg.awaits:
            # Its wait has ended: it computes by itself.
            if self.chance.randint(0, 3):
                return
            leg.awaits = False
        if position == self.stop_at:
            leg.is_live = False
            output = RequestOutput(
                request_id=leg_id,
                token_ids=[],
                finish_reason=FinishReason.STOP,
                stop_token_id=truth(position),
                **facts,
            )
        elif request.prefill_lease_s is not None and self.max_tokens > 1:
            leg.is_live, leg.is_held = False, True
            leg.held_until_s = self.now_s + LIMITS.lease_s
            output = RequestOutput(
                request_id=leg_id,
                token_ids=[truth(0)],
                finish_reason=FinishReason.PREFILLED,
                kv_handle=KvHandle(request_id=leg_id, num_tokens=3, lease_s=30.0),
                continuation=Continuation(token_ids=[truth(0)], seed=SEED),
                **facts,
            )
        else:
            leg.position += 1
            is_last = leg.position >= self.max_tokens
            leg.is_live = not is_last
            output = RequestOutput(
                request_id=leg_id,
                token_ids=[truth(position)],
                finish_reason=FinishReason.LENGTH if is_last else None,
                **facts,
            )
        self.take(LegOutput(leg_id, output))

    def fail(self, leg_id, error):
        leg = self.legs[leg_id]
        if leg.is_live:
            leg.is_live = False
            self.take(LegFailed(leg_id, error))

    def crash(self, name):
        self.incarnations[name] += 1
        for leg_id, leg in list(self.legs.items()):
            if leg.instance.name == name:
                leg.is_held = False
                if leg.is_live:
                    leg.is_live = False
                    self.take(LegOutput(leg_id, make_error_output(leg_id, PeerLostError)))

    def pass_time(self, seconds):
        self.now_s += seconds
        for leg in self.legs.values():
            leg.is_held = leg.is_held and self.now_s < leg.held_until_s
        self.execute(self.machine.tick(self.now_s))

    def step(self):
        live = [leg_id for leg_id, leg in self.legs.items() if leg.is_live]
        choices = ["advance"] * 6 * bool(live) + ["answer_place"] * 4 * bool(self.place)
        choices += ["answer_continue"] * 4 * bool(self.continues)
        choices += ["refuse"] * bool(live) + ["crash", "time", "stale"]
        if self.chance.randint(0, 60) == 0:
            choices = ["cancel"]
        match self.chance.choice(choices):
            case "advance":
                self.advance(self.chance.choice(live))
            case "answer_place":
                self.answer_place()
            case "answer_continue":
                self.answer_continue()
            case "refuse":
                error = self.chance.choice(
                    [CapacityError, PeerLostError, ConfigError, DeadlineError]
                )
                leg_id = self.chance.choice(live)
                if self.legs[leg_id].position == self.num_known(
                    self.legs[leg_id].request.continuation
                ):
                    self.fail(leg_id, error("toy.add", "no"))
            case "crash":
                self.crash(self.chance.choice(list(self.incarnations)))
            case "cancel":
                self.take(Cancel())
            case "time":
                self.pass_time(self.chance.choice([0.1, 1.0, 25.0, 40.0]))
            case "stale":
                leg_id = self.chance.choice([*self.legs, "nobody"])
                if leg_id not in {leg.leg_id for leg in self.machine.held.values()}:
                    output = RequestOutput(request_id=leg_id, token_ids=[9])
                    stale = [
                        LegOutput(leg_id, output),
                        Continued(leg_id, True),
                        LegFailed(leg_id, PeerLostError("toy", "x")),
                    ]
                    self.take(self.chance.choice(stale))


def make_error_output(leg_id, error):
    return RequestOutput(
        request_id=leg_id,
        token_ids=[],
        finish_reason=FinishReason.ERROR,
        error_code=error.code,
        error_text="gone",
    )


def test_a_request_ends_once_with_the_right_tokens_and_nothing_is_left():
    fired = set()
    for seed in range(4000):
        chance = random.Random(seed)
        stop_at = chance.choice([99, 99, 99, 0, 2])
        world = World(chance, chance.randint(1, 5), chance.choice([30.0, 1e6]), stop_at, fired)
        for _ in range(60):
            if world.end is not None:
                break
            world.step()
        if world.end is None:
            world.take(Cancel())
        assert world.end is not None, seed
        if world.end is FinishReason.LENGTH:
            assert len(world.tokens) == world.max_tokens, seed
        if world.end is FinishReason.STOP:
            assert len(world.tokens) == world.stop_at, seed
        assert not any(leg.is_live or leg.is_held for leg in world.legs.values()), seed
    exits = {(state, event) for state in State for event in TABLE[state].exits}
    assert fired == exits, exits - fired


def test_without_faults_the_pair_serves_it():
    """The walk of a healthy request, so that the property test is not about failures alone."""
    world = World(random.Random(0), 3, 60.0)
    place, world.place = world.place, None
    p0, d0 = InstanceRef("p0", 0), InstanceRef("d0", 0)
    assert (place.is_held, place.needs_decode, place.prefill) == (False, True, None)
    world.take(Pair(p0, d0))
    reader, prefill = world.legs
    assert world.legs[reader].request.kv_source.handle.request_id == prefill
    assert world.legs[reader].request.sampling.prompt_logprobs is None
    assert world.legs[prefill].request.sampling.prompt_logprobs == 0
    assert world.machine.state is State.PREFILLING
    world.advance(prefill)
    assert (world.machine.state, world.tokens) == (State.CONTINUING, [truth(0)])
    action = world.continues.pop()
    world.legs[reader].awaits, world.legs[reader].position = False, 1
    world.take(Continued(action.leg.leg_id, True))
    assert world.machine.state is State.LOADING
    assert world.legs[prefill].is_held
    world.advance(reader)
    assert world.machine.state is State.DECODING
    assert not world.legs[prefill].is_held
    world.advance(reader)
    assert world.end is FinishReason.LENGTH
    assert world.tokens == [truth(0), truth(1), truth(2)]
    assert world.num_notes == 0


def test_without_attempts_a_request_is_still_placed_once():
    """``max_attempts`` counts fallbacks, not placements."""
    sampling = SamplingParams(max_tokens=3, seed=SEED)
    request = AddRequest(request_id="r", prompt_ids=PROMPT, sampling=sampling, timeout_s=60.0)
    machine = RequestStates(request, Limits(max_attempts=0), 0.0)
    assert [type(action) for action in machine.start(0.0)] == [Place]
    (submit,) = machine.take(Alone(InstanceRef("p0", 0)), 0.0)
    actions = machine.take(LegFailed(submit.leg.leg_id, PeerLostError("toy", "gone")), 1.0)
    assert [type(action) for action in actions] == [Note, Fail]
    assert machine.state is State.FAILED


def test_one_loss_is_one_attempt_also_when_the_held_blocks_go_with_it():
    """A decode instance dies while it loads and no other can read the blocks: one failure."""
    sampling = SamplingParams(max_tokens=3, seed=SEED)
    request = AddRequest(request_id="r", prompt_ids=PROMPT, sampling=sampling, timeout_s=60.0)
    machine = RequestStates(request, Limits(max_attempts=1), 0.0)
    machine.start(0.0)
    (prefill,) = machine.take(Pair(InstanceRef("p0", 0), None), 0.0)
    output = RequestOutput(
        prefill.leg.leg_id,
        [1],
        FinishReason.PREFILLED,
        kv_handle=KvHandle(request_id=prefill.leg.leg_id, num_tokens=len(PROMPT), lease_s=30.0),
    )
    machine.take(LegOutput(prefill.leg.leg_id, output), 1.0)
    (decode,) = machine.take(Pair(None, InstanceRef("d0", 0)), 1.0)
    lost = PeerLostError("toy", "gone")
    machine.take(LegFailed(decode.leg.leg_id, lost), 2.0)
    assert machine.state is State.HELD
    machine.take(NoRoute(), 2.0)
    assert machine.state is State.PLACING
    (alone,) = machine.take(Alone(InstanceRef("p0", 0)), 2.0)
    assert alone.request.continuation.token_ids == [1]
    machine.take(LegFailed(alone.leg.leg_id, lost), 3.0)
    assert machine.state is State.FAILED


def test_a_machine_refuses_a_route_to_another_model():
    """Whatever a policy answers, also for a pair of two models and for blocks that are held."""
    world = World(random.Random(0), 3, 60.0)
    p0, d0 = InstanceRef("p0", 0, "a model"), InstanceRef("d0", 0, "another model")
    world.take(Pair(p0, d0))
    assert world.machine.state is State.PREFILLING_ALONE
    world.advance("r-1p")
    assert (world.machine.state, world.place.identity) == (State.HELD, "a model")
    world.take(Pair(None, d0))
    assert (world.machine.state, world.place.is_held) == (State.PLACING, False)
    world.take(Alone(d0))
    assert isinstance(world.end, PeerLostError)
    assert "the model that computed the 1 tokens" in world.end.what
    assert list(world.legs) == ["r-1p"]


def test_a_request_that_is_not_placed_ends_by_its_deadline():
    world = World(random.Random(0), 3, 1e6)
    world.pass_time(LIMITS.recovery_s - 1)
    assert world.end is None
    world.pass_time(1.0)
    assert isinstance(world.end, PeerLostError)
    world = World(random.Random(0), 3, 10.0)
    world.pass_time(10.0)
    assert world.end is FinishReason.DEADLINE
