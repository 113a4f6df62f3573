"""``/models``: lists the models of this address, and loads, wakes or puts them to sleep."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import UnsupportedError
from tandem.server.context import ServerContext
from tandem.server.hub.hub import ModelHub
from tandem.server.protocol.hub import ChangeModels, HostedModels, HostedModelStatus

__all__ = ["change_models", "list_hosted_models"]

_decoder = msgspec.json.Decoder(ChangeModels)
_encode = msgspec.json.Encoder().encode


async def list_hosted_models(context: ServerContext, _: Request) -> Response:
    """List the models of this address and their states."""
    if context.hub is None:
        return _answer_alone(context)
    return _answer(context.hub)


async def change_models(context: ServerContext, http: Request) -> Response:
    """Load, wake, put to sleep, evict or pin a model, without failing a request."""
    hub = _require_hub(context)
    change = await context.read_request(http, _decoder)
    match change.action:
        case "load" | "wake":
            await hub.wake(change.model)
        case "sleep":
            await hub.sleep(change.model)
        case "evict":
            await hub.evict(change.model)
        case "pin" | "unpin":
            hub.pin(change.model, is_pinned=change.action == "pin")
    return _answer(hub)


def _require_hub(context: ServerContext) -> ModelHub:
    if context.hub is None:
        what = "this server has one model, which is always awake: see --hub.file"
        raise UnsupportedError("server.models", what)
    return context.hub


def _answer_alone(context: ServerContext) -> Response:
    """Describe the only model of a server without a hub, which never sleeps."""
    info = context.engine.info
    need = 0 if info is None else info.memory_bytes
    only = HostedModelStatus(
        name=context.models.first,
        state="new" if info is None else "awake",
        need_bytes=need,
        num_live=context.lifecycle.num_in_flight,
        is_pinned=True,
    )
    reply = HostedModels(models=[only], used_bytes=need)
    return Response(_encode(reply), media_type="application/json")


def _answer(hub: ModelHub) -> Response:
    reply = HostedModels(
        models=[
            HostedModelStatus(
                name=each.name,
                state=each.state,
                need_bytes=hub.residency.need_of(each.name),
                num_live=each.engine.num_live,
                is_pinned=each.is_pinned,
            )
            for each in hub.models.values()
        ],
        used_bytes=hub.residency.used_bytes,
    )
    return Response(_encode(reply), media_type="application/json")
