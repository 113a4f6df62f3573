"""The methods that an endpoint offers to its peers, and the listener of their events."""

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tandem.core.errors import ConfigError, ConflictError

__all__ = ["EventCallback", "Handler", "Kept", "Method", "MethodTable"]

Req = TypeVar("Req")
Res = TypeVar("Res")


@dataclass(frozen=True, slots=True)
class Kept:
    """The return value of a handler in place of its response: ``work`` makes the response, and
    continues when its caller has disconnected.

    Once it has begun, only the end of the event loop cancels it.
    """

    work: Coroutine[Any, Any, Any]


Handler = Callable[[Any, Req], Awaitable[Res]] | Callable[[Any, Req], Res | Awaitable[Res] | Kept]
"""A handler: takes the calling ``Peer`` and the request."""
EventCallback = Callable[[Any, Any], None]
"""An event callback: takes the ``Peer`` that sent the event, and the event."""


@dataclass(frozen=True, slots=True)
class Method:
    """A registered method: its handler, and the decoder of its request."""

    name: str
    handler: Callable[..., Any]
    decoder: msgspec.msgpack.Decoder[Any]
    is_async: bool


class MethodTable:
    """The methods and the event listener of one endpoint, shared by all its peers.

    Filled before the endpoint opens. Handlers run on the endpoint's event loop. A plain function
    must be quick, since it delays every peer; a handler that waits is ``async``.
    """

    def __init__(self) -> None:
        self._methods: dict[str, Method] = {}
        self.event_decoder: msgspec.msgpack.Decoder[Any] | None = None
        self.event_callback: EventCallback | None = None

    def register(
        self,
        name: str,
        handler: Handler[Req, Res],
        request_type: type[Req],
        response_type: type[Res],
    ) -> None:
        """Register the handler of a method.

        Args:
            name: unique in this table.
            handler: ``(peer, request) -> response``, async or not. A plain function that finds that
                it must wait may return a coroutine, or ``Kept``, in place of the response.
            request_type: the type that the body decodes to; also a union or a builtin generic.
            response_type: the type that the handler returns; msgpack must be able to encode it.

        Raises: ConflictError if the name is taken; ConfigError if msgspec cannot encode a type.
        """
        if name in self._methods:
            raise ConflictError("rpc.register", f"method {name!r} is registered twice", field=name)
        decoder = _make_decoder(name, request_type)
        _make_decoder(name, response_type)
        is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        self._methods[name] = Method(name, handler, decoder, is_async)

    def listen(self, callback: EventCallback, event_type: Any) -> None:
        """Pass every event of every peer to ``callback(peer, event)``, in order for each peer.

        Args:
            callback: plain function, quick, called on the endpoint's event loop.
            event_type: a struct with a tag, or a union of such.

        Raises: ConflictError if there is a listener already; ConfigError for a wrong type.
        """
        if self.event_callback is not None:
            raise ConflictError("rpc.listen", "events have a listener already")
        self.event_decoder = _make_decoder("event", event_type)
        self.event_callback = callback

    def find(self, name: str) -> Method | None:
        """Return the method with a name; None without one."""
        return self._methods.get(name)

    def list_names(self) -> list[str]:
        """Return the names of all methods, sorted."""
        return sorted(self._methods)


def _make_decoder(name: str, message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    try:
        return msgspec.msgpack.Decoder(message_type)
    except TypeError as error:
        raise ConfigError(
            "rpc.register", f"{name!r}: {message_type!r} cannot be sent: {error}", field=name
        ) from None
