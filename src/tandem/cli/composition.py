"""The composition of a server from its parts, for `tandem serve` and ``tandem.llm.LLM``."""

import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.applications import Starlette

from tandem.cli.config import Config, check_store
from tandem.core.adapter import AdapterSource, read_sources
from tandem.core.errors import ConfigError, NotFoundError
from tandem.core.wire import InstanceStage, StageChanged
from tandem.engine.cluster.client import ClusterClient, make_specs
from tandem.engine.config import EngineConfig
from tandem.engine.launching.attached import AttachedCluster
from tandem.engine.launching.rosters import Rosters
from tandem.engine.launching.service import LauncherService, make_prefix
from tandem.engine.launching.trust import derive_transfer_secret, read_cluster_secret
from tandem.engine.memory import check_context
from tandem.engine.process.fork_server import ForkServer
from tandem.engine.process.instance import InstanceSpec
from tandem.engine.process.launcher import ProcessLauncher
from tandem.engine.process.store_child import StoreChild
from tandem.models.families import read_json
from tandem.models.loading.hub import resolve_folder
from tandem.models.loading.packed_cache import may_write_cache
from tandem.models.sources.gguf_files import find_gguf
from tandem.models.tokenizing.tokenizer import Tokenizer, load_tokenizer
from tandem.rpc.wire.endpoint import parse_endpoint
from tandem.server.api.names import find_names
from tandem.server.app import build_app
from tandem.server.defaults import load_sampling_defaults
from tandem.server.lifecycle import Lifecycle
from tandem.transfer.config import TransferConfig

__all__ = [
    "CheckedModel",
    "Composition",
    "check_files",
    "check_model",
    "compose",
    "compose_launcher",
]

ATTACH_TIMEOUT_S = 600.0
"""Seconds to wait for a launcher to be reachable; its machine may still be starting."""


class CheckedModel(NamedTuple):
    """The files of a model, checked against the settings as far as that is quick."""

    folder: Path
    tokenizer: Tokenizer
    sources: tuple[AdapterSource, ...]


class Composition(NamedTuple):
    """The parts of a running server (engine client, HTTP application); ``compose`` owns them."""

    engine: ClusterClient
    app: Starlette
    """HTTP application; ``state.context`` is its ``ServerContext``."""


def check_model(settings: Config) -> CheckedModel:
    """Find the model's files, before processes are started and weights are read.

    Raises: ConfigError (settings do not go together); errors of ``check_files`` and
        ``load_tokenizer``.
    """
    if settings.cluster.launchers:
        if settings.store.memory_bytes:
            raise ConfigError(
                "cli.serve",
                "instances of launchers use the store of these: set store.memory there",
                field="store.memory",
            )
    else:
        settings.cluster.require_pairs()
    folder, sources = check_files(settings)
    tokenizer = load_tokenizer(folder)
    if settings.server.chat_template:
        tokenizer.chat_template = _read_template(settings.server.chat_template)
    return CheckedModel(folder, tokenizer, sources)


def _read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        what = f"chat template {path!r}: {error}: give a file of jinja"
        raise ConfigError("cli.serve", what, field="server.chat_template") from error


def check_files(settings: Config) -> tuple[Path, tuple[AdapterSource, ...]]:
    """Return the folder of the model, and its adapters.

    Raises: ConfigError (a setting does not fit the model or another setting); errors of
        ``resolve_folder``.
    """
    check_store(settings.store)
    folder = resolve_folder(settings.model.path, revision=settings.model.revision)
    if find_gguf(folder) is None:
        # The configuration is read first, so that a folder without a model is reported as such, and
        # not as one without a tokenizer.
        _check_context(settings.engine, read_json(folder / "config.json"))
    sources = read_sources(settings.model.adapter)
    names = find_names(settings.model.path, settings.server.served_model_name, folder)
    for source in sources:
        names.check_adapter_name(source.name)
        if not settings.cluster.launchers:  # They may have folders of their own.
            _check_adapter(source)
    return folder, sources


def _check_adapter(source: AdapterSource) -> None:
    """Raise NotFoundError if a folder holds no adapter, seconds before an instance would."""
    name = "adapter_config.json"
    if not (Path(source.folder) / name).exists():
        what = f"adapter {source.name}: {source.folder} is not an adapter: no {name}"
        raise NotFoundError("cli.serve", f"{what}: give its folder", field="model.adapter")


def _check_context(engine: EngineConfig, values: dict[str, Any]) -> None:
    """Check that the context is not longer than the model's own, if its configuration states that
    plainly.

    Raises: ConfigError (it is longer).
    """
    own = values.get("max_position_embeddings")
    if isinstance(own, int) and own > 0:
        check_context(engine.max_model_len, own)


@contextlib.asynccontextmanager
async def compose(
    settings: Config,
    model: CheckedModel,
    fork_server: ForkServer,
    *,
    log_level: str,
    log_format: str,
    on_stage: Callable[[StageChanged], None] | None = None,
    lifecycle: Lifecycle | None = None,
    is_asleep: bool = False,
) -> AsyncIterator[Composition]:
    """Start the instances, and their store if one is configured, and build the application over
    them.

    Args:
        settings: settings of the server.
        model: model of these settings, checked.
        fork_server: starts the instances' processes; not owned.
        log_level: log level of the started processes.
        log_format: log format of the started processes.
        on_stage: see ``ClusterClient``.
        lifecycle: see ``build_app``.
        is_asleep: see ``ClusterClient``.
    """
    async with contextlib.AsyncExitStack() as opened:
        opening = _open_common(settings, model.sources, log_level=log_level, log_format=log_format)
        common, child = await opened.enter_async_context(opening)
        if settings.cluster.launchers:
            if on_stage is not None:
                on_stage(StageChanged(InstanceStage.STARTING, "looking for instances"))
            rosters = Rosters(
                settings.cluster.launchers,
                common.secret,
                settings.rpc,
                settings.cluster.recovery_s,
            )
            await (await opened.enter_async_context(rosters)).wait_first(ATTACH_TIMEOUT_S)
            cluster = AttachedCluster(rosters, common, settings.cluster, on_stage=on_stage)
        else:
            cluster = ClusterClient(
                make_specs(settings.cluster, common),
                settings.cluster,
                on_stage=on_stage,
                is_staggered=may_write_cache(settings.model.packed_cache, model.folder),
                make_launcher=partial(ProcessLauncher, fork_server),
                is_asleep=is_asleep,
            )
        engine = await opened.enter_async_context(cluster)
        adapter_folder = settings.model.adapter_folder
        app = build_app(
            settings.server,
            engine,
            model.tokenizer,
            settings.model.path,
            folder=model.folder,
            defaults=load_sampling_defaults(model.folder),
            adapter_folder=Path(adapter_folder) if adapter_folder else None,
            read_store=None if child is None else lambda: child.status,
            lifecycle=lifecycle,
        )
        yield Composition(engine, app)


@contextlib.asynccontextmanager
async def compose_launcher(
    settings: Config, fork_server: ForkServer, *, log_level: str, log_format: str
) -> AsyncIterator[LauncherService]:
    """Start instances, and their store if one is configured, and serve their roster to servers.

    Args:
        settings: settings of the instances, with ``launcher.listen``.
        fork_server: starts the instances' processes; not owned.
        log_level: log level of the started processes.
        log_format: log format of the started processes.
    """
    endpoint = settings.launcher.listen
    folder, sources = check_files(settings)
    async with contextlib.AsyncExitStack() as opened:
        opening = _open_common(settings, sources, log_level=log_level, log_format=log_format)
        common, _ = await opened.enter_async_context(opening)
        parsed = parse_endpoint(endpoint)
        if not parsed.is_local_socket and common.secret is None:
            raise ConfigError(
                "cluster.launch",
                f"{endpoint} is reachable from other machines: make keys with `tandem cluster "
                "keys` and set cluster.secret_file",
                field="cluster.secret_file",
            )
        if common.secret is not None:
            host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host or "127.0.0.1"
            transfer = TransferConfig(
                secret=derive_transfer_secret(common.secret), listen=(f"{host}:0",)
            )
            common = msgspec.structs.replace(common, transfer=transfer)
        prefix = make_prefix(settings.launcher.name)
        specs = [
            # Several servers share these instances and choose among them by cached blocks, so every
            # instance reports its blocks.
            msgspec.structs.replace(spec, name=prefix + spec.name, tells_blocks=True)
            for spec in make_specs(settings.cluster, common)
        ]
        service = LauncherService(
            specs,
            settings.cluster,
            endpoint,
            settings.launcher.name,
            fork_server=fork_server,
            is_staggered=may_write_cache(settings.model.packed_cache, folder),
        )
        yield await opened.enter_async_context(service)


@contextlib.asynccontextmanager
async def _open_common(
    settings: Config, sources: tuple[AdapterSource, ...], *, log_level: str, log_format: str
) -> AsyncIterator[tuple[InstanceSpec, StoreChild | None]]:
    """Give the settings that all instances share, and the store that was started for them; None if
    the settings ask for no store.
    """
    async with contextlib.AsyncExitStack() as opened:
        store, child = None, None
        if settings.store.memory_bytes:
            child = StoreChild(
                settings.store, settings.rpc, log_level=log_level, log_format=log_format
            )
            store = (await opened.enter_async_context(child)).store
        elif settings.store.master:
            store = settings.store
        common = InstanceSpec(
            model=settings.model,
            adapters=sources,
            engine=settings.engine,
            rpc=settings.rpc,
            secret=read_cluster_secret(settings.cluster),
            tiers=settings.tiers,
            store=store,
            kv_events=settings.kv_events,
            log_level=log_level,
            log_format=log_format,
        )
        yield common, child
