"""``tandem cluster launch``: the process that owns the instances of one machine."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.config import LAUNCH_SETTINGS, Config, load_config, with_config_flags
from tandem.cli.extras import require_serve
from tandem.cli.output import JsonFlag, print_json, print_next
from tandem.core.descriptors import raise_limit
from tandem.core.errors import ConfigError
from tandem.core.logs import LogFormat, LogLevel, configure_logging

if TYPE_CHECKING:
    from tandem.engine.launching.service import LauncherService

__all__ = ["launch"]


@with_config_flags(LAUNCH_SETTINGS)
def launch(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Folder, GGUF file, hub id or `demo`.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least severe lines.")] = LogLevel.WARNING,
    log_format: Annotated[LogFormat, typer.Option(help="text or json.")] = LogFormat.TEXT,
    json: JsonFlag = False,
    **flags: Any,
) -> None:
    """Own instances on this machine, for servers that run with --cluster.launchers."""
    settings = load_config(config, flags, model=model).config
    if not settings.model.path:
        raise ConfigError(
            "cluster.launch", "name a model: a folder, a hub id or `demo`", field="model.path"
        )
    if not settings.launcher.listen:
        raise ConfigError(
            "cluster.launch",
            "say where servers find it: ipc:///path/launcher.sock or tcp://host:port",
            field="launcher.listen",
        )
    require_serve()
    configure_logging(settings.launcher.name or "launcher", log_level, log_format)
    raise_limit()
    asyncio.run(_launch(settings, log_level, log_format, json=json))


async def _launch(settings: Config, log_level: str, log_format: str, *, json: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with _compose(settings, log_level, log_format) as service:
        stopped = asyncio.create_task(stop.wait())
        serving = asyncio.create_task(_announce(service, settings, json=json))
        try:
            await asyncio.wait((stopped, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
                await stopped
                stop.clear()
                # A second signal ends the draining at once.
                draining = asyncio.create_task(service.drain(settings.launcher.drain_timeout_s))
                again = asyncio.create_task(stop.wait())
                await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
                for task in (draining, again):
                    task.cancel()
                await asyncio.gather(draining, again, return_exceptions=True)
        finally:
            for task in (stopped, serving):
                task.cancel()
            await asyncio.gather(stopped, serving, return_exceptions=True)


@contextlib.asynccontextmanager
async def _compose(
    settings: Config, log_level: str, log_format: str
) -> "AsyncIterator[LauncherService]":
    from tandem.engine.process.fork_server import ForkServer

    # The libraries of instances are imported while this process imports the launcher.
    async with ForkServer() as fork_server:
        from tandem.cli.composition import compose_launcher

        composing = compose_launcher(
            settings, fork_server, log_level=log_level, log_format=log_format
        )
        async with composing as service:
            yield service


async def _announce(service: "LauncherService", settings: Config, *, json: bool) -> None:
    """Print the launcher's address once all instances serve; scripts wait for this line."""
    info = await service.wait_ready()
    if json:
        print_json({"endpoint": service.endpoint, "instances": service.instances})
    else:
        names = ", ".join(service.instances)
        sys.stdout.write(f"{names} of {info.model}; launcher at {service.endpoint}\n")
        sys.stdout.flush()
        cluster = settings.cluster
        proof = ("--cluster.secret-file", cluster.secret_file) if cluster.secret_file else ()
        words = ("serve", settings.model.path, "--cluster.launchers", service.endpoint, *proof)
        print_next("tandem", *words)
    sys.stdout.flush()
