"""The HTTP application: its routes, its middleware and the context that they share.

Middleware from the outermost on: access log (ids), CORS (answers preflights, which carry no key),
admission (counts and drains), host check, key check; then the route. Probes pass all of them. Every
error leaves through ``_answer_error``.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.core.errors import ConfigError, InternalError, TandemError
from tandem.core.instance_status import StoreStatus
from tandem.models.file_facts import FileFacts, read_file_facts
from tandem.models.tokenizing.tokenizer import Tokenizer
from tandem.server.api.endpoints import list_endpoints
from tandem.server.api.explain import collect_timeline
from tandem.server.api.names import find_names
from tandem.server.api.openapi import Handler
from tandem.server.api.prompts import PromptEncoder
from tandem.server.batches.worker import work_on_batches
from tandem.server.config import (
    ServerConfig,
    check_exposure,
    is_loopback,
    load_api_keys,
    load_terms,
)
from tandem.server.context import ServerContext
from tandem.server.defaults import NEUTRAL, DefaultSampling
from tandem.server.dialects.ollama import write_ollama_error
from tandem.server.dialects.vectors.embeddings import read_pooling
from tandem.server.edge.access import CLIENT_CLOSED, AccessLog
from tandem.server.edge.auth import ADMIN_PATHS, ApiKeyGate
from tandem.server.edge.connection import ClientGoneError
from tandem.server.edge.hosts import CrossOrigin, HostGate
from tandem.server.edge.http_errors import (
    HttpError,
    WriteError,
    describe_error,
    encode_error,
    error_response,
)
from tandem.server.engine import EngineClient
from tandem.server.lifecycle import AdmissionGate, Lifecycle
from tandem.server.outputs.formats import FORMATS, OutputFormat, detect_format
from tandem.server.page.files import list_page_routes
from tandem.server.telemetry.load_log import log_load
from tandem.server.telemetry.metrics import ServerMetrics
from tandem.server.telemetry.timelines import TimelineRing
from tandem.server.telemetry.tracing import make_tracer
from tandem.server.text.chat_template import ChatTemplate
from tandem.server.text.work_threads import WorkThreads

__all__ = ["build_app"]

_logger = logging.getLogger(__name__)

_LONGEST_PATH = 200
_NEAR = 0.9
"""Likeness of two paths of which one may have been meant by the other."""
_KEEPING = frozenset(f"/api/{verb}" for verb in ("pull", "push", "create", "copy", "delete"))
"""Endpoints of Ollama that change which models there are."""


def build_app(
    config: ServerConfig,
    engine: EngineClient,
    tokenizer: Tokenizer,
    model: str,
    *,
    folder: Path | None = None,
    defaults: DefaultSampling | None = None,
    adapter_folder: Path | None = None,
    read_store: Callable[[], StoreStatus] | None = None,
    lifecycle: Lifecycle | None = None,
) -> Starlette:
    """Build the HTTP application over one engine.

    Args:
        config: settings, which are checked here.
        engine: engine client; not owned. It may still be loading.
        tokenizer: tokenizer of the engine's model.
        model: the user's name for it, a folder or a hub id; see ``names.find_names``.
        folder: folder of the model's files; None: there is none.
        defaults: sampling values of requests that name none; None: the neutral ones.
        adapter_folder: folder from which adapters may be loaded while serving; None: none may.
        read_store: returns the state of the server's own store; None: there is none.
        lifecycle: lifecycle that is shared with other models' applications; None: a new one.

    Returns: the application; ``state.context`` is its ``ServerContext``.

    Raises:
        ConfigError: the settings contradict each other, or would give access without a key.
    """
    keys = load_api_keys(config)
    terms = load_terms(config)
    check_exposure(config, keys)
    models = find_names(model, config.served_model_name, folder)
    metrics = ServerMetrics(models.first)
    context = ServerContext(
        config=config,
        engine=engine,
        encoder=_make_encoder(config, tokenizer),
        models=models,
        defaults=defaults if defaults is not None else NEUTRAL,
        files=FileFacts("safetensors") if folder is None else read_file_facts(folder),
        metrics=metrics,
        lifecycle=Lifecycle(metrics) if lifecycle is None else lifecycle,
        timelines=TimelineRing(config.timelines),
        has_keys=bool(keys),
        terms=terms,
        has_admin_keys=bool(config.admin_api_key),
        adapter_folder=adapter_folder,
        read_store=read_store,
        pooling=read_pooling(folder),
    )
    context.tracer = make_tracer(
        config.otlp_endpoint, models.first, lambda record: collect_timeline(context, record)
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        warm_up = asyncio.create_task(context.encoder.warm_up())
        load_log = None
        if config.load_log_s > 0:
            load_log = asyncio.create_task(log_load(context, config.load_log_s))
        async with work_on_batches(config, handlers.__getitem__) as context.batches:
            yield
        if load_log is not None:
            load_log.cancel()
            await asyncio.gather(load_log, return_exceptions=True)
        jobs = [*context.background_jobs.values()]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await warm_up
        if context.tracer is not None:
            await context.tracer.close()
        context.close()

    hosts = list(config.allowed_hosts)
    if not is_loopback(config.host):
        hosts.append(config.host)
    endpoints = list_endpoints(config)
    handlers = {each.path: _bind(context, each.handler) for each in endpoints}
    page = list_page_routes()
    app = Starlette(
        routes=[
            *(
                Route(each.path, _bind(context, each.handler), methods=list(each.methods))
                for each in endpoints
            ),
            *page,
        ],
        middleware=_make_gates(context, keys, hosts, [route.path for route in page]),
        exception_handlers={HTTPException: _answer_http_exception},
        lifespan=lifespan,
    )
    app.state.context = context
    return app


def _make_gates(
    context: ServerContext, keys: tuple[str, ...], hosts: list[str], page: list[str]
) -> list[Middleware]:
    config = context.config
    origins = config.cors_origins
    # Whoever may connect may do all on a server without keys; local pages may do a little of it.
    allows_local = not keys and is_loopback(config.host)
    return [
        Middleware(AccessLog, clock=context.clock),
        Middleware(CrossOrigin, origins=origins, allows_local=allows_local),
        Middleware(AdmissionGate, lifecycle=context.lifecycle, max_in_flight=config.max_in_flight),
        Middleware(HostGate, allowed=hosts, origins=origins, allows_local=allows_local),
        Middleware(ApiKeyGate, keys=keys, admin_keys=config.admin_api_key, keyless_paths=page),
    ]


def _make_encoder(config: ServerConfig, tokenizer: Tokenizer) -> PromptEncoder:
    template = None
    if tokenizer.chat_template is not None:
        template = ChatTemplate(
            tokenizer.chat_template,
            tokenizer.special_tokens,
            tool_source=tokenizer.tool_template,
            timeout_s=config.template_timeout_s,
            # A rendered prompt longer than four bodies of the largest size comes from a template
            # that loops without end.
            max_chars=4 * config.max_body_bytes,
        )
    threads = WorkThreads(config.tokenizer_threads)
    return PromptEncoder(tokenizer, threads, template, _find_form(config, tokenizer))


def _find_form(config: ServerConfig, tokenizer: Tokenizer) -> OutputFormat | None:
    name = config.output_format
    if name == "auto":
        sources = [source or "" for source in (tokenizer.tool_template, tokenizer.chat_template)]
        name = next(filter(None, map(detect_format, sources)), "none")
    elif name != "none" and name not in FORMATS:
        known = ", ".join(FORMATS)
        what = f"output_format {name!r} is not known: use auto, none, {known}"
        raise ConfigError("server.build_app", what, field="server.output_format")
    return FORMATS.get(name)


def _bind(context: ServerContext, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            is_for_model = request.method == "POST" and request.url.path not in ADMIN_PATHS
            if context.wake is not None and is_for_model:
                await context.wake()
            return await handler(context, request)
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED)
        except HttpError as error:
            return error_response(error, _find_form_of_errors(request))
        except TandemError as error:
            return _answer_error(request, error)
        except Exception:
            _logger.exception("event=request_failed path=%s", request.url.path)
            error = InternalError("server.handle", "the server failed; its log says why")
            return error_response(describe_error(error), _find_form_of_errors(request))

    return endpoint


def _answer_error(request: Request, error: TandemError) -> Response:
    answer = describe_error(error)
    if answer.status >= 500 and not error.retryable:
        _logger.error("event=request_failed path=%s error=%s", request.url.path, error)
    return error_response(answer, _find_form_of_errors(request))


def _find_form_of_errors(request: Request) -> WriteError:
    """Return the function that encodes errors for the request's API; by default OpenAI's."""
    return getattr(request.state, "write_error", encode_error)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Return the router's own refusals (no such path, wrong method) in the form of errors of the
    API to which the path would belong.
    """
    assert isinstance(error, HTTPException)
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=error.headers)
    what = error.detail
    if error.status_code == 404:
        path = quote(request.url.path)[:_LONGEST_PATH]
        known = {each.path for each in list_endpoints(request.app.state.context.config)}
        near = get_close_matches(request.url.path[:_LONGEST_PATH], known, n=1, cutoff=_NEAR)
        hint = f"did you mean {near[0].replace(':path', '')}? " if near else ""
        what = f"there is no endpoint {path}: {hint}GET /openapi.json lists all"
        if request.url.path in _KEEPING:
            what = f"{path} is not served: `tandem pull`, `list` and `rm` keep the models"
    is_ollama = request.url.path.startswith("/api/")
    return error_response(
        HttpError(
            error.status_code,
            what,
            code="method_not_allowed" if error.status_code == 405 else "not_found",
            headers=error.headers,
        ),
        write_ollama_error if is_ollama else encode_error,
    )
