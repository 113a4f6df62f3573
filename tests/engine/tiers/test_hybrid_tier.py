"""Goal: a state is found in the store with all blocks before it, or not at all, and changes no bit.

Method: a tiny hybrid in bfloat16 over a real store; each engine begins with empty memory.
"""

import time

import pytest
from hybrid import STATE_BYTES, save_hybrid
from test_disaggregation import Node, hand_over
from test_store_tier import TIMEOUT_S, LiveStore, Served

from tandem.engine.tiers.store_tier import make_object_key
from tandem.models.config import ModelConfig

BLOCK = 16
PROMPT = [(7 * i * i + 3) % 120 + 3 for i in range(5 * BLOCK + 5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_hybrid(tmp_path_factory.mktemp("hybrid"))
    return ModelConfig(path=str(folder), dtype="bfloat16", packed_cache="off", proof="off")


@pytest.fixture(scope="module")
def serve(model):
    made = []

    def make(store):
        made.append(Served(store, {"num_state_slots": 8}, model))
        return made[-1]

    yield make
    for served in made:
        served.close()


def test_another_engine_goes_on_from_a_state_in_the_store(serve, tmp_path):
    expected = serve(None).generate(PROMPT, seed=3)[0]
    with LiveStore(tmp_path) as store:
        first = serve(store)
        assert first.generate(PROMPT, seed=3) == (expected, 0)
        first.wait_stored(5)
        deadline = time.monotonic() + TIMEOUT_S
        while not first.tier.counters.stored_states:
            assert time.monotonic() < deadline, first.tier.counters
            time.sleep(0.005)
        # The last block's end before the end of the prompt.
        second = serve(store)
        assert second.generate(PROMPT, seed=3) == (expected, 5 * BLOCK)
        counters = second.tier.counters
        assert (counters.loaded_states, counters.loaded_blocks) == (1, 5)
        assert counters.loaded_bytes > STATE_BYTES
        # The prompt of a next turn: the same state, and what follows is computed.
        assert second.generate([*PROMPT, 9, 9])[1] >= 5 * BLOCK
        # Half a point is a miss: a state whose blocks are not all there.
        keys = second.engine._scheduler.make_block_keys(PROMPT, "")
        identity = second.built.identity.digest.hex()
        state = make_object_key(identity, keys[4], "state")
        assert store.run(lambda client: client.exists(state))
        store.run(lambda client: client.remove(make_object_key(identity, keys[2])))
        assert serve(store).generate(PROMPT, seed=3) == (expected, 0)


@pytest.mark.slow
@pytest.mark.parametrize("is_early", [True, False])
def test_a_decode_instance_goes_on_from_the_state_of_the_prefill(serve, model, is_early):
    """It computes nothing of the prompt, and gives the tokens of one engine alone."""
    expected = serve(None).generate(PROMPT, seed=3)[0]
    nodes = [
        Node(role, role, {"num_state_slots": 4, "max_batch_tokens": 64}, model)
        for role in ("prefill", "decode")
    ]
    prefill, decode = nodes
    try:
        decode.open(prefill)
        fields = {"prompt": PROMPT, "seed": 3}
        assert hand_over(prefill, decode, 1, is_early=is_early, **fields) == expected
        assert decode.cached("d1") == len(PROMPT)
        assert decode.reads.peer_read_bytes > STATE_BYTES
        for node in nodes:
            node.wait_idle()
            assert node.engine.get_stats().num_used_state_slots == 0
            node.engine._scheduler.check()
    finally:
        for node in nodes:
            node.close()
