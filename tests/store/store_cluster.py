"""Processes of a store that can be killed, stopped and started again; see ``store_program.py``."""

import os
import queue
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
TIMEOUT_S = 30.0
RPC = RpcConfig(heartbeat_interval_ms=100, lease_ms=1000)


class Child:
    def __init__(self, *arguments: str) -> None:
        source = str(Path(tandem.__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=dict(os.environ, PYTHONPATH=source),
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))

    def read_line(self) -> str:
        return self._lines.get(timeout=TIMEOUT_S)

    def tell(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    def end(self) -> None:
        self.kill()
        self._reader.join(TIMEOUT_S)
        self.process.stdin.close()
        self.process.stdout.close()


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

    def start(self, role: str, *rest: str, **changes) -> Child:
        config = msgspec.structs.replace(self.config, **changes)
        encode = msgspec.json.encode
        child = Child(role, encode(config).decode(), encode(RPC).decode(), *rest)
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
