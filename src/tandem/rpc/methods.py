"""The methods of an endpoint for its peers: named methods with types, and one listener of
events.
"""

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
    """The result of a handler whose work goes on when its caller has gone.

    Nobody but the loop cancels it once it has begun.
    """

    work: Coroutine[Any, Any, Any]


Handler = Callable[[Any, Req], Awaitable[Res]] | Callable[[Any, Req], Res | Awaitable[Res] | Kept]
"""Takes the ``Peer`` that calls and the request."""
EventCallback = Callable[[Any, Any], None]
"""Takes the ``Peer`` that pushed and the event."""


@dataclass(frozen=True, slots=True)
class Method:
    """A registered handler and how to read its request."""

    name: str
    handler: Callable[..., Any]
    decoder: msgspec.msgpack.Decoder[Any]
    is_async: bool


class MethodTable:
    """The methods and the event listener of one endpoint; shared by all its peers.

    Filled before the endpoint opens. Handlers run on the endpoint's loop: a plain function must
    be quick, since it holds up every peer; anything that waits is ``async``.
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
        """Serve calls of ``name``.

        Args:
            name: unique in this table.
            handler: ``(peer, request) -> response``, async or not; a plain function that finds that
                it has to wait may return a coroutine, or ``Kept``, in place of the response.
            request_type: what the body must decode to; also a union or a builtin generic.
            response_type: what the handler returns; checked to be a type msgpack can carry.

        Raises: ConflictError if the name is taken; ConfigError if msgspec cannot carry a type.
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
        """Give every event of every peer to ``callback(peer, event)``, in order per peer.

        Args:
            callback: plain function, quick, on the endpoint's loop.
            event_type: a struct with a tag, or a union of such.

        Raises: ConflictError if there is a listener already; ConfigError for a wrong type.
        """
        if self.event_callback is not None:
            raise ConflictError("rpc.listen", "events have a listener already")
        self.event_decoder = _make_decoder("event", event_type)
        self.event_callback = callback

    def find(self, name: str) -> Method | None:
        """Return the method of that name, if there is one."""
        return self._methods.get(name)

    def list_names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self._methods)


def _make_decoder(name: str, message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    try:
        return msgspec.msgpack.Decoder(message_type)
    except TypeError as error:
        raise ConfigError(
            "rpc.register", f"{name!r}: {message_type!r} cannot be sent: {error}", field=name
        ) from None
