"""Starting, connecting to and ending an instance: the system calls that supervision needs.

``ProcessLauncher`` starts child processes; the simulated world has a launcher of its own.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Protocol

import msgspec

from tandem.engine.process.child_process import end_child, start_child, write_settings
from tandem.engine.process.instance import PREPARE, SERVER_ROLE, InstanceSpec, compat_facts
from tandem.engine.process.session import SessionClient
from tandem.rpc import Auth, RpcClient, make_identity, make_runtime_dir

__all__ = ["InstanceChild", "Launcher", "ProcessLauncher", "make_instance_client"]

MODULE = "tandem.engine.process.instance"
CONNECT_TIMEOUT_S = 120.0
"""Seconds from the start of the process until its socket exists; it loads the model afterwards.
Importing torch has taken half a minute on a cold, busy disk."""


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

    async def prepare(self) -> None:
        """Do in advance the part of the next start that needs no settings, such as imports.
        Idempotent.
        """
        ...

    async def discard(self) -> None:
        """End what ``prepare`` has started for the next start. Idempotent."""
        ...

    async def close(self) -> None:
        """Remove files that starts have left; call it after the last process has ended."""
        ...


class ProcessLauncher:
    """Starts instances as child processes, which listen on sockets in a temporary folder.

    Args:
        endpoint: endpoint for them to listen on instead; empty: a socket.
    """

    def __init__(self, endpoint: str = "") -> None:
        self._fixed_endpoint = endpoint
        self.endpoint = endpoint
        """Endpoint of the latest process that was started."""
        self._folder: Path | None = None
        self.num_started = 0
        self._prepared: asyncio.subprocess.Process | None = None
        """Process that was started in advance: it imports libraries and waits for its settings."""

    async def start(self, spec: InstanceSpec) -> "ChildInstance":
        """Start a child process, or use the prepared one, and send it its settings."""
        folder = self._make_folder()
        endpoint = self._fixed_endpoint or f"ipc://{folder / f'{self.num_started}.sock'}"
        self.endpoint = endpoint
        self.num_started += 1
        spec = msgspec.structs.replace(spec, endpoint=endpoint)
        process, self._prepared = self._prepared, None
        if process is None or process.returncode is not None:
            process = await start_child(MODULE)
        write_settings(process, spec)
        return ChildInstance(process, make_instance_client(endpoint, spec))

    async def prepare(self) -> None:
        """Start a process that imports libraries and then waits for its settings."""
        # Make a writable folder first, because some libraries fail to import without one, with
        # unclear errors.
        self._make_folder()
        if self._prepared is None:
            self._prepared = await start_child(MODULE)
            assert self._prepared.stdin is not None
            self._prepared.stdin.write(PREPARE)

    def _make_folder(self) -> Path:
        if self._folder is None:
            self._folder = make_runtime_dir()
        return self._folder

    async def discard(self) -> None:
        """Kill the process that ``prepare`` has started in advance, if there is one."""
        process, self._prepared = self._prepared, None
        if process is not None:
            exited = asyncio.create_task(process.wait())
            # Kill the prepared process: it has no requests to finish, and does not read its input
            # during imports.
            await end_child(process, exited, is_lost=True)

    async def close(self) -> None:
        """Discard the prepared process and remove the folder of sockets."""
        await self.discard()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class ChildInstance:
    """An instance in a child process; an ``InstanceChild``."""

    def __init__(self, process: asyncio.subprocess.Process, client: RpcClient) -> None:
        self._process = process
        self._exited = asyncio.create_task(process.wait())
        self.client = client

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    async def wait(self) -> int:
        """Return the exit status once the child has ended."""
        return await asyncio.shield(self._exited)

    async def end(self, *, is_lost: bool = False) -> None:
        """End the child process, by force if necessary."""
        await end_child(self._process, self._exited, is_lost=is_lost)
