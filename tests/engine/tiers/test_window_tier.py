"""Goal: a window is found elsewhere with all blocks before it, or not at all, and changes no bit.

Method: a tiny gpt-oss in bfloat16, over a real store and over two instances; each engine begins
with empty memory.
"""

import time

import pytest
from test_disaggregation import Node, hand_over
from test_store_tier import TIMEOUT_S, LiveStore, Served
from windowed import WINDOW, save_windowed

from tandem.engine.groups.windows import count_seen_blocks
from tandem.engine.tiers.store_tier import make_object_key
from tandem.models.config import ModelConfig

BLOCK = 16
SEEN = count_seen_blocks(WINDOW, BLOCK)
PROMPT = [(7 * i * i + 3) % 120 + 3 for i in range(6 * BLOCK + 5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_windowed(tmp_path_factory.mktemp("windowed"))
    return ModelConfig(path=str(folder), dtype="bfloat16", packed_cache="off", proof="off")


@pytest.fixture(scope="module")
def serve(model):
    made = []

    def make(store):
        made.append(Served(store, {"kv_dtype": "int8", "num_window_blocks": 12}, model))
        return made[-1]

    yield make
    for served in made:
        served.close()


def test_another_engine_goes_on_from_a_window_in_the_store(serve, tmp_path):
    expected = serve(None).generate(PROMPT, seed=3)[0]
    with LiveStore(tmp_path) as store:
        first = serve(store)
        assert first.generate(PROMPT, seed=3) == (expected, 0)
        first.wait_stored(6)
        deadline = time.monotonic() + TIMEOUT_S
        while first.tier.counters.stored_window_blocks < 6:
            assert time.monotonic() < deadline, first.tier.counters
            time.sleep(0.005)
        second = serve(store)
        assert second.generate(PROMPT, seed=3) == (expected, 6 * BLOCK)
        counters = second.tier.counters
        assert (counters.loaded_window_blocks, counters.loaded_blocks) == (SEEN, 6)
        # Half a point is a miss: without the last window, up to the one before.
        keys = second.engine._scheduler.make_block_keys(PROMPT, "")
        identity = second.built.identity.digest.hex()
        window = make_object_key(identity, keys[5], "window")
        assert store.run(lambda client: client.exists(window))
        store.run(lambda client: client.remove(window))
        third = serve(store)
        assert third.generate(PROMPT, seed=3) == (expected, 5 * BLOCK)
        third.engine._scheduler.check()


@pytest.mark.parametrize("is_early", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_decode_instance_goes_on_from_the_window_of_the_prefill(serve, model, is_early):
    """It computes nothing of the prompt, and gives the tokens of one engine alone."""
    expected = serve(None).generate(PROMPT, seed=3)[0]
    settings = {"kv_dtype": "int8", "max_batch_tokens": 64}
    nodes = [Node(role, role, settings, model) for role in ("prefill", "decode")]
    prefill, decode = nodes
    try:
        decode.open(prefill)
        fields = {"prompt": PROMPT, "seed": 3}
        assert hand_over(prefill, decode, 1, is_early=is_early, **fields) == expected
        assert decode.cached("d1") == len(PROMPT)
        assert prefill.built.info.num_window_blocks > 0
        for node in nodes:
            node.wait_idle()
            assert node.engine.get_stats().num_used_window_blocks == 0
            node.engine._scheduler.check()
    finally:
        for node in nodes:
            node.close()
