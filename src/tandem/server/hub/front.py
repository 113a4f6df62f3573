"""The application of an address with several models: it passes each request to its model's.

Each model has an application of its own, with all middleware. Requests that concern no model go to
the first one. The body is read here, within the model's limits, and passed on.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from tandem.core.errors import NotFoundError
from tandem.server.context import ServerContext
from tandem.server.edge.connection import ClientGoneError, read_body
from tandem.server.edge.http_errors import HttpError, error_response
from tandem.server.hub.hub import HostedModel, ModelHub

__all__ = ["ModelFront"]

MODEL_PATH = "/v1/models/"
SMALL_BODY = 1 << 16
"""Size in bytes up to which a request's body is searched for the model's name on the event loop; a
larger one is searched on a thread.
"""


class _Named(msgspec.Struct):
    """The fields of a body that name a model; others are skipped."""

    model: Any = None
    name: Any = None
    """Ollama's older name of ``model``."""


_decoder = msgspec.json.Decoder(_Named)


class ModelFront(Starlette):
    """The ASGI application that routes requests to the applications of models.

    Args:
        hub: the models; not owned.
    """

    def __init__(self, hub: ModelHub) -> None:
        super().__init__(lifespan=self._live)
        self._hub = hub
        self._models = list(hub.models.values())
        # The server drains one context at its end: all models' applications share its lifecycle, so
        # the first one's context serves.
        self.state.context = self._context_of(self._models[0])

    @staticmethod
    def _context_of(model: HostedModel) -> ServerContext:
        return model.app.state.context

    @asynccontextmanager
    async def _live(self, _: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as opened:
            for model in self._models:
                await opened.enter_async_context(model.app.router.lifespan_context(model.app))
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application of the model that it names."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        path: str = scope["path"]
        if path.startswith(MODEL_PATH):
            await self._find(path.removeprefix(MODEL_PATH)).app(scope, receive, send)
            return
        kind = dict(scope["headers"]).get(b"content-type", b"").partition(b";")[0].strip()
        if scope["method"] != "POST" or kind not in (b"application/json", b""):
            await self._models[0].app(scope, receive, send)
            return
        config = self._context_of(self._models[0]).config
        try:
            request = Request(scope, receive)
            body = await read_body(request, config.max_body_bytes, config.body_timeout_s)
        except HttpError as error:
            await error_response(error)(scope, receive, send)
            return
        except ClientGoneError:
            return
        if len(body) <= SMALL_BODY:
            name = _find_name(body)
        else:
            name = await asyncio.to_thread(_find_name, body)
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._find(name).app(scope, replay, send)

    def _find(self, name: str | None) -> HostedModel:
        """Return the model with this name; for an unknown one the first model, which refuses it."""
        for model in self._models:
            try:
                self._context_of(model).find_model(name)
            except NotFoundError:
                continue
            return model
        return self._models[0]


def _find_name(body: bytes) -> str | None:
    """Return the name of a model that a body asks for; None if it names none or is not a JSON
    object.
    """
    try:
        named = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    for value in (named.model, named.name):
        if isinstance(value, str):
            return value
    return None
