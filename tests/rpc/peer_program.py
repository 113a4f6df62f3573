"""The other process of the fault tests: one endpoint, told what to be by its arguments.

Prints ``ready`` when it serves or is connected; ends when its standard input does.
"""

import asyncio
import os
import sys
import threading

import msgspec
import zmq
import zmq.asyncio

from tandem.rpc import Auth, Peer, RpcClient, RpcConfig, RpcServer, make_identity
from tandem.rpc.wire.frames import Call, Reply, as_body


class Point(msgspec.Struct):
    x: int
    label: str


class Tick(msgspec.Struct, tag="tick"):
    number: int


def say(text: str) -> None:
    print(text, flush=True)


def make_config() -> RpcConfig:
    return msgspec.json.decode(os.environ.get("RPC_CONFIG", "{}"), type=RpcConfig)


async def read_end() -> None:
    """Wait for the end of standard input, so that no child outlives its test."""
    ended = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set_result, None)

    threading.Thread(target=wait, daemon=True).start()
    await ended


async def serve(endpoint: str) -> None:
    server = RpcServer(
        endpoint, identity=make_identity("child"), auth=Auth.local(), config=make_config()
    )

    async def echo(peer: Peer, point: Point) -> Point:
        return point

    async def hang(peer: Peer, point: Point) -> Point:
        say("hanging")
        await asyncio.Event().wait()
        raise AssertionError

    def get_pid(peer: Peer, _: None) -> int:
        return os.getpid()

    server.register("echo", echo, Point, Point)
    server.register("echo_plain", lambda peer, point: point, Point, Point)
    server.register("hang", hang, Point, Point)
    server.register("get_pid", get_pid, type(None), int)
    async with server:
        say("ready")
        await read_end()


async def connect(endpoint: str) -> None:
    client = RpcClient(
        endpoint, identity=make_identity("child"), auth=Auth.local(), config=make_config()
    )
    client.on_peer_lost(lambda peer, error: say(f"lost {error.code}"))
    async with client:
        say("ready")
        await read_end()


def serve_bare(endpoint: str) -> None:
    """The least that a round trip can cost: blocking sockets and the same messages."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind(endpoint)
        decoder = msgspec.msgpack.Decoder(Call)
        point_decoder = msgspec.msgpack.Decoder(Point)
        encoder = msgspec.msgpack.Encoder()
        say("ready")
        while True:
            routing_id = socket.recv()
            call = decoder.decode(socket.recv())
            point = point_decoder.decode(call.body)
            socket.send(routing_id, zmq.SNDMORE)
            socket.send(encoder.encode(Reply(call.call_id, as_body(point))))


async def serve_bare_asyncio(endpoint: str) -> None:
    """The same on a loop, as pyzmq offers it: one task a call, so that handlers may wait."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.bind(endpoint)
    decoder = msgspec.msgpack.Decoder(Call)
    point_decoder = msgspec.msgpack.Decoder(Point)
    encoder = msgspec.msgpack.Encoder()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(routing_id: bytes, data: bytes) -> None:
        call = decoder.decode(data)
        point = point_decoder.decode(call.body)
        await socket.send_multipart(
            [routing_id, encoder.encode(Reply(call.call_id, as_body(point)))]
        )

    say("ready")
    while True:
        routing_id, data = await socket.recv_multipart()
        task = asyncio.create_task(answer(routing_id, data))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    mode, address = sys.argv[1:]
    if mode == "bare":
        serve_bare(address)
    else:
        programs = {"serve": serve, "connect": connect, "bare_asyncio": serve_bare_asyncio}
        asyncio.run(programs[mode](address))
