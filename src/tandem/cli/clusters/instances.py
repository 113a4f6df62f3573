"""Commands that list the instances of a running server, or change them while they serve."""

import sys
from typing import Annotated, Any

import msgspec
import typer

from tandem.cli.asking.call import call_server
from tandem.cli.output import JsonFlag, print_json, show_work
from tandem.core.instance_status import InstanceStatus

__all__ = ["ApiKeyFlag", "UrlFlag", "add", "drain", "remove", "restart", "role", "show", "undrain"]

TIMEOUT_S = 3600.0
URL = "http://127.0.0.1:8000"
UrlFlag = Annotated[str, typer.Option("--url", help="The server.")]
ApiKeyFlag = Annotated[str | None, typer.Option("--api-key", help="Key of an admin.")]
Instance = Annotated[str, typer.Argument(help="Name of the instance.")]
Patience = Annotated[
    float, typer.Option(help="Seconds until requests that have not ended go on elsewhere.")
]


class _Listed(msgspec.Struct):
    instances: list[InstanceStatus]


def show(url: UrlFlag = URL, api_key: ApiKeyFlag = None, json: JsonFlag = False) -> None:
    """List the instances of a server."""
    _print(_ask(url, None, api_key), json=json)


def role(
    instance: Instance,
    role: Annotated[str, typer.Argument(help="unified, prefill or decode.")],
    url: UrlFlag = URL,
    api_key: ApiKeyFlag = None,
    json: JsonFlag = False,
) -> None:
    """Change the role of an instance; it finishes the requests that it has begun."""
    _print(_ask(url, {"action": "role", "instance": instance, "role": role}, api_key), json=json)


def drain(
    instance: Instance, url: UrlFlag = URL, api_key: ApiKeyFlag = None, json: JsonFlag = False
) -> None:
    """Send an instance no new requests."""
    _print(_ask(url, {"action": "drain", "instance": instance}, api_key), json=json)


def undrain(
    instance: Instance, url: UrlFlag = URL, api_key: ApiKeyFlag = None, json: JsonFlag = False
) -> None:
    """Send an instance new requests again."""
    _print(_ask(url, {"action": "undrain", "instance": instance}, api_key), json=json)


def restart(
    instance: Annotated[
        str, typer.Argument(help="Name; without one all, one after the other.")
    ] = "",
    patience_s: Patience = 30.0,
    url: UrlFlag = URL,
    api_key: ApiKeyFlag = None,
    json: JsonFlag = False,
) -> None:
    """Replace the process of an instance when its requests have ended."""
    body = {"action": "restart", "instance": instance, "patience_s": patience_s}
    _print(_ask(url, body, api_key), json=json)


def add(
    role: Annotated[str, typer.Option(help="unified, prefill or decode.")] = "unified",
    url: UrlFlag = URL,
    api_key: ApiKeyFlag = None,
    json: JsonFlag = False,
) -> None:
    """Start one more instance."""
    _print(_ask(url, {"action": "add", "role": role}, api_key), json=json)


def remove(
    instance: Instance,
    patience_s: Patience = 30.0,
    url: UrlFlag = URL,
    api_key: ApiKeyFlag = None,
    json: JsonFlag = False,
) -> None:
    """End an instance for good when its requests have ended."""
    body = {"action": "remove", "instance": instance, "patience_s": patience_s}
    _print(_ask(url, body, api_key), json=json)


def _print(listed: _Listed, *, json: bool) -> None:
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


def _ask(url: str, body: dict[str, Any] | None, api_key: str | None) -> _Listed:
    what = "asking" if body is None else f"waiting for the end of {body['action']}"
    with show_work(f"{what}: {url}"):
        return call_server(
            url, "/instances", _Listed, body=body, api_key=api_key, timeout_s=TIMEOUT_S
        )
