"""``/instances``: lists the server's instances, and changes them while they serve."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import ConfigError
from tandem.server.context import ServerContext
from tandem.server.protocol.instances import ChangeInstances, InstanceList

__all__ = ["change_instances", "list_instances"]

_decoder = msgspec.json.Decoder(ChangeInstances)
_encode = msgspec.json.Encoder().encode


async def list_instances(context: ServerContext, _: Request) -> Response:
    """List the instances and their states."""
    return _answer(context)


async def change_instances(context: ServerContext, http: Request) -> Response:
    """Carry out one change of the instances, without failing a request; list them afterwards."""
    change = await context.read_request(http, _decoder)
    engine, name = context.engine, change.instance
    needs_name = change.action not in ("add", "restart")
    if needs_name and not name:
        what = f"{change.action} is done to one instance: name it"
        raise ConfigError("server.change_instances", what, field="instance")
    match change.action:
        case "role":
            if change.role is None:
                what = "say which role: unified, prefill or decode"
                raise ConfigError("server.change_instances", what, field="role")
            await engine.set_role(name, change.role)
        case "drain":
            await engine.drain(name, is_draining=True)
        case "undrain":
            await engine.drain(name, is_draining=False)
        case "restart":
            if name:
                await engine.restart(name, patience_s=change.patience_s)
            else:
                await engine.restart_all(patience_s=change.patience_s)
        case "add":
            await engine.add_instance(change.role or "unified")
        case "remove":
            await engine.remove_instance(name, patience_s=change.patience_s)
    return _answer(context)


def _answer(context: ServerContext) -> Response:
    reply = InstanceList(instances=context.engine.instances)
    return Response(_encode(reply), media_type="application/json")
