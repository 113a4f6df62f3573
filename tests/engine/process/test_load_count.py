"""Goal: every request counts once in the load of its instance, in whatever order pushes come.

Method: a toy instance whose pushes are lost and reordered, then a real engine behind a real
``InstanceApi``, pushing from a second thread; as long as nothing ends, the count is all that was
sent.
"""

import asyncio
import random
import threading
from types import SimpleNamespace

import msgspec
import pytest
from step_runner import StepRunner

from tandem.conductor.load_count import LoadCount
from tandem.core.clock import ManualClock
from tandem.core.errors import CapacityError
from tandem.core.wire import (
    GROWTH_BLOCKS,
    AddRequest,
    Continuation,
    InstanceLoad,
    KvHandle,
    PrefillKv,
    SamplingParams,
)
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.process.instance_api import LOAD_INTERVAL_S, InstanceApi
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.tiers.config import TierConfig
from tandem.engine.tiers.planner import CostTierPlanner

SIZE = 4
NUM_BLOCKS = 4096
INFO = SimpleNamespace(num_blocks=NUM_BLOCKS, block_size=SIZE, max_model_len=100)
WAIT_S = 60.0


def ask(name, prompt_len, max_tokens=3, **fields):
    return AddRequest(
        request_id=name,
        prompt_ids=list(range(prompt_len)),
        sampling=SamplingParams(max_tokens=max_tokens),
        **fields,
    )


def blocks(num_tokens):
    return -(-num_tokens // SIZE)


def expect(requests):
    """Return the load of requests of which nothing has been computed."""
    lengths = [len(request.prompt_ids) for request in requests]
    return InstanceLoad(
        queued_tokens=sum(lengths),
        num_decoding=len(lengths),
        free_blocks=NUM_BLOCKS - sum(blocks(n) + GROWTH_BLOCKS for n in lengths),
        largest_blocks=max((blocks(n + 3) for n in lengths), default=0),
        queued_context=sum(n * n / 2 for n in lengths),
        decode_tokens=sum(lengths),
        num_requests=len(lengths),
    )


@pytest.mark.parametrize("seed", range(20))
def test_pushes_in_any_order_count_every_request_once(seed):
    """Requests arrive in order, are taken in out of order, and no push is sure to arrive."""
    chance, count = random.Random(seed), LoadCount()
    sent, on_the_way, pending, added, pushes = [], [], [], [], []
    num_received = version = 0
    for n in range(400):
        match chance.randrange(5):
            case 0:
                sent.append(count.note_sent(ask(f"r{n}", chance.randint(1, 60))))
                on_the_way.append(sent[-1])
            case 1 if on_the_way:
                pending.append(on_the_way.pop(0))
                num_received = pending[-1].number
            case 2 if pending:
                added.append(pending.pop(chance.randrange(len(pending))))
            case 3:
                version += 1
                waiting = tuple(request.number for request in pending)
                pushes.append(
                    msgspec.structs.replace(
                        expect(added), version=version, num_received=num_received, pending=waiting
                    )
                )
            case 4 if pushes:
                count.take(pushes.pop(chance.randrange(len(pushes))))
        assert count.estimate(INFO) == expect(sent)
    assert len(added) > 20


def test_an_older_push_is_not_taken_for_the_present():
    count = LoadCount()
    count.take(InstanceLoad(version=5, queued_tokens=10))
    count.take(InstanceLoad(version=4, queued_tokens=70))
    assert count.estimate(INFO).queued_tokens == 10


def test_a_request_is_counted_by_what_it_will_do():
    def load_of(**fields):
        count = LoadCount()
        count.note_sent(ask("r", 10, **fields))
        load = count.estimate(INFO)
        return (load.queued_tokens, load.num_decoding, NUM_BLOCKS - load.free_blocks)

    handle = KvHandle(request_id="p", num_tokens=10, lease_s=5.0)
    read = PrefillKv(instance="p0", handle=handle)
    assert load_of() == (10, 1, 3 + GROWTH_BLOCKS)
    assert load_of(prefill_lease_s=5.0) == (10, 0, 3)
    assert load_of(kv_source=read) == (0, 1, 3 + GROWTH_BLOCKS)
    going_on = Continuation(token_ids=[1, 2, 3], seed=1)
    assert load_of(continuation=going_on) == (13, 1, 4 + GROWTH_BLOCKS)


class Runner(StepRunner):
    def pick(self, sequence):
        return 90


class Store:
    """Answers a lookup when the test says so."""

    def __init__(self):
        self.asked = []

    async def count_stored(self, keys):
        answer = asyncio.get_running_loop().create_future()
        self.asked.append(answer)
        return await answer


class Server:
    """A ``ServerPeer`` that keeps what it is told."""

    def __init__(self):
        self.pushed = []

    def push_threadsafe(self, event):
        self.pushed.append(event)

    def take_loads(self):
        loads = [event.load for event in self.pushed if event.load is not None]
        self.pushed.clear()
        return loads


class Instance:
    def __init__(self, store=None, read_load_speed=None, **config):
        values = {"block_size": SIZE, "max_model_len": 100, "max_running": 64, "max_queue": 1000}
        config = EngineConfig(**values | config)
        self.clock, pool = ManualClock(), BlockPool(NUM_BLOCKS)
        scheduler = Scheduler(config, pool, PrefixIndex(pool, SIZE))
        self.engine = Engine(scheduler, Runner(), self.clock, vocab_size=1000, eos_token_ids=())
        self.api = InstanceApi(
            "i", self.engine, self.clock, store, info=INFO, read_load_speed=read_load_speed
        )

    def run(self):
        """Compute until nothing is left."""
        while self.engine.has_requests:
            self.api.deliver(self.engine.step())


def test_what_an_instance_tells_and_what_it_was_sent_are_all_there_is():
    """Lookups in the store end in any order, pushes come in any order."""

    async def work():
        chance, store, server, count = random.Random(3), Store(), Server(), LoadCount()
        instance = Instance(store)
        sent, calls, told = [], [], []
        for n in range(40):
            sent.append(count.note_sent(ask(f"r{n}", chance.randint(5, 60))))
            calls.append(asyncio.create_task(instance.api.add(server, sent[-1])))
            await asyncio.sleep(0)
            if len(store.asked) > 5:
                store.asked.pop(chance.randrange(5)).set_result(0)
                await asyncio.sleep(0)
            instance.api.deliver(())
            told += server.take_loads()
            if len(told) > 3:
                count.take(told.pop(chance.randrange(len(told))))
            assert count.estimate(INFO) == expect(sent)
        assert 0 < count.num_unanswered < 40
        for answer in store.asked:
            answer.set_result(0)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*calls)
        instance.run()
        last = server.take_loads()[-1]
        count.take(last)
        assert (last.num_received, last.pending) == (40, ())
        assert count.estimate(INFO) == InstanceLoad(free_blocks=NUM_BLOCKS)
        instance.api.deliver(())
        assert server.pushed == [], "nothing has changed"

    asyncio.run(work())


def test_a_load_contains_what_it_says_although_another_thread_measures_it():
    instance, server, stop = Instance(), Server(), threading.Event()

    def measure():
        while not stop.is_set():
            instance.api.deliver(())

    async def work():
        for number in range(1, 401):
            await instance.api.add(server, ask(f"r{number}", 5, number=number))

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        asyncio.run(work())
    finally:
        stop.set()
        thread.join(WAIT_S)
    instance.api.deliver(())
    loads = server.take_loads()
    assert [load.version for load in loads] == sorted(load.version for load in loads)
    assert loads[-1].num_received == loads[-1].num_decoding == 400
    for load in loads:
        assert load.num_decoding == load.num_received - len(load.pending)


def test_the_speed_of_loads_is_told_as_the_planner_measures_it():
    planner = CostTierPlanner(TierConfig(), block_size=SIZE, block_bytes=1000)
    instance, server, count = (
        Instance(read_load_speed=planner.read_load_speed),
        Server(),
        LoadCount(),
    )
    asyncio.run(instance.api.add(server, count.note_sent(ask("r", 5))))
    instance.api.deliver(())
    planner.note_load(50_000, 2.0)
    instance.api.deliver(())
    first, second = server.take_loads()
    assert (first.load_tokens_per_s, second.load_tokens_per_s) == (0.0, 25 * SIZE)
    count.take(second)
    assert count.estimate(INFO).load_tokens_per_s == 25 * SIZE


def test_a_refused_request_does_not_stay_pending():
    async def work():
        instance, server = Instance(max_running=1, max_queue=1), Server()
        await instance.api.add(server, ask("r1", 5, number=1))
        await instance.api.add(server, ask("r2", 5, number=2))
        with pytest.raises(CapacityError):
            await instance.api.add(server, ask("r3", 5, number=3))
        instance.api.deliver(())
        [load] = server.take_loads()
        assert (load.num_received, load.pending, load.num_decoding) == (3, (), 2)

    asyncio.run(work())


def test_steps_tell_the_load_now_and_then_and_the_last_one_always():
    async def work():
        instance, server = Instance(), Server()
        await instance.api.add(server, ask("r", 9, max_tokens=9, number=1))
        instance.api.deliver(instance.engine.step())
        assert server.take_loads()[0].queued_tokens == 0, "the prompt is computed"
        instance.api.deliver(instance.engine.step())
        instance.api.deliver(instance.engine.step())
        assert [event.load for event in server.pushed] == [None, None], "it has just been told"
        instance.clock.advance(LOAD_INTERVAL_S)
        server.pushed.clear()
        instance.api.deliver(instance.engine.step())
        [event] = server.pushed
        assert (len(event.outputs), event.load.num_decoding) == (1, 1)
        assert NUM_BLOCKS - event.load.free_blocks == blocks(9 + 4) + GROWTH_BLOCKS
        server.pushed.clear()
        instance.run()
        assert server.pushed[-1].load.num_decoding == 0

    asyncio.run(work())


def test_a_prefill_in_chunks_tells_what_is_left_of_it():
    """Such a step has no outputs, and its load is pushed all the same."""

    async def work():
        instance, server = Instance(max_batch_tokens=16, max_running=8), Server()
        await instance.api.add(server, ask("r", 40, number=1))
        left = []
        for _ in range(3):
            instance.clock.advance(LOAD_INTERVAL_S)
            instance.api.deliver(instance.engine.step())
            left += [load.queued_tokens for load in server.take_loads()]
        assert left == [24, 8, 0]

    asyncio.run(work())
