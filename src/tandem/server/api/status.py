"""The state of the server: models, health, readiness, information, metrics, cache control."""

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import tandem
from tandem.core.errors import ConfigError, PermissionDeniedError
from tandem.core.wire import InstanceStage
from tandem.server.context import ServedModel, ServerContext
from tandem.server.edge.auth import is_admin
from tandem.server.edge.http_errors import RETRY_LATER_S
from tandem.server.protocol.openai import ModelCard, ModelList
from tandem.server.protocol.sglang import AbortRequest
from tandem.server.protocol.status import (
    AbortReply,
    FlushReply,
    Health,
    ModelInfo,
    Readiness,
    ServerInfo,
    Version,
)
from tandem.server.telemetry.metrics import merge_pages

__all__ = [
    "abort_request",
    "flush_cache",
    "get_expert_counts",
    "get_health",
    "get_live",
    "get_metrics",
    "get_model",
    "get_model_info",
    "get_ready",
    "get_server_info",
    "get_version",
    "list_models",
]

_abort_decoder = msgspec.json.Decoder(AbortRequest)
_encode = msgspec.json.Encoder().encode


def _is_ready(context: ServerContext) -> bool:
    if context.hub is not None:
        # A sleeping model counts as ready: the request that names it wakes it.
        states = {model.state for model in context.hub.models.values()}
        return not context.lifecycle.is_draining and states != {"waking"}
    is_up = context.engine.stage.stage == InstanceStage.READY and context.engine.info is not None
    return is_up and not context.lifecycle.is_draining


def _name_stage(context: ServerContext) -> str:
    is_draining = context.lifecycle.is_draining
    return str(InstanceStage.DRAINING if is_draining else context.engine.stage.stage)


def _answer(reply: msgspec.Struct, *, is_ok: bool = True) -> Response:
    return Response(
        _encode(reply),
        status_code=200 if is_ok else 503,
        headers={} if is_ok else {"Retry-After": str(RETRY_LATER_S)},
        media_type="application/json",
    )


async def get_health(context: ServerContext, _: Request) -> Response:
    """Answer 200 if requests are served, 503 while the server loads, is down or drains."""
    return _answer(Health(_name_stage(context)), is_ok=_is_ready(context))


async def get_live(context: ServerContext, _: Request) -> Response:
    """Answer 200 while the server works, also while it loads or drains; 503 if it needs a
    restart.
    """
    is_failed = context.engine.stage.stage == InstanceStage.FAILED
    return _answer(Health(_name_stage(context)), is_ok=not is_failed)


async def get_ready(context: ServerContext, _: Request) -> Response:
    """Answer as /health does, with the progress of loading."""
    stage = context.engine.stage
    reply = Readiness(_name_stage(context), stage.detail, stage.done, stage.total)
    return _answer(reply, is_ok=_is_ready(context))


async def get_version(_: ServerContext, __: Request) -> Response:
    """Return the version of the server."""
    return _answer(Version(tandem.__version__))


def _make_card(context: ServerContext, model: ServedModel) -> ModelCard:
    info, adapter = context.engine.info, model.adapter
    return ModelCard(
        id=model.name,
        created=context.created_at,
        root=context.models.root if adapter is None else adapter.folder,
        parent=None if adapter is None else context.models.first,
        max_model_len=info.max_model_len if info is not None else None,
        default_sampling=context.defaults.chat.list_values(),
        note=context.files.note if adapter is None else "",
    )


async def list_models(context: ServerContext, _: Request) -> Response:
    """List the names of models and adapters that requests can ask for."""
    cards: list[ModelCard] = []
    for each in context.siblings:
        served = [ServedModel(name) for name in each.models.served]
        served += [ServedModel(name, info) for name, info in each.engine.adapters.items()]
        cards += [_make_card(each, model) for model in served]
    return _answer(ModelList(data=cards))


async def get_model(context: ServerContext, http: Request) -> Response:
    """Describe one model; its name may contain slashes. Without a name, list them."""
    if not http.path_params["name"]:
        return await list_models(context, http)
    model = context.find_model(http.path_params["name"])
    return _answer(_make_card(context, model))


async def get_model_info(context: ServerContext, _: Request) -> Response:
    """Describe the model in SGLang's form; SGLang's frontend reads ``model_path``."""
    info = context.ready_info()
    return _answer(
        ModelInfo(
            model_path=context.models.root,
            tokenizer_path=context.models.root,
            served_model_name=context.models.first,
            preferred_sampling_params=context.defaults.own.list_values(),
            model_type=info.architecture,
            max_model_len=info.max_model_len,
            num_parameters=info.num_parameters,
            weight_version=info.weight_version,
        )
    )


async def get_server_info(context: ServerContext, _: Request) -> Response:
    """Return the settings (without secrets), facts about the instances, and their statistics."""
    stats = await context.read_stats()
    config = msgspec.to_builtins(context.config)
    for secret in ("api_key", "api_key_file", "admin_api_key", "ssl_certfile", "ssl_keyfile"):
        del config[secret]
    info = context.engine.info
    return _answer(
        ServerInfo(
            version=tandem.__version__,
            served_model_name=context.models.first,
            config=config,
            instance=info,
            stats=stats,
            stage=context.engine.stage,
            instances=context.engine.instances,
            store=None if context.read_store is None else context.read_store(),
            max_total_num_tokens=info.num_blocks * info.block_size if info is not None else 0,
        )
    )


async def get_metrics(context: ServerContext, _: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    pages: list[bytes] = []
    for each in context.siblings:
        stats = await each.read_stats()
        engine = each.engine
        page = each.metrics.render(stats, engine.instances, engine.fallbacks, engine.margins)
        pages.append(page)
    return Response(merge_pages(pages), media_type=CONTENT_TYPE_LATEST)


async def get_expert_counts(context: ServerContext, http: Request) -> Response:
    """Return how often each expert was chosen, by tokens of all clients; needs admin rights."""
    if not is_admin(http.scope):
        what = "the counts are of all clients' texts: use an admin key (server.admin_api_key)"
        raise PermissionDeniedError("server.expert_counts", what)
    return _answer(await context.engine.read_expert_counts())


async def flush_cache(context: ServerContext, http: Request) -> Response:
    """Drop all clients' cached prefixes that no running request uses; needs admin rights."""
    if not is_admin(http.scope):
        what = "the cache is all clients': use an admin key (server.admin_api_key)"
        raise PermissionDeniedError("server.flush_cache", what)
    num_blocks = await context.engine.flush_cache()
    return _answer(FlushReply(success=True, num_freed_blocks=num_blocks))


async def abort_request(context: ServerContext, http: Request) -> Response:
    """End the caller's request with this id, or all of them; with admin rights, any client's."""
    request = await context.read_request(http, _abort_decoder)
    if request.rid is None and not request.abort_all:
        raise ConfigError("server.abort_request", "rid is missing, and abort_all", field="rid")
    name = None if request.abort_all else request.rid
    owner = None if is_admin(http.scope) else context.find_owner(http)
    return _answer(AbortReply(await context.lifecycle.abort(name, owner)))
