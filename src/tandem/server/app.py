"""The application: routes, middleware and what they share.

Order of the gates, outermost first: admission (counts, drains), host, key, then the route. Probes
pass all of them. No request is handled in two places, and every answer that is an error leaves
through ``_answer_error``.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.core.errors import InternalError, TandemError
from tandem.server import generate, status, tokens
from tandem.server.auth import ApiKeyGate
from tandem.server.chat import answer_chat
from tandem.server.chat_template import ChatTemplate
from tandem.server.completions import answer_completion
from tandem.server.config import ServerConfig, check_exposure, is_loopback, load_api_keys
from tandem.server.connection import ClientGoneError
from tandem.server.context import ServerContext
from tandem.server.engine import EngineClient
from tandem.server.hosts import HostGate
from tandem.server.http_errors import HttpError, describe_error, error_response
from tandem.server.lifecycle import AdmissionGate, Lifecycle
from tandem.server.metrics import ServerMetrics
from tandem.server.prompts import PromptEncoder
from tandem.server.sampling import SamplingDefaults
from tandem.server.tokenizer import Tokenizer, TokenThreads

__all__ = ["build_app"]

_logger = logging.getLogger(__name__)

_Handler = Callable[[ServerContext, Request], Awaitable[Response]]
_CLIENT_CLOSED = 499
"""What nginx logs for a client that left; nobody reads it."""


def build_app(
    config: ServerConfig,
    engine: EngineClient,
    tokenizer: Tokenizer,
    model_name: str,
    *,
    defaults: SamplingDefaults | None = None,
) -> Starlette:
    """Build the HTTP application over one engine.

    Args:
        config: checked here.
        engine: borrowed; may still be loading.
        tokenizer: of the model that the engine runs.
        model_name: reported where ``served_model_name`` does not say otherwise.
        defaults: sampling defaults of the checkpoint (``sampling.load_sampling_defaults``).

    Returns: the application; ``state.context`` is its ``ServerContext``.

    Raises:
        ConfigError: settings that contradict, or would let strangers in.
    """
    keys = load_api_keys(config)
    check_exposure(config, keys)
    names = config.served_model_name or (model_name,)
    metrics = ServerMetrics(names[0])
    context = ServerContext(
        config=config,
        engine=engine,
        encoder=_make_encoder(config, tokenizer),
        model_names=names,
        defaults=defaults if defaults is not None else SamplingDefaults(),
        metrics=metrics,
        lifecycle=Lifecycle(metrics),
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        warm_up = asyncio.create_task(context.encoder.warm_up())
        yield
        await warm_up
        context.encoder.close()

    hosts = list(config.allowed_hosts)
    if not is_loopback(config.host):
        hosts.append(config.host)
    app = Starlette(
        routes=_make_routes(context),
        middleware=[
            Middleware(
                AdmissionGate, lifecycle=context.lifecycle, max_in_flight=config.max_in_flight
            ),
            Middleware(HostGate, allowed=hosts),
            Middleware(ApiKeyGate, keys=keys),
        ],
        exception_handlers={HTTPException: _answer_http_exception},
        lifespan=lifespan,
    )
    app.state.context = context
    return app


def _make_encoder(config: ServerConfig, tokenizer: Tokenizer) -> PromptEncoder:
    template = None
    if tokenizer.chat_template is not None:
        template = ChatTemplate(
            tokenizer.chat_template,
            tokenizer.special_tokens,
            timeout_s=config.template_timeout_s,
            # A rendering that is longer than a body may be comes from a runaway loop.
            max_chars=4 * config.max_body_bytes,
        )
    return PromptEncoder(tokenizer, TokenThreads(config.tokenizer_threads), template)


def _make_routes(context: ServerContext) -> list[Route]:
    get, post = ("GET",), ("POST",)
    table: list[tuple[str, Sequence[str], _Handler]] = [
        ("/v1/chat/completions", post, answer_chat),
        ("/v1/completions", post, answer_completion),
        ("/v1/models", get, status.list_models),
        ("/v1/models/{name:path}", get, status.get_model),
        ("/generate", post, generate.answer_generate),
        ("/tokenize", post, tokens.tokenize),
        ("/v1/tokenize", post, tokens.tokenize),
        ("/detokenize", post, tokens.detokenize),
        ("/v1/detokenize", post, tokens.detokenize),
        ("/get_model_info", get, status.get_model_info),
        ("/model_info", get, status.get_model_info),
        ("/get_server_info", get, status.get_server_info),
        ("/server_info", get, status.get_server_info),
        ("/flush_cache", ("GET", "POST"), status.flush_cache),
        ("/abort_request", post, status.abort_request),
        ("/health", get, status.get_health),
        ("/ready", get, status.get_ready),
    ]
    if context.config.metrics:
        table.append(("/metrics", get, status.get_metrics))
    return [
        Route(path, _bind(context, handler), methods=list(methods))
        for path, methods, handler in table
    ]


def _bind(context: ServerContext, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(context, request)
        except ClientGoneError:
            return Response(status_code=_CLIENT_CLOSED)
        except HttpError as error:
            return error_response(error)
        except TandemError as error:
            return _answer_error(request, error)
        except Exception:
            _logger.exception("event=request_failed path=%s", request.url.path)
            error = InternalError("server.handle", "the server failed; its log says why")
            return error_response(describe_error(error))

    return endpoint


def _answer_error(request: Request, error: TandemError) -> Response:
    answer = describe_error(error)
    if answer.status >= 500 and not error.retryable:
        _logger.error("event=request_failed path=%s error=%s", request.url.path, error)
    return error_response(answer)


async def _answer_http_exception(_: Request, error: Exception) -> Response:
    """Give the router's own refusals (no such path, wrong method) the common shape."""
    assert isinstance(error, HTTPException)
    return error_response(
        HttpError(
            error.status_code,
            error.detail,
            code="method_not_allowed" if error.status_code == 405 else "not_found",
            headers=error.headers,
        )
    )
