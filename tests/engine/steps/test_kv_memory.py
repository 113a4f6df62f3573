"""Goal: memory for KV is taken as blocks are first used, and its lack is waited out, never a crash.

Method: the pool and the scheduler over a memory that gives as much as it is told to; the extents
over memory that can be measured; the built engine on the demo model.
"""

import mmap

import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import CapacityError
from tandem.core.wire import FinishReason, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.kv_memory import KEEP_FREE_BYTES, KvExtents
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.scheduler import MEMORY_RETRY_S, MEMORY_WAIT_S, Scheduler
from tandem.kernels.cpu.device import CPU, CpuDevice, CpuMemory
from tandem.models.config import ModelConfig
from tandem.transfer import TransferConfig, TransferEngine

SIZE = 4
PAGE = mmap.PAGESIZE


class Memory:
    """Has memory for ``limit`` blocks; gives it two at a time."""

    def __init__(self, limit):
        self.limit = limit
        self.num_reserved = 0
        self.asked = []

    def reserve_blocks(self, num_blocks):
        self.asked.append(num_blocks)
        wanted = min(-(-num_blocks // 2) * 2, self.limit)
        self.num_reserved = max(self.num_reserved, wanted)
        return self.num_reserved


class Stage:
    """A scheduler of 16 blocks over a ``Memory``; one second a step."""

    def __init__(self, limit):
        self.memory = Memory(limit)
        self.pool = BlockPool(16, self.memory)
        config = EngineConfig(
            block_size=SIZE, max_model_len=64, max_batch_tokens=16, max_running=4, max_queue=4
        )
        self.scheduler = Scheduler(config, self.pool, PrefixIndex(self.pool, SIZE))
        self.now_s = 0.0
        self.starved = []

    def add(self, name, length, max_tokens):
        first = sum(map(ord, name)) * 1000
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(name, list(range(first, first + length)), sampling, self.now_s)
        self.scheduler.add(request)
        return request

    def step(self):
        plan = self.scheduler.schedule(self.now_s)
        self.starved += [request.request_id for request in plan.starved]
        names = [sequence.request.request_id for sequence in plan.sequences]
        if names:
            sampled = {s.request.request_id: [1] for s in plan.sequences if s.wants_sample}
            self.scheduler.complete(plan, sampled, self.now_s)
        self.scheduler.check()
        self.now_s += 1.0
        return names

    def run(self, limit=200):
        for _ in range(limit):
            if not self.scheduler.has_requests:
                return
            self.step()
        pytest.fail("requests are left")


# ------------------------------------------------------------------------ the pool


def test_memory_is_asked_for_as_blocks_are_first_taken_and_freed_ones_go_first():
    memory = Memory(16)
    pool = BlockPool(16, memory)
    assert (pool.num_free, memory.num_reserved) == (16, 0)
    first = [pool.allocate() for _ in range(3)]
    assert first == [0, 1, 2]
    assert memory.num_reserved == 4
    for block_id in first:
        pool.release(block_id)
    for _ in range(5):
        for block_id in [pool.allocate() for _ in range(3)]:
            pool.release(block_id)
    assert memory.asked == [1, 3]
    pool.check()


def test_what_the_machine_lacks_is_not_free_until_it_is_there():
    memory = Memory(5)
    pool = BlockPool(16, memory)
    pool.reserve(8)
    assert (pool.is_short, pool.num_blocks, pool.num_free) == (True, 5, 5)
    taken = [pool.allocate() for _ in range(5)]
    with pytest.raises(CapacityError, match="0 of 5 blocks free"):
        pool.allocate()
    pool.release(taken[2])
    assert (pool.num_free, pool.num_used) == (1, 4)
    pool.retry()
    assert pool.is_short
    memory.limit = 16
    pool.retry()
    assert (pool.is_short, pool.num_blocks, pool.num_free) == (False, 16, 12)
    pool.check()


# ------------------------------------------------------------------------ the scheduler


def test_requests_share_what_memory_there_is_and_all_end():
    stage = Stage(limit=6)
    requests = [stage.add(name, 8, 12) for name in "abcd"]
    stage.run()
    assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * 4
    assert stage.memory.num_reserved == 6
    assert stage.scheduler.get_stats().num_blocks == 6, "the count follows"


def test_a_prompt_without_memory_is_refused_and_taken_once_it_is_there():
    stage = Stage(limit=3)
    stage.add("a", 12, 1)
    stage.add("b", 12, 1)
    stage.run()
    with pytest.raises(CapacityError, match="takes 4 blocks, and the machine has memory for 3"):
        stage.add("c", 16, 1)
    stage.memory.limit = 16
    stage.now_s += MEMORY_RETRY_S
    stage.step()
    request = stage.add("c", 16, 1)
    stage.run()
    assert request.finish_reason is FinishReason.LENGTH


def test_a_request_waits_for_its_next_extent():
    stage = Stage(limit=3)
    request = stage.add("a", 8, 12)
    while stage.step():
        pass
    assert stage.pool.is_short
    assert stage.step() == [], "asked once more, and then again in a while"
    assert not request.is_finished
    assert stage.now_s - 1 < stage.scheduler.wake_s <= stage.now_s + MEMORY_RETRY_S
    stage.memory.limit = 16
    stage.run()
    assert (request.finish_reason, len(request.output_ids)) == (FinishReason.LENGTH, 12)


def test_a_request_that_waits_too_long_ends_and_makes_room():
    stage = Stage(limit=3)
    large = stage.add("a", 8, 30)
    small = stage.add("b", 8, 4)
    stage.run()
    assert stage.starved == ["a"]
    assert large.finish_reason is FinishReason.ERROR
    assert small.finish_reason is FinishReason.LENGTH
    assert stage.now_s > MEMORY_WAIT_S


# ------------------------------------------------------------------------ the memory


@pytest.fixture(params=["anonymous", "shared"])
def memory(request):
    """64 extents of 16 pages, of which nothing is reserved."""
    if request.param == "anonymous":
        yield CPU.map_memory(1024 * PAGE)
        return
    with TransferEngine(TransferConfig(name="kv")) as engine:
        yield engine.allocate(1024 * PAGE, reserved_bytes=0)


def test_extents_are_reserved_up_to_the_last_block_that_is_used(memory):
    extents = KvExtents(memory, num_blocks=512, block_bytes=2 * PAGE, extent_bytes=16 * PAGE)
    assert memory.reserved_bytes == 0
    assert extents.reserve_blocks(1) == 8
    assert memory.reserved_bytes == 16 * PAGE
    assert extents.reserve_blocks(17) == 24
    memory.array[: 48 * PAGE] = 7  # Touching it is safe.
    assert extents.reserve_blocks(512) == 512
    assert memory.array[48 * PAGE :].any() == 0


def test_nothing_is_reserved_that_others_need(memory, caplog):
    free = KEEP_FREE_BYTES + 40 * PAGE
    extents = KvExtents(
        memory,
        num_blocks=512,
        block_bytes=2 * PAGE,
        extent_bytes=16 * PAGE,
        read_free_bytes=lambda: free - memory.reserved_bytes,
    )
    for _ in range(3):
        assert extents.reserve_blocks(100) == 16
    assert memory.reserved_bytes == 32 * PAGE
    assert [record.message.split()[0] for record in caplog.records] == ["event=kv_memory_short"]
    free += 1024 * PAGE
    assert extents.reserve_blocks(100) == 104
    assert caplog.records[-1].message.startswith("event=kv_memory_back")


def test_an_idle_engine_has_one_extent_of_its_devices_memory(monkeypatch):
    made = []

    def map_memory(device, size_bytes):
        made.append(CpuMemory(size_bytes))
        return made[-1]

    monkeypatch.setattr(CpuDevice, "map_memory", map_memory)
    model = ModelConfig(path="demo", dtype="bfloat16")
    config = EngineConfig(num_kv_blocks=2048, threads=1)
    built = build_engine(model, config, ManualClock())
    assert built.info.num_blocks == 2048
    assert 0 < made[0].reserved_bytes < made[0].array.nbytes // 8
    assert built.cache.tensor.data_ptr() == made[0].tensor.data_ptr()
