"""48 chats get the same tokens, bit for bit, when steps are planned ahead.

Goal: with ``engine.overlap`` on and all chats at once, each gets the tokens that it gets alone
without: plain, with int8 KV, with adapters, disaggregated, and from the store.
Method: the demo model in this process; half of the chats are greedy, half seeded, and a third
begins alike.
"""

import pytest
from random_adapter import write_adapter
from test_disaggregation import Node
from test_store_tier import LiveStore, Served

from tandem.core.adapter import AdapterSource
from tandem.core.wire import KvHandle, PrefillKv
from tandem.engine.adapters import AdapterTable

pytestmark = pytest.mark.slow

NUM_CHATS = 48
NUM_TOKENS = 12
OVERLAP = {"overlap": "on", "max_batch_tokens": 64, "max_running": 16, "num_kv_blocks": 400}
SHARED = [(i * 7919) % 3000 + 5 for i in range(40)]
CHATS = [
    (SHARED if i % 3 == 0 else []) + [(j * 31 + i * 977) % 3000 + 5 for j in range(5 + 2 * i)]
    for i in range(NUM_CHATS)
]


def find_seed(i):
    return None if i % 2 else i


def run_alone(node, fields=lambda i: {}):
    """Return the tokens of chats that run one after the other."""
    told = []
    for i, prompt in enumerate(CHATS):
        node.add(f"alone{i}", prompt, NUM_TOKENS, find_seed(i), **fields(i))
        told.append(node.tokens(f"alone{i}"))
    return told


def run_together(node, fields=lambda i: {}):
    """Return the tokens of chats that run at once; they are all queued before the first step."""
    node.gate.clear()
    for i, prompt in enumerate(CHATS):
        node.add(f"all{i}", prompt, NUM_TOKENS, find_seed(i), **fields(i))
    node.gate.set()
    return [node.tokens(f"all{i}") for i in range(NUM_CHATS)]


@pytest.fixture
def make():
    """Makes nodes that are closed in the end."""
    nodes = []

    def make_one(role=None, name="node", **engine):
        nodes.append(Node(role, name, engine))
        return nodes[-1]

    yield make_one
    for node in nodes:
        node.close()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_chats_at_once_with_overlap(make, kv_dtype):
    expected = run_alone(make(kv_dtype=kv_dtype))
    assert len({tuple(tokens) for tokens in expected}) > NUM_CHATS // 2
    assert run_together(make(kv_dtype=kv_dtype, **OVERLAP)) == expected


def test_chats_with_adapters(make, tmp_path):
    def adapt(node):
        adapters = node.built.model.enable_adapters(2)
        table = AdapterTable(adapters, node.engine, node.built.identity, None)
        digests = [""]
        for seed in (1, 2):
            folder = tmp_path / str(seed)
            write_adapter(table, folder, seed)
            digests.append(table.load(AdapterSource(name=str(seed), folder=str(folder))).digest)
        return lambda i: {"adapter": digests[i % 3]}

    alone, ahead = make(), make(**OVERLAP)
    expected = run_alone(alone, adapt(alone))
    assert run_together(ahead, adapt(ahead)) == expected
    assert run_together(make(**OVERLAP)) != expected, "the adapters change nothing"


def test_chats_over_two_instances(make):
    expected = run_alone(make())
    prefill, decode = make("prefill", "prefill", **OVERLAP), make("decode", "decode", **OVERLAP)
    decode.open(prefill)
    for i, prompt in enumerate(CHATS):
        prefill.add(f"p{i}", prompt, NUM_TOKENS, find_seed(i), prefill_lease_s=60.0)
    lasts = [prefill.wait(f"p{i}") for i in range(NUM_CHATS)]
    for i, (prompt, last) in enumerate(zip(CHATS, lasts, strict=True)):
        assert isinstance(last.kv_handle, KvHandle)
        source = PrefillKv(instance="prefill", handle=last.kv_handle)
        decode.add(
            f"d{i}", prompt, NUM_TOKENS, find_seed(i),
            kv_source=source, continuation=last.continuation,
        )  # fmt: skip
    firsts = [prefill.tokens(f"p{i}") for i in range(NUM_CHATS)]
    told = [first + decode.tokens(f"d{i}") for i, first in enumerate(firsts)]
    assert told == expected
    assert decode.reads.peer_read_blocks > 0


def test_chats_from_the_store(make, tmp_path):
    expected = run_alone(make())
    with LiveStore(tmp_path) as store:
        for is_warm in (False, True):
            served = Served(store, {"overlap": "on"})
            assert served.tier is not None
            try:
                told = [
                    served.generate(prompt, NUM_TOKENS, seed=find_seed(i))[0]
                    for i, prompt in enumerate(CHATS)
                ]
                assert told == expected
                if is_warm:
                    assert served.tier.counters.loaded_blocks > 0
                else:
                    served.wait_stored(NUM_CHATS)
            finally:
                served.close()
