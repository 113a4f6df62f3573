"""Goal: chats on a model with windows take the memory of what its layers still see.

Method: the planner divides a budget, and the real scheduler runs 100 chats in it at once, with
gpt-oss-120b's sizes and without a model. The formula: full layers hold all tokens, the others a
window.
"""

import pytest

from tandem.core.spec import GqaLayout, split_layout
from tandem.core.wire import SamplingParams
from tandem.engine.config import EngineConfig
from tandem.engine.groups.windows import WindowPolicy
from tandem.engine.memory import GIB, plan_kv_cache
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.scheduler import Scheduler

WINDOW, NUM_CHATS, LENGTH = 128, 100, 8000
OUTPUT = 400
"""Longer than the prompts of all take, so that all chats are there at once."""
WHOLE = GqaLayout(num_layers=36, num_kv_heads=8, head_dim=64, block_size=64)
MAX_SHARE = 1.2


def run(scheduler, block_bytes=(0, 0), now_s=0.0):
    """Run until nothing lives; the most requests at once, and the most bytes that they owned."""
    most, used, ended = 0, 0, []
    while scheduler.has_requests:
        now_s += 0.1
        plan = scheduler.schedule(now_s)
        stats = scheduler.get_stats()
        most = max(most, stats.num_running)
        owned = (stats.num_used_blocks, stats.num_used_window_blocks)
        used = max(used, sum(n * size for n, size in zip(owned, block_bytes, strict=True)))
        sampled = {s.request.request_id: [7] for s in plan.sequences if s.wants_sample}
        ended += scheduler.complete(plan, sampled, now_s)
    return most, used, ended


@pytest.mark.slow
def test_a_hundred_chats_of_8000_tokens_fit_a_budget_of_their_windows():
    layout, windows = split_layout(WHOLE, range(0, 36, 2), WINDOW)
    length = LENGTH - OUTPUT
    token_bytes = layout.bytes_per_token
    formula = NUM_CHATS * (LENGTH * token_bytes + WINDOW * windows.layout.bytes_per_token)
    config = EngineConfig(
        kv_cache_gib=MAX_SHARE * formula / GIB,
        max_running=NUM_CHATS,
        max_batch_tokens=4096,
        max_model_len=9000,
    )
    plan = plan_kv_cache(
        config,
        block_bytes=layout.bytes_per_block,
        own_context=131_072,
        available_bytes=1 << 40,
        total_bytes=1 << 40,
        windows=windows,
    )
    assert plan.size_bytes + plan.windows.size_bytes <= MAX_SHARE * formula
    # Today's layers without a window beside them would not fit.
    assert NUM_CHATS * LENGTH * WHOLE.bytes_per_token > 1.9 * formula
    pool = BlockPool(plan.num_blocks)
    index = PrefixIndex(pool, 64, b"model")
    policy = WindowPolicy(WINDOW, plan.windows.num_blocks)
    scheduler = Scheduler(config, pool, index, None, None, policy)

    def ask(number, prompt_ids, num_tokens):
        sampling = SamplingParams(max_tokens=num_tokens)
        scheduler.add(Request(f"{number}", prompt_ids, sampling, arrival_s=0.0))

    prompts = [
        [(i * j) % 5000 + number for j in range(length)] for number, i in enumerate(range(1, 101))
    ]
    for number, prompt_ids in enumerate(prompts):
        ask(number, prompt_ids, OUTPUT)
    sizes = (layout.bytes_per_block, windows.layout.bytes_per_block)
    most, used, ended = run(scheduler, sizes)
    print(f"owned {used / formula:.3f} of the formula, allotted {MAX_SHARE}")
    assert most == NUM_CHATS
    assert scheduler.get_stats().num_preemptions == 0
    assert used <= 1.1 * formula
    # The next message of each finds all of it.
    for number, request in enumerate(sorted(ended, key=lambda r: int(r.request_id))):
        ask(NUM_CHATS + number, [*prompts[number], *request.output_ids, 1, 2, 3], 2)
    _, _, turns = run(scheduler, now_s=1e4)
    assert [r.report.num_cached_tokens for r in turns] == [LENGTH - 1] * NUM_CHATS
