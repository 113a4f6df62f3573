"""What the channel costs over bare sockets.

Method: clients here, servers in processes of their own: ours; a blocking ROUTER that decodes and
encodes the same messages and does nothing else; and the same on ``zmq.asyncio``. They are called
in alternating batches, and the ratio is taken batch by batch, so that a slow moment of the machine
hits all.
"""

import asyncio
import statistics
import time

import msgspec
import pytest
import zmq
import zmq.asyncio

from tandem.rpc import Auth, RpcClient, make_identity
from tandem.rpc.wire.frames import Call, Reply, as_body

BATCHES = 21
CALLS_PER_BATCH = 150


class Point(msgspec.Struct):
    x: int
    label: str


def measure_bare(endpoint, batches):
    """Yield microseconds a round trip over blocking sockets, batch by batch."""
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(Reply)
    point_decoder = msgspec.msgpack.Decoder(Point)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        for _ in range(batches):
            begin = time.perf_counter()
            for number in range(CALLS_PER_BATCH):
                socket.send(encoder.encode(Call(number, "echo", 1000, as_body(Point(1, "a")))))
                assert socket.poll(5000)
                reply = decoder.decode(socket.recv())
                assert point_decoder.decode(reply.body) == Point(1, "a")
            yield (time.perf_counter() - begin) / CALLS_PER_BATCH * 1e6


async def measure_zmq_asyncio(socket):
    """Return microseconds a round trip over pyzmq's own asyncio sockets, for one batch."""
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(Reply)
    point_decoder = msgspec.msgpack.Decoder(Point)
    begin = time.perf_counter()
    for number in range(CALLS_PER_BATCH):
        await socket.send(encoder.encode(Call(number, "echo", 1000, as_body(Point(1, "a")))))
        reply = decoder.decode(await socket.recv())
        assert point_decoder.decode(reply.body) == Point(1, "a")
    return (time.perf_counter() - begin) / CALLS_PER_BATCH * 1e6


async def measure_ours(client, method):
    """Return microseconds a round trip over our channel, for one batch."""
    begin = time.perf_counter()
    for _ in range(CALLS_PER_BATCH):
        assert await client.call(method, Point(1, "a"), Point) == Point(1, "a")
    return (time.perf_counter() - begin) / CALLS_PER_BATCH * 1e6


async def measure_round_trip(ours, bare, bare_asyncio, batches=BATCHES):
    """Return microseconds a round trip by way and batch; each argument is an endpoint served."""
    times = {"async handler": [], "plain handler": [], "blocking": [], "zmq.asyncio": []}
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(bare_asyncio)
    blocking_batches = measure_bare(bare, batches + 1)
    async with RpcClient(ours, identity=make_identity("bench"), auth=Auth.local()) as client:
        for _ in range(batches + 1):
            times["async handler"].append(await measure_ours(client, "echo"))
            times["zmq.asyncio"].append(await measure_zmq_asyncio(socket))
            times["plain handler"].append(await measure_ours(client, "echo_plain"))
            times["blocking"].append(next(blocking_batches))
    blocking_batches.close()
    socket.close()
    context.term()
    return {name: batch[1:] for name, batch in times.items()}  # The first warms up.


def describe(times, name, baseline):
    ratios = [a / b for a, b in zip(times[name], times[baseline], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    best = min(times[name]) / min(times[baseline])
    print(
        f"rpc_round_trip {name}  ours {statistics.median(times[name]):.0f} us  baseline "
        f"{baseline} {statistics.median(times[baseline]):.0f} us  ratio {middle:.2f} "
        f"[{low:.2f}, {high:.2f}]  of the best batches {best:.2f}  n={len(ratios)} interleaved"
    )
    return middle


@pytest.mark.slow
def test_round_trip_costs_little_over_bare_sockets(folder, spawn):
    endpoints = [f"ipc://{folder}/{name}.sock" for name in ("ours", "bare", "bare_asyncio")]
    for mode, endpoint in zip(("serve", "bare", "bare_asyncio"), endpoints, strict=True):
        spawn(mode, endpoint).expect("ready")
    times = asyncio.run(asyncio.wait_for(measure_round_trip(*endpoints), 120))
    for name in ("async handler", "plain handler"):
        # For information: what event loops cost over threads that block.
        describe(times, name, "blocking")
        # Like for like: a loop on both sides, and handlers that may wait.
        assert describe(times, name, "zmq.asyncio") < 1.4
