"""Starting, connecting to and ending an instance: the system calls that supervision needs.

``ProcessLauncher`` starts child processes; the simulated world has a launcher of its own.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Protocol

import msgspec

from tandem.engine.process.child_process import end_child, write_settings
from tandem.engine.process.fork_server import ForkedProcess, ForkServer
from tandem.engine.process.instance import SERVER_ROLE, InstanceSpec, compat_facts
from tandem.engine.process.session import SessionClient
from tandem.rpc import Auth, RpcClient, make_identity, make_runtime_dir

__all__ = ["InstanceChild", "Launcher", "ProcessLauncher", "make_instance_client"]

CONNECT_TIMEOUT_S = 120.0
"""Seconds from the start of the process until its socket exists; it loads the model afterwards."""


class InstanceChild(Protocol):
    """The running process of one instance."""

    @property
    def pid(self) -> int:
        """Process id of the instance."""
        ...

    @property
    def client(self) -> SessionClient:
        """Control channel to the instance, not connected yet."""
        ...

    async def wait(self) -> int:
        """Wait until the process has ended; return its exit status. May be awaited several
        times.
        """
        ...

    async def end(self, *, is_lost: bool = False) -> None:
        """End the process, by force if it does not end in time. A process that is lost
        (``is_lost``, it no longer answers) gets less time.
        """
        ...


def make_instance_client(endpoint: str, spec: InstanceSpec) -> RpcClient:
    """Return the control channel to an instance, without connecting it."""
    return RpcClient(
        endpoint,
        identity=make_identity("server", SERVER_ROLE, compat=compat_facts()),
        auth=Auth.for_endpoint(endpoint, spec.secret),
        config=msgspec.structs.replace(spec.rpc, connect_timeout_ms=int(CONNECT_TIMEOUT_S * 1e3)),
    )


class Launcher(Protocol):
    """Starts the processes of one instance, one after the other."""

    async def start(self, spec: InstanceSpec) -> InstanceChild:
        """Start the instance at an endpoint that the launcher chooses; the caller ends it."""
        ...

    async def close(self) -> None:
        """Remove files that starts have left; call it after the last process has ended."""
        ...


class ProcessLauncher:
    """Starts instances as forks of one process; they listen on sockets in a temporary folder.

    Args:
        fork_server: forks them; not owned.
        endpoint: endpoint for them to listen on instead; empty: a socket.
    """

    def __init__(self, fork_server: ForkServer, endpoint: str = "") -> None:
        self._fork_server = fork_server
        self._fixed_endpoint = endpoint
        self.endpoint = endpoint
        """Endpoint of the latest process that was started."""
        self._folder: Path | None = None
        self.num_started = 0

    async def start(self, spec: InstanceSpec) -> "ChildInstance":
        """Fork a process and send it its settings."""
        if self._folder is None:
            self._folder = make_runtime_dir()
        folder = self._folder
        endpoint = self._fixed_endpoint or f"ipc://{folder / f'{self.num_started}.sock'}"
        self.endpoint = endpoint
        self.num_started += 1
        spec = msgspec.structs.replace(spec, endpoint=endpoint)
        process = await self._fork_server.fork()
        write_settings(process, spec)
        return ChildInstance(process, make_instance_client(endpoint, spec))

    async def close(self) -> None:
        """Remove the folder of sockets."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class ChildInstance:
    """An instance in a child process; an ``InstanceChild``."""

    def __init__(self, process: ForkedProcess, client: RpcClient) -> None:
        self._process = process
        self._exited = asyncio.create_task(process.wait())
        self.client = client

    @property
    def pid(self) -> int:
        """Process id of the instance."""
        return self._process.pid

    async def wait(self) -> int:
        """Return the exit status once the child has ended."""
        return await asyncio.shield(self._exited)

    async def end(self, *, is_lost: bool = False) -> None:
        """End the child process, by force if necessary."""
        await end_child(self._process, self._exited, is_lost=is_lost)
