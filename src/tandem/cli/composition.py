"""The parts of a server put together: `tandem serve` and ``tandem.llm.LLM`` both get them here."""

import contextlib
from collections.abc import AsyncIterator, Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette

from tandem.cli.config import Config, check_store
from tandem.core.adapter import AdapterSource, read_sources
from tandem.core.wire import StageChanged
from tandem.engine.cluster.client import ClusterClient, make_specs
from tandem.engine.config import EngineConfig
from tandem.engine.memory import check_context
from tandem.engine.process.instance import InstanceSpec
from tandem.engine.process.launcher import ProcessLauncher
from tandem.engine.process.store_child import StoreChild
from tandem.models.families import read_json
from tandem.models.loading.hub import resolve_folder
from tandem.models.loading.packed_cache import may_write_cache
from tandem.models.sources.gguf_files import find_gguf
from tandem.models.tokenizing.tokenizer import Tokenizer, load_tokenizer
from tandem.server.api.names import find_names
from tandem.server.api.sampling import load_sampling_defaults
from tandem.server.app import build_app

__all__ = ["CheckedModel", "Composition", "check_model", "compose"]


class CheckedModel(NamedTuple):
    """Files of a model that the settings fit, as far as that is cheap to tell."""

    folder: Path
    tokenizer: Tokenizer
    sources: tuple[AdapterSource, ...]


class Composition(NamedTuple):
    """Parts that serve; ``compose`` owns them."""

    engine: ClusterClient
    app: Starlette
    """``state.context`` is its ``ServerContext``."""


def check_model(settings: Config) -> CheckedModel:
    """Find the model's files, before processes are started and weights are read.

    Raises: ConfigError, and as ``resolve_folder`` and ``load_tokenizer``.
    """
    check_store(settings.store)
    folder = resolve_folder(settings.model.path, revision=settings.model.revision)
    if find_gguf(folder) is None:
        # A folder without a model is refused before its tokenizer.
        _check_context(settings.engine, read_json(folder / "config.json"))
    sources = read_sources(settings.model.adapter)
    names = find_names(settings.model.path, settings.server.served_model_name, folder)
    for source in sources:
        names.check_adapter_name(source.name)
    return CheckedModel(folder, load_tokenizer(folder), sources)


def _check_context(engine: EngineConfig, values: dict[str, Any]) -> None:
    """Refuse a context beyond the model's own, as far as its configuration names that plainly.

    Raises: ConfigError.
    """
    own = values.get("max_position_embeddings")
    if isinstance(own, int) and own > 0:
        check_context(engine.max_model_len, own)


@contextlib.asynccontextmanager
async def compose(
    settings: Config,
    model: CheckedModel,
    launchers: list[ProcessLauncher],
    *,
    log_level: str,
    log_format: str,
    on_stage: Callable[[StageChanged], None] | None = None,
) -> AsyncIterator[Composition]:
    """Start the instances, and the store of their own, and build the application over them.

    Args:
        settings: of the server.
        model: of these settings.
        launchers: one for each instance; borrowed.
        log_level: of the processes started.
        log_format: of the processes started.
        on_stage: as of ``ClusterClient``.
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
            adapters=model.sources,
            engine=settings.engine,
            rpc=settings.rpc,
            tiers=settings.tiers,
            store=store,
            kv_events=settings.kv_events,
            log_level=log_level,
            log_format=log_format,
        )
        cluster = ClusterClient(
            make_specs(settings.cluster, common),
            settings.cluster,
            on_stage=on_stage,
            is_staggered=may_write_cache(settings.model.packed_cache, model.folder),
            # Those that are added later have none prepared.
            make_launcher=chain(launchers, iter(ProcessLauncher, None)).__next__,
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
        )
        yield Composition(engine, app)
