"""Processes of a store that can be killed, stopped and started again; see ``store_program.py``."""

import atexit
import functools
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

import tandem
from tandem.rpc import RpcConfig
from tandem.store import StoreClient, StoreConfig

PROGRAM = Path(__file__).with_name("store_program.py")
TIMEOUT_S = 60.0
RPC = RpcConfig(heartbeat_interval_ms=100, lease_ms=1000)


def start_program(*arguments: str, **options) -> subprocess.Popen:
    source = str(Path(tandem.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments],
        stderr=subprocess.DEVNULL,
        env=dict(os.environ, PYTHONPATH=source, OPENBLAS_NUM_THREADS="1"),
        **options,
    )


class Nursery:
    """A process that has imported everything and has no threads, and forks itself on demand.

    Most of what starting a process of the tests takes is Python's imports.
    """

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_program(
                "nursery",
                str(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._channel.settimeout(TIMEOUT_S)
        atexit.register(self.close)

    def fork(self, arguments: tuple[str, ...], stdin: int, stdout: int) -> "Forked":
        socket.send_fds(self._channel, [json.dumps(arguments).encode()], [stdin, stdout])
        data, (descriptor,), *_ = socket.recv_fds(self._channel, 100, 1)
        return Forked(int(data), descriptor)

    def close(self) -> None:
        self._channel.close()
        self._process.wait(TIMEOUT_S)


@functools.cache
def find_nursery() -> Nursery:
    return Nursery()


class Forked:
    """A grandchild, as ``Popen`` would be of it: by a descriptor, which means no other process."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor
        self._has_ended = False

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        return 0 if self._wait(0) else None

    def wait(self, timeout: float) -> None:
        if not self._wait(timeout):
            raise subprocess.TimeoutExpired("store_program", timeout)

    def _wait(self, timeout_s: float) -> bool:
        if not self._has_ended:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            if poll.poll(timeout_s * 1000):
                self._has_ended = True
                os.close(self._descriptor)
        return self._has_ended


class Child:
    """One process. A fresh one is started from the beginning, as by a user; others are forked."""

    def __init__(self, *arguments: str, is_fresh: bool = False) -> None:
        stdin, write_end = os.pipe()
        read_end, stdout = os.pipe()
        try:
            if is_fresh:
                self.process = start_program(*arguments, stdin=stdin, stdout=stdout)
            else:
                self.process = find_nursery().fork(arguments, stdin, stdout)
        finally:
            os.close(stdin)
            os.close(stdout)
            self._stdin = os.fdopen(write_end, "w")
            self._stdout = os.fdopen(read_end)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._stdout:
            self._lines.put(line.rstrip("\n"))

    def read_line(self) -> str:
        return self._lines.get(timeout=TIMEOUT_S)

    def tell(self) -> None:
        self._stdin.write("go\n")
        self._stdin.flush()

    def ask_to_end(self) -> None:
        """Close its standard input, at which it leaves as a program does that is told to stop."""
        self._stdin.close()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    def end(self) -> None:
        self.kill()
        self._reader.join(TIMEOUT_S)
        self._stdin.close()
        self._stdout.close()


class Cluster:
    """A folder, its master, hosts and clients."""

    def __init__(self, folder: Path, segments: Path) -> None:
        self.segments = segments
        self.config = StoreConfig(
            master=f"ipc://{folder}/m.sock",
            segment_dir=str(segments),
            segment_bytes=2**26,
            lease_ms=500,
            put_timeout_ms=1000,
            put_wait_ms=5000,
            recovery_ms=1500,
        )
        self.children: list[Child] = []
        self.clients: list[StoreClient] = []

    def start(self, role: str, *rest: str, is_fresh: bool = False, **changes) -> Child:
        config = msgspec.structs.replace(self.config, **changes)
        encode = msgspec.json.encode
        arguments = (role, encode(config).decode(), encode(RPC).decode(), *rest)
        child = Child(*arguments, is_fresh=is_fresh)
        self.children.append(child)
        if role != "stall":
            assert child.read_line() == "ready"
        return child

    def client(self) -> StoreClient:
        client = StoreClient(self.config, RPC)
        self.clients.append(client)
        return client

    def wait_for(self, check, what: str) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while not check():
            assert time.monotonic() < end_s, what
            time.sleep(0.01)

    def wait_hosts(self, client: StoreClient, count: int) -> None:
        def are_up() -> bool:
            return sum(host.stage.value == "active" for host in client.status().hosts) == count

        self.wait_for(are_up, f"{count} active hosts")

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for child in self.children:
            child.end()
