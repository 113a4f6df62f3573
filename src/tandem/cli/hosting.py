"""``tandem serve --hub.file``: serve several models behind one address."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tandem.cli.config import Config
from tandem.cli.extras import require_serve
from tandem.cli.output import print_json, print_next
from tandem.core.adapter import read_sources
from tandem.core.descriptors import raise_limit
from tandem.core.errors import ConfigError
from tandem.core.logs import LogFormat, LogLevel, configure_logging
from tandem.integrations.deploying.processes import merge_settings
from tandem.server.config import configure_access_log
from tandem.server.hub.config import HostedSpec, load_hub_file

if TYPE_CHECKING:
    from tandem.engine.cluster.client import ClusterClient
    from tandem.engine.process.fork_server import ForkServer
    from tandem.server.hub.front import ModelFront
    from tandem.server.hub.hub import ModelHub

__all__ = ["compose_models", "serve_models"]

WEIGHT_FILES = ("*.safetensors", "*.gguf")


def serve_models(
    settings: Config, log_level: LogLevel, log_format: LogFormat, *, json: bool
) -> None:
    """Serve the models of a file over HTTP."""
    if settings.model.path:
        raise ConfigError(
            "cli.serve", "the file names the models: give none beside it", field="hub.file"
        )
    require_serve()
    configure_logging("server", log_level, log_format)
    configure_access_log(settings.server, log_level)
    raise_limit()
    asyncio.run(_serve(settings, log_level, log_format, json=json))


async def _serve(settings: Config, log_level: str, log_format: str, *, json: bool) -> None:
    from tandem.engine.process.fork_server import ForkServer

    async with contextlib.AsyncExitStack() as opened:
        # The libraries of instances are imported while this process imports the server.
        fork_server = await opened.enter_async_context(ForkServer())
        from tandem.server.run import RunningServer, open_listener, run_server

        listener = opened.enter_context(open_listener(settings.server))
        composing = compose_models(
            settings, fork_server, log_level=log_level, log_format=log_format
        )
        async with composing as (hub, front):

            def announce(running: RunningServer) -> None:
                if json:
                    print_json({"url": running.url, "models": list(hub.models)})
                else:
                    sys.stdout.write(f"Serving {', '.join(hub.models)} at {running.url}\n")
                sys.stdout.flush()
                if not json:
                    print_next("tandem", "chat", next(iter(hub.models)), "--url", running.url)

            # Pinned models are woken before the port is opened, so that they serve from the first
            # request on.
            for model in hub.models.values():
                if model.is_pinned:
                    await hub.wake(model.name)
            await run_server(settings.server, front, announce, listener)


@contextlib.asynccontextmanager
async def compose_models(
    settings: Config, fork_server: "ForkServer", *, log_level: str, log_format: str
) -> "AsyncIterator[tuple[ModelHub, ModelFront]]":
    """Build an application for each model of ``hub.file``, and the one that passes requests to
    them.

    Args:
        settings: settings of the server, and of each model unless the file overrides them.
        fork_server: starts the instances' processes; not owned.
        log_level: log level of the started processes.
        log_format: log format of the started processes.
    """
    from tandem.cli.composition import check_model, compose
    from tandem.server.hub.front import ModelFront
    from tandem.server.hub.hub import HostedModel, ModelHub
    from tandem.server.hub.residency import Residency

    file = load_hub_file(Path(settings.hub.file))
    own = {name: _overlay(settings, name, spec) for name, spec in file.models.items()}
    checked = {name: check_model(each) for name, each in own.items()}
    needs = {
        name: spec.memory_bytes or _estimate(checked[name].folder, own[name])
        for name, spec in file.models.items()
    }
    residency = Residency(file.memory_bytes, needs)
    async with contextlib.AsyncExitStack() as opened:
        models: dict[str, HostedModel] = {}
        engines: dict[str, ClusterClient] = {}
        lifecycle = None
        for name, spec in file.models.items():
            composing = compose(
                own[name],
                checked[name],
                fork_server,
                log_level=log_level,
                log_format=log_format,
                lifecycle=lifecycle,
                is_asleep=True,
            )
            engine, app = await opened.enter_async_context(composing)
            lifecycle = app.state.context.lifecycle
            engines[name] = engine
            models[name] = HostedModel(name, app, engine, spec.is_pinned)
        hub = ModelHub(models, residency)
        opened.push_async_callback(hub.close)
        for name, model in models.items():
            model.app.state.context.hub = hub
            model.app.state.context.wake = hub.make_loader(name)
            engines[name].gate = hub.make_gate(name)
        yield hub, ModelFront(hub)


def _overlay(settings: Config, name: str, spec: HostedSpec) -> Config:
    """Return the settings of one model: those of the server, overridden by the file's.

    Raises: ConfigError (the file's settings are invalid).
    """
    values = merge_settings(msgspec.to_builtins(settings), spec.settings)
    forced = {
        "model": {"path": spec.path},
        "server": {"served_model_name": [name]},
        "hub": {"file": ""},
    }
    try:
        return msgspec.convert(merge_settings(values, forced), type=Config)
    except msgspec.ValidationError as error:
        what = f"{settings.hub.file}: models.{name}.settings: {error}"
        raise ConfigError("hub.read", what, field="hub.file") from None


def _estimate(folder: Path, settings: Config) -> int:
    """Return about how many bytes a model needs: the size of its files and those of its adapters,
    plus the configured KV cache.

    Raises: ConfigError (a setting does not name an adapter as NAME=FOLDER).
    """
    adapters = [Path(source.folder) for source in read_sources(settings.model.adapter)]
    sizes = [
        path.stat().st_size
        for place in (folder, *adapters)
        for pattern in WEIGHT_FILES
        for path in ([place] if place.is_file() else place.glob(pattern))
    ]
    return sum(sizes) + int((settings.engine.kv_cache_gib or 0) * 2**30)
