"""The processes of a cluster on one machine: started, watched, restarted, ended in order.

All runs on one event loop. The processes end when this one does, however it ends.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import yaml

from tandem import _native
from tandem.core.config import child_environment
from tandem.core.errors import PeerLostError
from tandem.integrations.deploying.processes import (
    Addresses,
    Kind,
    ProcessPlan,
    plan_groups,
    plan_servers,
    plan_store,
)
from tandem.integrations.deploying.spec import ClusterSpec
from tandem.placement.cores import divide_cores
from tandem.rpc import generate_secret, read_secret, write_secret

__all__ = ["ProcessRunner", "plan_local", "start_bound"]

logger = logging.getLogger(__name__)

MODULE = "tandem.integrations.deploying.bound"
PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
MAX_FAILED_STARTS = 3
END_S = 15.0
"""Seconds after the drain (finishing the requests) after which a process that has not ended is
killed.
"""
ENDING: tuple[Kind, ...] = ("server", "launcher", "store-host", "store-master")
"""Order in which the kinds of processes are ended: those that others need come last."""
MAX_LINE = 500


def plan_local(spec: ClusterSpec, folder: Path) -> list[ProcessPlan]:
    """Return the processes of a cluster on this machine, connected by Unix sockets in a folder.

    Args:
        spec: describes the cluster.
        folder: from ``make_runtime_dir``, for sockets.
    """
    num_launchers = sum(group.launchers for group in spec.groups)
    launchers = [f"ipc://{folder / f'l{index}.sock'}" for index in range(num_launchers)]
    master = "" if spec.store is None else f"ipc://{folder / 'm.sock'}"
    addresses = Addresses(launchers=launchers, store=master, store_listen=master)
    plans = plan_store(spec, addresses)
    plans += plan_groups(
        spec,
        addresses,
        lambda _, number: launchers[number],
        lambda group, index: f"{group.name}-{index}" if group.launchers > 1 else group.name,
    )
    return [*plans, *plan_servers(spec, addresses, spec.servers.host)]


async def start_bound(
    plan: ProcessPlan, folder: Path, secret_file: Path, cores: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """Start a process of a cluster, which prints a line to standard output when it is up.

    Args:
        plan: the process to start.
        folder: for the file of its settings.
        secret_file: file of the cluster's secret.
        cores: cores that it runs on; empty for all.
    """
    arguments = list(plan.arguments)
    environment = {"OMP_WAIT_POLICY": "PASSIVE"}
    if plan.settings:
        file = folder / f"{plan.name}.yaml"
        file.write_text(yaml.safe_dump(plan.settings))
        arguments += ["--config", str(file)]
    if plan.kind in ("launcher", "server"):
        environment["TANDEM_CLUSTER__SECRET_FILE"] = str(secret_file)
    if plan.kind != "server" and "--store.master" in arguments:
        environment["TANDEM_STORE__SECRET"] = read_secret(secret_file)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        MODULE,
        ",".join(map(str, cores)) or "all",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=child_environment(environment),
        # Give the child its own session, because Ctrl-C in a terminal is meant for this process
        # only, which then ends its children in order.
        start_new_session=True,
    )


class _Running:
    """One process of a cluster that is kept running, over all its restarts."""

    def __init__(self, plan: ProcessPlan, cores: Sequence[int]) -> None:
        self.plan = plan
        self.cores = cores
        self.process: asyncio.subprocess.Process | None = None
        self.up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Future that is done with the first line that the process prints, or with an error if the
        process was given up.
        """
        self.num_restarts = 0
        self.is_ending = False


class ProcessRunner:
    """Runs the processes of a cluster. An async context manager; entering it starts all.

    Args:
        plans: the processes in the order of their starts.
        folder: folder for settings and secrets; borrowed.
        drain_s: seconds that processes get to complete running work.
        secret_file: file of the cluster's secret; None to make one in the folder.
        on_up: called with the plan and each line that a process prints once it is up.
        max_failed_starts: number of failed starts after which a process that has never been up is
            given up; None for never.
    """

    def __init__(
        self,
        plans: Sequence[ProcessPlan],
        folder: Path,
        drain_s: float,
        *,
        secret_file: Path | None = None,
        on_up: Callable[[ProcessPlan, str], None] | None = None,
        max_failed_starts: int | None = MAX_FAILED_STARTS,
    ) -> None:
        self._max_failed_starts = max_failed_starts
        self._plans = list(plans)
        self._folder = folder
        self._drain_s = drain_s
        self._secret_file = secret_file
        self._on_up = on_up
        self._running: list[_Running] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        if self._secret_file is None:
            self._secret_file = self._folder / "secret"
            write_secret(self._secret_file, generate_secret())
        launchers = [plan.name for plan in self._plans if plan.kind == "launcher"]
        shares: dict[str, tuple[int, ...]] = {}
        if len(launchers) > 1:
            cores = _native.read_topology().cores
            shares = dict(zip(launchers, divide_cores(cores, len(launchers)), strict=True))
        for plan in self._plans:
            running = _Running(plan, shares.get(plan.name, ()))
            self._running.append(running)
            self._tasks.append(asyncio.create_task(self._keep(running)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for kind in ENDING:
            ending = [each for each in self._running if each.plan.kind == kind]
            await asyncio.gather(*(self._end(each) for each in ending))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def list_up(self) -> dict[str, str]:
        """Return, by name of each process that has been up, the first line that it printed."""
        return {
            each.plan.name: each.up.result()
            for each in self._running
            if each.up.done() and each.up.exception() is None
        }

    def list_pids(self) -> dict[str, int]:
        """Return the process ids of the running processes, by name."""
        return {
            each.plan.name: each.process.pid
            for each in self._running
            if each.process is not None and each.process.returncode is None
        }

    async def wait_up(self) -> None:
        """Wait until every process has been up once (it prints a line then).

        Raises: PeerLostError if a process was given up; names it.
        """
        await asyncio.gather(*(asyncio.shield(each.up) for each in self._running))

    async def _keep(self, running: _Running) -> None:
        """Run one process of the cluster, and restart it whenever it ends."""
        assert self._secret_file is not None, "entered before"
        pause_s, num_failed = PAUSE_S, 0
        while not running.is_ending:
            process = running.process = await start_bound(
                running.plan, self._folder, self._secret_file, running.cores
            )
            was_up = await self._follow(running, process)
            status = await process.wait()
            if running.is_ending:
                return
            num_failed = 0 if was_up else num_failed + 1
            name = running.plan.name
            limit = self._max_failed_starts
            if limit is not None and num_failed >= limit and not running.up.done():
                what = f"{name} ended {num_failed} times before it was up, status {status}"
                running.up.set_exception(PeerLostError("cluster.up", what))
                return
            logger.error("event=process_lost name=%s status=%d", name, status)
            pause_s = PAUSE_S if was_up else min(2 * pause_s, MAX_PAUSE_S)
            running.num_restarts += 1
            await asyncio.sleep(pause_s)

    async def _follow(self, running: _Running, process: asyncio.subprocess.Process) -> bool:
        """Read a process's output until it ends. Return True if it came up.

        The commands of a cluster print nothing before they are up, so the first line means that.
        """
        assert process.stdout is not None, "piped"
        was_up = False
        async for line in process.stdout:
            text = line.decode(errors="replace").strip()[:MAX_LINE]
            if text and (running.plan.kind != "server" or text.startswith("Serving")):
                was_up = True
                if not running.up.done():
                    running.up.set_result(text)
                if self._on_up is not None:
                    self._on_up(running.plan, text)
        return was_up

    async def _end(self, running: _Running) -> None:
        running.is_ending = True
        process = running.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), self._drain_s + END_S)
        except TimeoutError:
            # Killing this process also ends its children, because their end of the pipe closes.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            await process.wait()
