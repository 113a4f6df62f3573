"""What runs and how it fares: models, health, readiness, information, metrics, cache control."""

import asyncio

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import tandem
from tandem.core.errors import ConfigError, PeerLostError
from tandem.core.wire import InstanceStage, InstanceStats
from tandem.server.connection import read_body
from tandem.server.context import ServerContext
from tandem.server.http_errors import RETRY_LATER_S
from tandem.server.protocol.decode import decode_body
from tandem.server.protocol.openai import ModelCard, ModelList
from tandem.server.protocol.sglang import AbortRequest

__all__ = [
    "abort_request",
    "flush_cache",
    "get_health",
    "get_metrics",
    "get_model",
    "get_model_info",
    "get_ready",
    "get_server_info",
    "list_models",
]

_STATS_TIMEOUT_S = 2.0
"""A scrape must not wait for a stuck instance; Prometheus itself gives up after ten seconds."""

_abort_decoder = msgspec.json.Decoder(AbortRequest)
_encode = msgspec.json.Encoder().encode


async def get_health(context: ServerContext, _: Request) -> Response:
    """Liveness: 200 while loading and draining too, 503 once the instance has failed for good."""
    stage = context.engine.stage.stage
    is_failed = stage == InstanceStage.FAILED
    return JSONResponse({"status": str(stage)}, status_code=503 if is_failed else 200)


async def get_ready(context: ServerContext, _: Request) -> Response:
    """Readiness: 200 if a request would be served now, else 503 with how far loading has come."""
    stage = context.engine.stage
    is_draining = context.lifecycle.is_draining
    is_ready = (
        stage.stage == InstanceStage.READY and context.engine.info is not None and not is_draining
    )
    name = InstanceStage.DRAINING if is_draining else stage.stage
    return JSONResponse(
        {
            "status": str(name),
            "detail": stage.detail,
            "done": stage.done,
            "total": stage.total,
        },
        status_code=200 if is_ready else 503,
        headers={} if is_ready else {"Retry-After": str(RETRY_LATER_S)},
    )


def _make_card(context: ServerContext, name: str) -> ModelCard:
    info = context.engine.info
    return ModelCard(
        id=name,
        created=context.created_at,
        root=context.model_names[0],
        max_model_len=info.max_model_len if info is not None else None,
    )


async def list_models(context: ServerContext, _: Request) -> Response:
    """List the names that can be asked for."""
    models = ModelList(data=[_make_card(context, name) for name in context.model_names])
    return Response(_encode(models), media_type="application/json")


async def get_model(context: ServerContext, http: Request) -> Response:
    """Describe one model; names may hold slashes."""
    name = context.check_model(http.path_params["name"])
    return Response(_encode(_make_card(context, name)), media_type="application/json")


async def get_model_info(context: ServerContext, _: Request) -> Response:
    """Describe the model as SGLang does; its frontend reads ``model_path``."""
    info = context.ready_info()
    return JSONResponse(
        {
            "model_path": info.model,
            "tokenizer_path": info.model,
            "served_model_name": context.model_names[0],
            "is_generation": True,
            "preferred_sampling_params": {
                k: v for k, v in msgspec.to_builtins(context.defaults).items() if v is not None
            },
            "model_type": info.architecture,
            "max_model_len": info.max_model_len,
            "num_parameters": info.num_parameters,
            "weight_version": info.weight_version,
        }
    )


async def get_server_info(context: ServerContext, _: Request) -> Response:
    """Return settings (without secrets), what runs, and its counters."""
    stats = await _read_stats(context)
    config = msgspec.to_builtins(context.config)
    for secret in ("api_key", "api_key_file", "ssl_certfile", "ssl_keyfile"):
        del config[secret]
    info = context.engine.info
    return JSONResponse(
        {
            "version": tandem.__version__,
            "served_model_name": context.model_names[0],
            "config": config,
            "instance": msgspec.to_builtins(info) if info is not None else None,
            "stats": msgspec.to_builtins(stats) if stats is not None else None,
            "stage": msgspec.to_builtins(context.engine.stage),
            "max_total_num_tokens": info.num_blocks * info.block_size if info is not None else 0,
            # SGLang's benchmark client looks for a list here.
            "internal_states": [],
        }
    )


async def get_metrics(context: ServerContext, _: Request) -> Response:
    """Return the Prometheus page."""
    stats = await _read_stats(context)
    return Response(context.metrics.render(stats), media_type=CONTENT_TYPE_LATEST)


async def flush_cache(context: ServerContext, _: Request) -> Response:
    """Forget cached prefixes that no running request uses."""
    num_blocks = await context.engine.flush_cache()
    return JSONResponse({"success": True, "num_freed_blocks": num_blocks})


async def abort_request(context: ServerContext, http: Request) -> Response:
    """End a request by the id its client gave it, or all requests."""
    body = await read_body(http, context.config.max_body_bytes, context.config.body_timeout_s)
    request = decode_body(body, _abort_decoder)
    if request.rid is None and not request.abort_all:
        raise ConfigError("server.abort_request", "rid is missing, and abort_all", field="rid")
    name = None if request.abort_all else request.rid
    return JSONResponse({"num_aborted": await context.lifecycle.abort(name)})


async def _read_stats(context: ServerContext) -> InstanceStats | None:
    """Return the instance's counters, None while it is down or does not answer."""
    try:
        async with asyncio.timeout(_STATS_TIMEOUT_S):
            return await context.engine.stats()
    except (PeerLostError, TimeoutError):  # DeadlineError is a TimeoutError.
        return None
