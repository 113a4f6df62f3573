"""Small scenarios, and traces of conversations that go on."""

import random

from tandem.core.loads.traces import TraceRow
from tandem.sim.cluster.scenario import parse_scenario

COSTS = (
    "{step_s: 0.01, prefill_token_s: 1e-4, prefill_context_s: 0, decode_s: 0, decode_token_s: 0}"
)
ONE = """
instances: [{calibration: COSTS, kv_tokens: TOKENS, kv_bytes_per_token: 1000,
  engine: {block_size: 512, max_batch_tokens: 2048, max_running: 64, max_queue: 10000}}]
"""
PAIR = """
instances:
  - {count: 2, role: prefill, calibration: COSTS, kv_tokens: TOKENS, kv_bytes_per_token: 1000,
     engine: ENGINE}
  - {count: 2, role: decode, calibration: COSTS, kv_tokens: TOKENS, kv_bytes_per_token: 1000,
     engine: ENGINE}
links: {gbps: 0.8, efficiency: 1.0, latency_us: 0, is_layerwise: LAYERWISE}
"""
ENGINE = "{block_size: 512, max_batch_tokens: 2048, max_running: 64, max_queue: 10000}"


def make(text, tokens=2**20, *, layerwise="false"):
    text = text.replace("COSTS", COSTS).replace("TOKENS", str(tokens)).replace("ENGINE", ENGINE)
    return parse_scenario(text.replace("LAYERWISE", layerwise), "test")


def draw_rows(count, seed=1, gap_ms=300):
    """Return conversations that go on, mixed, by one turn or another."""
    chance = random.Random(seed)
    talks, rows, fresh = [[0]], [], iter(range(1, 10**6))
    for number in range(count):
        ids = chance.choice(talks[-30:]) + [next(fresh) for _ in range(chance.randint(1, 6))]
        talks.append(ids)
        length = 512 * len(ids) - chance.randint(0, 511)
        rows.append(TraceRow(number * gap_ms, length, chance.randint(1, 60), ids))
    return rows
