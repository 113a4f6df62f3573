"""``tandem cluster``: the instances of a running server, and changes of them while they serve."""

import sys
from typing import Annotated, Any

import msgspec
import typer

from tandem.cli.asking.call import call_server
from tandem.cli.output import JsonFlag, print_json
from tandem.core.errors import ConfigError
from tandem.core.instance_status import InstanceStatus

__all__ = ["cluster"]

TIMEOUT_S = 3600.0
ACTIONS = ("list", "role", "drain", "undrain", "restart", "add", "remove")


class _Listed(msgspec.Struct):
    instances: list[InstanceStatus]


def cluster(
    action: Annotated[str, typer.Argument(help=f"One of {', '.join(ACTIONS)}.")] = "list",
    instance: Annotated[
        str, typer.Argument(help="Name; restart without one restarts all, one after the other.")
    ] = "",
    role: Annotated[
        str | None, typer.Option(help="unified, prefill or decode; with role and add.")
    ] = None,
    patience_s: Annotated[
        float, typer.Option(help="Seconds until requests go on elsewhere; restart, remove.")
    ] = 30.0,
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="Key of an admin.")] = None,
    json: JsonFlag = False,
) -> None:
    """List the instances of a server, or change them without failing a request."""
    if action not in ACTIONS:
        raise ConfigError(
            "cli.cluster", f"{action!r} is no action: give one of {', '.join(ACTIONS)}"
        )
    body: dict[str, Any] | None = None
    if action != "list":
        body = {"action": action, "instance": instance, "patience_s": patience_s}
        if role is not None:
            body["role"] = role
    listed = call_server(
        url, "/instances", _Listed, body=body, api_key=api_key, timeout_s=TIMEOUT_S
    )
    if json:
        print_json(listed)
        return
    for each in listed.instances:
        state = "draining" if each.is_draining else str(each.stage.stage)
        reads = f", reads {', '.join(each.sources)}" if each.sources else ""
        sys.stdout.write(
            f"{each.name}: {each.role}, {state}, pid {each.pid}, {each.num_restarts} restarts, "
            f"step error {each.step_error:.0%}{reads}\n"
        )
