"""Goal: the dispatcher carries out what machines ask for, also where calls fail or come late.

Method: instances in memory, whose outputs the test sends; nothing of processes or models.
"""

import asyncio

import pytest

from tandem.conductor.admission import Admission
from tandem.conductor.conductor import Conductor
from tandem.conductor.fleet import Load
from tandem.conductor.load_count import LoadCount
from tandem.conductor.policies.table import make_policy
from tandem.conductor.routes import InstanceRef
from tandem.core.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    OverloadError,
    PeerLostError,
)
from tandem.core.wire import (
    AddRequest,
    FinishReason,
    InstanceLoad,
    RequestOutput,
    SamplingParams,
    Slo,
)
from tandem.engine.cluster.dispatcher import Dispatcher
from tandem.engine.cluster.placing import Placing
from tandem.engine.cluster.request_states import Limits
from tandem.engine.process.methods import CONTINUE

TIMEOUT_S = 60.0


class Info:
    num_blocks, block_size, max_model_len, max_batch_tokens = 100, 16, 2048, 512
    group_depth = 0

    def __init__(self, identity="a model"):
        self.kv_identity = identity.encode().hex()


class ToyPort:
    """An instance of which the test is the engine."""

    role = "unified"
    sources = frozenset()

    def __init__(self, name, error=None):
        self.name, self.error = name, error
        self.incarnation, self.info = 0, Info()
        self.live, self.requests, self.released = {}, [], []
        self.load = LoadCount()

    @property
    def ref(self):
        identity = "" if self.info is None else self.info.kv_identity
        return InstanceRef(self.name, self.incarnation, identity)

    async def submit(self, request, put):
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        self.live[request.request_id] = put

    async def call(self, method, message):
        assert method is CONTINUE
        return False

    def cancel(self, request_id):
        self.live.pop(request_id, None)

    def release_hold(self, request_id):
        self.released.append(request_id)

    def send(self, *token_ids, finish_reason=None):
        ((leg_id, put),) = self.live.items()
        if finish_reason is not None:
            del self.live[leg_id]
        put(RequestOutput(leg_id, list(token_ids), finish_reason))

    def die(self):
        self.info, live, self.live = None, self.live, {}
        for leg_id, put in live.items():
            put(RequestOutput(leg_id, [], FinishReason.ERROR, error_code="peer_lost"))

    def restart(self, *identity):
        self.incarnation, self.info = self.incarnation + 1, Info(*identity)
        self.load = LoadCount()


def ask(**fields):
    return AddRequest(
        request_id="r", prompt_ids=[1, 2], sampling=SamplingParams(max_tokens=9), **fields
    )


def run(work):
    async def bounded():
        async with asyncio.timeout(TIMEOUT_S):
            return await work

    return asyncio.run(bounded())


def count_decoding(dispatcher):
    dispatcher.note_change()
    fleet = dispatcher.conductor.fleet
    serving = [row for row in range(fleet.num_rows) if fleet.is_serving[row]]
    return {fleet.name_of(row): int(fleet.num_decoding[row]) for row in serving}


def make(*ports, **limits):
    return Dispatcher(ports, Conductor(make_policy("prefix")), Limits(**limits))


def test_a_stream_goes_on_at_another_instance_with_what_it_has():
    a, b = ToyPort("a"), ToyPort("b")

    async def work():
        dispatcher = make(a, b)
        stream = await dispatcher.submit(ask())
        a.send(5, 6)
        a.die()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        loads = count_decoding(dispatcher)
        assert loads == {"b": 1}, "the load went with the request"
        a.restart()
        loads = count_decoding(dispatcher)
        assert loads == {"a": 0, "b": 1}
        assert b.requests[0].continuation.token_ids == [5, 6]
        assert b.requests[0].continuation.seed == a.requests[0].sampling.seed
        b.send(7, finish_reason=FinishReason.LENGTH)
        outputs = [output async for output in stream]
        assert [output.token_ids for output in outputs] == [[5, 6], [7]]
        assert {output.request_id for output in outputs} == {"r"}
        assert dispatcher.fallbacks == {"decode_peer_lost": 1}
        assert dispatcher.num_live == 0
        assert [leg.instance for leg in dispatcher.list_legs("r")] == ["a", "b"]

    run(work())


def test_a_request_waits_for_the_only_instance_to_come_back():
    a = ToyPort("a")

    async def work():
        dispatcher = make(a)
        stream = await dispatcher.submit(ask())
        a.send(5)
        a.die()
        a.restart()
        dispatcher.note_change()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        a.send(6, finish_reason=FinishReason.LENGTH)
        assert [t async for output in stream for t in output.token_ids] == [5, 6]

    run(work())


def test_a_request_whose_objectives_cannot_be_kept_is_refused_and_leaves_nothing():
    a = ToyPort("a")

    async def work():
        dispatcher = Dispatcher(
            [a], Conductor(make_policy("mooncake"), Admission("predicted")), Limits()
        )
        a.load.take(InstanceLoad(1, 0, (), 90_000, 7, 50, 9))
        with pytest.raises(OverloadError) as caught:
            await dispatcher.submit(ask(slo=Slo(ttft_s=1.0)))
        assert caught.value.retry_after_s > 5
        assert (dispatcher.num_live, a.requests) == (0, [])
        stream = await dispatcher.submit(ask())
        a.send(5)
        a.send(6, finish_reason=FinishReason.LENGTH)
        assert [t async for output in stream for t in output.token_ids] == [5, 6]
        choice = dispatcher.find_choice("r")
        assert choice.decision.chosen.instance == "a"
        assert choice.decision.chosen.queue_s > 5
        assert choice.first_token_s is not None

    run(work())


@pytest.mark.parametrize("mode", ["none", "predicted"])
def test_admission_knows_what_of_a_prompt_the_only_instance_has(mode):
    """Else the time of a cached prompt is that of a new one, and it is refused."""
    placing = Placing(Conductor(make_policy("mooncake"), Admission(mode)))
    placing.sync(ToyPort("a"))
    assert len(placing.describe(ask(slo=Slo(ttft_s=1.0))).chains) == (mode == "predicted")
    assert not placing.describe(ask()).chains


def test_the_conductor_is_told_which_answers_were_whole():
    """One that a client leaves says nothing about the length of answers."""
    a, ends = ToyPort("a"), []

    class Noting(Conductor):
        def note_end(self, request_id, num_tokens, now_s, *, is_whole=True):
            ends.append((num_tokens, is_whole))

    async def work():
        dispatcher = Dispatcher([a], Noting(make_policy("prefix")), Limits())
        await dispatcher.submit(ask())
        a.send(5, 6, finish_reason=FinishReason.STOP)
        await dispatcher.submit(ask())
        a.send(7)
        await dispatcher.close()

    run(work())
    assert ends == [(2, True), (1, False)]


async def pass_turns():
    for _ in range(3):
        await asyncio.sleep(0)


def test_tokens_of_two_models_never_mix_in_one_answer():
    """A stream ends, at once and by a retryable error, when only another model is left."""
    a, b = ToyPort("a"), ToyPort("b")

    async def work():
        dispatcher = make(a, b)
        stream = await dispatcher.submit(ask())
        a.send(5, 6)
        b.die()
        a.die()
        await pass_turns()
        a.restart("another model")
        dispatcher.note_change()
        await pass_turns()
        assert not a.live, "it waits for b, which may still serve the model"
        assert dispatcher.num_live == 1
        b.restart("another model")
        dispatcher.note_change()
        assert dispatcher.num_live == 0
        *tokens, last = [output async for output in stream]
        assert [output.token_ids for output in tokens] == [[5, 6]]
        assert (last.finish_reason, last.error_code) == (FinishReason.ERROR, "peer_lost")
        assert "the model that computed the 2 tokens" in last.error_text
        assert not (a.live or b.live)

    run(work())


def test_a_stream_goes_on_where_its_model_is():
    """An idle instance with another model is passed over for a busier one with the same."""
    a, b, c = ToyPort("a"), ToyPort("b"), ToyPort("c")
    b.info = Info("another model")

    async def work():
        dispatcher = make(a, b, c)
        stream = await dispatcher.submit(ask())
        a.send(5)
        a.die()
        await pass_turns()
        assert not b.live
        c.send(6, finish_reason=FinishReason.LENGTH)
        assert [t async for output in stream for t in output.token_ids] == [5, 6]

    run(work())


def test_the_wait_for_an_instance_with_the_same_model_is_bounded():
    """The error says what was waited for."""
    a, b = ToyPort("a"), ToyPort("b")
    b.info = Info("another model")

    async def work():
        dispatcher = make(a, b, recovery_s=0.01)
        stream = await dispatcher.submit(ask())
        a.send(5)
        a.die()
        last = [output async for output in stream][-1]
        assert last.error_code == "peer_lost"
        assert "the model that computed the 1 tokens" in last.error_text

    run(work())


def test_a_request_that_has_sent_nothing_starts_over_with_any_model():
    """Only tokens bind a request to a model."""
    a = ToyPort("a")

    async def work():
        dispatcher = make(a)
        asking = asyncio.create_task(dispatcher.submit(ask()))
        await pass_turns()
        a.die()
        a.restart("another model")
        dispatcher.note_change()
        await pass_turns()
        a.send(7, finish_reason=FinishReason.LENGTH)
        assert [t async for output in await asking for t in output.token_ids] == [7]

    run(work())


def test_a_refusal_of_all_is_raised_as_it_is():
    full = [ToyPort(name, CapacityError("toy.add", "full")) for name in "ab"]

    async def work():
        dispatcher = make(*full)
        with pytest.raises(CapacityError, match="full"):
            await dispatcher.submit(ask())
        assert [len(port.requests) for port in full] == [1, 1]
        wrong = make(ToyPort("a", ConfigError("toy.add", "no", field="top_p")), ToyPort("b"))
        with pytest.raises(ConfigError) as caught:
            await wrong.submit(ask())
        assert caught.value.field == "top_p"
        assert dispatcher.num_live == wrong.num_live == 0

    run(work())


def test_a_request_that_nobody_can_place_ends_by_its_deadline():
    a = ToyPort("a")
    a.info = None

    async def work():
        dispatcher = make(a, recovery_s=0.01)
        with pytest.raises(PeerLostError, match="no instance"):
            await dispatcher.submit(ask())
        assert dispatcher.num_live == 0

    run(work())


def test_after_a_long_outage_a_new_request_is_refused_at_once():
    """While instances may still come back it waits; later it must not hang until its deadline."""
    a = ToyPort("a")

    async def work():
        dispatcher = make(a, recovery_s=0.02)
        a.die()
        dispatcher.note_change()
        with pytest.raises(PeerLostError, match="no instance"):
            await dispatcher.submit(ask())
        await asyncio.sleep(0.03)
        asking = asyncio.create_task(dispatcher.submit(ask()))
        await pass_turns()
        assert asking.done(), "it waits although nobody came back in time"
        with pytest.raises(PeerLostError, match="no instance"):
            await asking
        a.restart()
        dispatcher.note_change()
        await dispatcher.submit(ask())
        assert len(a.live) == 1
        await dispatcher.close()

    run(work())


def test_an_accepted_request_waits_for_one_that_is_down_although_the_others_refuse():
    """Its instance dies, the other is full: that is no reason to end it, the first comes back."""
    a, b = ToyPort("a"), ToyPort("b", CapacityError("toy.add", "full"))

    async def work():
        dispatcher = make(a, b)
        stream = await dispatcher.submit(ask())
        a.send(5)
        a.die()
        dispatcher.note_change()
        await pass_turns()
        assert len(b.requests) == 1
        assert dispatcher.num_live == 1
        a.restart()
        dispatcher.note_change()
        await pass_turns()
        a.send(6, finish_reason=FinishReason.LENGTH)
        assert [t async for output in stream for t in output.token_ids] == [5, 6]
        # A new one is refused as ever: its client can ask elsewhere.
        a.die()
        with pytest.raises(CapacityError):
            await dispatcher.submit(ask())

    run(work())


def test_who_leaves_frees_the_instance_before_and_after_it_accepted():
    a = ToyPort("a")

    async def work():
        dispatcher = make(a)
        stream = await dispatcher.submit(ask())
        with pytest.raises(ConflictError):
            await dispatcher.submit(ask())
        assert len(a.live) == 1
        await stream.cancel()
        assert not a.live
        waiting = asyncio.create_task(dispatcher.submit(ask()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0)
        assert not a.live
        assert dispatcher.num_live == 0
        left = await dispatcher.submit(ask())
        await dispatcher.close()
        assert not a.live
        assert [o.finish_reason async for o in left] == [FinishReason.CANCELLED]

    run(work())


def ask_as(request_id, prompt_len=32):
    return AddRequest(
        request_id=request_id,
        prompt_ids=[1] * prompt_len,
        sampling=SamplingParams(max_tokens=9),
    )


def test_requests_of_one_turn_are_spread():
    """Each is counted when it is placed, not when it is sent or told of."""
    a, b = ToyPort("a"), ToyPort("b")

    async def work():
        dispatcher = make(a, b)
        asking = [asyncio.create_task(dispatcher.submit(ask_as(f"r{n}"))) for n in range(6)]
        await asyncio.gather(*asking)
        assert (len(a.live), len(b.live)) == (3, 3)
        await dispatcher.close()

    run(work())


def test_a_view_is_what_an_instance_tells_and_what_it_was_sent_since():
    a = ToyPort("a")

    async def work():
        dispatcher = make(a)
        await dispatcher.submit(ask_as("r1"))
        await dispatcher.submit(ask_as("r2", 64))
        a.load.take(InstanceLoad(1, 1, (), 20, 7, 50, 9))
        fleet = dispatcher.conductor.fleet
        row = fleet.find("a")
        load = Load(*(int(value) for value in fleet.load[:, row]))
        assert (load.queued_tokens, load.num_decoding, load.used_blocks) == (84, 8, 50 + 4 + 2)
        assert (load.largest_blocks, load.num_requests) == (9, 1)
        a.load.take(InstanceLoad(2, 2, (), 30, 8, 44, 9))
        load = Load(*(int(value) for value in fleet.load[:, row]))
        assert (load.queued_tokens, load.num_decoding, load.used_blocks) == (30, 8, 56)
        await dispatcher.close()

    run(work())


def test_a_request_that_is_over_before_a_push_counts_no_more():
    """Refused, ended or left: what the instance tells does not have to say so."""
    full, a = ToyPort("a", CapacityError("toy.add", "full")), ToyPort("b")

    async def work():
        dispatcher = make(full, a)
        ended, left = await dispatcher.submit(ask_as("r1")), await dispatcher.submit(ask_as("r2"))
        assert full.load.num_unanswered == 0
        assert a.load.num_unanswered == 2
        a.live.pop(next(iter(a.live)))(
            RequestOutput(a.requests[0].request_id, [7], FinishReason.LENGTH)
        )
        assert a.load.num_unanswered == 1
        await left.cancel()
        assert a.load.num_unanswered == 0
        assert [output.token_ids async for output in ended] == [[7]]

    run(work())
