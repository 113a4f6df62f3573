"""What the tests of the control channel share: a private folder and child processes."""

import asyncio
import os
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import zmq

import tandem
from tandem.rpc import RpcConfig, make_identity, make_runtime_dir
from tandem.rpc.handshake import make_limits
from tandem.rpc.wire.frames import Hello, decode_frame, encode_frame

PROGRAM = Path(__file__).with_name("peer_program.py")
CHILD_TIMEOUT_S = 60.0


class Child:
    """A process running ``peer_program.py``, read line by line with a deadline."""

    def __init__(self, mode: str, endpoint: str, config_json: str = "{}") -> None:
        source = str(Path(tandem.__file__).parents[1])
        environment = dict(os.environ, PYTHONPATH=source, RPC_CONFIG=config_json)
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), mode, endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def expect(self, line: str) -> None:
        assert self._lines.get(timeout=CHILD_TIMEOUT_S) == line

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(CHILD_TIMEOUT_S)
        self._reader.join(CHILD_TIMEOUT_S)
        self.process.stdin.close()
        self.process.stdout.close()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))


class RawClient:
    """A DEALER that sends whatever it is told, and reads only when asked."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        # Before it connects: a refusal may come at once, and comes but once.
        self.events = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        self.socket.connect(endpoint)

    def send(self, *parts: bytes) -> None:
        self.socket.send_multipart(list(parts))

    def say_hello(self, **changes) -> None:
        fields = {
            "protocol": 1,
            "min_protocol": 1,
            "epoch": 1,
            "identity": make_identity("raw"),
            "limits": make_limits(RpcConfig()),
        } | changes
        self.send(encode_frame(Hello(**fields)))

    async def receive(self):
        """Return the next frame; does not hold up the loop that may have to send it."""
        for _ in range(10_000):
            if self.socket.poll(0):
                return decode_frame(self.socket.recv())
            await asyncio.sleep(0.001)
        raise AssertionError("nothing arrived in 10 s")

    def close(self) -> None:
        """Idempotent: a test may end a client before its fixture does."""
        if self.socket.closed:
            return
        self.socket.disable_monitor()
        self.events.close()
        self.socket.close()
        self._context.term()


@pytest.fixture
def raw_client():
    """Open raw clients: ``raw_client(endpoint)``."""
    clients: list[RawClient] = []

    def start(endpoint: str) -> RawClient:
        clients.append(RawClient(endpoint))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


@pytest.fixture
def folder():
    """A runtime folder of the test's own."""
    path = make_runtime_dir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def endpoint(folder):
    """A local address that nobody serves yet."""
    return f"ipc://{folder}/server.sock"


@pytest.fixture
def spawn():
    """Start children that are ended with the test: ``spawn(mode, endpoint, config_json)``."""
    children: list[Child] = []

    def start(*arguments: str) -> Child:
        children.append(Child(*arguments))
        return children[-1]

    yield start
    for child in children:
        child.end()
