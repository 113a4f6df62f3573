"""KV events reach subscribers in the formats of vLLM and SGLang, and nobody else."""

import contextlib
import struct

import msgspec
import pytest
import zmq

from tandem.core.errors import ConfigError, PermissionDeniedError
from tandem.core.instance_status import Statistics
from tandem.core.wire import SamplingParams
from tandem.engine.config import KvEventConfig
from tandem.engine.groups.chain import hash_block, pack_tokens
from tandem.engine.groups.reuse import StatePolicy, StateReuse
from tandem.engine.groups.snapshots import Snapshot
from tandem.engine.groups.windows import WindowPolicy, WindowReuse
from tandem.engine.kv_events import KvEventPublisher
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.request import Request
from tandem.rpc import Auth, generate_secret

BLOCK = 4
TIMEOUT_MS = 10_000


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list
    data_parallel_rank: int | None = None


@pytest.fixture
def publish():
    """Makes (publisher, index); closes the publishers at the end."""
    with contextlib.ExitStack() as stack:

        def make(kv_kind="", window=0, **settings):
            settings.setdefault("endpoint", "tcp://127.0.0.1:0")
            publisher = KvEventPublisher(
                KvEventConfig(**settings),
                block_size=BLOCK,
                now=lambda: 12.5,
                kv_kind=kv_kind,
                window=window,
            )
            stack.callback(publisher.close)
            pool = BlockPool(8)
            index = PrefixIndex(pool, BLOCK)
            index.observers.append(publisher)
            return publisher, index, pool

        yield make


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


@pytest.fixture
def subscribe(context):
    """Makes subscribers that the publisher has admitted; None for one that it did not."""
    with contextlib.ExitStack() as stack:

        def make(publisher, topic="", auth=None, timeout_ms=TIMEOUT_MS):
            socket = stack.enter_context(context.socket(zmq.SUB))
            socket.setsockopt(zmq.LINGER, 0)
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
            if auth is not None:
                auth.secure_client(socket)
            socket.setsockopt_string(zmq.SUBSCRIBE, topic)
            socket.connect(publisher.addresses[0])
            has_connected = monitor.poll(timeout_ms)
            socket.disable_monitor()
            monitor.close()
            return socket if has_connected else None

        yield make


def insert_chain(index, pool, tokens):
    keys = []
    root = index.make_root_key("")
    index.extend_keys(root, keys, tokens)
    node = index.get_root(root)
    blocks = []
    for i, key in enumerate(keys):
        blocks.append(pool.allocate())
        node = index.insert(node, key, tokens[i * BLOCK : (i + 1) * BLOCK], blocks[-1])
    return keys, blocks


def receive(socket, num_events):
    """Events until there are so many, and the sequence numbers they came with."""
    events, numbers = [], []
    while len(events) < num_events:
        _, number, payload = socket.recv_multipart()
        batch = msgspec.msgpack.decode(payload, type=Batch)
        assert batch.ts == 12.5
        events += batch.events
        numbers.append(struct.unpack(">Q", number)[0])
    return events, numbers


def poke(publisher, socket):
    """Publish until the subscription has arrived: ZeroMQ has no sign of that."""
    while True:
        publisher.note_cleared()
        if socket.poll(50):
            break
    while socket.poll(100):
        socket.recv_multipart()


def test_stored_removed_cleared_as_maps(publish, subscribe):
    publisher, index, pool = publish()
    socket = subscribe(publisher)
    poke(publisher, socket)
    keys, blocks = insert_chain(index, pool, list(range(9)))
    index.release(tuple(blocks))
    assert len(index.evict(1)) == 1
    index.clear()
    events, numbers = receive(socket, 4)
    first, second, removed, cleared = events
    assert first["type"] == second["type"] == "BlockStored"
    assert first["block_hashes"] == [keys[0]]
    assert first["parent_block_hash"] is None
    assert first["token_ids"] == [0, 1, 2, 3]
    assert first["block_size"] == BLOCK
    assert second["parent_block_hash"] == keys[0]
    assert removed == {"type": "BlockRemoved", "block_hashes": [keys[1]], "medium": "CPU"}
    assert cleared == {"type": "AllBlocksCleared"}
    assert numbers == sorted(numbers)


def test_states_are_a_group_of_their_own(publish, subscribe):
    """The same hash is told of a block and of the state behind it; each removal names its group."""
    publisher, index, pool = publish(kv_kind="full_attention")
    socket = subscribe(publisher)
    poke(publisher, socket)
    keys, blocks = insert_chain(index, pool, list(range(8)))
    policy = StatePolicy(num_slots=1, min_gain=1)
    states = StateReuse(policy, index, BLOCK, Statistics(), is_enabled=True)
    for length in (8, 7):
        request = Request("r", list(range(length)), SamplingParams(), 0.0)
        request.prefix.root_key = index.make_root_key("")
        request.prefix.block_keys = keys[: length // BLOCK]
        request.state_notes.slot = states.take_for_load(None)
        states.release(request, length, is_sound=True)
    index.release(tuple(blocks))
    index.evict(1)
    events = receive(socket, 6)[0]
    told = [
        (e["type"], e["block_hashes"][0], e["group_idx"], e["kv_cache_spec_kind"]) for e in events
    ]
    own = hash_block(keys[0], pack_tokens([4, 5, 6]))
    assert told == [
        ("BlockStored", keys[0], 0, "full_attention"),
        ("BlockStored", keys[1], 0, "full_attention"),
        ("BlockStored", keys[1], 1, "mamba"),
        ("BlockRemoved", keys[1], 1, "mamba"),
        ("BlockStored", own, 1, "mamba"),
        ("BlockRemoved", keys[1], 0, "full_attention"),
    ]
    assert (events[4]["parent_block_hash"], events[4]["token_ids"]) == (keys[0], [4, 5, 6])


def test_windows_are_a_group_of_their_own(publish):
    """A router learns which blocks have lost their window while their other layers are there."""
    publisher, index, pool = publish(kv_kind="full_attention", window=6)
    policy = WindowPolicy(window=6, num_blocks=6)
    windows = WindowReuse(policy, index, BLOCK, Statistics(), is_ahead=False)
    keys, blocks = insert_chain(index, pool, list(range(12)))
    for node in index.match_blocks(keys).nodes:
        [window_block] = windows.take_for_load(1, [])
        windows.end_load(None, node, 0, window_block)
    windows.take_for_load(4, [])  # Evicts the window of the first.
    index.release(tuple(blocks))
    index.evict(1)
    told = [
        (e["type"], e["block_hashes"][0], e["group_idx"], e.get("kv_cache_spec_sliding_window"))
        for e in publisher._events
    ]
    assert told == [
        *(("BlockStored", key, 0, None) for key in keys),
        *(("BlockStored", key, 2, 6) for key in keys),
        ("BlockRemoved", keys[0], 2, None),
        ("BlockRemoved", keys[2], 0, None),
        ("BlockRemoved", keys[2], 2, None),
    ]


def test_arrays_have_no_states(publish):
    """An array names no group: a state that is gone would be taken for its block."""
    publisher, index, pool = publish(encoding="array", kv_kind="full_attention")
    keys, _ = insert_chain(index, pool, list(range(4)))
    snapshot = Snapshot(keys[0], b"", 4, 0)
    publisher.note_state_kept(snapshot)
    publisher.note_state_removed(snapshot)
    publisher.note_window_removed(keys[0])
    assert [event[0] for event in publisher._events] == ["BlockStored"]


def test_arrays_with_integers_as_sglang_has_them(publish, subscribe):
    publisher, index, pool = publish(encoding="array")
    socket = subscribe(publisher)
    poke(publisher, socket)
    keys, _ = insert_chain(index, pool, list(range(5)))
    ((name, hashes, parent, tokens, size, lora, medium),) = receive(socket, 1)[0]
    assert (name, parent, tokens, size, lora, medium) == (
        "BlockStored", None, [0, 1, 2, 3], BLOCK, None, "CPU",
    )  # fmt: skip
    assert hashes == [struct.unpack(">q", keys[0][:8])[0]]


def test_replay_gives_what_was_missed_and_ends(publish, subscribe, context):
    publisher, index, pool = publish(replay_endpoint="tcp://127.0.0.1:0", topic="kv")
    socket = subscribe(publisher, "kv")
    poke(publisher, socket)
    insert_chain(index, pool, list(range(5)))
    _, numbers = receive(socket, 1)
    with context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        asking.connect(publisher.addresses[1])
        asking.send_multipart([b"", struct.pack(">Q", numbers[0])])
        answers = []
        while not answers or answers[-1][2] != struct.pack(">q", -1):
            answers.append(asking.recv_multipart())
        asking.send_multipart([b"", b"no number"])  # Refused, and no harm done.
        asking.send_multipart([b"", struct.pack(">Q", 2**63)])
        assert asking.recv_multipart()[2] == struct.pack(">q", -1)
    assert [struct.unpack(">Q", answer[2])[0] for answer in answers[:-1]] == numbers
    assert answers[0][1] == b"kv"


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
def test_others_cannot_read_prompts(publish, endpoint):
    with pytest.raises(PermissionDeniedError, match="prompts"):
        publish(endpoint=endpoint)


def test_curve_admits_those_who_hold_the_secret(publish, subscribe):
    secret = generate_secret()
    publisher, index, pool = publish(secret=secret)
    socket = subscribe(publisher, auth=Auth.cluster(secret))
    poke(publisher, socket)
    insert_chain(index, pool, list(range(5)))
    assert receive(socket, 1)[0][0]["type"] == "BlockStored"
    stranger = Auth.cluster(generate_secret())
    assert subscribe(publisher, auth=stranger, timeout_ms=300) is None
    assert subscribe(publisher, timeout_ms=300) is None


def test_an_address_in_use_is_refused_by_name(publish):
    publisher, _, _ = publish()
    with pytest.raises(ConfigError, match="cannot bind"):
        publish(endpoint=publisher.addresses[0])
